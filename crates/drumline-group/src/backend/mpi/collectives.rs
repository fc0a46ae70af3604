//! Collectives over MPI, of bytes.
//!
//! Reductions exchange slices, each rank adds its slice, and the sums are gathered: every rank sends and gets
//! `2 (p - 1) / p` of the data. Short ones gather everything and add it all: one round.
//!
//! Long data goes in pieces, and each piece begins before the one before it is over. So MPI's counts of 32 bits
//! suffice for data of any length, and the copies to and from MPI's memory stay in the cache.

use std::{ops::Range, time::Instant};

use drumline_engine::Cause;
use drumline_mpi::Request as Pending;
use drumline_schedule::{
    Collective,
    step::{Buffer, Rank},
};

use super::{own_sums, rank::OverMpi, wait::failed};
use crate::backend::{Call, Request};

type Block = Range<usize>;

/// A reduction of so few bytes, those of all ranks together, is one all-gather.
const SHORT_BYTES_MAX: usize = 16 << 10;

/// A piece of a call that is under way.
struct Begun {
    piece: Block,
    pending: Pending,
}

impl OverMpi {
    pub(super) fn carry_out(&self, request: &mut Request<'_>) -> Result<(), Cause> {
        let call = request.call;
        let root = call.root().unwrap_or(0);
        match call.collective() {
            Collective::Barrier | Collective::MonitoredBarrier => {
                let pending = self.communicator.barrier().map_err(failed)?;
                self.end(pending, call.deadline()).map(drop)
            }
            Collective::AllReduce | Collective::ReduceSlices => self.all_reduce(call, request.data),
            Collective::Reduce => self.reduce(call, request.data, Some(root)),
            Collective::ReduceScatter => self.reduce_scatter(call, request.input, request.data),
            Collective::AllGather => self.all_gather(call, request.input, request.data),
            Collective::Broadcast => self.broadcast(call, request.data, root),
            Collective::Gather => self.gather(call, request.input, request.data, root),
            Collective::Scatter => self.scatter(call, request.input, request.data, root),
            Collective::AllToAll => self.all_to_all(call, request.input, request.data),
        }
    }

    fn all_reduce(&self, call: Call<'_>, data: &mut [u8]) -> Result<(), Cause> {
        let own_sums = own_sums::of(&call).filter(|_| self.adds_by_itself);
        if let Some((number, op)) = own_sums {
            let size = call.dtype().size();
            return self.overlapped(
                data,
                pieces(data.len(), align(self.piece_bytes, size)),
                |data, piece| {
                    let mut buffer = self.buffers.take(piece.len());
                    buffer[..piece.len()].copy_from_slice(&data[piece.clone()]);
                    let elements = piece.len() / size;
                    self.communicator.all_reduce(buffer, elements, number, op)
                },
                |data, piece, _, sums| {
                    let piece = &mut data[piece];
                    piece.copy_from_slice(&sums[..piece.len()]);
                    call.divide(piece)
                },
                call.deadline(),
            );
        }
        self.reduce(call, data, None)
    }

    /// Reduces to all ranks, or to `root` alone.
    fn reduce(&self, call: Call<'_>, data: &mut [u8], root: Option<Rank>) -> Result<(), Cause> {
        if data.len() * self.world_size > SHORT_BYTES_MAX {
            return self.reduce_in_slices(call, data, root);
        }
        let gets_sums = root.is_none_or(|root| root == self.rank);
        self.gather_and_add(call, data, 0..if gets_sums { self.world_size } else { 0 })
    }

