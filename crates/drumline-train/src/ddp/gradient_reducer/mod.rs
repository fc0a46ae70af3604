mod activity;
mod check;
mod in_flight;
mod lent;
mod memory;
mod plan;
mod shards;
mod sizes;
mod step;

#[cfg(test)]
mod tests;
mod timeline;
mod values;

use std::{
    marker::PhantomData,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use self::{
    lent::Lent,
    plan::{Plan, check_trainable},
    step::Step,
};
use super::{DdpOptions, FaultKind, GradientFault, Owners, ParameterSpec};
use crate::{Error, Result, failure};
use drumline_group::{Element, ProcessGroup};

pub use self::{
    lent::SharedGradient,
    step::StepsBefore,
    timeline::{BucketTimes, ReducerStats, Timeline},
    values::{Place, Values, ValuesMut},
};

/// Averages gradients over a group while backward still computes later ones.
///
/// [`GradientReducer::submit`] copies a gradient to its place in a bucket. When the last member of a bucket
/// has come, the bucket's memory moves to the group. The group all-reduces it in the background and moves it
/// back. The two share no memory, so a hook never waits for the network. [`GradientReducer::finish`] ends the
/// step and lends the averages out.
///
/// The group adds each element in a fixed order, so the averages have the same bits whatever the bucket size
/// and the timing.
///
/// # Which bucket a gradient is in
///
/// The first step expects gradients in reverse order of definition. At its end the lowest rank with data tells all ranks
/// the order that it has seen, and the buckets are made again from that order, once. A rank whose gradients come
/// in another order waits a little longer, but has the same buckets.
///
/// # Several backward passes for one step
///
/// [`GradientReducer::accumulate`] adds a gradient to this rank's share of the step and sends nothing. A
/// gradient that is submitted later is added to it, and the sum is averaged.
///
/// # Sharded
///
/// With [`DdpOptions::sharded`] each parameter has an [owner](Owners), and each rank gets the averages of its own
/// parameters alone, with the same bits. It takes the optimizer's step for these, so it needs the optimizer's state of
/// these. Then [`GradientReducer::gather`] brings the new values to all ranks. Both halves together send as many bytes
/// as averages for everyone do. (This is stage 1 of ZeRO: Rajbhandari et al., 2020.)
///
/// # Shards
///
/// With [`DdpOptions::shards`] a step is so many shards, whatever the number of ranks, and each rank has a
/// [run](GradientReducer::shards) of them. For each of its shards but the last, the rank
/// [accumulates](GradientReducer::accumulate) every gradient and then says [`end_shard`](GradientReducer::end_shard). Those
/// of the last shard are submitted. [`finish_shards`](GradientReducer::finish_shards) averages the gradients over the shards,
/// along one tree.
///
/// ```
/// use drumline::{DType, ddp::{DdpOptions, GradientReducer, ParameterSpec}};
///
/// let of_shard = [1e8_f32, 1.0, -1e8, 3.0, 0.5]; // f32 has seven digits: the order of sums decides
/// let average = |ranks| {
///     drumline::local(ranks, |group| {
///         let bias = ParameterSpec::new("bias", [1], DType::F32);
///         let options = DdpOptions::default().shards(5);
///         let reducer = GradientReducer::new(vec![bias], &options, &group)?;
///         let shards = reducer.shards().unwrap();
///         for shard in shards.start..shards.end - 1 {
///             reducer.accumulate(0, |place| place.copy_from(of_shard[shard..=shard].into()));
///             reducer.end_shard();
///         }
///         reducer.submit(0, of_shard[shards.end - 1..shards.end].into());
///         let losses: Vec<f64> = of_shard[shards].iter().copied().map(f64::from).collect();
///         let (averaged, _loss) = reducer.finish_shards(7, &losses)?; // of step 7
///         Ok(averaged.get::<f32>(0).unwrap()[0].to_bits())
///     })
/// };
/// let alone = average(1)?[0];
/// for ranks in 2..=5 {
///     assert_eq!(average(ranks)?, vec![alone; ranks]);
/// }
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # When a rank has a fault
///
/// Every bucket carries a few more elements: marks that are 0 or 1. They say whether the rank has used each
/// parameter of the bucket, and whether it has seen a fault (a gradient of the wrong length, say). The first bucket also
/// says which ranks have data of their own. A rank with a fault still takes part in all collectives, with zeros in place of
/// missing gradients. So no peer waits in vain. All ranks see an average above zero in the same step, tell
/// each other their faults, and return the same [`Gradients`](crate::ErrorKind::Gradients). The next step may go on as usual.
///
/// ```
/// use drumline::{DType, ProcessGroup, ddp::{DdpOptions, GradientReducer, ParameterSpec}};
///
/// std::thread::scope(|threads| {
///     for group in drumline::rendezvous::local_world(2)? {
///         threads.spawn(move || {
///             let bias = ParameterSpec::new("bias", [1], DType::F32);
///             let options = DdpOptions::default();
///             let reducer = GradientReducer::new(vec![bias], &options, &group).unwrap();
///             for step in 0..3 {
///                 let gradient = [group.rank() as f32 + step as f32]; // what backward has found
///                 reducer.submit(0, gradient[..].into());
///                 let averaged = reducer.finish().unwrap();
///                 assert_eq!(averaged.get::<f32>(0), Some(&[0.5 + step as f32][..]));
///             }
///         });
///     }
///     Ok::<_, drumline::Error>(())
/// })?;
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Debug)]
pub struct GradientReducer {
    parameters: Vec<ParameterSpec>,
    options: DdpOptions,
    owners: Option<Arc<Owners>>,
    step: Mutex<Step>,
}

