//! Passes gradients between burn and the reducer.

use std::{
    collections::{HashMap, HashSet},
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use burn::{
    module::{Module, Param},
    optim::GradientsParams,
    tensor::{DType, Gradients, Tensor, TensorData},
};
use drumline::ddp::{
    Averaged, FaultKind, GradientFault, GradientReducer, Place, UnusedParameters, Values, ValuesMut,
};

use crate::{
    Result,
    burn_version::shared,
    host::Batch,
    pack::is_flex,
    tensors::{VisitFloat, visit_floats},
};

/// The index of each trained parameter in the reducer, by path.
pub(crate) type Slots = HashMap<String, usize>;

/// The gradients of a backward, by parameter.
pub(crate) trait Source {
    /// That of a parameter, if it has one. It may be gone afterwards.
    fn take<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) -> Option<Tensor<D>>;
}

impl Source for &Gradients {
    fn take<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) -> Option<Tensor<D>> {
        parameter.base().grad(self)
    }
}

/// Those of a rank that may have none.
impl Source for Option<&mut Gradients> {
    fn take<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) -> Option<Tensor<D>> {
        parameter.base().grad_remove(self.as_mut()?)
    }
}

impl Source for &GradientsParams {
    fn take<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) -> Option<Tensor<D>> {
        self.get::<D>(parameter.id)
    }
}

impl Source for GradientsParams {
    fn take<const D: usize>(&mut self, parameter: &Param<Tensor<D>>) -> Option<Tensor<D>> {
        self.remove::<D>(parameter.id)
    }
}

/// Submits the gradients that no tap has submitted: the parameter has no tap, one of its uses is in a
/// graph that is still alive, or the model read it without the tap. These gradients are final now.
///
/// If a device fails, every rank will learn it in this step. Returns the first failure.
pub(crate) fn submit_missing<M: Module>(
    reducer: &GradientReducer,
    slots: &Slots,
    gradients: impl Source,
    model: &M,
) -> Result<()> {
    match reducer.missing() {
        missing if missing.is_empty() => Ok(()),
        missing => Pass::new(reducer, slots, gradients, What::Submit(missing)).run(reducer, model),
    }
}

/// Adds all gradients to this rank's share of the step. Failures are as in [`submit_missing`].
pub(crate) fn accumulate<M: Module>(
    reducer: &GradientReducer,
    slots: &Slots,
    gradients: impl Source,
    model: &M,
) -> Result<()> {
    Pass::new(reducer, slots, gradients, What::Accumulate).run(reducer, model)
}

/// Burn's own gradients. In a world of one rank they are the averages. `kept` replaces some of them.
pub(crate) fn own<M: Module>(
    slots: &Slots,
    gradients: &mut Gradients,
    model: &M,
    kept: GradientsParams,
    policy: UnusedParameters,
    step: u64,
) -> Result<GradientsParams> {
    let mut find = FindUnused { slots, gradients, faults: Vec::new() };
    if policy == UnusedParameters::Error {
        visit_floats(model, &mut find);
    }
    match find.faults {
        faults if faults.is_empty() => {
            let own = GradientsParams::from_module(gradients, model);
            let mut replace = Replace { by: kept, gradients: own };
            visit_floats(model, &mut replace);
            Ok(replace.gradients)
        }
        faults => Err(drumline::train::failure::gradients(step, faults)),
    }
}

/// Hands the averages to burn, beside those gradients that the ranks have `kept` for themselves.
///
/// An average goes into the memory of this rank's `own` gradient, which optimizers write to. Without one, or on another
/// device, it stays in its bucket. burn then copies it to new memory when it first writes to it, and to get new memory
/// takes several times as long as the copy.
pub(crate) fn collect<M: Module>(
    averaged: &Averaged<'_>,
    slots: &Slots,
    model: &M,
    kept: GradientsParams,
    own: impl Source,
) -> GradientsParams {
    let mut collect = Collect { slots, averaged, own, gradients: kept };
    visit_floats(model, &mut collect);
    collect.gradients
}

/// Collects gradients for the reducer, by bucket.
struct Pass<'a, S> {
    slots: &'a Slots,
    gradients: S,
    what: What,
    /// The bucket of each parameter.
    bucket_of: Vec<usize>,
    buckets: Vec<Collected>,
}

/// Gradients of one bucket. They are read together, so a device is waited for once for each bucket.
#[derive(Default)]
struct Collected {
    /// The slots of their parameters.
    slots: Vec<usize>,
    batch: Batch,
}

enum What {
    /// Submit the gradients of these parameters, in rising order, because they are final.
    Submit(Vec<usize>),
    /// Add all gradients; more will follow.
    Accumulate,
}

impl<'a, S: Source> Pass<'a, S> {
    fn new(reducer: &GradientReducer, slots: &'a Slots, gradients: S, what: What) -> Self {
        let members = reducer.buckets();
        let mut bucket_of = vec![0; members.iter().map(Vec::len).sum()];
        for (bucket, members) in members.iter().enumerate() {
            members.iter().for_each(|&slot| bucket_of[slot] = bucket);
        }
        let buckets = members.iter().map(|_| Collected::default()).collect();
        Self { slots, gradients, what, bucket_of, buckets }
    }

