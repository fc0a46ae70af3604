use std::{
    fmt, io,
    ops::Range,
    sync::{
        Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use super::{
    AlreadyReady, Bucket, DdpOptions, FaultKind, GradientFault, ParameterSpec, Reducer, Unfinished,
    plan_buckets,
};
use crate::{DType, Element, Error, ProcessGroup, ReduceOp, Result};

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
            _ => Some(Worker::start(group.clone())?),
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
        let Some(slot) = self.slots.get(parameter) else {
            let problem = format!("there are {} parameters, no {parameter}", self.slots.len());
            let error = Error::InvalidArgument { operation: "submit a gradient", problem };
            self.lock().failed.get_or_insert(error);
            return;
        };
        let mut step = self.lock();
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
        self.lock().fault(parameter, FaultKind::WrongType);
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
                    _ => faults.push(GradientFault::new(&spec.name, kind, vec![rank])),
                }
            }
        }
        Ok(faults)
    }

    fn own_faults(&self, mine: &[(usize, FaultKind)]) -> Vec<GradientFault> {
        let fault = |&(parameter, kind): &(usize, FaultKind)| {
            GradientFault::new(&self.parameters[parameter].name, kind, vec![self.group.rank()])
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

/// Borrowed elements of a gradient, row-major.
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Values<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Double precision.
    F64(&'a [f64]),
}

impl<'a> Values<'a> {
    /// The elements, if they are `T`.
    pub fn as_slice<T: Element>(self) -> Option<&'a [T]> {
        match self {
            Values::F32(values) if T::DTYPE == DType::F32 => Some(bytemuck::cast_slice(values)),
            Values::F64(values) if T::DTYPE == DType::F64 => Some(bytemuck::cast_slice(values)),
            _ => None,
        }
    }

    fn fits(self, spec: &ParameterSpec) -> bool {
        let (dtype, elements) = match self {
            Values::F32(values) => (DType::F32, values.len()),
            Values::F64(values) => (DType::F64, values.len()),
        };
        dtype == spec.dtype && elements == spec.elements()
    }
}

impl<'a> From<&'a [f32]> for Values<'a> {
    fn from(values: &'a [f32]) -> Self {
        Values::F32(values)
    }
}

impl<'a> From<&'a [f64]> for Values<'a> {
    fn from(values: &'a [f64]) -> Self {
        Values::F64(values)
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

/// The elements of a bucket, and one more: the fault flag.
enum Memory {
    F32(Vec<f32>),
    F64(Vec<f64>),
}

impl Memory {
    fn new(bucket: &Bucket, parameters: &[ParameterSpec]) -> Self {
        let elements: usize = bucket.parameters.iter().map(|&p| parameters[p].elements()).sum();
        match bucket.dtype {
            DType::F64 => Memory::F64(vec![0.0; elements + 1]),
            _ => Memory::F32(vec![0.0; elements + 1]),
        }
    }

    fn write(&mut self, range: Range<usize>, values: Values<'_>) {
        match (self, values) {
            (Memory::F32(memory), Values::F32(values)) => memory[range].copy_from_slice(values),
            (Memory::F64(memory), Values::F64(values)) => memory[range].copy_from_slice(values),
            _ => debug_assert!(false, "`fits` compared the dtypes"),
        }
    }

    fn zero(&mut self, range: Range<usize>) {
        match self {
            Memory::F32(memory) => memory[range].fill(0.0),
            Memory::F64(memory) => memory[range].fill(0.0),
        }
    }

    fn read(&self, range: Range<usize>) -> Values<'_> {
        match self {
            Memory::F32(memory) => Values::F32(&memory[range]),
            Memory::F64(memory) => Values::F64(&memory[range]),
        }
    }

    fn set_flag(&mut self, fault: bool) {
        let last = self.elements();
        match self {
            Memory::F32(memory) => memory[last] = f32::from(u8::from(fault)),
            Memory::F64(memory) => memory[last] = f64::from(u8::from(fault)),
        }
    }

    /// Before the all-reduce: this rank has faults. After it: some rank has.
    fn flag(&self) -> bool {
        let last = self.elements();
        match self {
            Memory::F32(memory) => memory[last] != 0.0,
            Memory::F64(memory) => memory[last] != 0.0,
        }
    }

    fn all_reduce(&mut self, group: &ProcessGroup) -> Result<()> {
        match self {
            Memory::F32(memory) => group.all_reduce(memory, ReduceOp::Avg),
            Memory::F64(memory) => group.all_reduce(memory, ReduceOp::Avg),
        }
    }

    /// Without the flag.
    fn elements(&self) -> usize {
        match self {
            Memory::F32(memory) => memory.len() - 1,
            Memory::F64(memory) => memory.len() - 1,
        }
    }

    fn gradient_bytes(&self) -> usize {
        match self {
            Memory::F32(_) => self.elements() * DType::F32.size(),
            Memory::F64(_) => self.elements() * DType::F64.size(),
        }
    }
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Memory({} bytes)", self.gradient_bytes())
    }
}

/// The communication thread: takes buckets by value, one after the other, and gives them back.
///
/// It is not joined when dropped: a collective that waits for a dead peer ends by its own
/// deadline, and nobody should wait for that. The closed channel ends the thread.
#[derive(Debug)]
struct Worker {
    jobs: Sender<(usize, Memory)>,
    done: Receiver<Done>,
    in_flight: usize,
}

#[derive(Debug)]
struct Done {
    bucket: usize,
    memory: Memory,
    result: Result<()>,
    took: Duration,
}

impl Worker {
    fn start(group: ProcessGroup) -> Result<Self> {
        let (jobs, next_job) = channel::<(usize, Memory)>();
        let (send_done, done) = channel();
        let work = move || {
            while let Ok((bucket, mut memory)) = next_job.recv() {
                let start = Instant::now();
                let result = memory.all_reduce(&group);
                let done = Done { bucket, memory, result, took: start.elapsed() };
                if send_done.send(done).is_err() {
                    break;
                }
            }
        };
        thread::Builder::new()
            .name("drumline-ddp".to_owned())
            .spawn(work)
            .map_err(|error| Error::io("start the communication thread", error))?;
        Ok(Self { jobs, done, in_flight: 0 })
    }

    fn start_all_reduce(&mut self, bucket: usize, memory: Memory) {
        // If the thread has gone, `wait` finds out: what is in flight never comes back.
        let _ = self.jobs.send((bucket, memory));
        self.in_flight += 1;
    }

    fn wait(&mut self) -> Result<Done> {
        let done = self.done.recv().map_err(|_| {
            let gone = io::Error::other("it ended early; its panic message stands above");
            Error::io("wait for the communication thread", gone)
        })?;
        self.in_flight -= 1;
        Ok(done)
    }
}
