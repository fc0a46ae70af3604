//! Whether the parameters of a model have the same values on all ranks.

use burn::{
    module::{Module, Param},
    tensor::Tensor,
};
use drumline::{ProcessGroup, ddp::GradientReducer};

use crate::{
    Error, Result,
    agreement::agree,
    gradients::Slots,
    host::{Batch, Unreadable},
    tensors::{VisitFloat, visit_floats},
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
        (Err(problem), Ok(())) => Err(Error::OnOtherRanks { problem }),
    }
}

/// Digests the parameters of `model` that `slots` has, each to the place that it has there.
pub(crate) fn digest<M: Module>(slots: &Slots, model: &M, digests: &mut [u64]) -> Result<()> {
    let mut collect = Collect { slots, parameters: Vec::new(), batch: Batch::default() };
    visit_floats(model, &mut collect);
    let Collect { parameters, batch, .. } = collect;
    let tensors = batch.read().map_err(|Unreadable { first, device, problem }| Error::Device {
        name: parameters[first].1.clone(),
        device,
        problem,
    })?;
    for ((slot, _), tensor) in parameters.iter().zip(tensors) {
        digests[*slot] = tensor.with_values(|values| values.digest()).unwrap_or_default();
    }
    Ok(())
}

struct Collect<'a> {
    slots: &'a Slots,
    /// Slots and names.
    parameters: Vec<(usize, String)>,
    batch: Batch,
}

impl VisitFloat for Collect<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        let Some(&slot) = self.slots.get(name) else { return };
        let value = param.base();
        self.parameters.push((slot, name.to_owned()));
        self.batch.add(if value.is_autodiff() { value.inner() } else { value });
    }
}
