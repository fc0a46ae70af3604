//! How steps are queued on a stream.

use std::ffi::c_int;

use drumline_device::Result;
use drumline_kernels::{DType, ReduceOp, bf16, f16};

use crate::nccl::functions::OF_HOST;
use crate::nccl::library::Nccl;
use crate::nccl::steps::{Reduction, Step};
use crate::table::Handle;
use drumline_device::fabric::Operator;

/// Where steps are queued.
#[derive(Clone, Copy)]
pub(crate) struct Queue<'a> {
    pub(crate) nccl: &'a Nccl,
    /// For errors.
    pub(crate) device: &'a str,
    pub(crate) communicator: Handle,
    pub(crate) stream: Handle,
}

/// `ncclUint8`: what is only moved has no type.
const BYTES: c_int = 1;

impl Queue<'_> {
    /// Queues all steps as one operation.
    ///
    /// # Safety
    ///
    /// The communicator and the stream live, and are of the current device, as the places are. The communicator is
    /// ready, and no other thread queues on it.
    pub(crate) unsafe fn queue(self, steps: &[Step]) -> Result<()> {
        let mut made = Vec::new();
        // SAFETY: the caller's promise.
        let mut queued = unsafe { self.with_operators(steps, &mut made) };
        // NCCL has read them.
        for operator in made {
            // SAFETY: it was made for this communicator, and is given back once.
            let code =
                unsafe { (self.nccl.functions().destroy_operator)(operator, self.communicator) };
            queued = queued.and(self.done("ncclRedOpDestroy", code));
        }
        queued
    }

    /// Makes the operators that NCCL does not have, and puts them into `made`.
    unsafe fn with_operators(self, steps: &[Step], made: &mut Vec<c_int>) -> Result<()> {
        let mut numbered = Vec::with_capacity(steps.len());
        for step in steps {
            let operator = match step.reduction() {
                None => 0,
                Some(Reduction { operator: Operator::Plain(operator), .. }) => number_of(*operator),
                Some(Reduction { operator: Operator::PreMulSum(factor), dtype, kind, .. }) => {
                    // SAFETY: the caller's promise.
                    let operator = unsafe { self.operator(*factor, *dtype, *kind) }?;
                    made.push(operator);
                    operator
                }
            };
            numbered.push((step, operator));
        }
        let [(step, operator)] = numbered[..] else {
            // SAFETY: no condition.
            self.done("ncclGroupStart", unsafe { (self.nccl.functions().group_start)() })?;
            let queued = numbered
                .iter()
                // SAFETY: the caller's promise.
                .try_for_each(|(step, operator)| unsafe { self.step(step, *operator) });
            // SAFETY: the group was started.
            let ended = self.done("ncclGroupEnd", unsafe { (self.nccl.functions().group_end)() });
            if ended.is_err() {
                // A group that is still open would swallow all later calls of this thread. If it is closed, NCCL says
                // so, and nothing happens.
                // SAFETY: no condition.
                unsafe { (self.nccl.functions().group_end)() };
            }
            return queued.and(ended);
        };
        // SAFETY: the caller's promise.
        unsafe { self.step(step, operator) }
    }

    unsafe fn operator(self, factor: f64, dtype: DType, kind: c_int) -> Result<c_int> {
        let (scalar, mut operator) = (in_type(factor, dtype), 0);
        // SAFETY: the caller's promise. The factor is as long as an element of any type, and NCCL reads it at once.
        let code = unsafe {
            (self.nccl.functions().create_factor)(
                &raw mut operator,
                scalar.as_ptr().cast(),
                kind,
                OF_HOST,
                self.communicator,
            )
        };
        self.done("ncclRedOpCreatePreMulSum", code).map(|()| operator)
    }

    /// The result of a call that this thread has just made, before the next call changes what NCCL says of it.
    fn done(self, call: &'static str, code: c_int) -> Result<()> {
        self.nccl.done(self.device, call, code)
    }

    unsafe fn step(self, step: &Step, operator: c_int) -> Result<()> {
        let Queue { nccl, communicator, stream, .. } = self;
        let functions = nccl.functions();
        // SAFETY: the caller's promise.
        unsafe {
            match *step {
                Step::AllReduce { from, to, reduction: Reduction { count, kind, .. } } => {
                    let (from, to) = (from.address, to.address);
                    let call = functions.all_reduce;
                    self.done(
                        "ncclAllReduce",
                        call(from, to, count, kind, operator, communicator, stream),
                    )
                }
                Step::Reduce { from, to, reduction: Reduction { count, kind, .. }, root } => {
                    let (from, to) = (from.address, to.address);
                    let code = (functions.reduce)(
                        from,
                        to,
                        count,
                        kind,
                        operator,
                        root,
                        communicator,
                        stream,
                    );
                    self.done("ncclReduce", code)
                }
                Step::ReduceScatter { from, to, reduction: Reduction { count, kind, .. } } => {
                    let (from, to) = (from.address, to.address);
                    let call = functions.reduce_scatter;
                    let code = call(from, to, count, kind, operator, communicator, stream);
                    self.done("ncclReduceScatter", code)
                }
                Step::Broadcast { place, root } => {
                    let (at, bytes) = (place.address, place.bytes);
                    let call = functions.broadcast;
                    self.done(
                        "ncclBroadcast",
                        call(at, at, bytes, BYTES, root, communicator, stream),
                    )
                }
                Step::AllGather { from, to } => {
                    let (from, to, bytes) = (from.address, to.address, from.bytes);
                    let code = (functions.all_gather)(from, to, bytes, BYTES, communicator, stream);
                    self.done("ncclAllGather", code)
                }
                Step::Send { from, peer } => {
                    let (from, bytes) = (from.address, from.bytes);
                    let code = (functions.send)(from, bytes, BYTES, peer, communicator, stream);
                    self.done("ncclSend", code)
                }
                Step::Receive { to, peer } => {
                    let (to, bytes) = (to.address, to.bytes);
                    let code = (functions.receive)(to, bytes, BYTES, peer, communicator, stream);
                    self.done("ncclRecv", code)
                }
            }
        }
    }
}

/// `ncclRedOp_t`; a number that NCCL refuses for what it does not have.
fn number_of(operator: ReduceOp) -> c_int {
    match operator {
        ReduceOp::Sum => 0,
        ReduceOp::Product => 1,
        ReduceOp::Max => 2,
        ReduceOp::Min => 3,
        ReduceOp::Avg => 4,
        _ => -1,
    }
}

/// The bytes of a factor as an element of this type.
fn in_type(factor: f64, dtype: DType) -> [u8; 8] {
    let mut bytes = [0; 8];
    match dtype {
        DType::F16 => bytes[..2].copy_from_slice(&f16::from_f64(factor).to_ne_bytes()),
        DType::Bf16 => bytes[..2].copy_from_slice(&bf16::from_f64(factor).to_ne_bytes()),
        DType::F32 => bytes[..4].copy_from_slice(&(factor as f32).to_ne_bytes()),
        _ => bytes = factor.to_ne_bytes(),
    }
    bytes
}
