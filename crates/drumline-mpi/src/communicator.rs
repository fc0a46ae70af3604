//! The calls of a communicator: their arguments are checked here, and MPI sees only what lies within the buffers.

use std::ffi::c_int;
use std::ops::Range;

use crate::error::{Error, Result};
use crate::mpi::Mpi;
use crate::number::{Number, Op};
use crate::request::Request;
use crate::table::{Bits, Memory, Operation};

/// The highest tag that every MPI has.
pub const TAG_MAX: u32 = 0x7fff;

/// Some ranks with a number each, and messages of their own.
///
/// All calls begin something and return at once. A buffer goes in, and comes back when the request is over. What is sent
/// or received lies at the beginning of a buffer, or where *blocks* say: ranges of bytes, one for each rank. All ranks
/// must begin the same collectives in the same order, with lengths that fit.
///
/// One call moves at most 2,147,483,647 bytes, counted from the beginning of each buffer.
#[derive(Clone, Copy, Debug)]
pub struct Communicator {
    mpi: &'static Mpi,
    bits: Bits,
    rank: usize,
    size: usize,
}

impl Communicator {
    pub(crate) fn new(mpi: &'static Mpi, bits: Bits, rank: usize, size: usize) -> Communicator {
        Communicator { mpi, bits, rank, size }
    }

    /// The number of this rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Is over when all ranks have begun it.
    pub fn barrier(&self) -> Result<Request> {
        self.begin(Operation::Barrier, Memory::default())
    }

    /// The first `len` bytes of the root's `data` come to all ranks.
    pub fn broadcast(&self, data: Vec<u8>, len: usize, root: usize) -> Result<Request> {
        let (len, root) = (count(len, "data", &data)?, self.number(root)?);
        self.begin(Operation::Broadcast { len, root }, received(data))
    }

    /// Every rank's own block comes to all. It works in place: the own block of `data` is there already.
    ///
    /// The blocks lie one behind the other, and are the same on all ranks.
    pub fn all_gather(&self, data: Vec<u8>, blocks: &[Range<usize>]) -> Result<Request> {
        let layout = self.layout(blocks, "data", &data)?;
        if let Some(pair) = blocks.windows(2).find(|pair| pair[0].end != pair[1].start) {
            return Err(Error::Gap { end: pair[0].end, start: pair[1].start });
        }
        if let Some(first) = blocks.first().filter(|first| first.start > 0) {
            return Err(Error::Gap { end: 0, start: first.start });
        }
        let lens = &layout[..self.size];
        match gathering(lens) {
            Gathering::Even { each } => self.begin(Operation::AllGather { each }, received(data)),
            Gathering::Uneven => {
                self.begin(Operation::AllGatherUneven, Memory { layout, ..received(data) })
            }
            Gathering::VeryUneven => {
                // A copy: Open MPI takes one buffer for both directions as MPI_IN_PLACE, which means another thing here.
                let own = data[blocks[self.rank].clone()].to_vec();
                let but_own = |mut lens: Vec<c_int>| {
                    lens[self.rank] = 0;
                    lens
                };
                let sent = [but_own(vec![lens[self.rank]; self.size]), vec![0; self.size]];
                let layout =
                    [sent.concat(), but_own(lens.to_vec()), layout[self.size..].to_vec()].concat();
                self.begin(Operation::AllToAll, Memory { send: own, receive: data, layout })
            }
        }
    }

    /// The first `len` bytes of every rank's `send` come to the root, into the rank's block of `receive`. Other ranks
    /// need no blocks and no memory to receive.
    pub fn gather(
        &self,
        send: Vec<u8>,
        len: usize,
        receive: Vec<u8>,
        blocks: &[Range<usize>],
        root: usize,
    ) -> Result<Request> {
        let len = count(len, "buffer to send", &send)?;
        let layout = self.layout_of_root(blocks, "buffer to receive", &receive, root)?;
        self.check_own(&layout, len, root)?;
        self.begin(
            Operation::Gather { len, root: self.number(root)? },
            Memory { send, receive, layout },
        )
    }

