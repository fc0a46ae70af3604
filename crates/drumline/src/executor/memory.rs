//! The buffers of one operation, by the names that a schedule gives them.

use std::ops::Range;

use drumline_kernels::{Element, ReduceOp, TreeInput, combine, reduce_tree};
use drumline_schedule::{
    Schedule,
    step::{Buffer, Loc, Step},
    tree::{Node, merges},
};

use super::machine::{Extents, Machine, STAGING};

/// Bytes for a transport, and local steps for the executor; the element type is hidden.
pub(crate) trait Memory {
    fn bytes(&self, loc: Loc) -> &[u8];
    fn bytes_mut(&mut self, loc: Loc) -> &mut [u8];
    fn compute(&mut self, step: &Step);
}

/// The caller's buffers and the working memory of one call.
pub(crate) struct Buffers<'a, T> {
    op: ReduceOp,
    world_size: usize,
    /// The lengths of `data` and `input`; `data` itself is empty while it is written to.
    extents: Extents,
    data: &'a mut [T],
    input: &'a [T],
    scratch: Vec<Slot>,
}

/// The part of a scratch slot that is backed by memory.
#[derive(Debug)]
struct Slot {
    id: usize,
    /// Which elements of the slot.
    backed: Range<usize>,
    /// At least those elements, from the first on.
    memory: Block,
}

/// Memory that every element type can lie in.
type Block = Vec<u64>;

/// Working memory that is kept from call to call, because fresh pages cost more than the
/// arithmetic on them. It grows to what the largest call needed.
#[derive(Debug, Default)]
pub(crate) struct Pool(Vec<Block>);

impl Pool {
    /// The largest block there is, made larger if need be. It holds left-overs.
    fn take(&mut self, bytes: usize) -> Block {
        let mut block = self.0.pop().unwrap_or_default();
        let words = bytes.div_ceil(size_of::<u64>());
        if block.len() < words {
            block.resize(words, 0);
        }
        block
    }

    fn put(&mut self, block: Block) {
        self.0.push(block);
        self.0.sort_unstable_by_key(Vec::len);
    }
}

impl Slot {
    fn slice<T: Element>(&self, range: Range<usize>) -> &[T] {
        &bytemuck::cast_slice(&self.memory)[self.within(range)]
    }

    fn slice_mut<T: Element>(&mut self, range: Range<usize>) -> &mut [T] {
        let range = self.within(range);
        &mut bytemuck::cast_slice_mut(&mut self.memory)[range]
    }

    fn within(&self, range: Range<usize>) -> Range<usize> {
        range.start - self.backed.start..range.end - self.backed.start
    }
}