    /// Every rank adds one slice of each piece. Then all ranks, or `root` alone, get the slices of all.
    fn reduce_in_slices(
        &self,
        call: Call<'_>,
        data: &mut [u8],
        root: Option<Rank>,
    ) -> Result<(), Cause> {
        let size = call.dtype().size();
        let mut pieces = pieces(data.len(), align(self.piece_bytes, size * self.world_size));
        let (mut exchanged, mut shared): (Option<Begun>, Option<Begun>) = (None, None);
        loop {
            let next = pieces.next().map(|piece| self.exchange_slices(data, piece, size));
            let next = next.transpose()?;
            let Some(Begun { piece, pending }) = std::mem::replace(&mut exchanged, next) else {
                if exchanged.is_none() {
                    break;
                }
                continue;
            };
            let (sent, came) = self.end(pending, call.deadline())?;
            let pending = self.add_slice(call, &data[piece.clone()], (sent, came), root)?;
            if let Some(done) = shared.replace(Begun { piece, pending }) {
                self.lay_out(done, data, root, call.deadline())?;
            }
        }
        match shared {
            Some(done) => self.lay_out(done, data, root, call.deadline()),
            None => Ok(()),
        }
    }

    /// Sends each rank its slice of a piece.
    fn exchange_slices(&self, data: &[u8], piece: Block, size: usize) -> Result<Begun, Cause> {
        let slices = slices(piece.len(), size, self.world_size);
        let mut send = self.buffers.take(piece.len());
        let own = slices[self.rank].len();
        let data = &data[piece.clone()];
        for part in [0..slices[self.rank].start, slices[self.rank].end..data.len()] {
            send[part.clone()].copy_from_slice(&data[part]);
        }
        let without_own = |mut blocks: Vec<Block>| {
            blocks[self.rank].end = blocks[self.rank].start;
            blocks
        };
        let receive = self.buffers.take(own * self.world_size);
        let came = side_by_side(vec![own; self.world_size]);
        let pending = self
            .communicator
            .all_to_all(send, &without_own(slices), receive, &without_own(came))
            .map_err(failed)?;
        Ok(Begun { piece, pending })
    }

    /// Adds this rank's slice of a piece, and begins to give it to the others.
    fn add_slice(
        &self,
        call: Call<'_>,
        piece: &[u8],
        (mut sums, came): (Vec<u8>, Vec<u8>),
        root: Option<Rank>,
    ) -> Result<Pending, Cause> {
        let slices = slices(piece.len(), call.dtype().size(), self.world_size);
        let own = slices[self.rank].clone();
        if !own.is_empty() {
            let from = |rank: Rank| match rank == self.rank {
                true => &piece[own.clone()],
                false => &came[rank * own.len()..][..own.len()],
            };
            let inputs: Vec<&[u8]> = (0..self.world_size).map(from).collect();
            call.reduce(&inputs, &mut sums[own.clone()])?;
        }
        self.buffers.give([came]);
        let begun = match root {
            None => self.communicator.all_gather(sums, &slices),
            Some(root) => {
                sums.copy_within(own.clone(), 0);
                let all = self.buffers.take(if self.rank == root { piece.len() } else { 0 });
                self.communicator.gather(sums, own.len(), all, &slices, root)
            }
        };
        begun.map_err(failed)
    }

    fn lay_out(
        &self,
        Begun { piece, pending }: Begun,
        data: &mut [u8],
        root: Option<Rank>,
        deadline: Instant,
    ) -> Result<(), Cause> {
        let (sent, all) = self.end(pending, deadline)?;
        if root.is_none_or(|root| root == self.rank) {
            data[piece.clone()].copy_from_slice(&all[..piece.len()]);
        }
        self.buffers.give([sent, all]);
        Ok(())
    }

    fn reduce_scatter(&self, call: Call<'_>, input: &[u8], data: &mut [u8]) -> Result<(), Cause> {
        let blocks = call.blocks(Buffer::Input);
        let step = align(self.piece_bytes / self.world_size, call.dtype().size());
        self.overlapped(
            data,
            pieces(longest(&blocks), step),
            |data, piece| {
                let (send, sent) = self.pack(input, &blocks, &piece);
                let own = part(&(0..data.len()), &piece).len();
                let came = side_by_side(vec![own; self.world_size]);
                let receive = self.buffers.take(end_of(&came));
                self.communicator.all_to_all(send, &sent, receive, &came)
            },
            |data, piece, _, came| {
                let own = part(&(0..data.len()), &piece);
                if own.is_empty() {
                    return Ok(());
                }
                let inputs: Vec<&[u8]> =
                    came.chunks_exact(own.len()).take(self.world_size).collect();
                call.reduce(&inputs, &mut data[own])
            },
            call.deadline(),
        )
    }

