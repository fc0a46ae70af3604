//! The steps that a rank carries out in memory, laid out.

use std::ops::Range;

use drumline_schedule::{
    step::{Buffer, Loc, Rank},
    tree::{Node, merges},
};

use super::flags::Seat;

/// A step that moves or combines elements in memory.
#[derive(Debug)]
pub enum Local {
    Copy {
        dst: Operand,
        src: Operand,
    },
    Combine {
        dsts: Vec<Operand>,
        srcs: Vec<Operand>,
        /// A program for a stack machine: how often to combine the two topmost values after each source is
        /// pushed.
        merges: Vec<usize>,
        /// How many ranks have contributed, if this step completes a result.
        finish: Option<usize>,
        /// Whether an operand lies in a place for sums.
        apart: bool,
    },
}

/// A place that a step reads or writes.
#[derive(Debug)]
pub struct Operand {
    pub area: Area,
    pub(crate) extent: Extent,
}

/// The memory in which an operand lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Area {
    Data,
    Input,
    Scratch,
    /// Places for sums.
    Sums,
    /// In the line of this rank's announcement.
    Line,
    LineOf(Seat),
    Slot,
    SlotOf(Seat),
    /// A neighbour's buffer that is registered for the call.
    RegisteredOf(Seat),
}

/// The memory in which staging slots lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slots {
    /// In the lines of announcements, where short data fits.
    InLine,
    /// In slots of their own.
    Apart,
}

/// The bytes of its memory that an operand takes.
#[derive(Debug)]
pub(crate) enum Extent {
    /// The same bytes in all windows.
    Fixed(Range<usize>),
    /// Other bytes in each window; resolved when the step runs.
    Moving(Loc),
}

impl Area {
    /// The memory of `loc`. `seat` finds the seat of a neighbour.
    pub(crate) fn of(loc: Loc, slots: Slots, seat: impl Fn(Rank) -> Seat) -> Area {
        match (loc.peer.map(seat), loc.buffer) {
            (None, Buffer::Slot) if slots == Slots::InLine => Area::Line,
            (Some(seat), Buffer::Slot) if slots == Slots::InLine => Area::LineOf(seat),
            (None, Buffer::Data) => Area::Data,
            (None, Buffer::Input) => Area::Input,
            (None, Buffer::Scratch(_)) => Area::Scratch,
            (None, Buffer::Sum(_)) => Area::Sums,
            (None, Buffer::Slot) => Area::Slot,
            (Some(seat), Buffer::Slot) => Area::SlotOf(seat),
            (Some(seat), Buffer::Data | Buffer::Input) => Area::RegisteredOf(seat),
            (Some(_), Buffer::Scratch(_) | Buffer::Sum(_)) => {
                unreachable!("no schedule names a peer's private memory")
            }
        }
    }
}

impl Local {
    /// Combines two sources.
    pub(crate) fn pair(dst: Operand, srcs: [Operand; 2], finish: Option<usize>) -> Local {
        Local::combine(vec![dst], srcs.into(), vec![0, 1], finish)
    }

    /// Combines the sources along the tree of sums.
    pub(crate) fn tree(
        dsts: &[Loc],
        srcs: &[(Node, Loc)],
        finish: Option<usize>,
        operand: impl Fn(Loc) -> Operand,
    ) -> Local {
        let nodes: Vec<Node> = srcs.iter().map(|(node, _)| *node).collect();
        let root = Node { lo: nodes[0].lo, len: nodes.iter().map(|node| node.len).sum() };
        let Some(merges) = merges(root, &nodes) else {
            unreachable!("the inputs of a ReduceTree tile a node");
        };
        let dsts = dsts.iter().map(|dst| operand(*dst)).collect();
        let srcs = srcs.iter().map(|(_, src)| operand(*src)).collect();
        Local::combine(dsts, srcs, merges, finish)
    }

    fn combine(
        dsts: Vec<Operand>,
        srcs: Vec<Operand>,
        merges: Vec<usize>,
        finish: Option<usize>,
    ) -> Local {
        let apart = dsts.iter().chain(&srcs).any(|operand| operand.area == Area::Sums);
        Local::Combine { dsts, srcs, merges, finish, apart }
    }
}