impl<'a, T: Element> Buffers<'a, T> {
    /// Lays out the working memory that `schedule` needs: of each slot only what is named.
    pub(crate) fn new(
        schedule: &Schedule,
        op: ReduceOp,
        data: &'a mut [T],
        input: &'a [T],
        pool: &mut Pool,
    ) -> Buffers<'a, T> {
        let extents = Extents { data: data.len(), input: input.len() };
        let staging = schedule.steps.iter().filter_map(|step| match step {
            Step::RecvReduce { dst, .. } => Some(dst.span.resolve(data.len())),
            _ => None,
        });
        let staging = staging.reduce(|a, b| a.start.min(b.start)..a.end.max(b.end));
        let scratch = schedule
            .scratch(data.len())
            .into_iter()
            .chain(staging.map(|hull| (STAGING, hull)))
            .map(|(id, backed)| {
                let memory = pool.take(size_of::<T>() * backed.len());
                Slot { id, backed, memory }
            })
            .collect();
        Buffers { op, world_size: schedule.world_size, extents, data, input, scratch }
    }

    /// Gives the working memory back.
    pub(crate) fn recycle(self, pool: &mut Pool) {
        self.scratch.into_iter().for_each(|slot| pool.put(slot.memory));
    }

    pub(crate) fn extents(&self) -> Extents {
        self.extents
    }

    fn range(&self, loc: Loc) -> Range<usize> {
        loc.span.resolve(self.extents.of(loc.buffer))
    }

    fn slot(&self, id: usize) -> usize {
        let Some(index) = self.scratch.iter().position(|slot| slot.id == id) else {
            unreachable!("the layout covers every slot that the schedule names");
        };
        index
    }

    fn slice(&self, loc: Loc) -> &[T] {
        let range = self.range(loc);
        match loc.buffer {
            Buffer::Data => &self.data[range],
            Buffer::Input => &self.input[range],
            Buffer::Scratch(id) => self.scratch[self.slot(id)].slice(range),
            Buffer::Slot => unreachable!("only algorithms that use private memory are run"),
        }
    }

    /// Runs `f` on `dst` while all other buffers can be read.
    ///
    /// The destination's buffer is taken out for the time of the call: a well-formed schedule
    /// reads nothing of it but the destination itself.
    fn write<R>(&mut self, dst: Loc, f: impl FnOnce(&mut [T], &Self) -> R) -> R {
        let range = self.range(dst);
        match dst.buffer {
            Buffer::Data => {
                let data = std::mem::take(&mut self.data);
                let result = f(&mut data[range], self);
                self.data = data;
                result
            }
            Buffer::Scratch(id) => {
                let index = self.slot(id);
                let mut slot = self.scratch.swap_remove(index);
                let result = f(slot.slice_mut(range), self);
                self.scratch.push(slot);
                result
            }
            Buffer::Input => unreachable!("no schedule writes to the input"),
            Buffer::Slot => unreachable!("only algorithms that use private memory are run"),
        }
    }

    fn reduce(&mut self, dst: Loc, src: Loc, finish: bool) {
        let (op, finish) = (self.op, finish.then_some(self.world_size));
        self.write(dst, |dst, others| combine(op, dst, others.slice(src), finish));
    }

    fn reduce_tree(&mut self, dst: Loc, srcs: &[(Node, Loc)], finish: bool) {
        let nodes: Vec<Node> = srcs.iter().map(|(node, _)| *node).collect();
        let root = Node { lo: nodes[0].lo, len: nodes.iter().map(|node| node.len).sum() };
        let Some(merges) = merges(root, &nodes) else {
            unreachable!("the inputs of a ReduceTree tile a node");
        };
        let (op, finish) = (self.op, finish.then_some(self.world_size));
        self.write(dst, |into, others| {
            let input = |loc: &Loc| match *loc == dst {
                true => TreeInput::Destination,
                false => TreeInput::Slice(others.slice(*loc)),
            };
            let inputs: Vec<_> = srcs.iter().map(|(_, loc)| input(loc)).collect();
            reduce_tree(op, into, &inputs, &merges, finish);
        });
    }
}

impl<T: Element> Memory for Buffers<'_, T> {
    fn bytes(&self, loc: Loc) -> &[u8] {
        bytemuck::cast_slice(self.slice(loc))
    }

    fn bytes_mut(&mut self, loc: Loc) -> &mut [u8] {
        let range = self.range(loc);
        bytemuck::cast_slice_mut(match loc.buffer {
            Buffer::Data => &mut self.data[range],
            Buffer::Scratch(id) => {
                let index = self.slot(id);
                self.scratch[index].slice_mut(range)
            }
            Buffer::Input => unreachable!("no schedule writes to the input"),
            Buffer::Slot => unreachable!("only algorithms that use private memory are run"),
        })
    }

    fn compute(&mut self, step: &Step) {
        match step {
            Step::RecvReduce { dst, finish, .. } => {
                self.reduce(*dst, Machine::staging(*dst), *finish);
            }
            Step::Reduce { dst, src, finish, .. } => self.reduce(*dst, *src, *finish),
            Step::ReduceTree { dsts, srcs, finish } => match dsts[..] {
                [dst] => self.reduce_tree(dst, srcs, *finish),
                _ => unreachable!("algorithms that use private memory have one destination"),
            },
            Step::Copy { dst, src } => {
                self.write(*dst, |dst, others| dst.copy_from_slice(others.slice(*src)));
            }
            Step::Send { .. }
            | Step::Recv { .. }
            | Step::Flush { .. }
            | Step::Post
            | Step::Wait { .. } => unreachable!("messages are the machine's business"),
        }
    }
}
