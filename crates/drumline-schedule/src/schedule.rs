//! The steps of one rank, and their text form.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use crate::collective::Collective;
use crate::extent::{Blocks, Counts};
use crate::lags::Lags;
use crate::step::{Buffer, Loc, Rank, Side, Span, Step};
use crate::tree::{Node, merges, tiled};

/// The steps of one rank in a collective.
///
/// It knows nothing of lengths, element types or transports. So one schedule serves every call with the same
/// collective, algorithm and root. Its text explains it:
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology};
///
/// let doubling = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let schedule = doubling.schedule(&Topology::flat(2), 1, 0)?;
/// assert_eq!(schedule.to_string(), "\
/// all_reduce doubling, rank 1 of 2
///   0  send    data -> rank 0
///   1  recv    scratch0 <- rank 0
///   2  flush   until rank 0 has taken message 1
///   3  reduce  data = finish(scratch0 + data)
/// ");
/// # Ok::<(), drumline_schedule::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Schedule {
    /// The collective that it carries out.
    pub collective: Collective,
    /// Name of the algorithm.
    pub algorithm: &'static str,
    /// Number of ranks.
    pub world_size: usize,
    /// The rank that runs it.
    pub rank: Rank,
    /// The root, where the collective has one.
    pub root: Rank,
    /// The memory that the ranks of a host share for it.
    pub memory: MemoryUse,
    /// Whether it serves blocks of different lengths.
    pub uneven: bool,
    /// By how much steps lag, if several windows are under way at once.
    pub lags: Lags,
    /// Where blocks lie in a slot that may hold a block for every rank.
    pub shelves: Shelves,
    /// A slot is cut into this number of parts, and a window takes up one of them.
    pub slot_parts: usize,
    /// The steps, in the order in which they take effect.
    pub steps: Vec<Step>,
}

impl Schedule {
    /// The number of posts, which is the same on every rank.
    pub fn posts(&self) -> usize {
        self.steps.iter().filter(|step| matches!(step, Step::Post)).count()
    }

    /// Whether this rank sends or receives.
    pub fn uses_messages(&self) -> bool {
        let is_message = |step: &Step| {
            matches!(step, Step::Send { .. } | Step::Recv { .. } | Step::RecvReduce { .. })
        };
        self.steps.iter().any(is_message)
    }

    /// Whether several windows of long data are under way at once. The same on all ranks.
    pub fn is_pipelined(&self) -> bool {
        self.lags != Lags::NONE
    }

    /// The number of blocks for which a slot has room at the same time.
    pub fn slot_blocks(&self) -> usize {
        match self.collective.blocks(Buffer::Slot, self.rank, self.root) {
            Blocks::All => self.shelves.count(self.world_size),
            Blocks::One | Blocks::None => 1,
        }
    }

    /// The number of elements of each block in one window, at least one. Slots hold `slot` elements.
    pub fn window(&self, slot: usize) -> usize {
        (slot / self.slot_parts / self.slot_blocks()).max(1)
    }

    /// The number of elements of each block in a window of about `bytes` bytes of a rank's data. With more than 16 ranks
    /// windows are longer, so that a message stays long enough to be worth its price: it carries at least a sixteenth of
    /// `bytes`. Where ranks share memory, windows are twice as long, because in each of them ranks also wait for their
    /// neighbours.
    pub fn window_of_bytes(&self, bytes: usize, element_bytes: usize) -> usize {
        let bytes = match self.memory {
            MemoryUse::Private => bytes,
            MemoryUse::Staged | MemoryUse::Registered => bytes.saturating_mul(2),
        };
        let message = bytes / self.world_size.clamp(1, 16) / element_bytes.max(1);
        let elements = match self.collective {
            // There is one block, and each rank reduces a part of it.
            Collective::AllReduce => message.saturating_mul(self.world_size),
            _ => message,
        };
        elements.max(1)
    }

    /// The memory that each scratch and each place for sums needs: the smallest range that holds all its named
    /// spans.
    pub fn scratch(&self, counts: &Counts) -> BTreeMap<Buffer, Range<usize>> {
        let mut slots: BTreeMap<Buffer, Range<usize>> = BTreeMap::new();
        for loc in self.steps.iter().flat_map(|step| step.reads().chain(step.writes())) {
            if let Buffer::Scratch(_) | Buffer::Sum(_) = loc.buffer {
                let named = self.resolve(loc, counts);
                let hull = slots.entry(loc.buffer).or_insert_with(|| named.clone());
                *hull = hull.start.min(named.start)..hull.end.max(named.end);
            }
        }
        slots
    }

