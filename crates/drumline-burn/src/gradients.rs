//! Passes gradients between burn and the reducer.

use std::collections::HashMap;

use burn::{
    backend::Dispatch,
    module::{Module, Param},
    optim::GradientsParams,
    tensor::{DType, Gradients, Tensor, TensorData},
};
use drumline::ddp::{
    Averaged, FaultKind, GradientFault, GradientReducer, UnusedParameters, Values, ValuesMut,
};

use crate::{
    Result,
    pack::{is_flex, pack_flex},
    tap::{GradientTap, InMemory},
    tensors::{VisitFloat, visit_floats},
};

/// The index of each trained parameter in the reducer, by path.
pub(crate) type Slots = HashMap<String, usize>;

/// Submits the gradients that no tap has submitted: the parameter has no tap, one of its uses is in a
/// graph that is still alive, or the model read it without the tap. These gradients are final now.
pub(crate) fn submit_missing<M: Module>(
    reducer: &GradientReducer,
    slots: &Slots,
    gradients: &Gradients,
    model: &M,
) {
    let missing = reducer.missing();
    if !missing.is_empty() {
        visit_floats(model, &mut Pass { reducer, slots, gradients, what: What::Submit(missing) });
    }
}

/// Adds all gradients to this rank's share of the step.
pub(crate) fn accumulate<M: Module>(
    reducer: &GradientReducer,
    slots: &Slots,
    gradients: &Gradients,
    model: &M,
) {
    visit_floats(model, &mut Pass { reducer, slots, gradients, what: What::Accumulate });
}

/// Burn's own gradients. In a world of one rank they are the averages.
pub(crate) fn own<M: Module>(
    slots: &Slots,
    gradients: Gradients,
    model: &M,
    policy: UnusedParameters,
    step: u64,
) -> Result<GradientsParams> {
    let mut find = FindUnused { slots, gradients: &gradients, faults: Vec::new() };
    if policy == UnusedParameters::Error {
        visit_floats(model, &mut find);
    }
    match find.faults {
        faults if faults.is_empty() => Ok(GradientsParams::from_grads(gradients, model)),
        faults => Err(drumline::train::Error::Gradients { step, faults }.into()),
    }
}

/// Converts the averages to tensors of burn.
pub(crate) fn collect<M: Module>(
    averaged: Averaged<'_>,
    slots: &Slots,
    model: &M,
) -> GradientsParams {
    let mut collect = Collect { slots, averaged, gradients: GradientsParams::new() };
    visit_floats(model, &mut collect);
    collect.gradients
}

/// Passes gradients to the reducer.
struct Pass<'a> {
    reducer: &'a GradientReducer,
    slots: &'a Slots,
    gradients: &'a Gradients,
    what: What,
}

enum What {
    /// Submit the gradients of these parameters, in rising order, because they are final.
    Submit(Vec<usize>),
    /// Add all gradients; more will follow.
    Accumulate,
}

impl VisitFloat for Pass<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        let Some(&slot) = self.slots.get(name) else { return };
        let Some(gradient) = param.base().grad(self.gradients) else { return };
        match &self.what {
            What::Accumulate => self.reducer.accumulate(slot, |place| pack(gradient, place)),
            What::Submit(missing) if missing.binary_search(&slot).is_ok() => {
                self.reducer.submit_with(slot, |place| pack(gradient, place));
            }
            What::Submit(_) => {}
        }
    }
}

/// Writes `gradient`, which may be on any device, to `place`. Returns whether type and length fit.
fn pack<const D: usize>(gradient: Tensor<D>, place: ValuesMut<'_>) -> bool {
    if is_flex(&gradient.device()) {
        let InMemory(gradient) = Dispatch::in_memory(gradient.into_dispatch());
        return pack_flex(&gradient, place);
    }
    let data = gradient.into_data();
    match data.dtype() {
        DType::F32 => data.as_slice().is_ok_and(|values| place.copy_from(Values::F32(values))),
        DType::F64 => data.as_slice().is_ok_and(|values| place.copy_from(Values::F64(values))),
        _ => false,
    }
}

struct FindUnused<'a> {
    slots: &'a Slots,
    gradients: &'a Gradients,
    faults: Vec<GradientFault>,
}

impl VisitFloat for FindUnused<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        if self.slots.contains_key(name) && param.base().grad(self.gradients).is_none() {
            self.faults.push(GradientFault::new(name, FaultKind::Unused, vec![0]));
        }
    }
}

struct Collect<'a> {
    slots: &'a Slots,
    averaged: Averaged<'a>,
    gradients: GradientsParams,
}

impl VisitFloat for Collect<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        let slot = self.slots.get(name);
        let Some(values) = slot.and_then(|&slot| self.averaged.values(slot)) else { return };
        let parameter = param.base();
        let data = match values {
            Values::F32(values) => TensorData::new(values.to_vec(), parameter.shape()),
            Values::F64(values) => TensorData::new(values.to_vec(), parameter.shape()),
            _ => return,
        };
        let options = (&parameter.device().without_autodiff(), data.dtype());
        self.gradients.register(param.id, Tensor::<D>::from_data(data, options));
    }
}
