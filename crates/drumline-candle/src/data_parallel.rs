use std::fmt;

use candle_core::{Device, Tensor, backprop::GradStore};
use candle_nn::{Optimizer, VarMap};
use drumline::{
    DType, ElasticGroup, Objects, ProcessGroup,
    ddp::{
        Averaged, DdpOptions, FaultKind, GradientFault, GradientReducer, Owners, ParameterSpec,
        ReducerStats, Timeline, UnusedParameters, ValuesMut, verify_model,
    },
    train,
};

use crate::{
    Error, ErrorKind, Result,
    failure::{self, OrFail},
    host,
    variables::{self, Variable},
};

/// Keeps the variables of a `VarMap` equal on all ranks, by averaging their gradients.
///
/// [`wrap`](Self::wrap) the `VarMap` once, when the model is built. Then call [`average`](Self::average) between
/// `loss.backward()` and the optimizer's step, or [`backward_step`](Self::backward_step) instead of the optimizer's.
/// The model and the optimizers stay candle's own; see the [crate's page](crate) for a whole program.
///
/// Every rank must wrap, average and synchronise buffers the same number of times, in the same order. `wrap` copies
/// rank 0's values to all ranks. After that, equal gradients and equal optimizers keep the ranks equal, bit for bit.
///
/// # Buffers
///
/// A `VarMap` does not tell what is trained. So the first step decides: a variable that gets no gradient on any rank
/// is a *buffer*, such as the running statistics of batch normalisation. Gradients of the others, the *parameters*,
/// are averaged. [`sync_buffers`](Self::sync_buffers) copies rank 0's buffers to all ranks.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder, VarMap, linear};
/// use drumline_candle::DataParallel;
///
/// drumline::local(2, |group| {
///     let varmap = VarMap::new();
///     let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
///     let model = linear(2, 1, vb)?; // random
///     let mut ddp = DataParallel::wrap(&varmap, &group)?;
///     let batch = Tensor::full(1 + group.rank() as u32, (4, 2), &Device::Cpu)?;
///     let batch = batch.to_dtype(DType::F32)?;
///     let loss = model.forward(&batch)?.mean_all()?;
///     let mut gradients = loss.backward()?;
///     ddp.average(&mut gradients)?;
///     let weight = gradients.get(model.weight()).unwrap();
///     assert_eq!(weight.to_vec2::<f32>()?, [[1.5; 2]]); // of both ranks
///     Ok(())
/// })?;
/// # Ok::<_, anyhow::Error>(())
/// ```
pub struct DataParallel {
    /// Goes on without ranks that have died if a step is shards.
    elastic: ElasticGroup,
    varmap: VarMap,
    /// All variables, in order of name.
    pub(crate) variables: Vec<Variable>,
    pub(crate) options: DdpOptions,
    /// The variables of floating-point types, and their owners if they have some.
    owners: Option<(Vec<ParameterSpec>, Owners)>,
    /// `None` until the ranks know what is trained.
    pub(crate) trained: Option<Trained>,
    pub(crate) steps: u64,
}

/// The variables whose gradients are averaged.
pub(crate) struct Trained {
    pub(crate) reducer: GradientReducer,
    /// Their places in `DataParallel::variables`, in rising order.
    pub(crate) places: Vec<usize>,
    /// Whether each of them has had a gradient on some rank.
    was_used: Vec<bool>,
}

/// Averages of trained variables, by their places.
type Averages = Vec<(usize, Tensor)>;

/// What this rank brings to a step.
pub(crate) struct Own<'a> {
    /// `None` for a rank without data.
    pub(crate) gradients: Option<&'a GradStore>,
    /// Why this rank cannot take part. Then every rank's step fails.
    pub(crate) problem: Option<String>,
}

impl DataParallel {
    /// Makes the variables of `varmap` equal on all ranks of `group`.
    ///
    /// Build the model before. The handle keeps a reference to the `VarMap`, as layers do.
    ///
    /// # Errors
    ///
    /// The ranks have different variables, or one that cannot be averaged. Every rank gets the error, which names
    /// rank and variable.
    pub fn wrap(varmap: &VarMap, group: &ProcessGroup) -> Result<Self> {
        Self::wrap_with(varmap, group, &DdpOptions::default())
    }

