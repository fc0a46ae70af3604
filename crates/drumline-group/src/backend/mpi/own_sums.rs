//! What MPI can reduce by itself, for [`SumOrder::Backend`](crate::algorithms::SumOrder::Backend).

use drumline_kernels::{DType, ReduceOp};
use drumline_mpi::{Number, Op};

use crate::backend::Call;

/// MPI's names for the type and the operator of a call, if it has both.
pub(super) fn of(call: &Call<'_>) -> Option<(Number, Op)> {
    let number = match call.dtype() {
        DType::I8 => Number::I8,
        DType::I16 => Number::I16,
        DType::I32 => Number::I32,
        DType::I64 => Number::I64,
        DType::U8 => Number::U8,
        DType::U16 => Number::U16,
        DType::U32 => Number::U32,
        DType::U64 => Number::U64,
        DType::F32 => Number::F32,
        DType::F64 => Number::F64,
        DType::Complex64 => Number::Complex64,
        DType::Complex128 => Number::Complex128,
        _ => return None,
    };
    let op = match call.built_in()? {
        ReduceOp::Sum | ReduceOp::Avg => Op::Sum,
        ReduceOp::Product => Op::Product,
        ReduceOp::Min => Op::Min,
        ReduceOp::Max => Op::Max,
        ReduceOp::Band => Op::BitAnd,
        ReduceOp::Bor => Op::BitOr,
        ReduceOp::Bxor => Op::BitXor,
        _ => return None,
    };
    op.serves(number).then_some((number, op))
}