    /// Passes the gradients of `model` on, one bucket after the other. Returns the first failure of a device.
    fn run<M: Module>(mut self, reducer: &GradientReducer, model: &M) -> Result<()> {
        visit_floats(model, &mut self);
        let mut result = Ok(());
        for Collected { slots, batch } in self.buckets {
            match batch.read() {
                Ok(gradients) => {
                    for (&slot, (_, gradient)) in slots.iter().zip(gradients) {
                        let pack = |place: Place<'_>| gradient.pack(place);
                        match &self.what {
                            What::Accumulate => reducer.accumulate_to(slot, pack),
                            What::Submit(_) => reducer.submit_to(slot, pack),
                        }
                    }
                }
                Err(error) => {
                    slots.iter().for_each(|&slot| reducer.fail(slot, FaultKind::Unread));
                    result = result.and(Err(error));
                }
            }
        }
        result
    }
}

impl<S: Source> VisitFloat for Pass<'_, S> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        let Some(&slot) = self.slots.get(name) else { return };
        if matches!(&self.what, What::Submit(missing) if missing.binary_search(&slot).is_err()) {
            return;
        }
        if let Some(gradient) = self.gradients.take(param) {
            let collected = &mut self.buckets[self.bucket_of[slot]];
            collected.slots.push(slot);
            collected.batch.add(name, gradient);
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

struct Replace {
    by: GradientsParams,
    gradients: GradientsParams,
}

impl VisitFloat for Replace {
    fn float<const D: usize>(&mut self, _: &str, param: &Param<Tensor<D>>) {
        if let Some(gradient) = self.by.remove::<D>(param.id) {
            self.gradients.register(param.id, gradient);
        }
    }
}

struct Collect<'a, S> {
    slots: &'a Slots,
    averaged: &'a Averaged<'a>,
    own: S,
    gradients: GradientsParams,
}

impl<S: Source> VisitFloat for Collect<'_, S> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        let slot = self.slots.get(name);
        let Some(gradient) = slot.and_then(|&slot| self.averaged.share(slot)) else { return };
        let parameter = param.base();
        if let Some(own) = self.own.take(param)
            && let Some(overwritten) = overwrite(own, gradient.values())
        {
            self.gradients.register(param.id, overwritten);
            return;
        }
        let dtype = match gradient.values() {
            Values::F32(_) => DType::F32,
            Values::F64(_) => DType::F64,
            Values::F16(_) => DType::F16,
            Values::Bf16(_) => DType::BF16,
            _ => return,
        };
        let bytes = shared(bytes::Bytes::from_owner(gradient));
        let data = TensorData::from_bytes(bytes, parameter.shape(), dtype);
        let options = (&parameter.device().without_autodiff(), dtype);
        self.gradients.register(param.id, Tensor::<D>::from_data(data, options));
    }
}

/// `tensor` with other values, if its elements lie in memory of the host that burn may write to.
fn overwrite<const D: usize>(tensor: Tensor<D>, values: Values<'_>) -> Option<Tensor<D>> {
    let device = tensor.device();
    if !is_flex(&device) {
        return None;
    }
    let mut data = tensor.into_data();
    let dtype = data.dtype();
    let place = match dtype {
        DType::F32 => data.as_mut_slice().ok().map(ValuesMut::F32),
        DType::F64 => data.as_mut_slice().ok().map(ValuesMut::F64),
        DType::F16 => data.as_mut_slice().ok().map(ValuesMut::F16),
        DType::BF16 => data.as_mut_slice().ok().map(ValuesMut::Bf16),
        _ => None,
    };
    place?.copy_from(values).then(|| Tensor::from_data(data, (&device, dtype)))
}

/// The parameters whose gradients every rank keeps for itself, and the sums of their micro-batches.
#[derive(Default)]
pub(crate) struct Kept {
    names: HashSet<String>,
    sums: Mutex<GradientsParams>,
}

impl Kept {
    pub(crate) fn new(names: impl IntoIterator<Item = String>) -> Self {
        Self { names: names.into_iter().collect(), sums: Mutex::default() }
    }

    /// Adds the gradients of one backward.
    pub(crate) fn add<M: Module>(&self, gradients: &Gradients, model: &M) {
        if !self.names.is_empty() {
            let mut sums = self.sums();
            visit_floats(model, &mut Keep { names: &self.names, gradients, sums: &mut sums });
        }
    }

    /// Whether there are gradients of a step that has not ended.
    pub(crate) fn has_gradients(&self) -> bool {
        !self.names.is_empty() && !self.sums().is_empty()
    }

    /// The gradients of the step, which ends.
    pub(crate) fn take(&self) -> GradientsParams {
        mem::take(&mut *self.sums())
    }

    fn sums(&self) -> MutexGuard<'_, GradientsParams> {
        self.sums.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Keep<'a> {
    names: &'a HashSet<String>,
    gradients: &'a Gradients,
    sums: &'a mut GradientsParams,
}

impl VisitFloat for Keep<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        if !self.names.contains(name) {
            return;
        }
        let Some(gradient) = param.base().grad(self.gradients) else { return };
        let sum = match self.sums.remove::<D>(param.id) {
            Some(sum) => sum + gradient,
            None => gradient,
        };
        self.sums.register(param.id, sum);
    }
}
