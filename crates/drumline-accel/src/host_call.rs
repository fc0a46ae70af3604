//! Calls of the host on memory that a device reaches. The type of its elements is known at run time.

use std::marker::PhantomData;

use drumline_group::{
    Bool, Complex, DType, Element, Error, F8E4M3, F8E5M2, Operator, ProcessGroup, Rank, Result,
    Work, bf16, driving, f16,
};

use crate::DeviceOp;
use crate::pool::Lent;

/// What is the same for all element types, for the one that is known at run time. `None`: there is no such type.
macro_rules! by_type {
    ($dtype:expr, $type:ident => $what:expr) => {
        by_type!($dtype, $type => $what;
            U8 u8, U16 u16, U32 u32, U64 u64, I8 i8, I16 i16, I32 i32, I64 i64, F16 f16, Bf16 bf16, F32 f32, F64 f64,
            F8E4M3 F8E4M3, F8E5M2 F8E5M2, Complex64 Complex<f32>, Complex128 Complex<f64>, Bool Bool)
    };
    ($dtype:expr, $type:ident => $what:expr; $($name:ident $element:ty),*) => {
        match $dtype {
            $(DType::$name => {
                type $type = $element;
                Some($what)
            })*
            _ => None,
        }
    };
}

/// Bytes that a call gets by value.
pub(crate) trait Memory: AsRef<[u8]> + AsMut<[u8]> + Send + 'static {}

impl<M: AsRef<[u8]> + AsMut<[u8]> + Send + 'static> Memory for M {}

/// The first bytes of a memory as elements.
struct Elements<T, M> {
    memory: M,
    bytes: usize,
    elements: PhantomData<T>,
}

impl<T, M> Elements<T, M> {
    fn new(memory: M, bytes: usize) -> Elements<T, M> {
        Elements { memory, bytes, elements: PhantomData }
    }
}

// No bytes may begin anywhere, and elements may not.
impl<T: Element, M: Memory> AsRef<[T]> for Elements<T, M> {
    fn as_ref(&self) -> &[T] {
        match self.bytes {
            0 => &[],
            bytes => bytemuck::cast_slice(&self.memory.as_ref()[..bytes]),
        }
    }
}

impl<T: Element, M: Memory> AsMut<[T]> for Elements<T, M> {
    fn as_mut(&mut self) -> &mut [T] {
        match self.bytes {
            0 => &mut [],
            bytes => bytemuck::cast_slice_mut(&mut self.memory.as_mut()[..bytes]),
        }
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
    Scan(DeviceOp),
    ExclusiveScan(DeviceOp),
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
            Operation::Scan(_) => "scan",
            Operation::ExclusiveScan(_) => "exclusive_scan",
            Operation::Barrier => "barrier",
            Operation::Send(..) => "send",
            Operation::Receive(..) => "recv",
        }
    }

    /// Messages run beside collectives.
    pub(crate) fn is_message(&self) -> bool {
        matches!(self, Operation::Send(..) | Operation::Receive(..))
    }
}

/// Gets the result of the sum of a window, and its slot.
pub(crate) type End<M> = Box<dyn FnOnce(Result<()>, M) + Send>;

/// The sum of one window.
pub(crate) struct Sum<'a, M> {
    pub(crate) group: &'a ProcessGroup,
    pub(crate) slot: M,
    pub(crate) bytes: usize,
    pub(crate) op: &'a DeviceOp,
    /// Whether the results stay in slices.
    pub(crate) in_slices: bool,
    pub(crate) end: End<M>,
}

impl<M: Memory> Sum<'_, M> {
    /// Begins it.
    pub(crate) fn begin(self, dtype: DType) {
        let Sum { slot, end, .. } = match Sum::as_type(dtype) {
            Some(begin) => return begin(self),
            None => self,
        };
        end(Err(unknown("all_reduce", dtype)), slot);
    }

    fn as_type(dtype: DType) -> Option<fn(Self)> {
        by_type!(dtype, T => Self::begin_as::<T>)
    }

    fn begin_as<T: Element>(self) {
        let Sum { group, slot, bytes, op, in_slices, end } = self;
        let op = match op_of::<T>("all_reduce", op) {
            Ok(op) => op,
            Err(error) => return end(Err(error), slot),
        };
        let elements = Elements::<T, M>::new(slot, bytes);
        let end = move |result, elements: Elements<T, M>| end(result, elements.memory);
        match in_slices {
            true => driving::reduce_slices_then(group, elements, op, end),
            false => driving::all_reduce_then(group, elements, op, end),
        }
    }
}

