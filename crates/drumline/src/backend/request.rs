//! What a backend is asked to do.

use std::{fmt, ops::Range, time::Instant};

use drumline_schedule::{
    Blocks,
    step::{Buffer, Rank},
};

use super::Operation;
use crate::{
    Cause, DType, call,
    executor::{Description, Header},
    operator::OperatorKind,
};

/// One collective on this rank.
///
/// | operation | `input` | `data` before | `data` after |
/// |---|---|---|---|
/// | all_reduce | | what this rank brings | the reduction |
/// | reduce | | what this rank brings | the reduction at the root; elsewhere as before |
/// | scan | | what this rank brings | that of ranks up to this one |
/// | exclusive_scan | | what this rank brings | that of ranks before this one; as before on rank 0 |
/// | broadcast | | at the root: what it brings | what the root brought |
/// | reduce_scatter | a block for every rank | | this rank's block of the reduction |
/// | all_gather | this rank's block | | the blocks of all ranks |
/// | gather | this rank's block | | at the root: the blocks of all ranks; elsewhere empty |
/// | scatter | at the root: a block for every rank | | this rank's block |
/// | all_to_all | a block for every rank | | a block from every rank |
/// | barrier, monitored_barrier | | | |
///
/// Blocks lie behind each other in order of rank; [`Call::input_block`] and [`Call::data_block`]
/// say where. Elements are in the machine's byte order.
#[derive(Debug)]
pub struct Request<'a> {
    /// The buffer for the result.
    pub data: &'a mut [u8],
    /// What is only read, where the operation does not work in place.
    pub input: &'a [u8],
    /// What is called.
    pub call: Call<'a>,
}

impl Request<'_> {
    /// What this rank brings: the input, or the data where the operation works in place.
    ///
    /// ```
    /// use drumline::backend::Request;
    ///
    /// /// What a backend sends first.
    /// fn bytes_to_send(request: &Request<'_>) -> usize {
    ///     request.contribution().len()
    /// }
    /// ```
    pub fn contribution(&self) -> &[u8] {
        match self.call.operation() {
            Operation::AllReduce
            | Operation::Reduce
            | Operation::Scan
            | Operation::ExclusiveScan => self.data,
            Operation::Broadcast if self.call.is_root() => self.data,
            Operation::Broadcast => &[],
            _ => self.input,
        }
    }
}

/// What is called, other than the buffers.
///
/// ```
/// use std::time::Instant;
///
/// use drumline::backend::{Call, Signature};
///
/// /// What a rank tells the others before it moves anything.
/// fn describe(call: &Call<'_>) -> [u8; Signature::BYTES] {
///     assert!(call.deadline() > Instant::now(), "call {} is late", call.sequence());
///     call.signature().to_bytes()
/// }
///
/// /// Where what this rank sends to `rank` lies, and what it gets from there.
/// fn way(call: &Call<'_>, rank: usize) -> (std::ops::Range<usize>, std::ops::Range<usize>) {
///     (call.input_block(rank), call.data_block(rank))
/// }
///
/// /// What others have told: must it be equal?
/// fn agrees(call: &Call<'_>, theirs: &[u8; Signature::BYTES]) -> bool {
///     Signature::from_bytes(theirs) == Some(call.signature())
/// }
///
/// /// Whether this rank has the result of a reduction.
/// fn has_result(call: &Call<'_>) -> bool {
///     call.operator().is_some() && (call.root().is_none() || call.is_root())
/// }
/// ```
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub(crate) call: &'a call::Call,
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    pub(crate) signature: Signature,
    pub(crate) deadline: Instant,
    pub(crate) reducer: &'a dyn Reduce,
}

/// Combines elements, whatever their type.
pub(crate) trait Reduce {
    fn reduce(&self, inputs: &[&[u8]], output: &mut [u8]) -> Result<(), Cause>;
}

