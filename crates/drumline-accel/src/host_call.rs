//! Calls of the host on memory that a device reaches: bytes, and the type of their elements.

use drumline_group::{
    DType, ProcessGroup, Rank, Result, Work,
    backend::Collective,
    driving::{Ask, recv_any_bytes, recv_bytes, send_bytes},
};

use crate::DeviceOp;
use crate::pool::Lent;

/// The first bytes of a memory.
pub(crate) struct Front<M> {
    memory: M,
    bytes: usize,
}

impl<M: AsRef<[u8]>> AsRef<[u8]> for Front<M> {
    fn as_ref(&self) -> &[u8] {
        &self.memory.as_ref()[..self.bytes]
    }
}

impl<M: AsMut<[u8]>> AsMut<[u8]> for Front<M> {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.memory.as_mut()[..self.bytes]
    }
}

/// What a staged call asks of the host.
#[derive(Clone, Debug)]
pub(crate) enum Operation {
    AllReduce(DeviceOp),
    Reduce(DeviceOp, Rank),
    Broadcast(Rank),
    AllGather,
    ReduceScatter(DeviceOp),
    Gather(Rank),
    Scatter(Rank),
    AllToAll,
    /// The counts of all ranks' blocks.
    AllGatherV(Vec<usize>),
    ReduceScatterV(DeviceOp, Vec<usize>),
    GatherV(Vec<usize>, Rank),
    ScatterV(Vec<usize>, Rank),
    /// What each rank gets, and what each brings.
    AllToAllV(Vec<usize>, Vec<usize>),
    Barrier,
    Send(Rank, u64),
    /// From a rank, or from any.
    Receive(Option<Rank>, u64),
}

impl Operation {
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Operation::AllReduce(_) => "all_reduce",
            Operation::Reduce(..) => "reduce",
            Operation::Broadcast(_) => "broadcast",
            Operation::AllGather => "all_gather",
            Operation::ReduceScatter(_) => "reduce_scatter",
            Operation::Gather(_) => "gather",
            Operation::Scatter(_) => "scatter",
            Operation::AllToAll => "all_to_all",
            Operation::AllGatherV(_) => "all_gather_v",
            Operation::ReduceScatterV(..) => "reduce_scatter_v",
            Operation::GatherV(..) => "gather_v",
            Operation::ScatterV(..) => "scatter_v",
            Operation::AllToAllV(..) => "all_to_all_v",
            Operation::Barrier => "barrier",
            Operation::Send(..) => "send",
            Operation::Receive(..) => "recv",
        }
    }

    /// Messages run beside collectives.
    pub(crate) fn is_message(&self) -> bool {
        matches!(self, Operation::Send(..) | Operation::Receive(..))
    }

    /// The call on the host, unless it is a message.
    fn ask(&self, dtype: DType) -> Option<Ask<'_>> {
        let ask = |collective| Ask::new(collective, dtype);
        Some(match self {
            Operation::AllReduce(op) => ask(Collective::AllReduce).by(op.clone()),
            Operation::Reduce(op, root) => ask(Collective::Reduce).by(op.clone()).at(*root),
            Operation::Broadcast(root) => ask(Collective::Broadcast).at(*root),
            Operation::AllGather => ask(Collective::AllGather),
            Operation::ReduceScatter(op) => ask(Collective::ReduceScatter).by(op.clone()),
            Operation::Gather(root) => ask(Collective::Gather).at(*root),
            Operation::Scatter(root) => ask(Collective::Scatter).at(*root),
            Operation::AllToAll => ask(Collective::AllToAll),
            Operation::AllGatherV(counts) => ask(Collective::AllGather).in_blocks(counts),
            Operation::ReduceScatterV(op, counts) => {
                ask(Collective::ReduceScatter).by(op.clone()).in_blocks(counts)
            }
            Operation::GatherV(counts, root) => ask(Collective::Gather).in_blocks(counts).at(*root),
            Operation::ScatterV(counts, root) => {
                ask(Collective::Scatter).in_blocks(counts).at(*root)
            }
            Operation::AllToAllV(send, recv) => ask(Collective::AllToAll).in_blocks((send, recv)),
            Operation::Barrier => ask(Collective::Barrier),
            Operation::Send(..) | Operation::Receive(..) => return None,
        })
    }
}

/// Begins the sum of one window. `end` gets its result, and its slot. With `in_slices`, the results stay in slices.
pub(crate) fn sum<M>(
    group: &ProcessGroup,
    (slot, bytes): (M, usize),
    (dtype, op): (DType, &DeviceOp),
    in_slices: bool,
    end: impl FnOnce(Result<()>, M) + Send + 'static,
) where
    M: AsRef<[u8]> + AsMut<[u8]> + Send + 'static,
{
    let collective = match in_slices {
        true => Collective::ReduceSlices,
        false => Collective::AllReduce,
    };
    let end = move |result, front: Front<M>| end(result, front.memory);
    let front = Front { memory: slot, bytes };
    Ask::new(collective, dtype).by(op.clone()).begin_then(group, front, end);
}

/// A staged call that is under way on the host.
pub(crate) enum UnderWay {
    Call(Work<Front<Lent>>),
    /// A message that any rank can send.
    FromAny(Work<(Front<Lent>, Rank)>),
}

impl UnderWay {
    pub(crate) fn has_ended(&self) -> bool {
        match self {
            UnderWay::Call(work) => work.is_completed(),
            UnderWay::FromAny(work) => work.is_completed(),
        }
    }

    /// The memory of the results comes back. A message that any rank could send tells which has.
    pub(crate) fn end(self) -> Result<(Lent, Option<Rank>)> {
        match self {
            UnderWay::Call(work) => Ok((work.wait()?.memory, None)),
            UnderWay::FromAny(work) => {
                let (front, from) = work.wait()?;
                Ok((front.memory, Some(from)))
            }
        }
    }
}

/// The memory of a staged call: what it changes, what it only reads, and how many bytes of both.
#[derive(Debug)]
pub(crate) struct Brought {
    pub(crate) data: (Lent, usize),
    pub(crate) input: (Lent, usize),
}

/// Begins a staged call.
pub(crate) fn begin(
    group: &ProcessGroup,
    operation: &Operation,
    dtype: DType,
    brought: Brought,
) -> Result<UnderWay> {
    let [data, input] =
        [brought.data, brought.input].map(|(memory, bytes)| Front { memory, bytes });
    let work = match (operation.ask(dtype), operation) {
        (Some(ask), _) => ask.begin(group, data, input),
        (None, Operation::Send(to, tag)) => send_bytes(group, dtype, data, *to, *tag),
        (None, Operation::Receive(Some(from), tag)) => recv_bytes(group, dtype, data, *from, *tag),
        (None, Operation::Receive(None, tag)) => {
            return Ok(UnderWay::FromAny(recv_any_bytes(group, dtype, data, *tag)?));
        }
        (None, other) => unreachable!("{} is a collective", other.name()),
    };
    Ok(UnderWay::Call(work?))
}
