mod memory;
mod worker;

use std::{
    ops::Range,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use self::{memory::Memory, worker::Worker};
use super::{
    AlreadyReady, Bucket, DdpOptions, FaultKind, GradientFault, ParameterSpec, Reducer, Unfinished,
    plan_buckets,
};
use crate::{DType, Element, Error, ProcessGroup, Result};

pub use self::memory::Values;

/// Averages gradients over a group while backward still computes the others.
///
/// [`GradientReducer::submit`] copies a gradient to its place in a bucket. When the last member
/// arrives, the bucket's memory moves to the communication thread, which all-reduces it and moves
/// it back. Nothing is shared between the two, so a hook never waits for the network.
/// [`GradientReducer::finish`] ends the step and lends the averages out.
///
/// The order of every sum is fixed by the group, element by element, so the averages have the
/// same bits whatever the bucket size and timing.
///
/// # When a rank has a fault
///
/// Every bucket carries one element more: 1 when its rank has seen a fault (a parameter without
/// gradient, say), else 0. A rank with a fault still takes part in all collectives, zeros in place
/// of what is missing. So no peer waits in vain, all ranks see a sum above zero in the same step,
/// exchange what happened, and every rank returns the same [`Error::Gradients`]. The next step
/// may go on as if nothing had happened.
#[derive(Debug)]
pub struct GradientReducer {
    parameters: Vec<ParameterSpec>,
    buckets: Vec<Bucket>,
    /// Where each parameter lies.
    slots: Vec<Slot>,
    group: ProcessGroup,
    step: Mutex<Step>,
}

impl GradientReducer {
    /// A reducer for the gradients of `parameters`, which must be equal on all ranks
    /// ([`verify_model`](super::verify_model) checks that). Expects them in reverse order.
    ///
    /// # Errors
    ///
    /// There are no parameters, one is neither f32 nor f64, or no thread can be started.
    pub fn new(
        parameters: Vec<ParameterSpec>,
        options: &DdpOptions,
        group: &ProcessGroup,
    ) -> Result<Self> {
        check_trainable(&parameters)?;
        let buckets = plan_buckets(&parameters, (0..parameters.len()).rev(), options)?;
        let slots = Slot::assign(&parameters, &buckets);
        let memory = buckets.iter().map(|_| None).collect();
        let worker = match group.world_size() {
            1 => None,
            _ => Some(Worker::start(group)?),
        };
        let step = Step {
            reducer: Reducer::new(&buckets),
            memory,
            faults: Vec::new(),
            worker,
            failed: None,
            stats: ReducerStats::default(),
        };
        Ok(Self { parameters, buckets, slots, group: group.clone(), step: Mutex::new(step) })
    }

    /// Hands in the final gradient of a parameter in this step, row-major.
    ///
    /// For gradient hooks: copies the values, never waits for a peer, never panics. Whatever is
    /// wrong comes out of [`GradientReducer::finish`].
    pub fn submit(&self, parameter: usize, gradient: Values<'_>) {
        let Some((slot, mut step)) = self.open(parameter) else { return };
        if !gradient.fits(&self.parameters[parameter]) {
            return step.fault(parameter, FaultKind::WrongType);
        }
        match step.reducer.ready(parameter) {
            Err(AlreadyReady) => step.fault(parameter, FaultKind::Twice),
            Ok(full) => {
                self.memory(&mut step, slot.bucket).write(slot.range.clone(), gradient);
                step.launch(full.clone());
                step.stats.buckets_launched_early += full.len() as u64;
            }
        }
    }

    /// Reports that a gradient exists but cannot be handed in: its dtype or length is wrong.
    pub fn reject(&self, parameter: usize) {
        if let Some((_, mut step)) = self.open(parameter) {
            step.fault(parameter, FaultKind::WrongType);
        }
    }

    /// The parameters whose gradient was not handed in yet in this step, by index.
    pub fn missing(&self) -> Vec<usize> {
        self.lock().reducer.missing()
    }

    /// Ends the step: launches what is left, waits for the averages and lends them out.
    ///
    /// # Errors
    ///
    /// [`Error::Gradients`] when a rank had a fault; the reducer can go on. Else the first error
    /// of a collective; the reducer stays failed and every later call repeats it.
    pub fn finish(&self) -> Result<Averaged<'_>> {
        let mut step = self.lock();
        let finished = self.finish_step(&mut step);
        step.faults.clear();
        match finished {
            Ok(faults) if faults.is_empty() => {
                let memory = step.memory.iter_mut().map(Option::take).collect();
                Ok(Averaged { reducer: self, memory })
            }
            Ok(faults) => Err(Error::Gradients { step: step.stats.steps, faults }),
            Err(error) => Err(step.failed.get_or_insert(error).clone()),
        }
    }

    /// How much was communicated so far, and how much of that backward did not hide.
    pub fn stats(&self) -> ReducerStats {
        self.lock().stats
    }

    /// The buckets, in launch order.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    fn finish_step(&self, step: &mut Step) -> Result<Vec<GradientFault>> {
        if let Some(error) = &step.failed {
            return Err(error.clone());
        }
        step.stats.steps += 1;
        let Unfinished { missing, buckets } = step.reducer.finish();
        for parameter in missing {
            let Slot { bucket, range } = &self.slots[parameter];
            self.memory(step, *bucket).zero(range.clone());
            if !step.faults.iter().any(|(faulty, _)| *faulty == parameter) {
                step.fault(parameter, FaultKind::Unused);
            }
        }
        step.launch(buckets);
        let a_rank_has_faults = step.wait()?;
        match (a_rank_has_faults, step.faults.is_empty()) {
            (true, _) => self.exchange_faults(&step.faults),
            (false, true) => Ok(Vec::new()),
            // Seen after the last bucket had left: the peers do not know, so the ranks are no
            // longer in step.
            (false, false) => {
                let faults = self.own_faults(&step.faults);
                Err(Error::Gradients { step: step.stats.steps, faults })
            }
        }
    }

    /// Some rank has faults, and all ranks know: one status byte per parameter and rank.
    fn exchange_faults(&self, mine: &[(usize, FaultKind)]) -> Result<Vec<GradientFault>> {
        let count = self.parameters.len();
        let mut status = vec![0_u8; count];
        for &(parameter, kind) in mine {
            status[parameter] = kind as u8;
        }
        let mut all = vec![0_u8; count * self.group.world_size()];
        self.group.all_gather(&status, &mut all)?;

        let mut faults: Vec<GradientFault> = Vec::new();
        for (parameter, spec) in self.parameters.iter().enumerate() {
            for (rank, status) in all.chunks_exact(count).enumerate() {
                let Some(kind) = FaultKind::from_status(status[parameter]) else { continue };
                match faults.last_mut() {
                    Some(last) if last.parameter == spec.name && last.kind == kind => {
                        last.ranks.push(rank);
                    }
                    _ => faults.push(GradientFault::new(spec.name.clone(), kind, vec![rank])),
                }
            }
        }
        Ok(faults)
    }

    /// The place of a parameter and the step, unless the reducer has failed.
    fn open(&self, parameter: usize) -> Option<(&Slot, MutexGuard<'_, Step>)> {
        let mut step = self.lock();
        let slot = self.slots.get(parameter);
        if slot.is_none() {
            let problem = format!("there are {} parameters, no {parameter}", self.slots.len());
            let error = Error::InvalidArgument { operation: "submit a gradient", problem };
            step.failed.get_or_insert(error);
        }
        slot.filter(|_| step.failed.is_none()).map(|slot| (slot, step))
    }

    fn own_faults(&self, mine: &[(usize, FaultKind)]) -> Vec<GradientFault> {
        let fault = |&(parameter, kind): &(usize, FaultKind)| {
            GradientFault::new(
                self.parameters[parameter].name.clone(),
                kind,
                vec![self.group.rank()],
            )
        };
        mine.iter().map(fault).collect()
    }

    /// The memory of a bucket that was not launched yet. Made anew at first, and while the
    /// averages of an earlier step are still in use.
    fn memory<'s>(&self, step: &'s mut Step, bucket: usize) -> &'s mut Memory {
        step.memory[bucket]
            .get_or_insert_with(|| Memory::new(&self.buckets[bucket], &self.parameters))
    }

    fn lock(&self) -> MutexGuard<'_, Step> {
        // Nothing panics while it holds the lock; if something did, the step would be wrong but
        // the memory is sound.
        self.step.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The averaged gradients of one step. Gives the memory back when dropped.