    /// Every rank's block of the root's `send` comes to the rank, as the first `len` bytes of its `receive`. Other ranks
    /// need no blocks and nothing to send.
    pub fn scatter(
        &self,
        send: Vec<u8>,
        blocks: &[Range<usize>],
        receive: Vec<u8>,
        len: usize,
        root: usize,
    ) -> Result<Request> {
        let len = count(len, "buffer to receive", &receive)?;
        let layout = self.layout_of_root(blocks, "buffer to send", &send, root)?;
        self.check_own(&layout, len, root)?;
        self.begin(
            Operation::Scatter { len, root: self.number(root)? },
            Memory { send, receive, layout },
        )
    }

    /// Every rank sends one block to every rank, and receives one from it. Blocks may be empty.
    pub fn all_to_all(
        &self,
        send: Vec<u8>,
        send_blocks: &[Range<usize>],
        receive: Vec<u8>,
        receive_blocks: &[Range<usize>],
    ) -> Result<Request> {
        let mut layout = self.layout(send_blocks, "buffer to send", &send)?;
        layout.extend(self.layout(receive_blocks, "buffer to receive", &receive)?);
        self.begin(Operation::AllToAll, Memory { send, receive, layout })
    }

    /// MPI combines the first `elements` numbers of every rank's `data`, in an order of its own. The result comes to all,
    /// in place.
    ///
    /// # Errors
    ///
    /// [`Error::Operator`] where [`Op::serves`] says no.
    pub fn all_reduce(
        &self,
        data: Vec<u8>,
        elements: usize,
        number: Number,
        op: Op,
    ) -> Result<Request> {
        let count = numbers(elements, number, op, &data)?;
        self.begin(Operation::AllReduce { count, number, op }, received(data))
    }

    /// As [`Communicator::all_reduce`], but the result comes to the root alone.
    ///
    /// # Errors
    ///
    /// [`Error::Operator`] where [`Op::serves`] says no.
    pub fn reduce(
        &self,
        data: Vec<u8>,
        elements: usize,
        number: Number,
        op: Op,
        root: usize,
    ) -> Result<Request> {
        let count = numbers(elements, number, op, &data)?;
        let is_root = root == self.rank;
        let root = self.number(root)?;
        self.begin(Operation::Reduce { count, number, op, root, is_root }, received(data))
    }

    /// As [`Communicator::all_reduce`], but each rank gets only its own `each` numbers, at the beginning of `data`. The
    /// data has that many for every rank.
    ///
    /// # Errors
    ///
    /// [`Error::Operator`] where [`Op::serves`] says no.
    pub fn reduce_scatter(
        &self,
        data: Vec<u8>,
        each: usize,
        number: Number,
        op: Op,
    ) -> Result<Request> {
        numbers(each.saturating_mul(self.size), number, op, &data)?;
        let each = numbers(each, number, op, &data)?;
        self.begin(Operation::ReduceScatter { each, number, op }, received(data))
    }

    /// Sends the first `len` bytes to another rank. `tag` is at most [`TAG_MAX`].
    pub fn send(&self, bytes: Vec<u8>, len: usize, to: usize, tag: u32) -> Result<Request> {
        let len = count(len, "buffer to send", &bytes)?;
        let (to, tag) = (self.number(to)?, checked_tag(tag)?);
        self.begin(Operation::Send { len, to, tag }, Memory { send: bytes, ..Memory::default() })
    }

    /// A message that has come, from a certain rank or from any. No other probe gets it.
    pub fn probe(&self, from: Option<usize>, tag: u32) -> Result<Option<Matched>> {
        let from = from.map(|from| self.number(from)).transpose()?;
        let found = self.mpi.enter()?.probe(self.bits, from, checked_tag(tag)?)?;
        let Some(found) = found else { return Ok(None) };
        self.mpi.opened();
        let number = |value: c_int| {
            let absurd = |_| Error::Absurd {
                function: "MPI_Improbe",
                value: value.into(),
                wanted: "a rank or a length",
            };
            usize::try_from(value).map_err(absurd)
        };
        let (from, len) = (number(found.from)?, number(found.len)?);
        Ok(Some(Matched { communicator: *self, message: found.message, from, len }))
    }

    /// All arguments are checked: every call of this lies in a function of this file.
    fn begin(&self, operation: Operation, memory: Memory) -> Result<Request> {
        // SAFETY: `count` and `numbers` have checked lengths, and `layout` blocks, against the buffers that `memory` has.
        // Both ends of a call that only the root lays out are checked at the root.
        unsafe { Request::begin(self.mpi, self.bits, operation, memory) }
    }

