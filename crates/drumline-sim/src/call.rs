//! Calls of collectives.

use crate::member::Order;
use drumline_conformance::{Buffers, Case, Kind, on_group::Form};
use drumline_schedule::{Borders, Counts};

/// A collective that all ranks of a group should call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct PlannedCall {
    pub(crate) group: usize,
    pub(crate) case: Case,
    /// Whether buffers are registered. Each rank decides for itself whether its call blocks.
    pub(crate) form: Form,
}

impl PlannedCall {
    /// The buffers of `rank` before the call.
    pub(crate) fn buffers(&self, rank: usize, world_size: usize) -> Buffers {
        self.case.buffers(rank, world_size)
    }

    /// The call of `rank` on these buffers.
    pub(crate) fn order<'a>(
        &self,
        rank: usize,
        world_size: usize,
        buffers: &'a Buffers,
    ) -> Order<'a> {
        let PlannedCall { case, form, .. } = *self;
        Order {
            collective: case.kind.collective(),
            reduce_op: case.kind.reduce_op(),
            root: case.kind.root(),
            dtype: case.dtype,
            counts: counts(&case, rank, world_size),
            data: &buffers.data,
            input: &buffers.input,
            registered: form == Form::Registered,
        }
    }
}

/// The lengths of the blocks that `rank` gives.
fn counts(case: &Case, rank: usize, world_size: usize) -> Counts {
    let borders = |counts: &[usize]| match Borders::new(counts) {
        Some(borders) => borders,
        None => unreachable!("buffers fit into memory"),
    };
    match case.kind {
        _ if !case.uneven => Counts::Even(case.elements),
        Kind::AllToAll => {
            let (sent, received) = case.counts_by_pair(rank, world_size);
            Counts::Own { sent: borders(&sent), received: borders(&received) }
        }
        _ => Counts::ByRank(borders(&case.counts(world_size))),
    }
}