    /// [`wrap`](Self::wrap) with other bucket sizes, or another policy for unused parameters.
    ///
    /// With [`UnusedParameters::Ignore`], every floating-point variable is a parameter from the start, and
    /// [`sync_buffers`](Self::sync_buffers) copies those that have not had a gradient yet.
    ///
    /// # Errors
    ///
    /// As for [`wrap`](Self::wrap).
    pub fn wrap_with(varmap: &VarMap, group: &ProcessGroup, options: &DdpOptions) -> Result<Self> {
        let ddp = Self::wrap_for(varmap, group, options)?;
        if options.sharded {
            let problem = "`DdpOptions::sharded` gives each rank the averages of its own variables alone: use \
                           `ShardedOptimizer::wrap_with`, whose steps bring their values to all ranks";
            fail_with(vec![Some(problem.to_owned()); group.world_size()])?;
        }
        Ok(ddp)
    }

    /// [`wrap_with`](Self::wrap_with), for a [`ShardedOptimizer`](crate::ShardedOptimizer) if the options say so.
    pub(crate) fn wrap_for(
        varmap: &VarMap,
        group: &ProcessGroup,
        options: &DdpOptions,
    ) -> Result<Self> {
        let (ignored, variables): (Vec<_>, Vec<_>) =
            variables::sorted(varmap).into_iter().partition(|it| options.ignores(&it.name));
        let shared = || options.sharded.then(|| variables::find_shared(&variables)).flatten();
        let shards = || {
            let problem = "`DdpOptions::shards` and `DdpOptions::sharded` exclude each other here";
            (options.sharded && options.shards.is_some()).then(|| problem.to_owned())
        };
        exchange(group, variables::find_problem(&variables).or_else(shared).or_else(shards))?;
        let is_float = |it: &&Variable| it.var.dtype().is_float();
        let floats: Vec<ParameterSpec> =
            variables.iter().filter(is_float).filter_map(Variable::spec).collect();
        let owners = options.sharded.then(|| Owners::plan(&floats, group.world_size()));
        let others = variables.iter().filter(|it| !is_float(it)).filter_map(Variable::spec);
        // Of what is ignored only the names are compared.
        let ignored = ignored.into_iter().map(|it| ParameterSpec::new(it.name, [], DType::U8));
        verify_model(group, &floats, &others.chain(ignored).collect::<Vec<_>>(), options)?;
        variables::broadcast(variables.iter(), group)?;
        let mut ddp = Self {
            elastic: match options.shards {
                Some(_) => ElasticGroup::new(group),
                None => ElasticGroup::fixed(group),
            },
            varmap: varmap.clone(),
            variables,
            options: options.clone(),
            owners: owners.map(|owners| (floats, owners)),
            trained: None,
            steps: 0,
        };
        if options.unused_parameters == UnusedParameters::Ignore {
            let places = 0..ddp.variables.len();
            ddp.train(places.filter(|&at| ddp.variables[at].var.dtype().is_float()).collect())?;
        }
        Ok(ddp)
    }

