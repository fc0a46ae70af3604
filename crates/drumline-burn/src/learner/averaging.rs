//! How gradients that `TrainStep::step` returns are averaged.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::{
    module::{Module, ModuleVisitor, Param, Reparameterization},
    optim::GradientsParams,
    tensor::{DType, Tensor, TensorData},
};
use drumline::{
    ProcessGroup,
    ddp::{DdpOptions, FaultKind, GradientReducer, UnusedParameters, Values, verify_model},
};

use crate::{
    DistributedDataParallel, Error, Result,
    gradients::{self, Slots},
    inspect::inspect,
    pack::device_name,
    sync_batch_norm,
    tap::{TapParameter, Taps},
    tensors::{self, Path, VisitFloat, Which, visit_floats},
};

/// What averages the gradients of a wrapped model.
#[derive(Clone)]
pub(super) struct Wrapped {
    group: ProcessGroup,
    averager: Averager,
}

/// Averages the gradients of one model.
#[derive(Clone)]
pub(super) struct Averager {
    reducer: Arc<GradientReducer>,
    slots: Slots,
    taps: Option<Arc<Taps>>,
    steps: Arc<AtomicU64>,
}

impl Wrapped {
    pub(super) fn new(ddp: &DistributedDataParallel) -> Self {
        let (reducer, slots, taps, steps) = ddp.parts();
        Self { group: ddp.group().clone(), averager: Averager { reducer, slots, taps, steps } }
    }

    /// Why the gradients of `model` cannot be averaged over `group` with this handle.
    pub(super) fn misfit<M: Module>(&self, model: &M, group: &ProcessGroup) -> Option<String> {
        if self.group.name() != group.name() || self.group.world_size() != group.world_size() {
            let [wrapped, given] = [&self.group, group].map(ProcessGroup::name);
            return Some(format!(
                "the model was wrapped over group {wrapped:?} and is to be trained over {given:?}"
            ));
        }
        let mut find = FindParameters::default();
        model.visit(&mut find);
        let other = |name: &&String| !self.averager.slots.contains_key(*name);
        let named = |what: &str, name: &String| {
            format!(
                "the learner has another model than the one that was wrapped: {what} `{name}`; pass the \
                 model that `DistributedDataParallel::wrap` returned to `Learner::new`"
            )
        };
        if let Some(name) = find.trained.iter().find(other) {
            return Some(named("the wrapped one does not train", name));
        }
        let has = |name: &&String| find.trained.contains(*name);
        let mut wrapped: Vec<&String> = self.averager.slots.keys().collect();
        wrapped.sort();
        if let Some(name) = wrapped.into_iter().find(|name| !has(name)) {
            return Some(named("it does not train", name));
        }
        if self.averager.taps.is_some() && find.tapped == 0 {
            return Some(
                "the model of the learner has no gradient taps; pass the model that \
                 `DistributedDataParallel::wrap` returned to `Learner::new`"
                    .to_owned(),
            );
        }
        None
    }
}

impl Averager {
    /// For `model`, which has rank 0's values when this returns.
    pub(super) fn new<M: Module>(
        wrapped: Option<&Wrapped>,
        model: M,
        group: &ProcessGroup,
    ) -> Result<(Self, M)> {
        if let Some(Wrapped { averager, .. }) = wrapped {
            // A checkpoint may have been loaded after the model was wrapped.
            return Ok((averager.clone(), tensors::broadcast(model, Which::All, group)?));
        }
        let options = DdpOptions::default().unused_parameters(UnusedParameters::Ignore);
        let inspected = inspect(&model)?;
        verify_model(group, &inspected.parameters, &inspected.buffers, &options)?;
        if let Some(problem) = inspected.problem {
            return Err(problem);
        }
        if inspected.parameters.is_empty() {
            let problem = "the model of the learner has no parameter to train; create it on a device with \
                           autodiff, such as `Device::flex().autodiff()`";
            return Err(Error::Learner { problem: problem.to_owned() });
        }
        let model = tensors::broadcast(model, Which::All, group)?;
        let names = inspected.parameters.iter().map(|spec| spec.name.clone());
        let slots = names.zip(0..).collect();
        let reducer = Arc::new(GradientReducer::new(inspected.parameters, &options, group)?);
        Ok((Self { reducer, slots, taps: None, steps: Arc::default() }, model))
    }