impl GradientReducer {
    /// A reducer for the gradients of `parameters`, which must be equal on all ranks
    /// ([`verify_model`](super::verify_model) checks that).
    ///
    /// # Errors
    ///
    /// There are no parameters, a parameter is none of f32, f64, f16 and bf16, the options
    /// [ignore](DdpOptions::ignore) one of the parameters, or no thread can be started.
    pub fn new(
        parameters: Vec<ParameterSpec>,
        options: &DdpOptions,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let owners = || Owners::plan(&parameters, group.world_size());
        let owners = options.sharded.then(owners);
        Self::with_owners(parameters, options, group, owners)
    }

    /// [`GradientReducer::new`] with these owners of the parameters, or none, whatever the options say.
    ///
    /// # Errors
    ///
    /// As there. Also if there are not as many owned parameters as parameters.
    pub fn with_owners(
        parameters: Vec<ParameterSpec>,
        options: &DdpOptions,
        group: &ProcessGroup,
        owners: Option<Owners>,
    ) -> Result<Self> {
        check_trainable(&parameters)?;
        if let Some(owners) = owners.as_ref().filter(|it| it.len() != parameters.len()) {
            let problem =
                format!("{} of {} parameters have owners", owners.len(), parameters.len());
            return Err(Error::argument("data-parallel training", problem));
        }
        if let Some(ignored) = parameters.iter().find(|spec| options.ignores(&spec.name)) {
            let problem =
                format!("parameter {ignored} is to be ignored, so the reducer must not get it");
            return Err(Error::argument("data-parallel training", problem));
        }
        let order = (0..parameters.len()).rev();
        let owners = owners.map(Arc::new);
        let least_bytes = sizes::LEAST_BYTES;
        let plan = Plan::new(&parameters, order, least_bytes, options, owners.as_ref(), group)?;
        let step = Mutex::new(Step::new(Arc::new(plan), parameters.len(), group)?);
        Ok(Self { parameters, options: options.clone(), owners, step })
    }

    /// Sets the start of the step's [`Timeline`]: backward begins. Without this call the step starts with the
    /// first gradient.
    pub fn begin_backward(&self) {
        self.lock().start_clock();
    }