    /// Replaces the gradients of the variables in `gradients` by their averages over all ranks, which have the same
    /// bits on every rank. Call it between `loss.backward()` and the optimizer's step.
    ///
    /// For several micro-batches, add up their gradients with candle's `GradStore::extend`, and average the sum.
    /// Nothing is sent before that.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor, backprop::GradStore};
    /// # use candle_nn::{Linear, Module, VarBuilder, VarMap, linear};
    /// # use drumline::ProcessGroup;
    /// use drumline_candle::DataParallel;
    ///
    /// fn gradients_of_a_large_batch(
    ///     ddp: &mut DataParallel,
    ///     model: &Linear,
    ///     parts: &[Tensor],
    /// ) -> anyhow::Result<GradStore> {
    ///     let mut gradients = GradStore::default();
    ///     for part in parts {
    ///         let loss = (model.forward(part)?.sqr()?.mean_all()? / parts.len() as f64)?;
    ///         gradients.extend(loss.backward()?)?; // nothing leaves this rank
    ///     }
    ///     ddp.average(&mut gradients)?; // all parts, from all ranks
    ///     Ok(gradients)
    /// }
    /// # let varmap = VarMap::new();
    /// # let model = linear(2, 1, VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu))?;
    /// # let mut ddp = DataParallel::wrap(&varmap, &ProcessGroup::alone())?;
    /// # let part = Tensor::ones((3, 2), DType::F32, &Device::Cpu)?;
    /// # let gradients = gradients_of_a_large_batch(&mut ddp, &model, &[part.clone(), part])?;
    /// # assert!(gradients.get(model.weight()).is_some());
    /// # Ok::<_, anyhow::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Every rank gets the error of any rank, and keeps its own gradients:
    ///
    /// - a parameter got no gradient on some rank (unless [`UnusedParameters::Ignore`] was chosen), or one of
    ///   another shape or type;
    /// - `gradients` has none of the wrapped variables on some rank;
    /// - a variable was added to the `VarMap` after wrapping, or taken out of it;
    /// - a variable that is a buffer has a gradient now;
    /// - where ranks [compare](DdpOptions::check_every) their parameters, a value differs;
    /// - a gradient could not be read from its device.
    ///
    /// Training can go on after these. After an error of the communication it cannot.
    pub fn average(&mut self, gradients: &mut GradStore) -> Result<()> {
        let problem = self.find_problem(gradients);
        let averages = self.take_part(Own { gradients: Some(gradients), problem })?;
        for (place, average) in averages.into_iter().flatten() {
            gradients.insert(&self.variables[place].var, average);
        }
        Ok(())
    }

    /// `loss.backward()`, with the gradients averaged over all ranks.
    ///
    /// # Errors
    ///
    /// As for [`average`](Self::average). If candle's backward fails on some rank, every rank gets an error that
    /// names it.
    pub fn backward(&mut self, loss: &Tensor) -> Result<GradStore> {
        match loss.backward() {
            Ok(mut gradients) => {
                self.average(&mut gradients)?;
                Ok(gradients)
            }
            Err(error) => {
                let problem = Some(format!("backward failed: {error}"));
                self.take_part(Own { gradients: Some(&GradStore::default()), problem })?;
                Err(error).or_fail()
            }
        }
    }

    /// `optimizer.backward_step(&loss)`, with the gradients averaged over all ranks.
    ///
    /// # Errors
    ///
    /// As for [`backward`](Self::backward), or the optimizer's.
    pub fn backward_step(&mut self, optimizer: &mut impl Optimizer, loss: &Tensor) -> Result<()> {
        let gradients = self.backward(loss)?;
        optimizer.step(&gradients).or_fail()
    }

    /// Takes part in a step of the other ranks without data: for a rank whose share of an epoch ends before theirs.
    /// Returns `None` when no rank has data left.
    ///
    /// Until then it returns the averages over all ranks, in which ranks without data count as zeros. The rank
    /// passes them to its optimizer as usual, so all ranks stay equal. With torch this is done by `Join`. All ranks
    /// must do this, including those with most data:
    ///
    /// ```
    /// # use candle_core::Tensor;
    /// # use candle_nn::Optimizer;
    /// # use drumline_candle::DataParallel;
    /// # fn epoch(ddp: &mut DataParallel, optimizer: &mut impl Optimizer, batches: Vec<Tensor>,
    /// #     loss: impl Fn(Tensor) -> candle_core::Result<Tensor>) -> anyhow::Result<()> {
    /// for batch in batches {
    ///     ddp.backward_step(optimizer, &loss(batch)?)?;
    /// }
    /// while let Some(gradients) = ddp.shadow()? {
    ///     optimizer.step(&gradients)?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`average`](Self::average).
    #[doc(alias = "join")]
    pub fn shadow(&mut self) -> Result<Option<GradStore>> {
        if self.group().world_size() == 1 {
            return Ok(None);
        }
        let problem = variables::find_change(&self.varmap, &self.variables, &self.options);
        let Some(averages) = self.take_part(Own { gradients: None, problem })? else {
            return Ok(None);
        };
        let mut gradients = GradStore::default();
        for (place, average) in averages {
            gradients.insert(&self.variables[place].var, average);
        }
        Ok(Some(gradients))
    }