    /// Counts and displacements of blocks that lie within a buffer.
    fn layout(
        &self,
        blocks: &[Range<usize>],
        what: &'static str,
        buffer: &[u8],
    ) -> Result<Vec<c_int>> {
        layout(self.size, blocks, what, buffer)
    }

    fn layout_of_root(
        &self,
        blocks: &[Range<usize>],
        what: &'static str,
        buffer: &[u8],
        root: usize,
    ) -> Result<Vec<c_int>> {
        if root == self.rank { self.layout(blocks, what, buffer) } else { Ok(Vec::new()) }
    }

    /// At the root, both ends of its own block must agree.
    fn check_own(&self, layout: &[c_int], len: c_int, root: usize) -> Result<()> {
        match layout.get(self.rank) {
            Some(&own) if own != len => Err(Error::Ranks {
                what: format!(
                    "the block of the root, rank {root}, has {own} bytes, but its other end has {len}"
                ),
            }),
            _ => Ok(()),
        }
    }

    fn number(&self, rank: usize) -> Result<c_int> {
        let what = || format!("there is no rank {rank}: the communicator has {} ranks", self.size);
        match c_int::try_from(rank) {
            Ok(number) if rank < self.size => Ok(number),
            _ => Err(Error::Ranks { what: what() }),
        }
    }
}

/// A message that has come and waits for memory.
///
/// Its sender may wait until it is received. So if it is dropped, MPI is not finalised at exit.
#[derive(Debug)]
#[must_use = "a message that is not received is lost"]
pub struct Matched {
    communicator: Communicator,
    message: Bits,
    from: usize,
    len: usize,
}

impl Matched {
    /// The rank that has sent it.
    pub fn from(&self) -> usize {
        self.from
    }

    /// Its length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether it has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Receives it into the beginning of `buffer`.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] if the buffer is too short. The message is lost then.
    pub fn receive(self, buffer: Vec<u8>) -> Result<Request> {
        let Matched { communicator, message, len, .. } = self;
        let len = count(len, "buffer to receive", &buffer)?;
        let request = communicator.begin(Operation::Receive { len, message }, received(buffer))?;
        communicator.mpi.closed(); // the request counts from here on
        Ok(request)
    }
}

/// Which of MPI's functions gathers blocks to all.
#[derive(Debug, PartialEq, Eq)]
enum Gathering {
    Even {
        each: c_int,
    },
    Uneven,
    /// Intel MPI passes long blocks on in pieces as long as the shortest one: 100,000 bytes beside an empty block take it
    /// 20 seconds. So here every rank sends its block to each other rank.
    VeryUneven,
}

/// It depends on the lengths alone, which all ranks know.
fn gathering(lens: &[c_int]) -> Gathering {
    let (shortest, longest) =
        lens.iter().fold((c_int::MAX, 0), |(low, high), &len| (low.min(len), high.max(len)));
    match shortest {
        each if each >= longest => Gathering::Even { each: longest },
        shortest if shortest >= longest / 2 => Gathering::Uneven,
        _ => Gathering::VeryUneven,
    }
}

fn received(receive: Vec<u8>) -> Memory {
    Memory { receive, ..Memory::default() }
}

/// The first `len` bytes of a buffer.
fn count(len: usize, what: &'static str, buffer: &[u8]) -> Result<c_int> {
    let range = block(&(0..len), what, buffer)?;
    Ok(range.0)
}

/// The count and the place of a block that lies within a buffer.
fn block(block: &Range<usize>, what: &'static str, buffer: &[u8]) -> Result<(c_int, c_int)> {
    let Range { start, end } = *block;
    if start > end || end > buffer.len() {
        return Err(Error::OutOfRange { what, start, end, bytes: buffer.len() });
    }
    let number = |value: usize| c_int::try_from(value).map_err(|_| Error::TooLong { bytes: end });
    number(end)?;
    Ok((number(end - start)?, number(start)?))
}

