use std::collections::HashMap;

use super::CheckError;
use crate::algorithm::MemoryUse;
use crate::extent::Blocks;
use crate::schedule::{Schedule, tiled};
use crate::step::{Buffer, Loc, Rank, Span, Step};
use crate::topology::Topology;
use crate::tree::{Node, merges};

/// What an executor relies on, step by step, without looking at other ranks.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology};
/// use drumline_schedule::check::{CheckError, Rule, check_schedules};
///
/// use drumline_schedule::step::{Loc, Span, Step};
///
/// let world = Topology::flat(2);
/// let mut schedules = Algorithm::find(Collective::AllGather, "bruck")?.schedules(&world, 0)?;
/// schedules[0].steps.push(Step::Recv { from: 1, dst: Loc::input(Span::WHOLE) });
/// let error = check_schedules(&world, &schedules, 10).unwrap_err();
/// assert!(matches!(error, CheckError::Form { rank: 0, rule: Rule::InputWritten, .. }), "{error}");
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rule {
    /// Peers are ranks of the world, and not the rank itself, whose own memory has no peer.
    #[error("its peer must be another rank of the world")]
    Peer,
    /// Spans lie in their buffer. Scratch is as long as need be.
    #[error("a span must lie in its buffer: `of` at least 1, `first + count` at most `of`")]
    Span,
    /// Not every collective has an input beside its data.
    #[error("this collective has no input buffer")]
    Input,
    /// Of a block for every rank, windows and borders are those of each block by itself.
    #[error("a staged algorithm names such blocks one by one")]
    ManyBlocks,
    /// No number of equal parts fits blocks of any length.
    #[error("an algorithm for blocks of different lengths names whole blocks only")]
    PartOfBlock,
    /// The input belongs to the user.
    #[error("the input is read only")]
    InputWritten,
    /// Memory is shared, and posts are counted, on one host.
    #[error("its peer must share the host")]
    OtherHost,
    /// An executor sets up what the algorithm declares.
    #[error("an algorithm that uses private memory has no slot, no post and no wait")]
    Undeclared,
    /// Peers share slots, and one of the users' buffers if those are registered.
    #[error("of a peer's memory only the slot may be named, or the buffer that is registered")]
    NotShared,
    /// What messages and `Reduce` act on is the rank's own.
    #[error("only `Copy` and `ReduceTree` act on a peer's memory")]
    PeerOperand,
    /// Operands lie in different buffers, so that one can be borrowed for writing.
    #[error("source and destination must be in different buffers")]
    SameBuffer,
    /// A tree has destinations in different buffers.
    #[error("a tree must have a destination, and no two in the same buffer")]
    TreeOutputs,
    /// An input of a tree is a destination itself or lies in another buffer.
    #[error("an input of the tree shares a destination's buffer without being the destination")]
    TreeInput,
    /// The inputs of a tree tile a node of the world's ranks.
    #[error("the inputs must tile one node of the tree, by ascending rank")]
    NotATree,
    /// An executor posts receives that follow each other at once; they complete in any order.
    #[error("it overlaps a receive before it, with no other step between the two")]
    ReceivesMeet,
    /// Only messages that have been sent can be flushed.
    #[error("flushes more messages than have been sent")]
    FlushAhead,
}

pub(super) fn check(topology: &Topology, schedule: &Schedule) -> Result<(), CheckError> {
    let mut sent: HashMap<Rank, usize> = HashMap::new();
    let mut receives: Vec<Loc> = Vec::new();
    for (index, step) in schedule.steps.iter().enumerate() {
        if let Step::Send { to, .. } = step {
            *sent.entry(*to).or_default() += 1;
        }
        if !matches!(step, Step::Recv { .. } | Step::Flush { .. }) {
            receives.clear();
        }
        let broken = broken_rule(topology, schedule, step).or_else(|| match step {
            Step::Recv { dst, .. } if receives.iter().any(|other| other.overlaps(*dst)) => {
                Some(Rule::ReceivesMeet)
            }
            Step::Flush { to, upto } if sent.get(to).copied().unwrap_or(0) < *upto => {
                Some(Rule::FlushAhead)
            }
            _ => None,
        });
        if let Some(rule) = broken {
            return Err(CheckError::Form { rank: schedule.rank, step: index, rule });
        }
        if let Step::Recv { dst, .. } = step {
            receives.push(*dst);
        }
    }
    Ok(())
}