    /// Copies rank 0's buffers to all ranks: running statistics and all other variables that are not trained.
    ///
    /// Each rank updates its buffers from its own data. All ranks must call this before evaluation, a checkpoint or
    /// a digest. For a model without buffers it costs one small message. Before the first step it copies all variables.
    ///
    /// # Errors
    ///
    /// Some rank has another list of variables now: one was added to its `VarMap`, taken out or replaced. Every rank gets
    /// the error, which names rank and variable. Or the communication failed, or candle could not read or set a variable.
    #[doc(alias = "broadcast_buffers")]
    pub fn sync_buffers(&self) -> Result<()> {
        let problem = variables::find_change(&self.varmap, &self.variables, &self.options);
        let is_parameter = self.find_parameters(problem)?;
        let buffers = self.variables.iter().zip(&is_parameter).filter(|(_, is)| !**is);
        variables::broadcast(buffers.map(|(variable, _)| variable), &self.group())
    }

    /// Which variables have had a gradient on some rank, by place: alike on all ranks, of which each may know of its own
    /// ones alone. If some rank has a problem, every rank gets it as an error.
    fn find_parameters(&self, problem: Option<String>) -> Result<Vec<bool>> {
        let mut own = vec![false; self.variables.len()];
        if let Some(trained) = &self.trained {
            for (&place, &was_used) in trained.places.iter().zip(&trained.was_used) {
                own[place] = was_used;
            }
        }
        let (mut problems, mut all) = (Vec::new(), vec![false; own.len()]);
        for (problem, of_rank) in self.group().all_gather_object(&(problem, own))? {
            problems.push(problem);
            all.iter_mut().zip(of_rank).for_each(|(is, of_rank)| *is |= of_rank);
        }
        fail_with(problems)?;
        Ok(all)
    }

    /// Compares the values of the parameters between the ranks, if it is time to.
    pub(crate) fn check_values(&self) -> Result<()> {
        let Some(trained) = self.trained.as_ref().filter(|it| it.reducer.is_check_due()) else {
            return Ok(());
        };
        let digest = |&place: &usize| {
            let Variable { name, var } = &self.variables[place];
            let digest = host::with_values(var, |values| values.digest());
            digest.map_err(|error| format!("variable `{name}` could not be read: {error}"))
        };
        let digests: Result<Vec<u64>, String> = trained.places.iter().map(digest).collect();
        let is_parameter = self.find_parameters(digests.as_ref().err().cloned())?;
        let mut digests = digests.unwrap_or_default(); // all ranks have theirs
        for (digest, &place) in digests.iter_mut().zip(&trained.places) {
            *digest *= u64::from(is_parameter[place]); // each rank has its own running statistics
        }
        trained.reducer.check(&digests)
    }

    /// The owner of a variable; `None` if it has none.
    pub(crate) fn owner(&self, name: &str) -> Option<usize> {
        let (floats, owners) = self.owners.as_ref()?;
        owners.of(floats.binary_search_by(|spec| spec.name[..].cmp(name)).ok()?)
    }

    /// Whether this rank has the averages and moments of a variable: its own ones, and those that every rank keeps for
    /// itself.
    pub(crate) fn keeps(&self, name: &str) -> bool {
        self.owner(name).is_none_or(|owner| owner == self.group().rank())
    }

    pub(crate) fn owners(&self) -> Option<&Owners> {
        self.owners.as_ref().map(|(_, owners)| owners)
    }