#[derive(Debug)]
pub struct Averaged<'a> {
    reducer: &'a GradientReducer,
    memory: Vec<Option<Memory>>,
}

impl Averaged<'_> {
    /// The average of a parameter's gradient; `None` if there is no such parameter.
    pub fn values(&self, parameter: usize) -> Option<Values<'_>> {
        let slot = self.reducer.slots.get(parameter)?;
        Some(self.memory[slot.bucket].as_ref()?.read(slot.range.clone()))
    }

    /// The average of a parameter's gradient, if its elements are `T`.
    pub fn get<T: Element>(&self, parameter: usize) -> Option<&[T]> {
        self.values(parameter)?.as_slice()
    }
}

impl Drop for Averaged<'_> {
    fn drop(&mut self) {
        let mut step = self.reducer.lock();
        for (place, memory) in step.memory.iter_mut().zip(self.memory.drain(..)) {
            if place.is_none() {
                *place = memory;
            }
        }
    }
}

/// What a [`GradientReducer`] has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReducerStats {
    /// Steps that were finished.
    pub steps: u64,
    /// Buckets that were launched.
    pub buckets_launched: u64,
    /// Buckets that were launched before `finish`: while backward was still going on.
    pub buckets_launched_early: u64,
    /// Bytes of gradients that were averaged.
    pub bytes: u64,
    /// How long the communication thread was in collectives.
    pub communication: Duration,
    /// How long `finish` waited for it: the part that backward did not hide.
    pub exposed: Duration,
}