    fn all_gather(&self, call: Call<'_>, input: &[u8], data: &mut [u8]) -> Result<(), Cause> {
        let blocks = call.blocks(Buffer::Data);
        self.overlapped(
            data,
            pieces(longest(&blocks), align(self.piece_bytes / self.world_size, 1)),
            |_, piece| {
                let packed = packed(&blocks, &piece);
                let mut all = self.buffers.take(end_of(&packed));
                all[packed[self.rank].clone()]
                    .copy_from_slice(&input[part(&(0..input.len()), &piece)]);
                self.communicator.all_gather(all, &packed)
            },
            |data, piece, _, all| {
                unpack(data, &blocks, &piece, all);
                Ok(())
            },
            call.deadline(),
        )
    }

    fn broadcast(&self, call: Call<'_>, data: &mut [u8], root: Rank) -> Result<(), Cause> {
        self.overlapped(
            data,
            pieces(data.len(), self.piece_bytes),
            |data, piece| {
                let len = piece.len();
                let mut buffer = self.buffers.take(len);
                if self.rank == root {
                    buffer[..len].copy_from_slice(&data[piece]);
                }
                self.communicator.broadcast(buffer, len, root)
            },
            |data, piece, _, came| {
                if self.rank != root {
                    data[piece.clone()].copy_from_slice(&came[..piece.len()]);
                }
                Ok(())
            },
            call.deadline(),
        )
    }

    fn gather(
        &self,
        call: Call<'_>,
        input: &[u8],
        data: &mut [u8],
        root: Rank,
    ) -> Result<(), Cause> {
        let blocks = call.blocks(Buffer::Data);
        let is_root = self.rank == root;
        self.overlapped(
            data,
            pieces(longest(&blocks), align(self.piece_bytes / self.world_size, 1)),
            |_, piece| {
                let packed = packed(&blocks, &piece);
                let (send, own) = self.pack(input, &side_by_side([input.len()]), &piece);
                let all = self.buffers.take(if is_root { end_of(&packed) } else { 0 });
                self.communicator.gather(send, end_of(&own), all, &packed, root)
            },
            |data, piece, _, all| {
                if is_root {
                    unpack(data, &blocks, &piece, all);
                }
                Ok(())
            },
            call.deadline(),
        )
    }

    fn scatter(
        &self,
        call: Call<'_>,
        input: &[u8],
        data: &mut [u8],
        root: Rank,
    ) -> Result<(), Cause> {
        let blocks = call.blocks(Buffer::Input);
        self.overlapped(
            data,
            pieces(longest(&blocks), align(self.piece_bytes / self.world_size, 1)),
            |data, piece| {
                let (send, sent) = match self.rank == root {
                    true => self.pack(input, &blocks, &piece),
                    false => (Vec::new(), packed(&blocks, &piece)),
                };
                let len = part(&(0..data.len()), &piece).len();
                self.communicator.scatter(send, &sent, self.buffers.take(len), len, root)
            },
            |data, piece, _, came| {
                let own = side_by_side([data.len()]);
                unpack(data, &own, &piece, came);
                Ok(())
            },
            call.deadline(),
        )
    }

    fn all_to_all(&self, call: Call<'_>, input: &[u8], data: &mut [u8]) -> Result<(), Cause> {
        let (sent, received) = (call.blocks(Buffer::Input), call.blocks(Buffer::Data));
        let longest = match call.has_own_counts() {
            true => self.compare_lengths(call, &sent, &received)?,
            false => longest(&sent),
        };
        self.overlapped(
            data,
            pieces(longest, align(self.piece_bytes / self.world_size, 1)),
            |_, piece| {
                let (send, going) = self.pack(input, &sent, &piece);
                let coming = packed(&received, &piece);
                let receive = self.buffers.take(end_of(&coming));
                self.communicator.all_to_all(send, &going, receive, &coming)
            },
            |data, piece, _, came| {
                unpack(data, &received, &piece, came);
                Ok(())
            },
            call.deadline(),
        )
    }