/// Counts, and behind them places.
fn layout(
    ranks: usize,
    blocks: &[Range<usize>],
    what: &'static str,
    buffer: &[u8],
) -> Result<Vec<c_int>> {
    if blocks.len() != ranks {
        let what = format!("the {what} has {} blocks for {ranks} ranks", blocks.len());
        return Err(Error::Ranks { what });
    }
    let mut layout = vec![0; 2 * ranks];
    for (rank, range) in blocks.iter().enumerate() {
        (layout[rank], layout[ranks + rank]) = block(range, what, buffer)?;
    }
    Ok(layout)
}

/// The first `elements` numbers of a buffer.
fn numbers(elements: usize, number: Number, op: Op, buffer: &[u8]) -> Result<c_int> {
    if !op.serves(number) {
        return Err(Error::Operator { op, number });
    }
    count(elements.saturating_mul(number.bytes()), "data", buffer)?;
    if elements > 0 && buffer.as_ptr().align_offset(number.align()) != 0 {
        return Err(Error::Misaligned { align: number.align() });
    }
    c_int::try_from(elements).map_err(|_| Error::TooLong { bytes: elements })
}

fn checked_tag(tag: u32) -> Result<c_int> {
    if tag > TAG_MAX { Err(Error::Tag { tag }) } else { Ok(tag as c_int) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_become_counts_and_places() {
        assert_eq!(layout(3, &[0..2, 5..5, 3..7], "data", &[0; 7]).unwrap(), [2, 0, 4, 0, 5, 3]);
    }

    #[test]
    fn lengths_choose_how_blocks_are_gathered() {
        assert_eq!(gathering(&[7, 7, 7]), Gathering::Even { each: 7 });
        assert_eq!(gathering(&[0, 0]), Gathering::Even { each: 0 });
        assert_eq!(gathering(&[7, 8, 7]), Gathering::Uneven);
        assert_eq!(gathering(&[7, 0, 7]), Gathering::VeryUneven);
        assert_eq!(gathering(&[8, 100]), Gathering::VeryUneven);
    }

    #[test]
    fn what_is_not_in_the_buffer_is_refused() {
        let backwards = Range { start: 3, end: 2 };
        for range in [0..8, 7..9, backwards, usize::MAX..usize::MAX] {
            let error = layout(1, std::slice::from_ref(&range), "data", &[0; 7]).unwrap_err();
            assert!(matches!(error, Error::OutOfRange { bytes: 7, .. }), "{range:?}: {error}");
        }
        assert!(matches!(
            count(8, "data", &[0; 7]),
            Err(Error::OutOfRange { start: 0, end: 8, .. })
        ));
        let error = layout(2, &[0..1, 1..2, 2..3], "data", &[0; 7]).unwrap_err();
        assert_eq!(error.to_string(), "the data has 3 blocks for 2 ranks");
    }

    #[test]
    fn what_does_not_fit_32_bits_is_refused() {
        // A buffer of zeros takes no memory before it is touched.
        let long = vec![0; 1 << 31];
        assert!(matches!(
            count(1 << 31, "data", &long),
            Err(Error::TooLong { bytes: 0x8000_0000 })
        ));
        assert_eq!(count((1 << 31) - 1, "data", &long).unwrap(), c_int::MAX);
        assert!(matches!(
            block(&((1 << 31) - 1..1 << 31), "data", &long),
            Err(Error::TooLong { .. })
        ));
    }

    #[test]
    fn numbers_need_room_and_an_operator() {
        let data = vec![0; 64];
        assert_eq!(numbers(8, Number::F64, Op::Sum, &data).unwrap(), 8);
        assert!(matches!(numbers(9, Number::F64, Op::Sum, &data), Err(Error::OutOfRange { .. })));
        assert!(matches!(
            numbers(usize::MAX, Number::F64, Op::Sum, &data),
            Err(Error::OutOfRange { .. })
        ));
        assert!(matches!(numbers(1, Number::F32, Op::BitOr, &data), Err(Error::Operator { .. })));
        assert!(matches!(
            numbers(1, Number::I32, Op::Sum, &data[1..]),
            Err(Error::Misaligned { align: 4 })
        ));
    }

    #[test]
    fn tags_end_where_every_mpi_ends() {
        assert_eq!(checked_tag(TAG_MAX).unwrap(), 32_767);
        assert!(matches!(checked_tag(TAG_MAX + 1), Err(Error::Tag { tag: 32_768 })));
    }
}
