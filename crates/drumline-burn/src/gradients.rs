//! Passes gradients between burn and the reducer.

use std::collections::HashMap;

use burn::{
    backend::{Dispatch, flex::FlexTensor},
    module::{Module, Param},
    optim::GradientsParams,
    tensor::{DType, Gradients, Tensor, TensorData},
};
use drumline::ddp::{
    Averaged, FaultKind, GradientFault, GradientReducer, UnusedParameters, Values, ValuesMut,
};

use crate::{
    Error, Result,
    pack::{device_name, is_tappable, pack_flex},
    tap::{GradientTap, Stored},
    tensors::{VisitFloat, visit_floats},
};

#[cfg(feature = "gpu")]
use {
    crate::read_back::{Arrived, read_back},
    burn_std::id::StreamId,
};

/// The index of each trained parameter in the reducer, by path.
pub(crate) type Slots = HashMap<String, usize>;

/// Submits the gradients that no tap has submitted: the parameter has no tap, one of its uses is in a
/// graph that is still alive, or the model read it without the tap. These gradients are final now.
///
/// If a device fails, every rank will learn it in this step. Returns the first failure.
pub(crate) fn submit_missing<M: Module>(
    reducer: &GradientReducer,
    slots: &Slots,
    gradients: &Gradients,
    model: &M,
) -> Result<()> {
    match reducer.missing() {
        missing if missing.is_empty() => Ok(()),
        missing => Pass { reducer, slots, gradients, what: What::Submit(missing), problem: None }
            .run(model),
    }
}

/// Adds all gradients to this rank's share of the step. Failures are as in [`submit_missing`].
pub(crate) fn accumulate<M: Module>(
    reducer: &GradientReducer,
    slots: &Slots,
    gradients: &Gradients,
    model: &M,
) -> Result<()> {
    Pass { reducer, slots, gradients, what: What::Accumulate, problem: None }.run(model)
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
    /// The first failure of a device.
    problem: Option<Error>,
}

impl Pass<'_> {
    fn run<M: Module>(mut self, model: &M) -> Result<()> {
        visit_floats(model, &mut self);
        self.problem.map_or(Ok(()), Err)
    }
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
        if matches!(&self.what, What::Submit(missing) if missing.binary_search(&slot).is_err()) {
            return;
        }
        let Some(gradient) = param.base().grad(self.gradients) else { return };
        let device = gradient.device();
        let gradient = match read(gradient) {
            Ok(gradient) => gradient,
            Err(problem) => {
                self.reducer.fail(slot, FaultKind::Unread);
                self.problem.get_or_insert(Error::Device {
                    name: name.to_owned(),
                    device: device_name(&device),
                    problem,
                });
                return;
            }
        };
        match &self.what {
            What::Accumulate => self.reducer.accumulate(slot, |place| gradient.pack(place)),
            What::Submit(_) => self.reducer.submit_with(slot, |place| gradient.pack(place)),
        }
    }
}

/// A gradient that the CPU can read.
enum Readable {
    Flex(FlexTensor),
    #[cfg(feature = "gpu")]
    Arrived(Arrived),
    Data(TensorData),
}

/// Waits for the device of `gradient`. Returns the problem if the device has failed.
fn read<const D: usize>(gradient: Tensor<D>) -> Result<Readable, String> {
    if !is_tappable(&gradient.device()) {
        return gradient.try_into_data().map(Readable::Data).map_err(|error| error.to_string());
    }
    match Dispatch::stored(gradient.into_dispatch()) {
        Stored::Here(gradient) => Ok(Readable::Flex(gradient)),
        #[cfg(feature = "gpu")]
        Stored::OnDevice(gradient) => {
            read_back(*gradient, StreamId::current()).wait().map(Readable::Arrived)
        }
    }
}

impl Readable {
    /// Writes the gradient to `place`. Returns whether type and length fit.
    fn pack(&self, place: ValuesMut<'_>) -> bool {
        match self {
            Readable::Flex(gradient) => pack_flex(gradient, place),
            #[cfg(feature = "gpu")]
            Readable::Arrived(gradient) => gradient.pack(place),
            Readable::Data(data) => match data.dtype() {
                DType::F32 => data.as_slice().is_ok_and(|it| place.copy_from(Values::F32(it))),
                DType::F64 => data.as_slice().is_ok_and(|it| place.copy_from(Values::F64(it))),
                _ => false,
            },
        }
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
