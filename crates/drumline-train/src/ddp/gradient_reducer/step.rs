//! The state of a step while gradients come in.

use std::{ops::Range, sync::Arc, time::Instant};

use drumline_group::ProcessGroup;

use super::{
    super::{Divisor, FaultKind, Reducer, Unfinished, UnusedParameters},
    activity::{self, Active},
    in_flight::InFlight,
    lent::{Home, Lent},
    memory::Memory,
    plan::Plan,
    timeline::{Clock, ReducerStats, Timeline},
    values::Place,
};
use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct Step {
    group: ProcessGroup,
    pub(super) plan: Arc<Plan>,
    /// Whether the plan was made from the observed order.
    pub(super) is_planned: bool,
    reducer: Reducer,
    /// The memory of each bucket. `None` before its first use, and while the bucket is under way or lent out.
    memory: Vec<Option<Memory>>,
    /// Where memory that was lent out comes back to.
    home: Arc<Home>,
    /// By parameter: whether its place holds gradients of this step, final or accumulated.
    is_used: Vec<bool>,
    /// Whether this rank has data of its own in this step.
    is_active: bool,
    /// The parameters in the order in which their gradients became final.
    pub(super) order: Vec<usize>,
    pub(super) faults: Vec<(usize, FaultKind)>,
    in_flight: InFlight,
    /// The lowest rank with data of its own in the last step in which some rank had any.
    pub(super) lowest_active: usize,
    /// The error that ended this reducer.
    pub(super) failed: Option<Error>,
    pub(super) stats: ReducerStats,
    clock: Clock,
    pub(super) timeline: Timeline,
}

impl Step {
    /// The first step.
    pub(super) fn new(plan: Arc<Plan>, parameters: usize, group: &ProcessGroup) -> Result<Self> {
        Ok(Self {
            group: group.clone(),
            is_planned: false,
            reducer: Reducer::new(&plan.buckets),
            memory: plan.buckets.iter().map(|_| None).collect(),
            home: Home::new(plan.buckets.len()),
            is_used: vec![false; parameters],
            is_active: true,
            order: Vec::with_capacity(parameters),
            faults: Vec::new(),
            in_flight: InFlight::default(),
            lowest_active: 0,
            failed: None,
            stats: ReducerStats::default(),
            clock: clock(1, &plan),
            timeline: Timeline::default(),
            plan,
        })
    }

    /// Backward begins.
    pub(super) fn start_clock(&mut self) {
        self.clock.start();
    }