    /// Runs a step of the model. If its gradients are the last ones before they are averaged, taps may send them.
    pub(super) fn run<T>(&self, is_last: bool, step: impl FnOnce() -> T) -> Result<T> {
        let result = match &self.taps {
            Some(taps) => taps.run(is_last, step),
            None => step(),
        };
        match sync_batch_norm::take_failure() {
            None => Ok(result),
            Some(error) => Err(error),
        }
    }

    /// Adds the gradients of one of several micro-batches to this rank's share. Sends nothing.
    pub(super) fn accumulate<M: Module>(
        &self,
        gradients: GradientsParams,
        model: &M,
    ) -> Result<()> {
        Pass { averager: self, gradients, what: What::Accumulate, problem: None }.run(model)
    }

    /// Averages the sum of what this rank has: of `gradients` and of all that was accumulated.
    pub(super) fn average<M: Module>(
        &self,
        gradients: GradientsParams,
        model: &M,
    ) -> Result<GradientsParams> {
        let what = What::Submit(self.reducer.missing());
        let submitted = Pass { averager: self, gradients, what, problem: None }.run(model);
        let averaged = self.reducer.finish(); // even after a failure: the other ranks wait for this one
        submitted?;
        let averaged = averaged?;
        self.steps.fetch_add(1, Ordering::Relaxed);
        Ok(gradients::collect(averaged, &self.slots, model))
    }
}

/// Passes gradients to the reducer.
struct Pass<'a> {
    averager: &'a Averager,
    gradients: GradientsParams,
    what: What,
    /// The first failure of a device.
    problem: Option<Error>,
}

enum What {
    /// Submit the gradients of these parameters, in rising order, because they are final.
    Submit(Vec<usize>),
    /// Add all gradients; more will follow.
    Accumulate,
}

impl Pass<'_> {
    fn run<M: Module>(mut self, model: &M) -> Result<()> {
        visit_floats(model, &mut self);
        self.problem.map_or(Ok(()), Err)
    }
}

impl VisitFloat for Pass<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        let Some(&slot) = self.averager.slots.get(name) else { return };
        if matches!(&self.what, What::Submit(slots) if slots.binary_search(&slot).is_err()) {
            return;
        }
        let Some(gradient) = self.gradients.remove::<D>(param.id) else { return };
        let device = gradient.device();
        let reducer = &self.averager.reducer;
        let data = match gradient.try_into_data() {
            Ok(data) => data,
            Err(problem) => {
                reducer.fail(slot, FaultKind::Unread);
                self.problem.get_or_insert(Error::Device {
                    name: name.to_owned(),
                    device: device_name(&device),
                    problem: problem.to_string(),
                });
                return;
            }
        };
        match &self.what {
            What::Accumulate => {
                reducer
                    .accumulate(slot, |place| values(&data).is_some_and(|it| place.copy_from(it)));
            }
            What::Submit(_) => {
                reducer
                    .submit_with(slot, |place| values(&data).is_some_and(|it| place.copy_from(it)));
            }
        }
    }
}

/// The elements of a gradient, if they can be averaged.
fn values(data: &TensorData) -> Option<Values<'_>> {
    match data.dtype() {
        DType::F32 => data.as_slice().ok().map(Values::F32),
        DType::F64 => data.as_slice().ok().map(Values::F64),
        _ => None,
    }
}

#[derive(Default)]
struct FindParameters {
    path: Path,
    trained: HashSet<String>,
    tapped: usize,
}

impl ModuleVisitor for FindParameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.trained.insert(self.path.name());
        }
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        if container_type == "Reparameterization" && name == TapParameter::NAME {
            self.tapped += 1;
        }
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}
