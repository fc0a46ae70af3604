//! Which algorithm an operation takes, and what the others would cost.

use drumline::{Collective, Explanation, ProcessGroup, Result};

use super::{choice::Buffers, operation::Operation, trial::Call};

/// What the library says of such a call; nothing of messages, which need no algorithm.
pub(super) fn explain(group: &ProcessGroup, call: &Call) -> Result<Option<Explanation>> {
    let Some(collective) = collective(call.operation) else { return Ok(None) };
    let registered = call.buffers == Buffers::Registered && group.shares_memory();
    group.explain(collective, call.block, call.dtype, registered).map(Some)
}

fn collective(operation: Operation) -> Option<Collective> {
    Some(match operation {
        Operation::AllReduce => Collective::AllReduce,
        Operation::Reduce => Collective::Reduce,
        Operation::Broadcast => Collective::Broadcast,
        Operation::AllGather => Collective::AllGather,
        Operation::Gather => Collective::Gather,
        Operation::Scatter => Collective::Scatter,
        Operation::ReduceScatter => Collective::ReduceScatter,
        Operation::AllToAll => Collective::AllToAll,
        Operation::Scan => Collective::Scan,
        Operation::ExclusiveScan => Collective::ExclusiveScan,
        Operation::Barrier => Collective::Barrier,
        Operation::SendRecv => return None,
    })
}
