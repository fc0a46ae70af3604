//! How gradients that `TrainStep::step` returns are averaged.

use std::{
    collections::HashSet,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use burn::{
    module::{Module, ModuleVisitor, Param},
    optim::GradientsParams,
    tensor::Tensor,
};
use drumline::{
    ElasticGroup, ProcessGroup,
    ddp::{Averaged, DdpOptions, GradientReducer, UnusedParameters},
};

use crate::{
    DistributedDataParallel, Result, check, failure,
    gradients::{self, Slots},
    inspect::inspect,
    running::Running,
    shards::Frame,
    step::Reduction,
    sync_batch_norm,
    tap::{Taps, Target, Wrapper},
    tensors::{self, Path, Which},
};

/// What averages the gradients of a wrapped model.
#[derive(Clone)]
pub(super) struct Wrapped {
    group: ProcessGroup,
    averager: Averager,
    pub(super) elastic: ElasticGroup,
    pub(super) options: DdpOptions,
}

/// Averages the gradients of one model.
#[derive(Clone)]
pub(super) struct Averager {
    reducer: Arc<GradientReducer>,
    slots: Slots,
    taps: Option<Arc<Taps>>,
    steps: Arc<AtomicU64>,
    /// Decides on the random numbers of shards.
    seed: u64,
}

impl Wrapped {
    pub(super) fn new(ddp: &DistributedDataParallel) -> Self {
        let handle = ddp.handle();
        let own = &handle.reductions.own;
        let averager = Averager {
            reducer: own.reducer.clone(),
            slots: own.slots().clone(),
            taps: handle.taps.clone(),
            steps: handle.steps.clone(),
            seed: handle.options.seed,
        };
        let (elastic, options) = (handle.elastic.clone(), handle.options.clone());
        Self { group: ddp.group(), averager, elastic, options }
    }

    /// Why the gradients of `model` cannot be averaged over `group` with this handle, in steps of so many shards.
    pub(super) fn misfit<M: Module>(
        &self,
        model: &M,
        group: &ProcessGroup,
        shards: Option<usize>,
    ) -> Option<String> {
        if self.group.name() != group.name() || self.group.world_size() != group.world_size() {
            let [wrapped, given] = [&self.group, group].map(ProcessGroup::name);
            return Some(format!(
                "the model was wrapped over group {wrapped:?} and is to be trained over {given:?}"
            ));
        }
        if self.options.shards != shards {
            let count = |shards: Option<usize>| shards.map_or("no".to_owned(), |it| it.to_string());
            let [wrapped, wanted] = [self.options.shards, shards].map(count);
            return Some(format!(
                "the model was wrapped for {wrapped} shards, and a step is to have {wanted}; wrap it with \
                 `DdpOptions::default().shards({wanted})`"
            ));
        }
        if let Some(name) = self.options.ignored.first() {
            return Some(format!(
                "the model was wrapped with `DdpOptions::ignore`, for `{name}`, and a learner cannot leave tensors \
                 to each rank; wrap the model without it"
            ));
        }
        let mut find = FindParameters::default();
        model.visit(&mut find);
        if let Some(name) = find.sharded {
            return Some(failure::optimizer_is_sharded(name).to_string());
        }
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
        let may_have_taps = || {
            let it = inspect(model, &DdpOptions::default());
            it.untappable.len() < it.parameters.len()
        };
        if self.averager.taps.is_some() && find.tapped == 0 && may_have_taps() {
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
    /// For `model`, which has rank 0's values when this returns. A step may be so many shards.
    pub(super) fn new<M: Module>(
        wrapped: Option<&Wrapped>,
        model: M,
        shards: Option<usize>,
        group: &ProcessGroup,
    ) -> Result<(Self, M)> {
        if let Some(Wrapped { averager, .. }) = wrapped {
            // A checkpoint may have been loaded after the model was wrapped.
            return Ok((
                averager.clone(),
                tensors::broadcast(model, Which::All, &|_| false, 0, group)?,
            ));
        }
        let options = DdpOptions::default().unused_parameters(UnusedParameters::Ignore);
        let options = shards.into_iter().fold(options, DdpOptions::shards);
        let mut inspected = inspect(&model, &options);
        inspected.verify(group, &options)?;
        let model = tensors::broadcast(model, Which::All, &|_| false, 0, group)?;
        let own = Reduction::new(&[&inspected.parameters], &options, group)?;
        let slots = own.slots().clone();
        let (steps, seed) = (Arc::default(), options.seed);
        Ok((Self { reducer: own.reducer, slots, taps: None, steps, seed }, model))
    }

    /// Runs a step of the model. If its gradients are the last ones before they are averaged, taps may send them.
    pub(super) fn run<T>(&self, is_last: bool, step: impl FnOnce() -> T) -> Result<T> {
        let target = || is_last.then(|| Target { reducer: self.reducer.clone(), base: 0 });
        let armed = self.taps.as_ref().map(|taps| taps.arm(target()));
        let result = step();
        drop(armed);
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
        gradients::accumulate(&self.reducer, &self.slots, gradients, model)
    }

    /// Whether the options ask for a comparison of parameters now.
    pub(super) fn is_check_due(&self) -> bool {
        self.reducer.is_check_due()
    }

    /// Compares the parameters between the ranks.
    pub(super) fn compare<M: Module>(&self, model: &M, group: &ProcessGroup) -> Result<()> {
        self.reducer.regroup(group, self.reducer.steps_before())?;
        let read = |digests: &mut [u64]| check::digest(&self.slots, model, digests);
        check::compare(group, &self.reducer, self.slots.len(), read)
    }

    /// Averages the sum of what this rank has: of `gradients` and of all that was accumulated.
    pub(super) fn average<M: Module>(
        &self,
        gradients: GradientsParams,
        model: &M,
    ) -> Result<GradientsParams> {
        self.average_by(gradients, model, || self.reducer.finish())
    }

    /// What surrounds a step of shards.
    pub(super) fn frame<'a>(
        &'a self,
        elastic: &'a ElasticGroup,
        running: &'a Running,
    ) -> Frame<'a> {
        Frame { elastic, reducer: &self.reducer, running, seed: self.seed }
    }

    /// The shards of this rank.
    pub(super) fn shards(&self) -> Range<usize> {
        self.reducer.shards().unwrap_or_default()
    }

    /// Averages the gradients of all shards of step `number`. `compute` gives those of a shard of this rank.
    pub(super) fn average_shards<M: Module>(
        &self,
        number: u64,
        mut compute: impl FnMut(usize) -> Result<GradientsParams>,
        model: &M,
    ) -> Result<GradientsParams> {
        let (own, reducer) = (self.shards(), &self.reducer);
        let mut run = || {
            for shard in own.start..own.end - 1 {
                self.accumulate(compute(shard)?, model)?;
                reducer.end_shard();
            }
            compute(own.end - 1)
        };
        match run() {
            Ok(last) => {
                // burn does not say which part of an output is the loss.
                let losses = vec![f64::NAN; own.len()];
                let finish = || reducer.finish_shards(number, &losses);
                self.average_by(last, model, || finish().map(|(averaged, _)| averaged))
            }
            Err(error) => {
                reducer.fail_step();
                // The other ranks wait for this one, and hear of it. This rank's own error says more.
                drop(reducer.finish_shards(number, &[]));
                Err(error)
            }
        }
    }

    /// The same with the reducer's averages, which `finish` waits for.
    fn average_by<'r, M: Module>(
        &self,
        gradients: GradientsParams,
        model: &M,
        finish: impl FnOnce() -> Result<Averaged<'r>>,
    ) -> Result<GradientsParams> {
        let submitted = gradients::submit_missing(&self.reducer, &self.slots, &gradients, model);
        let averaged = finish(); // even after a failure: the other ranks wait for this one
        submitted?;
        let averaged = averaged?;
        self.steps.fetch_add(1, Ordering::Relaxed);
        Ok(gradients::collect(&averaged, &self.slots, model, GradientsParams::new(), gradients))
    }
}

#[derive(Default)]
struct FindParameters {
    path: Path,
    trained: HashSet<String>,
    tapped: usize,
    /// The first parameter that was wrapped by a sharded optimizer.
    sharded: Option<String>,
}

impl ModuleVisitor for FindParameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.is_require_grad() {
            self.trained.insert(self.path.name());
        }
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        match Wrapper::of_tap(container_type, name) {
            Some(Wrapper::Ddp) => self.tapped += 1,
            Some(Wrapper::ShardedOptimizer) => {
                self.sharded.get_or_insert_with(|| self.path.name());
            }
            None => {}
        }
        self.path.enter(name);
    }

    fn exit_module(&mut self, _name: &str, _container_type: &str) {
        self.path.exit();
    }
}