    /// All variables but those that the options ignore, in order of name: alike on all ranks.
    pub(crate) fn variables(&self) -> &[Variable] {
        &self.variables
    }

    /// Whether the step that was averaged last is one after which ranks compare what must be equal.
    pub(crate) fn is_check_step(&self) -> bool {
        self.trained.as_ref().is_some_and(|it| it.reducer.is_check_step())
    }

    pub(crate) fn varmap(&self) -> &VarMap {
        &self.varmap
    }

    /// Gives all trained variables the values that their owners have.
    pub(crate) fn gather(&self) -> Result<()> {
        let Some(Trained { reducer, places, .. }) = &self.trained else { return Ok(()) };
        let variable = |slot: usize| &self.variables[places[slot]];
        let mut own = Ok(());
        let read =
            |slot: usize, place: ValuesMut<'_>| match variable(slot).var.to_device(&Device::Cpu) {
                Ok(on_host) => host::write_gradient(&on_host, place),
                Err(error) => {
                    own = Err(error).or_fail();
                    false
                }
            };
        let mut received = Vec::new();
        let gathered = reducer.gather(read, |slot, values| {
            received.push((slot, host::read_average(values, &variable(slot).var)));
        });
        own?; // the other ranks have an error, too
        gathered?;
        for (slot, value) in received {
            variable(slot).var.set(&value.or_fail()?).or_fail()?;
        }
        Ok(())
    }

    /// How much was communicated so far, and how long it took. Nothing is hidden behind backward.
    pub fn stats(&self) -> ReducerStats {
        let mut stats = self.trained.as_ref().map(|it| it.reducer.stats()).unwrap_or_default();
        stats.steps = self.steps;
        stats
    }

    /// When each bucket of the last step was launched and completed, counted from the beginning of
    /// [`average`](Self::average). It can be printed. Empty in a world of one rank.
    pub fn timeline(&self) -> Timeline {
        self.trained.as_ref().map(|it| it.reducer.timeline()).unwrap_or_default()
    }

    /// The group over which gradients are averaged. With [shards](DdpOptions::shards) it is another one after a rank has
    /// died.
    pub fn group(&self) -> ProcessGroup {
        self.elastic.group()
    }

    /// What goes on when a rank has died, if the options say [`shards`](DdpOptions::shards): each [`step`](Self::step) is a
    /// piece of it. Hand in what else the ranks do together.
    pub fn elastic(&self) -> &ElasticGroup {
        &self.elastic
    }

    /// Fixes the variables that are trained, by their places.
    fn train(&mut self, places: Vec<usize>) -> Result<()> {
        let spec = |&at: &usize| {
            let Variable { name, var } = &self.variables[at];
            Some(ParameterSpec::new(name.clone(), var.dims(), host::averaged_as(var.dtype())?))
        };
        let specs: Vec<ParameterSpec> = places.iter().filter_map(spec).collect();
        let owners = self.owners.as_ref().map(|(floats, owners)| {
            let at = |spec: &ParameterSpec| floats.iter().position(|it| it.name == spec.name);
            let chosen: Vec<usize> = specs.iter().filter_map(at).collect();
            owners.only(floats, &chosen)
        });
        let reducer = GradientReducer::with_owners(specs, &self.options, &self.group(), owners)?;
        let was_used = vec![false; places.len()];
        self.trained = Some(Trained { reducer, places, was_used });
        Ok(())
    }

    /// The problem with gradients that cannot be those of the wrapped variables.
    pub(crate) fn find_problem(&self, gradients: &GradStore) -> Option<String> {
        let change = variables::find_change(&self.varmap, &self.variables, &self.options);
        let has = |at: usize| gradients.get(&self.variables[at].var).is_some();
        let is_none = || {
            let (first, count) = (&self.variables.first()?.name, self.variables.len());
            (!(0..count).any(has)).then(|| {
                format!(
                    "the GradStore has no gradient of `{first}` or of any other of the {count} wrapped variables; \
                     pass what `loss.backward()` has returned, for a loss of the model in this VarMap"
                )
            })
        };
        let has_late = || {
            let trained = self.trained.as_ref()?;
            let is_buffer = |at: &usize| trained.places.binary_search(at).is_err();
            let late = (0..self.variables.len()).filter(is_buffer).find(|&at| has(at))?;
            Some(format!(
                "variable `{}` has a gradient, but had none on any rank in the first step, so it was taken for a \
                 buffer; choose `UnusedParameters::Ignore` for variables that only some steps train",
                self.variables[late].name
            ))
        };
        change.or_else(is_none).or_else(has_late)
    }

    /// Makes a step together with all ranks. Returns the averages by place, or `None` if no rank has data.
    ///
    /// In a world of one rank, the averages are the rank's own gradients, and none are returned.
    fn take_part(&mut self, own: Own<'_>) -> Result<Option<Averages>> {
        if self.options.shards.is_some() {
            let problem = "this `VarMap` was wrapped with `DdpOptions::shards`, so a step is one call of `step`; \
                           `average`, `backward` and `shadow` have no place beside it";
            return Err(Error::argument("a step of shards", problem));
        }
        self.check_values()?;
        if self.trained.is_none() && !self.agree(&own)? {
            return Ok(None);
        }
        let is_alone = self.group().world_size() == 1;
        let averages = if is_alone { self.check_alone(own)? } else { self.reduce(own)? };
        self.steps += u64::from(averages.is_some());
        Ok(averages)
    }

    /// In the first step: finds out together with all ranks which variables are trained. Returns false if no rank
    /// has data.
    pub(crate) fn agree(&mut self, own: &Own<'_>) -> Result<bool> {
        let has = |it: &Variable| own.gradients.is_some_and(|store| store.get(&it.var).is_some());
        let used: Vec<bool> = self.variables.iter().map(has).collect();
        let all = (own.gradients.is_some(), own.problem.clone(), used);
        let all = self.group().all_gather_object(&all)?;
        let (mut has_data, mut problems, mut is_trained) =
            (false, Vec::new(), vec![false; self.variables.len()]);
        for (rank_has_data, problem, used) in all {
            has_data |= rank_has_data;
            problems.push(problem);
            is_trained.iter_mut().zip(used).for_each(|(is, used)| *is |= used);
        }
        fail_with(problems)?;
        if has_data {
            let is_float = |at: &usize| self.variables[*at].var.dtype().is_float();
            let places = (0..self.variables.len()).filter(|&at| is_trained[at]).filter(is_float);
            self.train(places.collect())?;
        }
        Ok(has_data)
    }

    /// A step without other ranks.
    fn check_alone(&mut self, own: Own<'_>) -> Result<Option<Averages>> {
        fail_with(vec![own.problem])?;
        let (Some(trained), Some(gradients)) = (&mut self.trained, own.gradients) else {
            return Ok(None);
        };
        let mut faults = Vec::new();
        for (&place, was_used) in trained.places.iter().zip(&mut trained.was_used) {
            let Variable { name, var } = &self.variables[place];
            let kind = match gradients.get(var) {
                None => FaultKind::Unused,
                Some(gradient) if fits(gradient, var) => {
                    *was_used = true;
                    continue;
                }
                Some(_) => FaultKind::WrongType,
            };
            let is_allowed = self.options.unused_parameters == UnusedParameters::Ignore;
            if kind != FaultKind::Unused || !is_allowed {
                faults.push(GradientFault::new(name, kind, vec![0]));
            }
        }
        if faults.is_empty() {
            return Ok(Some(Vec::new()));
        }
        Err(train::failure::gradients(self.steps + 1, faults))
    }

    /// Averages the gradients of the trained variables over all ranks.
    fn reduce(&mut self, mut own: Own<'_>) -> Result<Option<Averages>> {
        let Some(Trained { reducer, places, .. }) = &self.trained else { return Ok(None) };
        reducer.begin_backward();
        match (&own.problem, own.gradients) {
            (None, Some(gradients)) => {
                own.problem = submit(reducer, &self.variables, places, gradients, true);
            }
            (None, None) => {}
            (Some(_), _) => reducer.fail(0, FaultKind::Unused),
        }
        self.finish(own.gradients.is_some() || own.problem.is_some(), own.problem)
    }

    /// Ends a step. Returns the averages by place, or `None` if no rank has data.
    fn finish(&mut self, has_part: bool, problem: Option<String>) -> Result<Option<Averages>> {
        let ended = self.end(problem, |reducer| match has_part {
            true => Ok(Some((reducer.finish()?, ()))),
            false => Ok(reducer.shadow()?.map(|averaged| (averaged, ()))),
        })?;
        Ok(ended.map(|(averages, ())| averages))
    }

    /// The same, as `end` does it, with what that gives besides.
    pub(crate) fn end<T>(
        &mut self,
        problem: Option<String>,
        end: impl FnOnce(&GradientReducer) -> Result<Option<(Averaged<'_>, T)>>,
    ) -> Result<Option<(Averages, T)>> {
        let group = self.group();
        let Some(Trained { reducer, places, was_used }) = &mut self.trained else {
            return Ok(None);
        };
        let (averaged, more) = match end(reducer) {
            Ok(Some(ended)) => ended,
            Ok(None) => return Ok(None),
            Err(error) if error.kind() == ErrorKind::Gradients => {
                // Every rank is here, because every rank has seen that some rank has a fault.
                exchange(&group, problem)?;
                return Err(error);
            }
            Err(error) => return Err(error),
        };
        let mut averages = Vec::with_capacity(places.len());
        for (slot, &place) in places.iter().enumerate() {
            if let Some(average) = averaged.values(slot) {
                was_used[slot] = true;
                let variable = &self.variables[place].var;
                averages.push((place, host::read_average(average, variable).or_fail()?));
            }
        }
        Ok(Some((averages, more)))
    }
}

