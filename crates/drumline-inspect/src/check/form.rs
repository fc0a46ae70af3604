use std::collections::HashMap;

use drumline_schedule::step::{Buffer, Loc, Rank, Span, Step};
use drumline_schedule::tree::{Node, merges, tiled};
use drumline_schedule::{Blocks, MemoryUse, Schedule, Topology};

use super::error::CheckError;
use super::rule::Rule;

/// Checks all rules that need no run, and returns the first schedule.
pub(crate) fn check_form<'a>(
    topology: &Topology,
    schedules: &'a [Schedule],
) -> Result<&'a Schedule, CheckError> {
    let first = schedules.first().ok_or(CheckError::NotOneWorld { index: 0 })?;
    let call = |s: &Schedule| (s.collective, s.algorithm, s.world_size, s.root, s.memory, s.uneven);
    if schedules.len() != topology.world_size {
        return Err(CheckError::NotOneWorld { index: schedules.len().min(topology.world_size) });
    }
    for (index, schedule) in schedules.iter().enumerate() {
        if call(schedule) != call(first)
            || schedule.rank != index
            || schedule.world_size != schedules.len()
        {
            return Err(CheckError::NotOneWorld { index });
        }
        check_steps(topology, schedule)?;
    }
    let posts = first.posts();
    match schedules.iter().find(|schedule| schedule.posts() != posts) {
        None => Ok(first),
        Some(other) => Err(CheckError::UnequalPosts {
            rank: other.rank,
            posts: other.posts(),
            posts_of_first: posts,
        }),
    }
}

fn check_steps(topology: &Topology, schedule: &Schedule) -> Result<(), CheckError> {
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
                Buffer::Scratch(_) | Buffer::Sum(_) => false,
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
        let is_scratch = matches!(buffer, Buffer::Scratch(_) | Buffer::Sum(_));
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