    /// The gradient that `fill` writes is final. Puts it into its place, or adds it to the gradient there,
    /// and launches the buckets that are full now.
    pub(super) fn submit(&mut self, parameter: usize, fill: impl FnOnce(Place<'_>) -> bool) {
        if !self.write(parameter, fill) {
            return;
        }
        self.order.push(parameter);
        self.clock.gradient(self.plan.slot(parameter).bucket);
        // `write` has checked that the parameter was not ready before.
        if let Ok(full) = self.reducer.ready(parameter) {
            self.stats.buckets_launched_early += full.len() as u64;
            self.launch(full);
        }
    }

    /// Puts the gradient that `fill` writes into its place, or adds it to what was accumulated there. Returns
    /// false, and notes a fault, if that fails.
    pub(super) fn write(&mut self, parameter: usize, fill: impl FnOnce(Place<'_>) -> bool) -> bool {
        if self.reducer.is_ready(parameter) {
            self.faults.push((parameter, FaultKind::Twice));
            return false;
        }
        let slot = self.plan.slot(parameter);
        let (bucket, range) = (slot.bucket, slot.range.clone());
        let holds_sum = self.is_used[parameter];
        let bytes = range.len() * self.plan.buckets[bucket].dtype.size();
        let is_written = fill(Place { values: self.memory(bucket).slice_mut(range), holds_sum });
        match is_written {
            true => {
                self.is_used[parameter] = true;
                self.stats.bytes_copied += bytes as u64;
            }
            false => self.faults.push((parameter, FaultKind::WrongType)),
        }
        is_written
    }

    /// Whether this rank has gradients of this step.
    pub(super) fn has_gradients(&self) -> bool {
        self.is_used.contains(&true)
    }

    pub(super) fn missing(&self) -> Vec<usize> {
        self.reducer.missing()
    }

    /// Backward has ended. Launches the remaining buckets, with zeros for parameters without a gradient.
    pub(super) fn launch_rest(&mut self, policy: UnusedParameters, is_active: bool) {
        self.clock.backward_ended();
        self.is_active = is_active;
        let Unfinished { missing, buckets } = self.reducer.finish();
        // Parameters without a gradient count as last, in the order in which they were expected.
        self.order.extend(missing.iter().rev());
        for parameter in missing {
            if self.is_used[parameter] {
                continue; // accumulated before this backward
            }
            let slot = self.plan.slot(parameter);
            let (bucket, range) = (slot.bucket, slot.range.clone());
            self.memory(bucket).zero(range);
            let is_known = self.faults.iter().any(|(faulty, _)| *faulty == parameter);
            if is_active && policy == UnusedParameters::Error && !is_known {
                self.faults.push((parameter, FaultKind::Unused));
            }
        }
        self.launch(buckets);
    }

    /// Waits until all buckets are back.
    pub(super) fn wait(&mut self, divisor: Divisor) -> Result<Marks> {
        let start = Instant::now();
        while let Some(done) = self.in_flight.wait()? {
            self.stats.communication += done.took;
            self.clock.done(done.bucket, done.at);
            self.memory[done.bucket] = Some(done.memory);
        }
        if self.group.world_size() > 1 {
            self.stats.exposed += start.elapsed();
        }
        let mut marks = Marks::default();
        for (bucket, memory) in self.memory.iter().enumerate() {
            let Some(memory) = memory else { continue };
            marks.has_fault |= memory.is_marked(self.plan.fault_mark(bucket));
            if bucket == 0 {
                let world_size = self.group.world_size();
                marks.active = activity::read(memory, self.plan.active_marks(), world_size);
            }
        }
        self.lowest_active = marks.active.lowest.unwrap_or(self.lowest_active);
        if divisor == Divisor::ActiveRanks {
            self.divide_by_active(marks.active.count);
        }
        Ok(marks)
    }

    /// Makes averages over all ranks those over the ranks with data.
    fn divide_by_active(&mut self, active: usize) {
        let all = self.group.world_size();
        if active == 0 || active == all {
            return;
        }
        for (bucket, memory) in self.memory.iter_mut().enumerate() {
            if let Some(memory) = memory {
                memory.divide_again(0..self.plan.elements(bucket), all, active);
            }
        }
    }

    /// Lends the averages out.
    pub(super) fn lend(&mut self) -> Vec<Option<Arc<Lent>>> {
        let home = &self.home;
        let lend = |(bucket, memory): (usize, &mut Option<Memory>)| {
            memory.take().map(|memory| home.lend(bucket, memory))
        };
        self.memory.iter_mut().enumerate().map(lend).collect()
    }

    /// Ends the step and starts the next one, with the plan `better` if there is one.
    pub(super) fn next(&mut self, better: Option<Plan>) {
        if let Some(better) = better.filter(|better| better.buckets != self.plan.buckets) {
            self.reducer = Reducer::new(&better.buckets);
            self.memory = better.buckets.iter().map(|_| None).collect();
            self.home = Home::new(better.buckets.len());
            self.plan = Arc::new(better);
        }
        self.is_used.fill(false);
        self.is_active = true;
        self.order.clear();
        self.faults.clear();
        let next = clock(self.stats.steps + 1, &self.plan);
        self.timeline = std::mem::replace(&mut self.clock, next).finish();
    }

    /// The memory of a bucket that is not under way. A bucket gets new memory in the first step, and when the
    /// caller still holds the averages of an earlier step.
    fn memory(&mut self, bucket: usize) -> &mut Memory {
        let Self { memory, home, plan, group, failed, .. } = self;
        memory[bucket].get_or_insert_with(|| {
            if let Some(back) = home.take(bucket) {
                return back;
            }
            let (bucket, elements) = (&plan.buckets[bucket], plan.all_elements(bucket));
            Memory::new(bucket, elements, plan.wire, group).unwrap_or_else(|error| {
                failed.get_or_insert(error);
                Memory::stopgap(bucket, elements)
            })
        })
    }

    fn launch(&mut self, buckets: Range<usize>) {
        for bucket in buckets {
            self.stats.buckets_launched += 1;
            self.stats.bytes += self.plan.gradient_bytes(bucket) as u64;
            self.clock.launched(bucket);
            let plan = self.plan.clone();
            let Some(mut memory) = self.memory[bucket].take() else { continue };
            for &member in &plan.buckets[bucket].parameters {
                memory.set_mark(plan.slot(member).mark, self.is_used[member].into());
            }
            memory.set_mark(plan.fault_mark(bucket), (!self.faults.is_empty()).into());
            if bucket == 0 {
                let at = plan.active_marks();
                activity::write(&mut memory, at, self.group.rank(), self.is_active);
            }
            match self.group.world_size() {
                1 => self.memory[bucket] = Some(memory),
                _ => {
                    let bytes = self.plan.gradient_bytes(bucket);
                    self.in_flight.launch(&self.group, bucket, bytes, memory);
                }
            }
        }
    }
}

/// What the marks of a step say about all ranks.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Marks {
    /// Whether at least one rank has seen a fault.
    pub(super) has_fault: bool,
    /// The ranks with data of their own.
    pub(super) active: Active,
}

fn clock(step: u64, plan: &Plan) -> Clock {
    Clock::new(step, (0..plan.buckets.len()).map(|bucket| plan.gradient_bytes(bucket)))
}
