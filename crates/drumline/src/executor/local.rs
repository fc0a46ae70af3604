//! What a rank does by itself, laid out.

use std::ops::Range;

use drumline_schedule::{
    step::{Buffer, Loc, Side, Step},
    tree::{Node, merges},
};

use super::machine::Machine;

/// A step that moves or combines elements in memory.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Local {
    Copy {
        dst: Operand,
        src: Operand,
    },
    Combine {
        dsts: Vec<Operand>,
        srcs: Vec<Operand>,
        /// How many sources become one: a stack program.
        merges: Vec<usize>,
        /// How many ranks have a part in the result, if it is one.
        finish: Option<usize>,
    },
}

/// A place that a step reads or writes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Operand {
    pub(crate) loc: Loc,
    /// Where it lies in its buffer, if it lies there in all windows.
    pub(super) range: Option<Range<usize>>,
}

impl Operand {
    pub(crate) fn is_slot_of_peer(&self) -> bool {
        self.loc.peer.is_some() && self.loc.buffer == Buffer::Slot
    }

    pub(crate) fn is_own_data(&self) -> bool {
        self.loc.peer.is_none() && self.loc.buffer == Buffer::Data
    }
}

impl Local {
    /// What a step does by itself, if anything, once its message has arrived, if it takes one.
    /// `contributions` of ranks make a result; `operand` knows where a place lies.
    pub(super) fn of(
        step: &Step,
        contributions: usize,
        operand: impl Fn(Loc) -> Operand,
    ) -> Option<Local> {
        let finish = |last: bool| last.then_some(contributions);
        let pair = |dst: Loc, src: Loc, side: Side, last: bool| Local::Combine {
            dsts: vec![operand(dst)],
            srcs: match side {
                Side::Left => vec![operand(src), operand(dst)],
                Side::Right => vec![operand(dst), operand(src)],
            },
            merges: vec![0, 1],
            finish: finish(last),
        };
        match step {
            Step::RecvReduce { dst, side, finish, .. } => {
                Some(pair(*dst, Machine::staging(*dst), *side, *finish))
            }
            Step::Reduce { dst, src, side, finish } => Some(pair(*dst, *src, *side, *finish)),
            Step::ReduceTree { dsts, srcs, finish: last } => Some(Local::Combine {
                dsts: dsts.iter().map(|dst| operand(*dst)).collect(),
                srcs: srcs.iter().map(|(_, src)| operand(*src)).collect(),
                merges: stack_program(srcs),
                finish: finish(*last),
            }),
            Step::Copy { dst, src } => Some(Local::Copy { dst: operand(*dst), src: operand(*src) }),
            Step::Send { .. }
            | Step::Recv { .. }
            | Step::Flush { .. }
            | Step::Post
            | Step::Wait { .. } => None,
        }
    }
}

/// How the inputs of a tree are combined.
fn stack_program(srcs: &[(Node, Loc)]) -> Vec<usize> {
    let nodes: Vec<Node> = srcs.iter().map(|(node, _)| *node).collect();
    let root = Node { lo: nodes[0].lo, len: nodes.iter().map(|node| node.len).sum() };
    let Some(merges) = merges(root, &nodes) else {
        unreachable!("the inputs of a ReduceTree tile a node");
    };
    merges
}
