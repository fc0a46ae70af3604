//! Which algorithm an operation takes, and what the others would cost.

use drumline::{
    ProcessGroup, Result,
    algorithms::{self, Explanation, shares_memory},
    backend::Collective,
};

use super::{choice::Buffers, operation::Operation, trial::Case};

/// The library's explanation; `None` for messages, which need no algorithm.
pub(super) fn explain(group: &ProcessGroup, case: &Case) -> Result<Option<Explanation>> {
    let Some(collective) = collective(case.operation) else { return Ok(None) };
    let registered = case.buffers == Buffers::Registered && shares_memory(group);
    algorithms::explain(group, collective, case.block, case.dtype, registered).map(Some)
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
        Operation::Barrier => Collective::Barrier,
        Operation::SendRecv => return None,
    })
}