/// Hands the gradients to the reducer. If others follow in this step, they are added to them. Returns the problem if one
/// could not be read from its device.
pub(crate) fn submit(
    reducer: &GradientReducer,
    variables: &[Variable],
    places: &[usize],
    gradients: &GradStore,
    is_last: bool,
) -> Option<String> {
    let mut problem = None;
    // The reducer's buckets begin with the last parameter: so the first bucket travels while others are filled.
    for (slot, &place) in places.iter().enumerate().rev() {
        let Variable { name, var } = &variables[place];
        let Some(gradient) = gradients.get(var) else { continue };
        match gradient.to_device(&Device::Cpu) {
            Ok(on_host) => {
                let fill =
                    |to: ValuesMut<'_>| fits(gradient, var) && host::write_gradient(&on_host, to);
                match is_last {
                    true => reducer.submit_with(slot, fill),
                    false => reducer.accumulate(slot, fill),
                }
            }
            Err(error) => {
                reducer.fail(slot, FaultKind::Unread);
                problem.get_or_insert(format!(
                    "the gradient of `{name}` could not be read from {:?}: {error}",
                    gradient.device().location()
                ));
            }
        }
    }
    problem
}

fn fits(gradient: &Tensor, variable: &Tensor) -> bool {
    gradient.dtype() == variable.dtype() && gradient.shape() == variable.shape()
}

/// Fails on every rank if some rank has a problem.
fn exchange(group: &ProcessGroup, mine: Option<String>) -> Result<()> {
    fail_with(group.all_gather_object(&mine)?)
}

/// Fails if some rank has a problem. The problems are in order of rank.
pub(crate) fn fail_with(problems: Vec<Option<String>>) -> Result<()> {
    match failure::group_problems(problems) {
        problems if problems.is_empty() => Ok(()),
        problems => Err(failure::ranks(problems)),
    }
}

impl fmt::Debug for DataParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataParallel")
            .field("group", &self.group())
            .field("variables", &self.variables.len())
            .field("parameters", &self.trained.as_ref().map(|trained| trained.places.len()))
            .finish_non_exhaustive()
    }
}