    /// Tells each rank how long its block is, and compares what the others tell with what this rank expects.
    /// Returns the longest block of all ranks: no rank knows those that others send each other.
    fn compare_lengths(
        &self,
        call: Call<'_>,
        sent: &[Block],
        received: &[Block],
    ) -> Result<usize, Cause> {
        const WORD: usize = 16;
        let blocks = side_by_side(vec![WORD; self.world_size]);
        let mut send = self.buffers.take(end_of(&blocks));
        let own_longest = longest(sent) as u64;
        for (word, block) in send.chunks_exact_mut(WORD).zip(sent) {
            word[..8].copy_from_slice(&(block.len() as u64).to_le_bytes());
            word[8..].copy_from_slice(&own_longest.to_le_bytes());
        }
        let receive = self.buffers.take(end_of(&blocks));
        let pending = self.communicator.all_to_all(send, &blocks, receive, &blocks);
        let pending = pending.map_err(failed)?;
        let (send, came) = self.end(pending, call.deadline())?;
        let mut longest = 0;
        for (peer, (word, expected)) in came.chunks_exact(WORD).zip(received).enumerate() {
            let [len, its_longest] = [&word[..8], &word[8..]]
                .map(|number| number.iter().rev().fold(0_u64, |all, it| all << 8 | u64::from(*it)));
            if len != expected.len() as u64 {
                let says = |bytes: u64| format!("{} of {bytes} bytes", call.signature());
                let (theirs, ours) = (says(len), says(expected.len() as u64));
                return Err(Cause::Mismatch { peer, theirs, ours });
            }
            longest = longest.max(its_longest);
        }
        self.buffers.give([send, came]);
        usize::try_from(longest).map_err(|_| Cause::Backend {
            problem: format!("a block of {longest} bytes does not fit this machine's memory"),
        })
    }

    /// All ranks bring data, and each reduces that of some of them.
    fn gather_and_add(
        &self,
        call: Call<'_>,
        data: &mut [u8],
        of: Range<Rank>,
    ) -> Result<(), Cause> {
        let step = align(self.piece_bytes / self.world_size, call.dtype().size());
        let packed = |piece: &Block| side_by_side(vec![piece.len(); self.world_size]);
        self.overlapped(
            data,
            pieces(data.len(), step),
            |data, piece| {
                let packed = packed(&piece);
                let mut all = self.buffers.take(end_of(&packed));
                all[packed[self.rank].clone()].copy_from_slice(&data[piece]);
                self.communicator.all_gather(all, &packed)
            },
            |data, piece, _, all| {
                let packed = &packed(&piece)[of.clone()];
                let inputs: Vec<&[u8]> = packed.iter().map(|it| &all[it.clone()]).collect();
                match inputs.is_empty() {
                    true => Ok(()), // this rank gets nothing
                    false => call.reduce(&inputs, &mut data[piece]),
                }
            },
            call.deadline(),
        )
    }

    /// A buffer with what a piece covers of each block, and where that lies there.
    fn pack(&self, from: &[u8], blocks: &[Block], piece: &Block) -> (Vec<u8>, Vec<Block>) {
        let packed = packed(blocks, piece);
        let mut buffer = self.buffers.take(end_of(&packed));
        for (to, block) in packed.iter().zip(blocks) {
            buffer[to.clone()].copy_from_slice(&from[part(block, piece)]);
        }
        (buffer, packed)
    }

    /// Carries out the pieces of a call. Each piece begins before the one before it ends.
    fn overlapped(
        &self,
        data: &mut [u8],
        pieces: impl Iterator<Item = Block>,
        mut begin: impl FnMut(&[u8], Block) -> Result<Pending, drumline_mpi::Error>,
        mut end: impl FnMut(&mut [u8], Block, &[u8], &[u8]) -> Result<(), Cause>,
        deadline: Instant,
    ) -> Result<(), Cause> {
        let mut under_way: Option<Begun> = None;
        for piece in pieces.map(Some).chain([None]) {
            let next = match piece {
                Some(piece) => {
                    let pending = begin(data, piece.clone());
                    let pending = pending.map_err(failed)?;
                    Some(Begun { piece, pending })
                }
                None => None,
            };
            if let Some(Begun { piece, pending }) = std::mem::replace(&mut under_way, next) {
                let (sent, came) = self.end(pending, deadline)?;
                end(data, piece, &sent, &came)?;
                self.buffers.give([sent, came]);
            }
        }
        Ok(())
    }

