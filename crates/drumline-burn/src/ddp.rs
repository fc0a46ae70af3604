use std::{
    collections::HashMap,
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::{
    backend::DispatchDevice,
    module::{Module, ModuleVisitor, Param, ParamId},
    optim::GradientsParams,
    tensor::{Gradients, Tensor, TensorData},
};
use drumline::{
    ProcessGroup,
    ddp::{
        Averaged, DdpOptions, FaultKind, GradientFault, GradientReducer, ParameterSpec,
        ReducerStats, Values, verify_model,
    },
};

use crate::{
    Error, Result,
    tap::{self, Taps},
    tensors::{self, Path, VisitFloat, Which, visit_floats},
};

/// Keeps the copies of a model on all ranks equal, by averaging their gradients.
///
/// [`wrap`](Self::wrap) once, then use [`backward`](Self::backward) instead of `loss.backward()`.
/// The model keeps its type; see the [crate's page](crate) for a whole program.
///
/// Every rank must wrap, run backward and synchronise buffers the same number of times, in the
/// same order. Rank 0's parameters win when wrapping; after that equal gradients and equal
/// optimizers keep the ranks equal, bit for bit.
pub struct DistributedDataParallel {
    group: ProcessGroup,
    /// The parameters that are trained, by path.
    slots: HashMap<String, usize>,
    /// `None` in a world of one: burn's own gradients are the averages already.
    taps: Option<Arc<Taps>>,
    steps: AtomicU64,
}

impl DistributedDataParallel {
    /// Makes `model` equal on all ranks of `group` and attaches gradient taps to its parameters.
    ///
    /// Returns the handle, and the model to train. Parameters that require no gradient now are
    /// treated as buffers.
    ///
    /// # Errors
    ///
    /// The ranks hold different models, or a parameter cannot be averaged; the error names it.
    pub fn wrap<M: Module>(model: M, group: &ProcessGroup) -> Result<(Self, M)> {
        Self::wrap_with(model, group, &DdpOptions::default())
    }

    /// [`wrap`](Self::wrap) with other bucket sizes.
    pub fn wrap_with<M: Module>(
        model: M,
        group: &ProcessGroup,
        options: &DdpOptions,
    ) -> Result<(Self, M)> {
        let (parameters, buffers) = specs(&model)?;
        // First, so that a rank with another model is not left waiting for one that gave up.
        verify_model(group, &parameters, &buffers, options)?;
        check_taps_fit(&model)?;
        let model = tensors::broadcast(model, Which::All, group)?;

        let slots: HashMap<String, usize> =
            parameters.iter().enumerate().map(|(slot, spec)| (spec.name.clone(), slot)).collect();
        let count = parameters.len();
        let reducer = GradientReducer::new(parameters, options, group)?;
        let (taps, model) = if group.world_size() == 1 {
            (None, model)
        } else {
            let taps = Arc::new(Taps::new(reducer, count));
            let model = tap::attach(model, &taps, |path| slots.get(path).copied());
            (Some(taps), model)
        };
        Ok((Self { group: group.clone(), slots, taps, steps: AtomicU64::new(0) }, model))
    }

    /// `loss.backward()`, with the gradients of `model` averaged over all ranks.
    ///
    /// Gradients leave for the other ranks while backward still computes the rest. What comes
    /// back has the same bits on every rank; hand it to the optimizer. (`loss.backward()` itself
    /// still works, and gives this rank's own gradients.)
    ///
    /// # Errors
    ///
    /// A parameter got no gradient, on whichever rank: every rank gets the same error, which names
    /// it. Or the communication failed.
    pub fn backward<M: Module, const D: usize>(
        &self,
        loss: Tensor<D>,
        model: &M,
    ) -> Result<GradientsParams> {
        if !loss.is_tracked() {
            return Err(Error::LossWithoutGradient);
        }
        let step = self.steps.fetch_add(1, Ordering::Relaxed) + 1;
        let Some(taps) = &self.taps else {
            return self.own_gradients(loss.backward(), model, step);
        };
        let gradients = taps.armed(|| loss.backward());
        self.submit_late(&taps.reducer, &gradients, model);
        drop(gradients);
        let averaged = taps.reducer.finish()?;
        let mut collect = Collect { ddp: self, averaged, gradients: GradientsParams::new() };
        visit_floats(model, &mut collect);
        Ok(collect.gradients)
    }

    /// Gives all ranks rank 0's buffers: running statistics and whatever else is not trained.
    ///
    /// Each rank updates them from its own data. Call this, on all ranks, before evaluation, a
    /// checkpoint or a digest. A model without buffers costs nothing.
    pub fn sync_buffers<M: Module>(&self, model: M) -> Result<M> {
        tensors::broadcast(model, Which::Buffers, &self.group)
    }

    /// The model without gradient taps.
    ///
    /// Not needed for saving, evaluation or [`named_tensors`](crate::named_tensors), which see the
    /// same model with and without taps; only for going on without this handle, or for wrapping
    /// again.
    pub fn unwrap<M: Module>(self, model: M) -> M {
        model.materialize()
    }

    /// How much was communicated so far, and how much of that backward did not hide.
    pub fn stats(&self) -> ReducerStats {
        match &self.taps {
            Some(taps) => taps.reducer.stats(),
            None => {
                let mut stats = ReducerStats::default();
                stats.steps = self.steps.load(Ordering::Relaxed);
                stats
            }
        }
    }

    /// The group that gradients are averaged over.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// Gradients that no tap handed in: a use of the parameter was left in a graph that is still
    /// alive, or the parameter was read past its tap. They are final now.
    fn submit_late<M: Module>(&self, reducer: &GradientReducer, gradients: &Gradients, model: &M) {
        let missing = reducer.missing();
        if !missing.is_empty() {
            visit_floats(model, &mut SubmitLate { ddp: self, reducer, missing, gradients });
        }
    }

    /// A world of one: the gradients are the averages, if none is missing.
    fn own_gradients<M: Module>(
        &self,
        gradients: Gradients,
        model: &M,
        step: u64,
    ) -> Result<GradientsParams> {
        let mut find = FindUnused { ddp: self, gradients: &gradients, faults: Vec::new() };
        visit_floats(model, &mut find);
        match find.faults {
            faults if faults.is_empty() => Ok(GradientsParams::from_grads(gradients, model)),
            faults => Err(drumline::Error::Gradients { step, faults }.into()),
        }
    }
}

impl fmt::Debug for DistributedDataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DistributedDataParallel")
            .field("group", &self.group)
            .field("parameters", &self.slots.len())
            .finish_non_exhaustive()
    }
}