    /// Messages and elements that this rank sends.
    pub fn sent(&self, counts: &Counts) -> (usize, usize) {
        let lengths = self.steps.iter().filter_map(|step| match step {
            Step::Send { src, .. } => Some(self.resolve(*src, counts).len()),
            _ => None,
        });
        lengths.fold((0, 0), |(messages, elements), len| (messages + 1, elements + len))
    }

    /// Messages and elements that this rank receives.
    pub fn received(&self, counts: &Counts) -> (usize, usize) {
        let lengths = self.steps.iter().filter_map(|step| match step {
            Step::Recv { dst, .. } | Step::RecvReduce { dst, .. } => {
                Some(self.resolve(*dst, counts).len())
            }
            _ => None,
        });
        lengths.fold((0, 0), |(messages, elements), len| (messages + 1, elements + len))
    }

    /// Elements that this rank copies.
    pub fn copied(&self, counts: &Counts) -> usize {
        let lengths = self.steps.iter().filter_map(|step| match step {
            Step::Copy { dst, .. } => Some(self.resolve(*dst, counts).len()),
            _ => None,
        });
        lengths.sum()
    }

    /// Elements that this rank reads from and writes to the memory of neighbours.
    pub fn shared(&self, counts: &Counts) -> usize {
        let locs = self.steps.iter().flat_map(|step| step.reads().chain(step.writes()));
        let shared = locs.filter(|loc| loc.peer.is_some());
        shared.map(|loc| self.resolve(loc, counts).len()).sum()
    }

    /// The blocks of the buffer that `loc` names.
    pub fn blocks(&self, loc: Loc) -> Blocks {
        self.collective.blocks(loc.buffer, loc.peer.unwrap_or(self.rank), self.root)
    }

    /// The elements of its buffer that `loc` covers.
    pub fn resolve(&self, loc: Loc, counts: &Counts) -> Range<usize> {
        let owner = loc.peer.unwrap_or(self.rank);
        match self.blocks(loc) {
            Blocks::None => 0..0,
            Blocks::One => loc.span.resolve(counts.block(loc.buffer, owner)),
            Blocks::All if loc.buffer == Buffer::Slot && loc.span.of == self.world_size => {
                let shelf = self.shelves.of(owner, loc.span.first, self.world_size);
                let start = shelf * counts.longest();
                start..start + counts.block(Buffer::Slot, loc.span.first)
            }
            Blocks::All if matches!(loc.buffer, Buffer::Scratch(_) | Buffer::Sum(_)) => {
                0..counts.resolve_in_all(loc.span, loc.buffer, self.world_size).len()
            }
            Blocks::All => counts.resolve_in_all(loc.span, loc.buffer, self.world_size),
        }
    }
}

/// Where the blocks of a slot lie, if it may hold a block for every rank. A shelf has room for one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Shelves {
    /// One for each rank but the owner, whose own block nobody fetches. The first is for the rank after the owner. So
    /// two ranks that exchange slots write exactly where they have just read.
    AfterOwner,
    /// The same in all slots of a host.
    Shared {
        /// The shelf of each block. Blocks on one shelf lie there one after another.
        of_block: Arc<[u32]>,
        /// The number of shelves, the same on all hosts.
        count: usize,
    },
}

impl Shelves {
    /// The shelf of each block, out of `count`.
    pub fn shared(of_block: impl IntoIterator<Item = usize>, count: usize) -> Shelves {
        let of_block = of_block.into_iter().map(|shelf| shelf as u32).collect();
        Shelves::Shared { of_block, count }
    }

    /// The shelf of `block` in the slot of rank `owner`.
    pub fn of(&self, owner: Rank, block: Rank, world_size: usize) -> usize {
        match self {
            Shelves::AfterOwner => (block + world_size - owner - 1) % world_size,
            Shelves::Shared { of_block, .. } => of_block[block] as usize,
        }
    }

    /// The number of shelves, at least one.
    pub fn count(&self, world_size: usize) -> usize {
        match self {
            Shelves::AfterOwner => world_size.saturating_sub(1).max(1),
            Shelves::Shared { count, .. } => *count,
        }
    }
}

/// The memory that the ranks of a host share for an algorithm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryUse {
    /// None: ranks send each other messages.
    Private,
    /// The [slots](Buffer::Slot). The users' buffers may lie anywhere.
    Staged,
    /// The slots, and each user's [buffer](Collective::registered_buffer) that is registered with the group.
    Registered,
}

