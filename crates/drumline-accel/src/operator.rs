/// How a call on a device combines the values of all ranks: a [`ReduceOp`], or an `Operator` of the type of the data.
///
/// ```
/// use drumline_accel::DeviceOp;
/// use drumline_group::{Operator, ReduceOp};
///
/// let mean: DeviceOp = ReduceOp::Avg.into();
/// let halves: DeviceOp = Operator::premul_sum(0.5_f32).into();
/// assert_eq!((mean.to_string(), halves.to_string()), ("avg".to_owned(), "premul_sum of f32".to_owned()));
/// ```
pub use drumline_group::driving::AnyOperator as DeviceOp;
use drumline_group::{DType, ReduceOp};

use crate::{Error, Result};

/// The operator, if it is one of the library.
pub(crate) fn builtin(op: &DeviceOp) -> Option<ReduceOp> {
    match op {
        DeviceOp::Builtin(op) => Some(*op),
        _ => None,
    }
}

/// Checks that the operator can be applied to the data.
pub(crate) fn check(operation: &'static str, op: &DeviceOp, data: DType) -> Result<()> {
    let problem = op.problem_with(data);
    problem.map_or(Ok(()), |problem| Err(Error::argument(operation, problem)))
}