fn check_trainable(parameters: &[ParameterSpec]) -> Result<()> {
    let problem = match parameters.iter().find(|p| !matches!(p.dtype, DType::F32 | DType::F64)) {
        Some(parameter) => format!("parameter {parameter} cannot be averaged; use f32 or f64"),
        None if parameters.is_empty() => "the model has no parameter to train".to_owned(),
        None => return Ok(()),
    };
    Err(Error::InvalidArgument { operation: "data-parallel training", problem })
}

/// The place of a gradient.
#[derive(Debug)]
struct Slot {
    bucket: usize,
    /// Elements of the bucket.
    range: Range<usize>,
}

impl Slot {
    fn assign(parameters: &[ParameterSpec], buckets: &[Bucket]) -> Vec<Slot> {
        let mut placed: Vec<(usize, Slot)> = Vec::with_capacity(parameters.len());
        for (bucket, Bucket { parameters: members, .. }) in buckets.iter().enumerate() {
            let mut at = 0;
            for &member in members {
                let range = at..at + parameters[member].elements();
                at = range.end;
                placed.push((member, Slot { bucket, range }));
            }
        }
        placed.sort_by_key(|(parameter, _)| *parameter);
        placed.into_iter().map(|(_, slot)| slot).collect()
    }
}

/// What changes while the gradients of a step come in.
#[derive(Debug)]
struct Step {
    reducer: Reducer,
    /// The memory of each bucket; `None` before its first use, and while it is with the
    /// communication thread or lent out.
    memory: Vec<Option<Memory>>,
    faults: Vec<(usize, FaultKind)>,
    /// `None` in a world of one.
    worker: Option<Worker>,
    /// The error that ended this reducer.
    failed: Option<Error>,
    stats: ReducerStats,
}

impl Step {
    fn fault(&mut self, parameter: usize, kind: FaultKind) {
        self.faults.push((parameter, kind));
    }

    fn launch(&mut self, buckets: Range<usize>) {
        for bucket in buckets {
            self.stats.buckets_launched += 1;
            let Some(mut memory) = self.memory[bucket].take() else { continue };
            memory.set_flag(!self.faults.is_empty());
            self.stats.bytes += memory.gradient_bytes() as u64;
            match &mut self.worker {
                Some(worker) => worker.start_all_reduce(bucket, memory),
                None => self.memory[bucket] = Some(memory),
            }
        }
    }

