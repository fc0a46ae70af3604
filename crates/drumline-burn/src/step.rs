//! A step of one wrapped model, or of several under one loss.

use std::{
    collections::HashSet,
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::{
    optim::GradientsParams,
    tensor::{Gradients, Tensor},
};
use drumline::{
    ElasticGroup, ProcessGroup,
    ddp::{Averaged, DdpOptions, GradientReducer, ParameterSpec, ReducerStats},
};

use crate::{
    Result,
    any_model::AnyModel,
    check,
    debug::Debug,
    failure,
    gradients::{Kept, Slots},
    running::Running,
    sync_batch_norm,
    tap::{Taps, Target},
};

/// What a handle knows of its model.
pub(crate) struct Handle {
    /// Goes on without ranks that have died if a step is shards.
    pub(crate) elastic: ElasticGroup,
    pub(crate) parameters: Vec<ParameterSpec>,
    pub(crate) options: DdpOptions,
    /// `None` if the world was one rank at the begin: then burn's own gradients are the averages.
    pub(crate) taps: Option<Arc<Taps>>,
    /// The gradients of ignored parameters.
    pub(crate) kept: Kept,
    pub(crate) steps: Arc<AtomicU64>,
    pub(crate) debug: Debug,
    pub(crate) reductions: Reductions,
    /// Empty unless a step is shards.
    pub(crate) running: Running,
}

/// Averages the gradients of all parameters of one model, or of several.
pub(crate) struct Reduction {
    pub(crate) reducer: Arc<GradientReducer>,
    /// The parameters of each model, and the index of the first of them.
    models: Vec<(Slots, usize)>,
}

impl Reduction {
    /// `models` lists the parameters of each model, in this order.
    pub(crate) fn new(
        models: &[&[ParameterSpec]],
        options: &DdpOptions,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let mut all = Vec::new();
        let mut slots = Vec::new();
        for (number, parameters) in models.iter().enumerate() {
            let base = all.len();
            let names = parameters.iter().map(|spec| spec.name.clone());
            slots.push((names.zip(base..).collect(), base));
            all.extend(parameters.iter().map(|spec| match models.len() {
                1 => spec.clone(),
                _ => {
                    let name = format!("{} of model {}", spec.name, number + 1);
                    ParameterSpec::new(name, spec.shape.clone(), spec.dtype)
                }
            }));
        }
        let reducer = Arc::new(GradientReducer::new(all, options, group)?);
        Ok(Self { reducer, models: slots })
    }

    /// The indices of the parameters of the first model.
    pub(crate) fn slots(&self) -> &Slots {
        &self.models[0].0
    }
}

/// The reductions that a model takes part in.
pub(crate) struct Reductions {
    pub(crate) own: Arc<Reduction>,
    /// Those with other models, by the ids of the models' handles in their order.
    shared: Mutex<Vec<(Vec<u64>, Arc<Reduction>)>>,
    /// That of the last step.
    last: Mutex<Arc<Reduction>>,
    id: u64,
}

impl Reductions {
    pub(crate) fn new(own: Reduction) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let own = Arc::new(own);
        let last = Mutex::new(own.clone());
        Self { own, shared: Mutex::default(), last, id: NEXT.fetch_add(1, Ordering::Relaxed) }
    }

    pub(crate) fn last(&self) -> Arc<Reduction> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// What the steps of this model have communicated. Those with other models count where the model is the first one.
    pub(crate) fn stats(&self) -> ReducerStats {
        let mut stats = self.own.reducer.stats();
        let shared = self.shared();
        for (_, reduction) in shared.iter().filter(|(ids, _)| ids.first() == Some(&self.id)) {
            let more = reduction.reducer.stats();
            stats.steps += more.steps;
            stats.buckets_launched += more.buckets_launched;
            stats.buckets_launched_early += more.buckets_launched_early;
            stats.bytes += more.bytes;
            stats.bytes_copied += more.bytes_copied;
            stats.bytes_gathered += more.bytes_gathered;
            stats.communication += more.communication;
            stats.exposed += more.exposed;
        }
        stats
    }

    fn shared(&self) -> MutexGuard<'_, Vec<(Vec<u64>, Arc<Reduction>)>> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether another reduction than `this` holds micro-batches.
    fn holds_others(&self, this: &Arc<Reduction>) -> bool {
        let holds = |it: &Arc<Reduction>| !Arc::ptr_eq(it, this) && it.reducer.has_gradients();
        holds(&self.own) || self.shared().iter().any(|(_, it)| holds(it))
    }
}