    fn end(&self, pending: Pending, deadline: Instant) -> Result<(Vec<u8>, Vec<u8>), Cause> {
        self.waiting.until_over(pending, deadline)
    }
}

/// Cuts `bytes` into pieces of `step` bytes; the last one may be shorter. No bytes are no piece.
fn pieces(bytes: usize, step: usize) -> impl Iterator<Item = Block> {
    (0..bytes).step_by(step).map(move |start| start..(start + step).min(bytes))
}

/// Cuts `bytes` into one slice of whole elements for each rank.
fn slices(bytes: usize, size: usize, ranks: usize) -> Vec<Block> {
    let elements = bytes / size;
    let border = |rank: usize| elements * rank / ranks * size;
    (0..ranks).map(|rank| border(rank)..border(rank + 1)).collect()
}

/// The part of a block that a piece covers, counted from the block's beginning.
fn part(block: &Block, piece: &Block) -> Block {
    (block.start + piece.start).min(block.end)..(block.start + piece.end).min(block.end)
}

/// Where lies what a piece covers of each block, if that is side by side.
fn packed(blocks: &[Block], piece: &Block) -> Vec<Block> {
    side_by_side(blocks.iter().map(|block| part(block, piece).len()))
}

/// Brings what a piece covers of each block to its place.
fn unpack(to: &mut [u8], blocks: &[Block], piece: &Block, bytes: &[u8]) {
    for (block, from) in blocks.iter().zip(packed(blocks, piece)) {
        to[part(block, piece)].copy_from_slice(&bytes[from]);
    }
}

/// Blocks of these lengths, one behind the other.
fn side_by_side(lens: impl IntoIterator<Item = usize>) -> Vec<Block> {
    let mut start = 0;
    let block = |len| {
        let block = start..start + len;
        start = block.end;
        block
    };
    lens.into_iter().map(block).collect()
}

fn end_of(blocks: &[Block]) -> usize {
    blocks.last().map_or(0, |block| block.end)
}

fn longest(blocks: &[Block]) -> usize {
    blocks.iter().map(ExactSizeIterator::len).max().unwrap_or(0)
}

/// The largest multiple of `unit` up to `bytes`, and one unit at least.
fn align(bytes: usize, unit: usize) -> usize {
    (bytes / unit).max(1) * unit
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_and_slices_tile_what_they_cut() {
        for (bytes, step) in [(0, 4), (1, 4), (8, 4), (9, 4)] {
            let pieces: Vec<Block> = pieces(bytes, step).collect();
            assert_eq!(
                pieces.iter().flat_map(Clone::clone).collect::<Vec<_>>(),
                Vec::from_iter(0..bytes)
            );
        }
        for (bytes, ranks) in [(0, 3), (8, 3), (40, 3), (8, 1)] {
            let slices = slices(bytes, 8, ranks);
            assert_eq!(slices.len(), ranks);
            assert!(slices.iter().all(|slice| slice.start % 8 == 0 && slice.end % 8 == 0));
            assert_eq!(slices.into_iter().flatten().collect::<Vec<_>>(), Vec::from_iter(0..bytes));
        }
    }

    #[test]
    fn a_piece_covers_no_more_than_the_block() {
        assert_eq!(part(&(10..15), &(0..4)), 10..14);
        assert_eq!(part(&(10..15), &(4..8)), 14..15);
        assert_eq!(part(&(10..15), &(8..12)), 15..15);
        assert_eq!(side_by_side([2, 0, 3]), [0..2, 2..2, 2..5]);
        assert_eq!((align(10, 4), align(3, 4)), (8, 4));
    }
}