impl Call<'_> {
    /// What it does.
    pub fn operation(&self) -> Operation {
        self.call.operation
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.call.dtype
    }

    /// The operator, where something is reduced: `sum`, `premul_sum`, or the name of a custom one.
    /// What this rank brings to a `premul_sum` is multiplied already.
    pub fn operator(&self) -> Option<&'static str> {
        self.call.operator.map(OperatorKind::name)
    }

    /// The root, where there is one.
    pub fn root(&self) -> Option<Rank> {
        self.call.root
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// How many ranks the group has.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Whether this rank is the root.
    pub fn is_root(&self) -> bool {
        self.call.root == Some(self.rank)
    }

    /// How many collectives the group has called before.
    pub fn sequence(&self) -> u64 {
        self.signature.0.sequence()
    }

    /// When the call must have ended.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// What must be the same on all ranks.
    pub fn signature(&self) -> Signature {
        self.signature
    }

    /// Where the block of `rank` lies in the input, in bytes. Nothing where it holds none.
    pub fn input_block(&self, rank: Rank) -> Range<usize> {
        self.block(Buffer::Input, rank)
    }

    /// Where the block of `rank` lies in the data, in bytes: for an all-to-all, that from `rank`.
    /// Nothing where it holds none.
    pub fn data_block(&self, rank: Rank) -> Range<usize> {
        self.block(Buffer::Data, rank)
    }

    fn block(&self, buffer: Buffer, rank: Rank) -> Range<usize> {
        let (call, size) = (self.call, self.call.dtype.size());
        let collective = call.operation.collective();
        let len = call.counts.block(buffer, rank) * size;
        match collective.blocks(buffer, self.rank, call.root.unwrap_or(0)) {
            Blocks::None => 0..0,
            Blocks::One if rank == self.rank => 0..len,
            Blocks::One => 0..0,
            Blocks::All => {
                let start: usize = (0..rank).map(|it| call.counts.block(buffer, it) * size).sum();
                start..start + len
            }
        }
    }

    /// Makes `output` of what ranks 0, 1, 2, ... brought, with the operator of the call, in the
    /// canonical order of sums. Nothing is left to be done: averages are divided, and narrow floats
    /// are rounded once. The bits are those of any other backend that calls this.
    ///
    /// # Errors
    ///
    /// [`Cause::Panicked`] when an operator of the user's does; [`Cause::Backend`] when there are
    /// no inputs, or lengths differ or are no number of elements.
    pub fn reduce(&self, inputs: &[&[u8]], output: &mut [u8]) -> Result<(), Cause> {
        let len = output.len();
        let fits = len.is_multiple_of(self.call.dtype.size())
            && !inputs.is_empty()
            && inputs.iter().all(|input| input.len() == len);
        if fits {
            return self.reducer.reduce(inputs, output);
        }
        let lens: Vec<usize> = inputs.iter().map(|input| input.len()).collect();
        let problem = format!("inputs of {lens:?} bytes cannot be reduced to {len} bytes");
        Err(Cause::Backend { problem })
    }
}

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Call").field(&self.signature).finish()
    }
}

/// What of a call must be the same on all ranks: compare them, and tell both in a
/// [`Cause::Mismatch`] where they differ.
///
/// Lengths in an uneven all-to-all are not part of it, since no rank knows those of others: the
/// receiver compares what arrives with [`Call::data_block`].
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Signature(pub(crate) Description);

impl Signature {
    /// Length of [`Signature::to_bytes`].
    pub const BYTES: usize = Header::BYTES;

    /// As it travels.
    pub fn to_bytes(&self) -> [u8; Signature::BYTES] {
        Header { description: self.0, part: 0, payload: 0 }.encode()
    }

    /// From another rank. `None` if it is no signature.
    pub fn from_bytes(bytes: &[u8; Signature::BYTES]) -> Option<Signature> {
        Header::decode(bytes).map(|header| Signature(header.description))
    }
}

/// `#3 all_reduce(sum) of 10 f32 [hub]`
impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