/// The tensors that are trained, and the others.
fn specs<M: Module>(model: &M) -> Result<(Vec<ParameterSpec>, Vec<ParameterSpec>)> {
    let (mut parameters, mut buffers) = (Vec::new(), Vec::new());
    tensors::visit(model, |tensor| {
        if !tensor.is_trained {
            buffers.push(tensor.spec);
            return Ok(());
        }
        match tensor.device.clone().without_autodiff().as_dispatch() {
            DispatchDevice::Flex(_) => parameters.push(tensor.spec),
            other => {
                let device = format!("{other:?}");
                return Err(Error::UnsupportedDevice { name: tensor.spec.name, device });
            }
        }
        Ok(())
    })?;
    Ok((parameters, buffers))
}

/// Refuses models whose parameters cannot be tapped or told apart.
fn check_taps_fit<M: Module>(model: &M) -> Result<()> {
    let mut check = CheckTapsFit { path: Path::default(), ids: HashMap::new(), result: Ok(()) };
    model.visit(&mut check);
    check.result
}

struct CheckTapsFit {
    path: Path,
    ids: HashMap<ParamId, String>,
    result: Result<()>,
}

impl ModuleVisitor for CheckTapsFit {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let second = self.path.name();
        if let Some(first) = self.ids.insert(param.id, second.clone())
            && self.result.is_ok()
        {
            self.result = Err(Error::SharedParameter { first, second });
        }
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        // burn enters what a parameter carries right after the parameter itself.
        if container_type == "Reparameterization" && self.result.is_ok() {
            let reparameterization = name.to_owned();
            let name = self.path.name();
            self.result = Err(Error::AlreadyReparameterized { name, reparameterization });
        }
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}

struct SubmitLate<'a> {
    ddp: &'a DistributedDataParallel,
    reducer: &'a GradientReducer,
    missing: Vec<usize>,
    gradients: &'a Gradients,
}

impl VisitFloat for SubmitLate<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        let Some(&slot) = self.ddp.slots.get(name) else { return };
        if self.missing.binary_search(&slot).is_err() {
            return;
        }
        let Some(gradient) = param.base().grad(self.gradients) else { return };
        let gradient = gradient.into_data();
        match (gradient.as_slice(), gradient.as_slice()) {
            (Ok(values), _) => self.reducer.submit(slot, Values::F32(values)),
            (_, Ok(values)) => self.reducer.submit(slot, Values::F64(values)),
            _ => self.reducer.reject(slot),
        }
    }
}

struct FindUnused<'a> {
    ddp: &'a DistributedDataParallel,
    gradients: &'a Gradients,
    faults: Vec<GradientFault>,
}

impl VisitFloat for FindUnused<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        if self.ddp.slots.contains_key(name) && param.base().grad(self.gradients).is_none() {
            self.faults.push(GradientFault::new(name, FaultKind::Unused, vec![0]));
        }
    }
}

/// Makes burn's tensors of the averages.
struct Collect<'a> {
    ddp: &'a DistributedDataParallel,
    averaged: Averaged<'a>,
    gradients: GradientsParams,
}

impl VisitFloat for Collect<'_> {
    fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
        let slot = self.ddp.slots.get(name);
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
