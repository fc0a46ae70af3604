//! Whether the parameters of a model have the same values on all ranks.

use burn::module::Module;
use drumline::{ProcessGroup, ddp::GradientReducer};

use crate::{
    Error, Result,
    agreement::agree,
    failure,
    gradients::Slots,
    host::{ParameterValue, parameter_values},
};

/// Compares the parameters between the ranks, which must all call this. `read` gives each parameter's digest its place.
pub(crate) fn compare(
    group: &ProcessGroup,
    reducer: &GradientReducer,
    parameters: usize,
    read: impl FnOnce(&mut [u64]) -> Result<()>,
) -> Result<()> {
    let mut digests = vec![0; parameters];
    let read = read(&mut digests);
    match (agree(group, read.as_ref().map_err(Error::to_string).copied())?, read) {
        (Ok(()), _) => Ok(reducer.check(&digests)?),
        (Err(_), Err(own)) => Err(own),
        (Err(problem), Ok(())) => Err(failure::on_other_ranks(problem)),
    }
}

/// Digests the parameters of `model` that `slots` has, each to the place that it has there.
pub(crate) fn digest<M: Module>(slots: &Slots, model: &M, digests: &mut [u64]) -> Result<()> {
    for ParameterValue { slot, name, value } in
        parameter_values(model, &|name| slots.get(name).copied())?
    {
        let dtype = value.dtype();
        digests[slot] = value
            .with_values(|values| values.digest())
            .ok_or_else(|| failure::unsupported_dtype(name, format!("{dtype:?}")))?;
    }
    Ok(())
}