    /// Hands in the final gradient of a parameter in this step, row-major.
    ///
    /// For gradient hooks: it copies the values, never waits for a peer and never panics.
    /// [`GradientReducer::finish`] returns the errors.
    pub fn submit(&self, parameter: usize, gradient: Values<'_>) {
        self.submit_to(parameter, |place| place.put(gradient));
    }

    /// Like [`GradientReducer::submit`], for gradients that are not row-major. `fill` writes the gradient to
    /// its place, or returns false if it does not fit.
    pub fn submit_with(&self, parameter: usize, fill: impl FnOnce(ValuesMut<'_>) -> bool) {
        self.submit_to(parameter, |place| place.put_with(fill));
    }

    /// Like [`GradientReducer::submit_with`], without memory of its own for a gradient that is added to micro-batches:
    /// `fill` adds it itself.
    pub fn submit_to(&self, parameter: usize, fill: impl FnOnce(Place<'_>) -> bool) {
        if let Some(mut step) = self.open(parameter) {
            step.submit(parameter, fill);
        }
    }

    /// Adds a gradient to this rank's share of the step and sends nothing, because another backward follows.
    /// `fill` is as in [`GradientReducer::submit_with`].
    pub fn accumulate(&self, parameter: usize, fill: impl FnOnce(ValuesMut<'_>) -> bool) {
        self.accumulate_to(parameter, |place| place.put_with(fill));
    }

    /// [`GradientReducer::accumulate`] with a `fill` as in [`GradientReducer::submit_to`].
    pub fn accumulate_to(&self, parameter: usize, fill: impl FnOnce(Place<'_>) -> bool) {
        if let Some(mut step) = self.open(parameter) {
            step.write(parameter, fill);
        }
    }

    /// Tells all ranks that this rank has no right gradient for a parameter, because of `kind`: the step ends with
    /// [`Gradients`](crate::ErrorKind::Gradients) on every rank.
    pub fn fail(&self, parameter: usize, kind: FaultKind) {
        if let Some(mut step) = self.open(parameter) {
            step.faults.push((parameter, kind));
        }
    }

    /// Tells all ranks that the program of this rank has failed in the present step, unless they hear of another fault:
    /// the step ends with [`Gradients`](crate::ErrorKind::Gradients) on every rank.
    pub fn fail_step(&self) {
        if let Some(mut step) = self.open(0)
            && step.faults.is_empty()
        {
            step.faults.push((0, FaultKind::Program));
        }
    }

    /// Whether gradients of this step were submitted or accumulated.
    pub fn has_gradients(&self) -> bool {
        self.lock().has_gradients()
    }

    /// The parameters whose gradient was not submitted yet in this step, by index.
    pub fn missing(&self) -> Vec<usize> {
        self.lock().missing()
    }

    /// Ends the step: launches the remaining buckets, waits for the averages and lends them out.
    ///
    /// # Errors
    ///
    /// [`Gradients`](crate::ErrorKind::Gradients) when a rank had a fault; the reducer can go on. Otherwise the first error of a
    /// collective; the reducer has failed, and every later call returns that error.
    pub fn finish(&self) -> Result<Averaged<'_>> {
        self.end_step(true, |_| ()).map(|((averaged, _), ())| averaged)
    }

    /// Takes part in a step without gradients of its own: for a rank that has no data left while other ranks
    /// have. Returns the averages over *all* ranks, with zeros for ranks that only shadow, unless
    /// [`Divisor::ActiveRanks`](super::Divisor) was chosen. Returns `None` once no rank has data.
    ///
    /// A rank that still holds gradients (of micro-batches whose step it did not end) has data in this step: they are
    /// averaged as [`GradientReducer::finish`] would, and the rank counts as active.
    ///
    /// # Errors
    ///
    /// As for [`GradientReducer::finish`].
    pub fn shadow(&self) -> Result<Option<Averaged<'_>>> {
        if self.options.shards.is_some() {
            let problem = "a step of shards has data for every rank: end it on all ranks alike";
            return Err(Error::argument("GradientReducer::shadow", problem));
        }
        let ended = self.end_step(false, |_| ());
        ended.map(|((averaged, is_active), ())| is_active.then_some(averaged))
    }

    /// The averages, and whether any rank had data of its own. `beside` begins more calls once all buckets are under way.
    fn end_step<T>(
        &self,
        has_data: bool,
        beside: impl FnOnce(&Step) -> T,
    ) -> Result<((Averaged<'_>, bool), T)> {
        let mut step = self.lock();
        if let Some(error) = &step.failed {
            return Err(error.clone());
        }
        let is_active = has_data || step.has_gradients();
        step.stats.steps += 1;
        step.launch_rest(self.options.unused_parameters, is_active);
        let beside = beside(&step);
        match self.reduce(&mut step) {
            Ok(Reduced::Averages { is_active, better }) => {
                step.averaged += u64::from(is_active);
                let (plan, buckets) = (step.plan.clone(), step.lend());
                let averaged = Averaged { _reducer: PhantomData, plan, buckets };
                step.next(better);
                Ok(((averaged, is_active), beside))
            }
            Ok(Reduced::Faults(faults)) => {
                step.next(None);
                Err(failure::gradients(step.stats.steps, faults))
            }
            Err(error) => Err(step.failed.insert(error).clone()),
        }
    }

    /// Which rank owns which parameter; `None` unless the options say [`sharded`](DdpOptions::sharded).
    pub fn owners(&self) -> Option<&Owners> {
        self.owners.as_deref()
    }

    /// Brings the new values of all parameters from their owners to all ranks, after a step of
    /// [sharded](GradientReducer#sharded) training.
    ///
    /// `read` writes the value of a parameter that this rank owns to its place, or returns false if it cannot. Then
    /// `take` gets the values of the other parameters. All buckets travel at once, in the memory of their gradients. Use
    /// what `take` got only if this returns no error. In a world of one rank nothing is called.
    ///
    /// # Errors
    ///
    /// [`Gradients`](crate::ErrorKind::Gradients) on every rank when `read` returned false on some rank: it names parameter and rank.
    /// [`Argument`](crate::ErrorKind::Argument) if parameters have no owners. Otherwise as for [`GradientReducer::finish`].
    pub fn gather(
        &self,
        read: impl FnMut(usize, ValuesMut<'_>) -> bool,
        take: impl FnMut(usize, Values<'_>),
    ) -> Result<()> {
        if self.owners.is_none() {
            let problem = "parameters have owners only with `DdpOptions::sharded`".to_owned();
            return Err(Error::argument("GradientReducer::gather", problem));
        }
        let mut step = self.lock();
        if let Some(error) = &step.failed {
            return Err(error.clone());
        }
        let mut faults = Vec::new();
        let faults = match step.gather(read, take, &mut faults) {
            Ok(false) => return step.failed.clone().map_or(Ok(()), Err),
            Ok(true) => self.exchange_faults(&faults, &step.group),
            Err(error) => Err(error),
        };
        match faults {
            Ok(faults) => Err(failure::gradients(step.stats.steps, faults)),
            Err(error) => Err(step.failed.insert(error).clone()),
        }
    }

    /// Whether the ranks are to [compare](GradientReducer::check) the values of their parameters before this step:
    /// after the first step that gave averages, and then as often as [`DdpOptions::check_every`] says. Adapters ask where
    /// a step begins, because only there the work of the optimizer can be seen. The answer is the same on all ranks.
    pub fn is_check_due(&self) -> bool {
        let is_open = {
            let step = self.lock();
            step.averaged != step.checked
        };
        is_open && self.is_check_step()
    }

    /// Whether the step that was averaged last is one after which ranks compare what must be equal. The answer is the
    /// same on all ranks.
    pub fn is_check_step(&self) -> bool {
        let every = self.options.check_every;
        let step = self.lock();
        let averaged = step.averaged;
        let is_time = averaged == 1 || every > 0 && averaged > 0 && averaged.is_multiple_of(every);
        step.group.world_size() > 1 && is_time
    }

    /// Compares the values of all parameters with those of the other ranks, which must all call this. `digests` has the
    /// [digest](Values::digest) of each parameter. It takes one gather of one number.
    ///
    /// # Errors
    ///
    /// [`ParametersDiffer`](crate::ErrorKind::ParametersDiffer), the same on every rank, names the first parameter that differs, and the ranks. What
    /// was accumulated for the step is dropped, as after any step that fails.
    /// [`Argument`](crate::ErrorKind::Argument) if there are not as many digests as parameters. Also the errors of the collectives.
    pub fn check(&self, digests: &[u64]) -> Result<()> {
        if digests.len() != self.parameters.len() {
            let problem =
                format!("{} digests of {} parameters", digests.len(), self.parameters.len());
            return Err(Error::argument("GradientReducer::check", problem));
        }
        let (step, group) = {
            let mut step = self.lock();
            step.checked = step.averaged;
            (step.averaged, step.group.clone())
        };
        let Some(difference) = check::compare(&group, digests)? else { return Ok(()) };
        self.lock().give_up();
        let check::Difference { first, ranks, reference, count } = difference;
        let parameter = self.parameters[first].name.clone();
        Err(failure::parameters_differ(step, &parameter, &ranks, reference, count))
    }

    /// The lowest rank that had data of its own in the last step: the same one on all ranks. If no rank has data any
    /// more, it is that of the last step in which some rank had; before the first step, rank 0.
    ///
    /// What ranks update from their own data (running statistics) is newest there.
    pub fn lowest_active_rank(&self) -> usize {
        self.lock().lowest_active
    }

    /// How much was communicated so far, and how long `finish` had to wait for it.
    pub fn stats(&self) -> ReducerStats {
        self.lock().stats
    }

    /// When the buckets of the last finished step were reduced. Empty before the first step ends.
    pub fn timeline(&self) -> Timeline {
        self.lock().timeline.clone()
    }

    /// The buckets of the present step in launch order: the parameters of each, by index.
    pub fn buckets(&self) -> Vec<Vec<usize>> {
        self.lock().plan.buckets.iter().map(|bucket| bucket.parameters.clone()).collect()
    }

    /// Waits for the buckets, and makes the other calls of the group in a step, in the same order on every rank.
    fn reduce(&self, step: &mut Step) -> Result<Reduced> {
        let marks = step.wait(self.options.divisor)?;
        if marks.has_fault {
            return self.exchange_faults(&step.faults, &step.group).map(Reduced::Faults);
        }
        let better = match step.is_planned {
            true => None,
            false => {
                let Self { parameters, options, owners, .. } = self;
                let (order, source, group) = (&step.order, step.lowest_active, &step.group);
                Some(Plan::agree(parameters, order, source, options, owners.as_ref(), group)?)
            }
        };
        step.is_planned = true;
        if step.faults.is_empty() {
            let is_active = marks.active.count > 0;
            step.stats.steps -= u64::from(!is_active); // all have ended; it was none
            return Ok(Reduced::Averages { is_active, better });
        }
        // The fault came after the last bucket was launched, so the peers do not know of it. The ranks are no
        // longer in step.
        let fault = |&(parameter, kind): &(usize, FaultKind)| {
            let name = self.parameters[parameter].name.clone();
            GradientFault::new(name, kind, vec![step.group.rank()])
        };
        let faults = step.faults.iter().map(fault).collect();
        Err(failure::gradients(step.stats.steps, faults))
    }

    /// Exchanges the faults of all ranks: one status byte for each parameter and rank. All ranks call this,
    /// because all know that some rank has a fault.
    fn exchange_faults(
        &self,
        mine: &[(usize, FaultKind)],
        group: &ProcessGroup,
    ) -> Result<Vec<GradientFault>> {
        let count = self.parameters.len();
        let mut status = vec![0_u8; count];
        for &(parameter, kind) in mine {
            status[parameter] = kind as u8;
        }
        let mut all = vec![0_u8; count * group.world_size()];
        group.all_gather(&status, &mut all)?;

        let mut faults: Vec<GradientFault> = Vec::new();
        for (parameter, spec) in self.parameters.iter().enumerate() {
            let first = faults.len();
            for (rank, status) in all.chunks_exact(count).enumerate() {
                let Some(kind) = FaultKind::from_status(status[parameter]) else { continue };
                match faults[first..].iter_mut().find(|fault| fault.kind == kind) {
                    Some(fault) => fault.ranks.push(rank),
                    None if kind == FaultKind::Program => {
                        faults.push(GradientFault::new("", kind, vec![rank]));
                    }
                    None => faults.push(GradientFault::new(spec.name.clone(), kind, vec![rank])),
                }
            }
        }
        Ok(faults)
    }

    /// The step, unless the reducer has failed or the parameter does not exist.
    fn open(&self, parameter: usize) -> Option<MutexGuard<'_, Step>> {
        let mut step = self.lock();
        let count = self.parameters.len();
        if parameter >= count {
            let problem = format!("there are {count} parameters, no {parameter}");
            let error = Error::argument("submit a gradient", problem);
            step.failed.get_or_insert(error);
        }
        step.failed.is_none().then_some(step)
    }

    fn lock(&self) -> MutexGuard<'_, Step> {
        // No code panics while it holds the lock. If some did, the step would be wrong, but the memory is
        // sound.
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How a step has ended: alike on all ranks.
enum Reduced {
    Averages {
        /// Whether some rank had data.
        is_active: bool,
        /// The plan for later steps, if this was the first step.
        better: Option<Plan>,
    },
    Faults(Vec<GradientFault>),
}

/// The averaged gradients of one step. They give their memory back when they are dropped.
///
/// ```
/// # use drumline::{DType, ProcessGroup, ddp::{DdpOptions, GradientReducer, ParameterSpec}};
/// # let group = ProcessGroup::alone();
/// # let parameters = vec![
/// #     ParameterSpec::new("weight", [2], DType::F32),
/// #     ParameterSpec::new("bias", [1], DType::F32),
/// # ];
/// # let reducer = GradientReducer::new(parameters, &DdpOptions::default(), &group)?;
/// use drumline::ddp::Averaged;
///
/// reducer.submit(0, [1.0_f32, 2.0][..].into());
/// reducer.submit(1, [3.0_f32][..].into());
/// let averaged: Averaged<'_> = reducer.finish()?;
/// let all = (0..2).filter_map(|parameter| averaged.get::<f32>(parameter)).flatten();
/// assert_eq!(all.map(|it| it * it).sum::<f32>(), 14.0); // the norm, squared
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Debug)]
pub struct Averaged<'a> {
    /// An average that is held while later steps run costs memory. So it is borrowed; [`Averaged::share`] says otherwise.
    _reducer: PhantomData<&'a GradientReducer>,
    plan: Arc<Plan>,
    buckets: Vec<Option<Arc<Lent>>>,
}

impl Averaged<'_> {
    /// The average of a parameter's gradient. `None` if no rank has used the parameter
    /// ([`UnusedParameters::Ignore`](super::UnusedParameters)), if it belongs to another rank
    /// ([`DdpOptions::sharded`]), or if it does not exist.
    pub fn values(&self, parameter: usize) -> Option<Values<'_>> {
        let slot = self.plan.own_slot(parameter)?;
        let memory = self.buckets[slot.bucket].as_ref()?.memory()?;
        memory.is_marked(slot.mark).then(|| memory.slice(slot.range))
    }

    /// The average of a parameter's gradient, if its elements are `T`.
    pub fn get<T: Element>(&self, parameter: usize) -> Option<&[T]> {
        self.values(parameter)?.as_slice()
    }

    /// The average of a parameter's gradient as an owner of its memory. `None` as for [`Averaged::values`].
    pub fn share(&self, parameter: usize) -> Option<SharedGradient> {
        self.values(parameter)?;
        let slot = self.plan.own_slot(parameter)?;
        let bucket = self.buckets[slot.bucket].clone()?;
        Some(SharedGradient::new(bucket, slot.range))
    }
}