/// A model and its handle, in a step.
#[derive(Clone, Copy)]
pub(crate) struct Part<'a> {
    pub(crate) handle: &'a Handle,
    pub(crate) model: &'a dyn AnyModel,
}

/// The models of one step.
pub(crate) struct Together<'a> {
    parts: Vec<Part<'a>>,
    reduction: Arc<Reduction>,
}

impl<'a> Together<'a> {
    pub(crate) fn one(handle: &'a Handle, model: &'a dyn AnyModel) -> Self {
        let reduction = handle.reductions.own.clone();
        Self { parts: vec![Part { handle, model }], reduction }
    }

    /// # Errors
    ///
    /// The models cannot be averaged together.
    pub(crate) fn all(parts: Vec<Part<'a>>) -> Result<Self> {
        let refuse = |problem: &str| Err(failure::cannot_combine(problem.to_owned()));
        let first = match parts[..] {
            [] => return refuse("there is no model"),
            [Part { handle, model }] => return Ok(Self::one(handle, model)),
            [Part { handle, .. }, ..] => handle,
        };
        let ids: Vec<u64> = parts.iter().map(|part| part.handle.reductions.id).collect();
        if ids.iter().collect::<HashSet<_>>().len() < ids.len() {
            return refuse("a model comes twice");
        }
        let known = first.reductions.shared().iter().find(|(of, _)| *of == ids).cloned();
        if let Some((_, reduction)) = known {
            return Ok(Self { parts, reduction });
        }
        // What one model ignores, the other need not have.
        let options = |handle: &Handle| {
            let mut options = handle.options.clone();
            options.ignored.clear();
            options
        };
        if parts.iter().any(|part| options(part.handle) != options(first)) {
            return refuse("wrap them with the same options");
        }
        let group = |handle: &Handle| {
            let group = handle.elastic.group();
            (group.name().to_owned(), group.ranks())
        };
        if parts.iter().any(|part| group(part.handle) != group(first)) {
            return refuse("wrap them with the same group");
        }
        let models: Vec<&[ParameterSpec]> =
            parts.iter().map(|part| &part.handle.parameters[..]).collect();
        let reduction = Arc::new(Reduction::new(&models, &options(first), &first.elastic.group())?);
        for part in &parts {
            part.handle.reductions.shared().push((ids.clone(), reduction.clone()));
        }
        Ok(Self { parts, reduction })
    }

    /// Runs backward, and averages the gradients with those of the other ranks: those of each model.
    pub(crate) fn backward<const D: usize>(&self, loss: Tensor<D>) -> Result<Vec<GradientsParams>> {
        self.refuse_shards()?;
        let own = self.run_last(loss)?;
        self.average(own)
    }

    /// Computes the gradients of each shard of this rank in step `number` from the loss that `of_shard` gives, and averages
    /// them over all shards. Also returns the average of the losses.
    pub(crate) fn shards<const D: usize>(
        &self,
        number: u64,
        mut of_shard: impl FnMut(usize) -> Result<Tensor<D>>,
    ) -> Result<(Vec<GradientsParams>, f64)> {
        let reducer = &self.reduction.reducer;
        let Some(shards) = reducer.shards() else {
            let problem = "the options of this model do not say how many there are: wrap it with \
                           `DdpOptions::default().shards(count)`";
            return Err(failure::shards(problem));
        };
        self.check()?;
        let mut losses = Vec::with_capacity(shards.len());
        let mut run = || {
            for shard in shards.start..shards.end - 1 {
                let loss = of_shard(shard)?;
                losses.push(loss.clone().detach());
                self.add(loss)?;
                reducer.end_shard();
            }
            let loss = of_shard(shards.end - 1)?;
            losses.push(loss.clone().detach());
            self.run_last(loss)
        };
        let own = match run() {
            Ok(own) => own,
            Err(error) => {
                drop(self.take_kept());
                reducer.fail_step();
                // The other ranks wait for this one, and hear of it. This rank's own error says more.
                drop(reducer.finish_shards(number, &[]));
                return Err(error);
            }
        };
        let value = |loss: Tensor<D>| {
            loss.sum().into_data().try_into_vec_as::<f64>().map_or(f64::NAN, |loss| loss[0])
        };
        let losses: Vec<f64> = losses.into_iter().map(value).collect();
        self.average_by(own, || reducer.finish_shards(number, &losses))
    }