fn broken_rule(topology: &Topology, schedule: &Schedule, step: &Step) -> Option<Rule> {
    let Schedule { collective, world_size, rank, memory, .. } = *schedule;
    let is_peer = |peer: Rank| peer < world_size && peer != rank;
    let shares_host = |peer: Rank| topology.host_of(peer) == topology.host_of(rank);
    if step.peer().is_some_and(|peer| !is_peer(peer)) {
        return Some(Rule::Peer);
    }
    if let Step::Post | Step::Wait { .. } = step
        && memory == MemoryUse::Private
    {
        return Some(Rule::Undeclared);
    }
    if let Step::Wait { peer, .. } = step
        && !shares_host(*peer)
    {
        return Some(Rule::OtherHost);
    }
    for Loc { peer, buffer, span } in step.reads().chain(step.writes()) {
        if buffer == Buffer::Slot && memory == MemoryUse::Private {
            return Some(Rule::Undeclared);
        }
        if let Some(peer) = peer {
            let shared = match buffer {
                Buffer::Slot => true,
                Buffer::Data | Buffer::Input => {
                    memory == MemoryUse::Registered && buffer == collective.registered_buffer()
                }
                Buffer::Scratch(_) => false,
            };
            let broken = [
                (is_peer(peer), Rule::Peer),
                (is_peer(peer) && shares_host(peer), Rule::OtherHost),
                (shared, Rule::NotShared),
                (matches!(step, Step::Copy { .. } | Step::ReduceTree { .. }), Rule::PeerOperand),
            ];
            if let Some((_, rule)) = broken.into_iter().find(|(kept, _)| !kept) {
                return Some(rule);
            }
        }
        let is_scratch = matches!(buffer, Buffer::Scratch(_));
        let end = span.first.checked_add(span.count);
        if span.of == 0 || end.is_none_or(|end| end > span.of && !is_scratch) {
            return Some(Rule::Span);
        }
        if buffer == Buffer::Input && !collective.has_input() {
            return Some(Rule::Input);
        }
        let loc = Loc { peer, buffer, span };
        match schedule.blocks(loc) {
            _ if span.count == 0 => {}
            Blocks::All
                if memory != MemoryUse::Private && (span.count, span.of) != (1, world_size) =>
            {
                return Some(Rule::ManyBlocks);
            }
            Blocks::All if schedule.uneven && span.of != world_size => {
                return Some(Rule::PartOfBlock);
            }
            Blocks::One if schedule.uneven && span != Span::WHOLE => {
                return Some(Rule::PartOfBlock);
            }
            Blocks::All | Blocks::One | Blocks::None => {}
        }
    }
    if step.writes().any(|dst| dst.buffer == Buffer::Input) {
        return Some(Rule::InputWritten);
    }
    match step {
        Step::Reduce { dst, src, .. } | Step::Copy { dst, src } if dst.shares_buffer(*src) => {
            Some(Rule::SameBuffer)
        }
        Step::ReduceTree { dsts, srcs, .. } => {
            let nodes: Vec<Node> = srcs.iter().map(|&(node, _)| node).collect();
            let tiles = tiled(&nodes)
                .filter(|node| node.lo + node.len <= world_size)
                .and_then(|node| merges(node, &nodes));
            if tiles.is_none() {
                return Some(Rule::NotATree);
            }
            let written: HashMap<(Option<Rank>, Buffer), Loc> =
                dsts.iter().map(|&dst| ((dst.peer, dst.buffer), dst)).collect();
            if written.is_empty() || written.len() < dsts.len() {
                return Some(Rule::TreeOutputs);
            }
            srcs.iter()
                .any(|(_, src)| written.get(&(src.peer, src.buffer)).is_some_and(|dst| src != dst))
                .then_some(Rule::TreeInput)
        }
        _ => None,
    }
}
