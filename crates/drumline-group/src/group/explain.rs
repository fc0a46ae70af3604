//! Which algorithm a call would take.

use drumline_engine::{call::Call, explain::Explanation, operator::OperatorKind};
use drumline_schedule::Counts;

use super::ProcessGroup;
use crate::{DType, ReduceOp, Result, backend::Collective};

/// Says which algorithm a call with blocks of `elements` elements takes, and why. It sends no message,
/// and all ranks get the same answer.
///
/// # Errors
///
/// As for the call itself: [`Setting`](crate::ErrorKind::Setting) when the settings name
/// an algorithm that cannot be used.
pub fn explain(
    group: &ProcessGroup,
    collective: Collective,
    elements: usize,
    dtype: DType,
    registered: bool,
) -> Result<Explanation> {
    let call = Call::new(collective, dtype, Counts::Even(elements));
    // With the sum as operator, because the operator decides the type in which partial results travel.
    let operator = collective.reduces().then_some(OperatorKind::Builtin(ReduceOp::Sum));
    group.explain_call(&Call { operator, ..call }, registered)
}

/// Whether ranks of this host share memory with this one.
pub fn shares_memory(group: &ProcessGroup) -> bool {
    group.inner.arena.is_some()
}