    /// Runs the last backward of a step.
    fn run_last<const D: usize>(&self, loss: Tensor<D>) -> Result<Gradients> {
        let debug = &self.parts[0].handle.debug;
        let began = debug.begin_backward();
        let own = self.run(loss, true)?;
        debug.end_backward(began);
        Ok(own)
    }

    /// Averages this rank's `own` gradients, and those that were added before, with those of the other ranks.
    fn average(&self, mut own: Gradients) -> Result<Vec<GradientsParams>> {
        let first = self.parts[0].handle;
        let reducer = &self.reduction.reducer;
        if first.taps.is_some() || reducer.has_gradients() {
            let finish = || Ok((reducer.finish()?, ()));
            return self.average_by(own, finish).map(|(gradients, ())| gradients);
        }
        let step = self.count_step();
        let kept = self.take_kept();
        let own = self.each().zip(kept).map(|((part, slots), kept)| {
            let policy = part.handle.options.unused_parameters;
            part.model.own(slots, &mut own, kept, policy, step)
        });
        let own = own.collect::<Result<Vec<_>>>()?;
        first.debug.end_step(&first.elastic.group(), || reducer.stats());
        self.of_these_models(own)
    }

    /// The same with the reducer's averages, which `finish` waits for.
    fn average_by<'r, T>(
        &self,
        mut own: Gradients,
        finish: impl FnOnce() -> Result<(Averaged<'r>, T)>,
    ) -> Result<(Vec<GradientsParams>, T)> {
        let first = self.parts[0].handle;
        self.count_step();
        let kept = self.take_kept();
        let reducer = &self.reduction.reducer;
        let submit =
            |(part, slots): (&Part<'_>, &Slots)| part.model.submit_missing(reducer, slots, &own);
        let submitted = self.each().map(submit).fold(Ok(()), Result::and);
        let averaged = finish(); // even after a failure: the other ranks wait for this one
        submitted?;
        let (averaged, more) = averaged?;
        first.debug.end_step(&first.elastic.group(), || reducer.stats());
        let each = self.each().zip(kept);
        let collect = |((part, slots), kept): ((&Part<'_>, &Slots), _)| {
            part.model.collect(&averaged, slots, kept, Some(&mut own))
        };
        Ok((self.of_these_models(each.map(collect).collect())?, more))
    }

    /// The gradients of a step, unless no rank has any: where unused parameters are ignored, nothing else tells of a loss
    /// that was computed from another model.
    fn of_these_models(&self, gradients: Vec<GradientsParams>) -> Result<Vec<GradientsParams>> {
        // Those of a sharded optimizer lie on their owners.
        let is_sharded = self.parts[0].handle.options.sharded;
        match !is_sharded && gradients.iter().all(GradientsParams::is_empty) {
            true => Err(failure::loss_of_another_model()),
            false => Ok(gradients),
        }
    }

    /// Runs backward, and adds the gradients to this rank's share of the step.
    pub(crate) fn accumulate<const D: usize>(&self, loss: Tensor<D>) -> Result<()> {
        self.refuse_shards()?;
        self.add(loss)
    }

    fn add<const D: usize>(&self, loss: Tensor<D>) -> Result<()> {
        let own = self.run(loss, false)?;
        let reducer = &self.reduction.reducer;
        let add = |(part, slots): (&Part<'_>, &Slots)| part.model.accumulate(reducer, slots, &own);
        self.each().map(add).fold(Ok(()), Result::and)
    }

    /// Takes part in a step without data. `None` when no rank has data left. Micro-batches whose step this rank did not
    /// end are data.
    pub(crate) fn shadow(&self) -> Result<Option<Vec<GradientsParams>>> {
        self.refuse_shards()?;
        self.refuse_others()?;
        let reducer = &self.reduction.reducer;
        let has_kept = self.parts.iter().any(|part| part.handle.kept.has_gradients());
        if self.parts[0].handle.taps.is_none() && !has_kept && !reducer.has_gradients() {
            return Ok(None);
        }
        self.check()?;
        let kept = self.take_kept();
        let averaged = if has_kept { Some(reducer.finish()?) } else { reducer.shadow()? };
        let Some(averaged) = averaged else { return Ok(None) };
        self.count_step();
        let collect = |((part, slots), kept): ((&Part<'_>, &Slots), _)| {
            part.model.collect(&averaged, slots, kept, None)
        };
        self.of_these_models(self.each().zip(kept).map(collect).collect()).map(Some)
    }

    /// This rank's own gradients. If `is_last`, the taps submit them.
    fn run<const D: usize>(&self, loss: Tensor<D>, is_last: bool) -> Result<Gradients> {
        if !loss.is_tracked() {
            return Err(failure::loss_without_gradient());
        }
        self.refuse_others()?;
        if is_last {
            self.check()?;
        }
        let reducer = &self.reduction.reducer;
        reducer.begin_backward();
        let target = |base| is_last.then(|| Target { reducer: reducer.clone(), base });
        let models = self.parts.iter().zip(&self.reduction.models);
        let armed: Vec<_> = models
            .filter_map(|(part, (_, base))| Some(part.handle.taps.as_ref()?.arm(target(*base))))
            .collect();
        let gradients = loss.backward();
        drop(armed);
        if let Some(error) = sync_batch_norm::take_failure() {
            return Err(error);
        }
        self.parts.iter().for_each(|part| part.model.keep(&part.handle.kept, &gradients));
        Ok(gradients)
    }

    /// Refuses a step of batches of ranks if the options say that a step is shards.
    fn refuse_shards(&self) -> Result<()> {
        match self.reduction.reducer.shards() {
            None => Ok(()),
            Some(_) => Err(failure::shards(
                "this model was wrapped with `DdpOptions::shards`, so a step is one call of `step`, which runs backward \
                 for each shard; `backward`, `accumulate` and `shadow` have no place beside it",
            )),
        }
    }

    /// Refuses a step while micro-batches of another one wait.
    fn refuse_others(&self) -> Result<()> {
        if self.parts.iter().any(|part| part.handle.reductions.holds_others(&self.reduction)) {
            let problem = "earlier micro-batches were for other models; end their step first, or pass the same \
                           models to `accumulate_all` and `backward_all`";
            return Err(failure::cannot_combine(problem.to_owned()));
        }
        Ok(())
    }

    /// Compares the parameters between the ranks, if it is time to. If they differ, the step has ended.
    fn check(&self) -> Result<()> {
        let reducer = &self.reduction.reducer;
        if !reducer.is_check_due() {
            return Ok(());
        }
        let count = self.parts.iter().map(|part| part.handle.parameters.len()).sum();
        let read = |digests: &mut [u64]| {
            self.each().try_for_each(|(part, slots)| part.model.digest(slots, digests))
        };
        let checked = check::compare(&self.parts[0].handle.elastic.group(), reducer, count, read);
        if checked.is_err() {
            drop(self.take_kept());
        }
        checked
    }

    /// The gradients that each model's ranks keep for themselves.
    fn take_kept(&self) -> Vec<GradientsParams> {
        self.parts.iter().map(|part| part.handle.kept.take()).collect()
    }

    /// The models, and the indices of their parameters.
    fn each(&self) -> impl Iterator<Item = (&Part<'a>, &Slots)> {
        self.parts.iter().zip(self.reduction.models.iter().map(|(slots, _)| slots))
    }

    /// Returns the number of the step, by the first model's count.
    fn count_step(&self) -> u64 {
        for Part { handle, .. } in &self.parts {
            handle.steps.fetch_add(1, Ordering::Relaxed);
            let mut last = handle.reductions.last.lock().unwrap_or_else(PoisonError::into_inner);
            *last = self.reduction.clone();
        }
        self.parts[0].handle.steps.load(Ordering::Relaxed)
    }
}

impl fmt::Debug for Part<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Part({} parameters)", self.handle.parameters.len())
    }
}