impl fmt::Display for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Schedule { collective, algorithm, rank, world_size, .. } = self;
        write!(f, "{collective} {algorithm}, rank {rank} of {world_size}")?;
        if collective.has_root() {
            write!(f, ", root {}", self.root)?;
        }
        writeln!(f)?;
        if self.steps.is_empty() {
            writeln!(f, "  nothing to do")?;
        }
        for (index, step) in self.steps.iter().enumerate() {
            writeln!(f, "{index:>3}  {step}")?;
        }
        Ok(())
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let finished = |finish: bool, sum: String| match finish {
            true => format!("finish({sum})"),
            false => sum,
        };
        let ordered = |dst: &Loc, side: Side, incoming: String| match side {
            Side::Left => format!("{incoming} + {dst}"),
            Side::Right => format!("{dst} + {incoming}"),
        };
        match self {
            Step::Send { to, src } => write!(f, "send    {src} -> rank {to}"),
            Step::Recv { from, dst } => write!(f, "recv    {dst} <- rank {from}"),
            Step::RecvReduce { from, dst, side, finish } => {
                let sum = ordered(dst, *side, format!("(message of rank {from})"));
                write!(f, "recv+   {dst} = {}", finished(*finish, sum))
            }
            Step::Reduce { dst, src, side, finish } => {
                let sum = ordered(dst, *side, src.to_string());
                write!(f, "reduce  {dst} = {}", finished(*finish, sum))
            }
            Step::ReduceTree { dsts, srcs, finish } => {
                let dsts: Vec<String> = dsts.iter().map(ToString::to_string).collect();
                write!(f, "reduce  {} = {}", dsts.join(", "), finished(*finish, tree_of(srcs)))
            }
            Step::Copy { dst, src } => write!(f, "copy    {dst} = {src}"),
            Step::Flush { to, upto: 1 } => {
                write!(f, "flush   until rank {to} has taken message 1")
            }
            Step::Flush { to, upto } => {
                write!(f, "flush   until rank {to} has taken messages 1 to {upto}")
            }
            Step::Post => f.write_str("post"),
            Step::Wait { peer, upto } => write!(f, "wait    for post {upto} of rank {peer}"),
        }
    }
}

/// The inputs with the parentheses of the tree; a plain list where they do not tile a node.
fn tree_of(srcs: &[(Node, Loc)]) -> String {
    let nodes: Vec<Node> = srcs.iter().map(|&(node, _)| node).collect();
    let texts = srcs.iter().map(|(_, loc)| loc.to_string());
    let Some(merges) = tiled(&nodes).and_then(|node| merges(node, &nodes)) else {
        return texts.collect::<Vec<_>>().join(", ");
    };
    let mut stack: Vec<String> = vec![];
    for (text, merges) in texts.zip(merges) {
        let mut right = text;
        for _ in 0..merges {
            let left = stack.pop().unwrap_or_default();
            right = format!("({left} + {right})");
        }
        stack.push(right);
    }
    let sum = stack.concat();
    // The outermost parentheses are redundant.
    sum.strip_prefix('(').and_then(|sum| sum.strip_suffix(')')).unwrap_or(&sum).to_owned()
}

impl fmt::Display for Loc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(peer) = self.peer {
            write!(f, "rank {peer}'s ")?;
        }
        match self.buffer {
            Buffer::Slot => f.write_str("slot")?,
            Buffer::Data => f.write_str("data")?,
            Buffer::Input => f.write_str("input")?,
            Buffer::Scratch(slot) => write!(f, "scratch{slot}")?,
            Buffer::Sum(slot) => write!(f, "sum{slot}")?,
        }
        match self.span {
            Span::WHOLE => Ok(()),
            span => write!(f, "{span}"),
        }
    }
}

/// `[2/5]` is block 2 of 5, `[1..3/5]` are its blocks 1 and 2, `[]` is nothing.
impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Span { first, count, of } = self;
        match count {
            0 => f.write_str("[]"),
            1 => write!(f, "[{first}/{of}]"),
            _ => write!(f, "[{first}..{}/{of}]", first + count),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Topology};

    #[test]
    fn text_shows_the_order_of_a_tree_sum() {
        let direct = Algorithm::find(Collective::AllReduce, "direct").unwrap();
        let text = direct.schedule(&Topology::flat(5), 3, 0).unwrap().to_string();
        let sum = "data[3/5] = finish(((scratch0[3/5] + scratch1[3/5]) + \
                   (scratch2[3/5] + data[3/5])) + scratch4[3/5])";
        assert!(text.contains(sum), "{text}");
    }

    #[test]
    fn scratch_is_the_hull_of_the_spans_named() {
        let direct = Algorithm::find(Collective::AllReduce, "direct").unwrap();
        let schedule = direct.schedule(&Topology::flat(3), 1, 0).unwrap();
        let expected = [0, 2].map(|slot| (Buffer::Scratch(slot), 3..6));
        assert_eq!(schedule.scratch(&Counts::Even(10)), BTreeMap::from(expected));
    }
}
