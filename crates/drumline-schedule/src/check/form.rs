use std::collections::HashMap;

use super::CheckError;
use crate::schedule::{Schedule, tiled};
use crate::step::{Buffer, Loc, Rank, Step};
use crate::tree::{Node, merges};

/// What an executor relies on, step by step, without looking at other ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rule {
    /// Peers are ranks of the world, and not the rank itself.
    #[error("its peer must be another rank of the world")]
    Peer,
    /// Spans lie in their buffer. Scratch is as long as need be.
    #[error("a span must lie in its buffer: `of` at least 1, `first + count` at most `of`")]
    Span,
    /// An all-gather and a reduce-scatter have an input beside their data.
    #[error("only all_gather and reduce_scatter have an input buffer")]
    Input,
    /// The input belongs to the user.
    #[error("the input is read only")]
    InputWritten,
    /// Local operands lie in different buffers, so that one can be borrowed for writing.
    #[error("source and destination must be in different buffers")]
    SameBuffer,
    /// An input of a tree is the destination itself or lies in another buffer.
    #[error("an input of the tree shares the destination's buffer without being the destination")]
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

pub(super) fn check(schedule: &Schedule) -> Result<(), CheckError> {
    let mut sent: HashMap<Rank, usize> = HashMap::new();
    let mut receives: Vec<Loc> = Vec::new();
    for (index, step) in schedule.steps.iter().enumerate() {
        if let Step::Send { to, .. } = step {
            *sent.entry(*to).or_default() += 1;
        }
        if !matches!(step, Step::Recv { .. }) {
            receives.clear();
        }
        let broken = broken_rule(schedule, step).or_else(|| match step {
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

fn broken_rule(schedule: &Schedule, step: &Step) -> Option<Rule> {
    let Schedule { collective, world_size, rank, .. } = *schedule;
    if step.peer().is_some_and(|peer| peer >= world_size || peer == rank) {
        return Some(Rule::Peer);
    }
    for Loc { buffer, span } in step.reads().chain(step.writes()) {
        let is_scratch = matches!(buffer, Buffer::Scratch(_));
        let end = span.first.checked_add(span.count);
        if span.of == 0 || end.is_none_or(|end| end > span.of && !is_scratch) {
            return Some(Rule::Span);
        }
        if buffer == Buffer::Input && !collective.has_input() {
            return Some(Rule::Input);
        }
    }
    if step.writes().is_some_and(|dst| dst.buffer == Buffer::Input) {
        return Some(Rule::InputWritten);
    }
    match step {
        Step::Reduce { dst, src, .. } | Step::Copy { dst, src } if dst.buffer == src.buffer => {
            Some(Rule::SameBuffer)
        }
        Step::ReduceTree { dst, srcs, .. } => {
            let nodes: Vec<Node> = srcs.iter().map(|&(node, _)| node).collect();
            let tiles = tiled(&nodes)
                .filter(|node| node.lo + node.len <= world_size)
                .and_then(|node| merges(node, &nodes));
            if tiles.is_none() {
                return Some(Rule::NotATree);
            }
            srcs.iter()
                .any(|(_, src)| src.buffer == dst.buffer && src != dst)
                .then_some(Rule::TreeInput)
        }
        _ => None,
    }
}