/// A staged call that is under way on the host.
pub(crate) trait UnderWay: Send {
    fn has_ended(&self) -> bool;

    /// The memory of the results comes back. A message that any rank could send tells which has.
    fn end(self: Box<Self>) -> Result<(Lent, Option<Rank>)>;
}

impl<T: Element> UnderWay for Work<Elements<T, Lent>> {
    fn has_ended(&self) -> bool {
        self.is_completed()
    }

    fn end(self: Box<Self>) -> Result<(Lent, Option<Rank>)> {
        match self.wait() {
            Ok(elements) => Ok((elements.memory, None)),
            Err(failed) => Err(failed.error),
        }
    }
}

impl<T: Element> UnderWay for Work<(Elements<T, Lent>, Rank)> {
    fn has_ended(&self) -> bool {
        self.is_completed()
    }

    fn end(self: Box<Self>) -> Result<(Lent, Option<Rank>)> {
        match self.wait() {
            Ok((elements, from)) => Ok((elements.memory, Some(from))),
            Err(failed) => Err(failed.error),
        }
    }
}

struct Barrier(Work<Vec<u8>>, Lent);

impl UnderWay for Barrier {
    fn has_ended(&self) -> bool {
        self.0.is_completed()
    }

    fn end(self: Box<Self>) -> Result<(Lent, Option<Rank>)> {
        let Barrier(work, memory) = *self;
        work.wait()?;
        Ok((memory, None))
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
) -> Result<Box<dyn UnderWay>> {
    let begin: Option<Begin> = by_type!(dtype, T => begin_as::<T>);
    begin.ok_or_else(|| unknown(operation.name(), dtype))?(group, operation, brought)
}

type Begin = fn(&ProcessGroup, &Operation, Brought) -> Result<Box<dyn UnderWay>>;

fn begin_as<T: Element>(
    group: &ProcessGroup,
    operation: &Operation,
    brought: Brought,
) -> Result<Box<dyn UnderWay>> {
    let op = |op| op_of::<T>(operation.name(), op);
    let data = Elements::<T, _>::new(brought.data.0, brought.data.1);
    let input = Elements::<T, _>::new(brought.input.0, brought.input.1);
    Ok(Box::new(match operation {
        Operation::AllReduce(by) => group.all_reduce_async(data, op(by)?),
        Operation::Reduce(by, root) => group.reduce_async(data, op(by)?, *root),
        Operation::Broadcast(root) => group.broadcast_async(data, *root),
        Operation::AllGather => group.all_gather_async(input, data),
        Operation::ReduceScatter(by) => group.reduce_scatter_async(input, data, op(by)?),
        Operation::Gather(root) => group.gather_async(input, data, *root),
        Operation::Scatter(root) => group.scatter_async(input, data, *root),
        Operation::AllToAll => group.all_to_all_async(input, data),
        Operation::AllGatherV(counts) => group.all_gather_v_async(input, data, counts),
        Operation::ReduceScatterV(by, counts) => {
            group.reduce_scatter_v_async(input, counts, data, op(by)?)
        }
        Operation::GatherV(counts, root) => group.gather_v_async(input, data, counts, *root),
        Operation::ScatterV(counts, root) => group.scatter_v_async(input, counts, data, *root),
        Operation::AllToAllV(send, recv) => group.all_to_all_v_async(input, send, data, recv),
        Operation::Scan(by) => group.scan_async(data, op(by)?),
        Operation::ExclusiveScan(by) => group.exclusive_scan_async(data, op(by)?),
        Operation::Send(to, tag) => group.send_async(data, *to, *tag),
        Operation::Receive(Some(from), tag) => group.recv_async(data, *from, *tag),
        Operation::Receive(None, tag) => return Ok(Box::new(group.recv_any_async(data, *tag)?)),
        Operation::Barrier => return Ok(Box::new(Barrier(group.barrier_async()?, data.memory))),
    }?))
}

fn op_of<T: Element>(operation: &'static str, op: &DeviceOp) -> Result<Operator<T>> {
    op.of().ok_or_else(|| Error::InvalidArgument {
        operation,
        problem: format!("the operator {op} is none of {}", T::DTYPE),
    })
}

fn unknown(operation: &'static str, dtype: DType) -> Error {
    Error::InvalidArgument { operation, problem: format!("no call on devices takes {dtype}") }
}