    /// Waits until all buckets are back. Says whether any rank has faults.
    fn wait(&mut self) -> Result<bool> {
        if let Some(worker) = &mut self.worker {
            let start = Instant::now();
            while worker.in_flight > 0 {
                let done = worker.wait()?;
                self.stats.communication += done.took;
                done.result?;
                self.memory[done.bucket] = Some(done.memory);
            }
            self.stats.exposed += start.elapsed();
        }
        Ok(self.memory.iter().flatten().any(Memory::flag))
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::ReduceOp;

    fn specs(elements: &[usize], dtype: DType) -> Vec<ParameterSpec> {
        let name = |i| format!("p{i}");
        elements.iter().enumerate().map(|(i, &n)| ParameterSpec::new(name(i), [n], dtype)).collect()
    }

    /// Runs `rank` on a thread per rank and returns what each gave.
    fn on_ranks<T: Send>(world_size: usize, rank: impl Fn(ProcessGroup) -> T + Sync) -> Vec<T> {
        let groups = ProcessGroup::local_world(world_size).unwrap();
        thread::scope(|scope| {
            let rank = &rank;
            let ranks: Vec<_> =
                groups.into_iter().map(|group| scope.spawn(move || rank(group))).collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    /// A gradient with rounding errors, different on each rank and in each step.
    fn gradient(rank: usize, step: usize, parameter: usize, elements: usize) -> Vec<f32> {
        let seed = (rank * 7 + step * 3 + parameter * 11 + 1) as f32;
        (0..elements).map(|i| (seed * (i as f32 + 0.7)).sin() * 1e3).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        /// Whatever the buckets and the order of arrival (it differs between ranks): the same
        /// bits on all ranks as one all-reduce per parameter gives.
        #[test]
        fn averages_have_the_bits_of_an_all_reduce_per_parameter(
            elements in prop::collection::vec(0usize..50, 1..8),
            world_size in 1usize..4, first in 0usize..300, rest in 0usize..300, turn in 0usize..8,
        ) {
            let options = DdpOptions::default().first_bucket_bytes(first).bucket_bytes(rest);
            let specs = specs(&elements, DType::F32);
            let results = on_ranks(world_size, |group| {
                let reducer = GradientReducer::new(specs.clone(), &options, &group).unwrap();
                for step in 0..3 {
                    let gradient = |p: usize| gradient(group.rank(), step, p, elements[p]);
                    for i in 0..elements.len() {
                        let parameter = (i + turn * group.rank()) % elements.len();
                        reducer.submit(parameter, gradient(parameter).as_slice().into());
                    }
                    let averaged = reducer.finish().unwrap();
                    for parameter in 0..elements.len() {
                        let mut wanted = gradient(parameter);
                        group.all_reduce(&mut wanted, ReduceOp::Avg).unwrap();
                        assert_eq!(averaged.get::<f32>(parameter), Some(&wanted[..]));
                    }
                }
                let stats = reducer.stats();
                assert_eq!(stats.steps, 3);
                assert_eq!(stats.buckets_launched, 3 * reducer.buckets().len() as u64);
                assert_eq!(stats.buckets_launched_early, stats.buckets_launched);
                assert_eq!(stats.bytes, 3 * 4 * elements.iter().sum::<usize>() as u64);
            });
            prop_assert_eq!(results.len(), world_size);
        }
    }

    #[test]
    fn both_dtypes_in_one_model() {
        let parameters = vec![
            ParameterSpec::new("a", [1], DType::F64),
            ParameterSpec::new("b", [2], DType::F32),
        ];
        on_ranks(2, |group| {
            let reducer =
                GradientReducer::new(parameters.clone(), &DdpOptions::default(), &group).unwrap();
            let rank = group.rank() as f32;
            reducer.submit(0, [f64::from(rank) + 2.0_f64.powi(-40)][..].into());
            reducer.submit(1, [rank, 2.0 * rank][..].into());
            let averaged = reducer.finish().unwrap();
            assert_eq!(averaged.get(0), Some(&[0.5 + 2.0_f64.powi(-40)][..]));
            assert_eq!(averaged.get(1), Some(&[0.5_f32, 1.0][..]));
            assert_eq!(averaged.get::<f32>(0), None, "it is f64");
            assert_eq!(averaged.values(2), None);
        });
    }

    /// Faults of one step: (rank, parameter, what it does instead of handing in a gradient).
    fn finish_with_faults(world_size: usize, faults: &[(usize, usize, FaultKind)]) -> Vec<Error> {
        on_ranks(world_size, |group| {
            let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
            let reducer =
                GradientReducer::new(specs(&[2, 2, 2], DType::F32), &options, &group).unwrap();
            let good = [1.0_f32, 1.0];
            for parameter in [2, 1, 0] {
                let fault = faults.iter().find(|f| (f.0, f.1) == (group.rank(), parameter));
                match fault.map(|fault| fault.2) {
                    None => reducer.submit(parameter, good[..].into()),
                    Some(FaultKind::Unused) => {}
                    Some(FaultKind::WrongType) => {
                        reducer.submit(parameter, [1.0_f64; 2][..].into())
                    }
                    Some(FaultKind::Twice) => {
                        reducer.submit(parameter, good[..].into());
                        reducer.submit(parameter, good[..].into());
                    }
                }
            }
            let error = reducer.finish().map(drop).unwrap_err();

            // The ranks are still in step: the next one works.
            (0..3).for_each(|parameter| reducer.submit(parameter, good[..].into()));
            assert_eq!(reducer.finish().unwrap().get(1), Some(&good[..]));
            error
        })
    }

    #[test]
    fn a_fault_on_one_rank_is_named_on_every_rank_and_the_next_step_works() {
        for (kind, wanted) in [
            (FaultKind::Unused, "got no gradient"),
            (FaultKind::WrongType, "got a gradient of another dtype or length"),
            (FaultKind::Twice, "got two gradients in one step"),
        ] {
            for error in finish_with_faults(3, &[(1, 1, kind)]) {
                let text = error.to_string();
                assert!(text.contains(&format!("parameter `p1` {wanted} on rank 1;")), "{text}");
                let Error::Gradients { step: 1, faults } = error else { panic!("{text}") };
                assert_eq!(faults, [GradientFault::new("p1", kind, vec![1])]);
            }
        }
    }

    #[test]
    fn faults_of_several_ranks_come_together() {
        let faults =
            [(0, 0, FaultKind::Unused), (1, 0, FaultKind::Unused), (1, 2, FaultKind::Unused)];
        for error in finish_with_faults(2, &faults) {
            let text = error.to_string();
            assert!(text.contains("`p0` got no gradient on ranks 0, 1; "), "{text}");
            assert!(text.contains("`p2` got no gradient on rank 1; "), "{text}");
        }
        for error in finish_with_faults(1, &[(0, 2, FaultKind::Unused)]) {
            assert!(error.to_string().contains("`p2` got no gradient on rank 0; "), "{error}");
        }
    }

    #[test]
    fn a_second_gradient_after_all_have_left_is_an_error_here() {
        on_ranks(2, |group| {
            let reducer =
                GradientReducer::new(specs(&[1], DType::F32), &DdpOptions::default(), &group)
                    .unwrap();
            reducer.submit(0, [1.0_f32][..].into());
            if group.rank() == 1 {
                reducer.submit(0, [1.0_f32][..].into());
                let text = reducer.finish().map(drop).unwrap_err().to_string();
                assert!(text.contains("`p0` got two gradients in one step on rank 1"), "{text}");
                assert_eq!(reducer.finish().map(drop).unwrap_err().to_string(), text);
            } else {
                assert!(reducer.finish().is_ok());
            }
        });
    }

    #[test]
    fn the_error_of_a_collective_comes_out_of_every_later_finish() {
        on_ranks(2, |group| {
            if group.rank() == 1 {
                return; // gone: its group is dropped
            }
            let reducer =
                GradientReducer::new(specs(&[1], DType::F32), &DdpOptions::default(), &group)
                    .unwrap();
            reducer.submit(0, [1.0_f32][..].into());
            let error = reducer.finish().map(drop).unwrap_err().to_string();
            assert!(error.contains('1'), "names the rank that has gone: {error}");
            reducer.submit(0, [1.0_f32][..].into());
            assert_eq!(reducer.finish().map(drop).unwrap_err().to_string(), error);
        });
    }

    #[test]
    fn dropping_a_reducer_with_a_collective_in_flight_does_not_wait() {
        let groups = ProcessGroup::local_world(2).unwrap();
        let reducer =
            GradientReducer::new(specs(&[1], DType::F32), &DdpOptions::default(), &groups[0])
                .unwrap();
        reducer.submit(0, [1.0_f32][..].into());
        drop(reducer); // rank 1 never answers; this test ends all the same
    }

    #[test]
    fn averages_may_outlive_the_next_step() {
        let group = ProcessGroup::alone();
        let reducer =
            GradientReducer::new(specs(&[1], DType::F32), &DdpOptions::default(), &group).unwrap();
        reducer.submit(0, [1.0_f32][..].into());
        let first = reducer.finish().unwrap();
        reducer.submit(0, [2.0_f32][..].into());
        let second = reducer.finish().unwrap();
        assert_eq!((first.get(0), second.get(0)), (Some(&[1.0_f32][..]), Some(&[2.0_f32][..])));
    }

    #[test]
    fn an_unknown_parameter_is_an_error_that_stays() {
        let group = ProcessGroup::alone();
        let reducer =
            GradientReducer::new(specs(&[1], DType::F32), &DdpOptions::default(), &group).unwrap();
        reducer.submit(1, [1.0_f32][..].into());
        reducer.submit(0, [1.0_f32][..].into());
        for _ in 0..2 {
            let error = reducer.finish().map(drop).unwrap_err().to_string();
            assert!(error.contains("there are 1 parameters, no 1"), "{error}");
        }
    }

    #[test]
    fn models_that_cannot_be_trained_are_refused() {
        let group = ProcessGroup::alone();
        for (parameters, wanted) in [
            (vec![], "no parameter to train"),
            (specs(&[3], DType::I64), "parameter `p0` i64[3] cannot be averaged"),
        ] {
            let error =
                GradientReducer::new(parameters, &DdpOptions::default(), &group).unwrap_err();
            assert!(error.to_string().contains(wanted), "{error}");
        }
    }
}
