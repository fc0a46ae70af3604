//! The state of a step while gradients come in.

use std::{ops::Range, sync::Arc, time::Instant};

use drumline_group::{ProcessGroup, ReduceOp};
use drumline_kernels::with_ieee_rounding;

use super::{
    super::{Bucket, Divisor, FaultKind, Reducer, Unfinished, UnusedParameters, shards::Leaf},
    activity::{self, Active},
    in_flight::{Done, InFlight},
    lent::{Home, Lent},
    memory::{Arrived, Memory},
    plan::{Plan, Slot},
    timeline::{Clock, ReducerStats, Timeline},
    values::{Place, Values, ValuesMut},
};
use crate::{Error, Result};

#[derive(Debug)]
pub(super) struct Step {
    pub(super) group: ProcessGroup,
    pub(super) plan: Arc<Plan>,
    /// Whether the plan was made from the observed order.
    pub(super) is_planned: bool,
    reducer: Reducer,
    /// The memory of each bucket. `None` before its first use, and while the bucket is under way or lent out.
    memory: Vec<Option<Memory>>,
    /// If a step is shards: the sums of each bucket above the lowest, which lies in its memory.
    upper: Vec<Vec<Memory>>,
    /// If parameters have owners: the memory of this rank's block of each bucket. `None` as above.
    parts: Vec<Option<Memory>>,
    /// Where memory that was lent out comes back to: that of blocks if parameters have owners, else that of buckets.
    home: Arc<Home>,
    /// By parameter: whether its place holds gradients of this step, final or accumulated.
    is_used: Vec<bool>,
    /// By parameter: how many gradients of this step have come, those of shards that did not use it among them.
    leaves: Vec<usize>,
    /// How many shards of this step are complete on this rank.
    complete: usize,
    /// Whether this rank has data of its own in this step.
    is_active: bool,
    /// The parameters in the order in which their gradients became final.
    pub(super) order: Vec<usize>,
    pub(super) faults: Vec<(usize, FaultKind)>,
    in_flight: InFlight,
    /// The lowest rank with data of its own in the last step in which some rank had any.
    pub(super) lowest_active: usize,
    /// The number of steps that have given averages. The same on all ranks.
    pub(super) averaged: u64,
    /// What that number was when values were compared last.
    pub(super) checked: u64,
    /// The error that ended this reducer.
    pub(super) failed: Option<Error>,
    pub(super) stats: ReducerStats,
    clock: Clock,
    pub(super) timeline: Timeline,
}

/// How many steps a reducer has made: see [`steps_before`](super::GradientReducer::steps_before).
#[derive(Clone, Copy, Debug)]
pub struct StepsBefore {
    averaged: u64,
    checked: u64,
}

impl Step {
    pub(super) fn before(&self) -> StepsBefore {
        StepsBefore { averaged: self.averaged, checked: self.checked }
    }

    /// The first step on another group, of a reducer that has made these steps.
    pub(super) fn after(
        &self,
        before: StepsBefore,
        plan: Arc<Plan>,
        group: &ProcessGroup,
    ) -> Result<Self> {
        let StepsBefore { averaged, checked } = before;
        let first = Step::new(plan, self.is_used.len(), group)?;
        Ok(Self { averaged, checked, stats: self.stats, ..first })
    }

    /// The first step.
    pub(super) fn new(plan: Arc<Plan>, parameters: usize, group: &ProcessGroup) -> Result<Self> {
        Ok(Self {
            group: group.clone(),
            is_planned: false,
            reducer: Reducer::new(&plan.buckets),
            memory: plan.buckets.iter().map(|_| None).collect(),
            upper: plan.buckets.iter().map(|_| Vec::new()).collect(),
            parts: plan.buckets.iter().map(|_| None).collect(),
            home: Home::new(plan.buckets.len()),
            is_used: vec![false; parameters],
            leaves: vec![0; parameters],
            complete: 0,
            is_active: true,
            order: Vec::with_capacity(parameters),
            faults: Vec::new(),
            in_flight: InFlight::default(),
            lowest_active: 0,
            averaged: 0,
            checked: 0,
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
        let is_second = self.plan.shards.is_some() && self.leaves[parameter] > self.complete;
        if self.reducer.is_ready(parameter) || is_second {
            self.faults.push((parameter, FaultKind::Twice));
            return false;
        }
        let is_written = self.put(parameter, fill);
        match is_written {
            true => {
                self.is_used[parameter] = true;
                let Slot { bucket, range, .. } = self.plan.slot(parameter);
                let bytes = range.len() * self.plan.buckets[*bucket].dtype.size();
                self.stats.bytes_copied += bytes as u64;
            }
            false => self.faults.push((parameter, FaultKind::WrongType)),
        }
        is_written
    }

    /// Puts the next gradient of a parameter where it belongs. Returns false if `fill` does, or if the step has all.
    fn put(&mut self, parameter: usize, fill: impl FnOnce(Place<'_>) -> bool) -> bool {
        let Some(Leaf { level, is_added, folds }) = self.plan.leaf(self.leaves[parameter]) else {
            return false;
        };
        let Slot { bucket, range, .. } = self.plan.slot(parameter).clone();
        let mut upper = std::mem::take(&mut self.upper[bucket]);
        while upper.len() < level {
            let elements = self.plan.all_elements(bucket);
            upper.push(Memory::private(&self.plan.buckets[bucket], elements, self.plan.wire));
        }
        let lowest = self.memory(bucket);
        // The order of sums and the mode of the thread must not change a bit.
        let is_put = with_ieee_rounding(|| {
            let place = match level {
                0 => &mut *lowest,
                _ => &mut upper[level - 1],
            };
            let values = place.slice_mut(range.clone());
            let is_put = fill(Place { values, holds_sum: is_added });
            for top in (level - folds + 1..=level).rev().filter(|_| is_put) {
                let (below, top) = upper.split_at_mut(top - 1);
                let below = below.last_mut().unwrap_or(&mut *lowest);
                below.slice_mut(range.clone()).add_from(top[0].slice(range.clone()));
            }
            is_put
        });
        self.upper[bucket] = upper;
        self.leaves[parameter] += usize::from(is_put);
        is_put
    }

    /// This rank's gradients of a shard are complete, and those of another one follow.
    pub(super) fn end_shard(&mut self, policy: UnusedParameters) {
        self.complete += 1;
        for parameter in 0..self.leaves.len() {
            self.fill_up(parameter, self.complete, policy);
        }
    }

    /// Puts zeros in the place of gradients that have not come, until there are `wanted`.
    fn fill_up(&mut self, parameter: usize, wanted: usize, policy: UnusedParameters) {
        let is_known = |(faulty, kind): &(usize, FaultKind)| {
            *faulty == parameter || *kind == FaultKind::Program
        };
        let is_missing = self.leaves[parameter] < wanted && self.is_active;
        if is_missing && policy == UnusedParameters::Error && !self.faults.iter().any(is_known) {
            self.faults.push((parameter, FaultKind::Unused));
        }
        while self.leaves[parameter] < wanted && self.put(parameter, |place| place.put_zeros()) {}
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
            self.fill_up(parameter, self.plan.leaves(), policy);
        }
        self.launch(buckets);
    }

    /// Waits until all buckets are back.
    pub(super) fn wait(&mut self, divisor: Divisor) -> Result<Marks> {
        let (start, before) = (Instant::now(), self.stats.communication);
        while let Some(Done { bucket, arrived, took }) = self.in_flight.wait()? {
            self.stats.communication += took;
            self.clock.done(bucket, arrived.at);
            self.memory[bucket] = arrived.whole;
            self.parts[bucket] = arrived.part;
        }
        if self.group.world_size() > 1 {
            // To wake takes time, too, and is no communication.
            self.stats.exposed += start.elapsed().min(self.stats.communication - before);
        }
        let (mut marks, plan) = (Marks::default(), self.plan.clone());
        for (bucket, memory) in self.averages_mut().iter_mut().enumerate() {
            let Some(memory) = memory else { continue };
            let block = plan.own_block(bucket);
            if let Some(shards) = plan.shards.as_ref().filter(|it| it.count > plan.divided_by()) {
                memory.divide(block.gradients, shards.count);
            }
            marks.has_fault |= block.fault_mark.is_some_and(|mark| memory.is_marked(mark));
            if let Some(active_marks) = block.active_marks {
                marks.active = activity::read(memory, active_marks, plan.divided_by());
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
        let plan = self.plan.clone();
        for (bucket, memory) in self.averages_mut().iter_mut().enumerate() {
            if let Some(memory) = memory {
                memory.divide_again(plan.own_block(bucket).gradients, all, active);
            }
        }
    }

    /// What has come back of each bucket.
    fn averages_mut(&mut self) -> &mut [Option<Memory>] {
        match self.plan.owners {
            None => &mut self.memory,
            Some(_) => &mut self.parts,
        }
    }

    /// Lends the averages out.
    pub(super) fn lend(&mut self) -> Vec<Option<Arc<Lent>>> {
        let home = self.home.clone();
        let lend = |(bucket, memory): (usize, &mut Option<Memory>)| {
            memory.take().map(|memory| home.lend(bucket, memory))
        };
        self.averages_mut().iter_mut().enumerate().map(lend).collect()
    }

    /// Sends the values of this rank's parameters, which `read` writes to their places, to all ranks, and calls `take`
    /// with those of the others. Returns whether some rank has a fault: `read` has returned false there. Its own are in
    /// `faults`.
    pub(super) fn gather(
        &mut self,
        mut read: impl FnMut(usize, ValuesMut<'_>) -> bool,
        mut take: impl FnMut(usize, Values<'_>),
        faults: &mut Vec<(usize, FaultKind)>,
    ) -> Result<bool> {
        let plan = self.plan.clone();
        let Some(owners) = &plan.owners else { return Ok(false) };
        // Behind the values of the last bucket, each rank has a mark for a fault. There is room in place of marks.
        let counts = |bucket: usize| -> Vec<usize> {
            let is_last = bucket + 1 == plan.buckets.len();
            let blocks = plan.blocks(bucket).iter();
            blocks.map(|block| block.gradients.len() + usize::from(is_last)).collect()
        };
        for (bucket, Bucket { parameters: members, .. }) in plan.buckets.iter().enumerate() {
            let (mut part, block) = (self.part(bucket), plan.own_block(bucket));
            for &member in members {
                let Some(Slot { range, .. }) = plan.own_slot(member) else { continue };
                if !read(member, part.slice_mut(range.clone())) {
                    part.zero(range);
                    faults.push((member, FaultKind::Value));
                }
            }
            if block.fault_mark.is_some() {
                part.set_mark(block.gradients.end, (!faults.is_empty()).into());
            }
            let (whole, bytes) = (self.free_memory(bucket), plan.gradient_bytes(bucket));
            self.stats.bytes_gathered += bytes as u64;
            self.in_flight.launch(&self.group, "parameters", (bucket, bytes), |group| {
                whole.all_gather(part, &counts(bucket), group)
            });
        }
        let (start, before, mut has_fault) = (Instant::now(), self.stats.communication, false);
        while let Some(Done { bucket, arrived: Arrived { whole, part, .. }, took }) =
            self.in_flight.wait()?
        {
            self.stats.communication += took;
            self.parts[bucket] = part;
            let Some(whole) = whole else { continue };
            let mut place = 0;
            for ((rank, block), count) in plan.blocks(bucket).iter().enumerate().zip(counts(bucket))
            {
                for &member in &plan.buckets[bucket].parameters {
                    let Slot { range, .. } = plan.slot(member);
                    if owners.of(member) == Some(rank) && rank != self.group.rank() {
                        let first = place + range.start - block.all.start;
                        take(member, whole.slice(first..first + range.len()));
                    }
                }
                if block.fault_mark.is_some() {
                    has_fault |= whole.is_marked(place + block.gradients.len());
                }
                place += count;
            }
            self.memory[bucket].get_or_insert(whole);
        }
        self.stats.exposed += start.elapsed().min(self.stats.communication - before);
        Ok(has_fault)
    }

    /// Drops the micro-batches of a step that fails before its last backward.
    pub(super) fn give_up(&mut self) {
        if self.reducer.missing().len() == self.is_used.len() {
            self.next(None);
        }
    }

    /// Ends the step and starts the next one, with the plan `better` if there is one.
    pub(super) fn next(&mut self, better: Option<Plan>) {
        if let Some(better) = better.filter(|better| better.buckets != self.plan.buckets) {
            self.reducer = Reducer::new(&better.buckets);
            self.memory = better.buckets.iter().map(|_| None).collect();
            self.upper = better.buckets.iter().map(|_| Vec::new()).collect();
            self.parts = better.buckets.iter().map(|_| None).collect();
            self.home = Home::new(better.buckets.len());
            self.plan = Arc::new(better);
        }
        self.is_used.fill(false);
        self.leaves.fill(0);
        self.complete = 0;
        self.is_active = true;
        self.order.clear();
        self.faults.clear();
        let next = clock(self.stats.steps + 1, &self.plan);
        self.timeline = std::mem::replace(&mut self.clock, next).finish();
    }

    /// The memory of a bucket that is not under way. A bucket gets new memory in the first step, and when the
    /// caller still holds the averages of an earlier step.
    fn memory(&mut self, bucket: usize) -> &mut Memory {
        let is_lent = self.plan.owners.is_none();
        let back = match &self.memory[bucket] {
            None if is_lent => self.home.take(bucket),
            _ => None,
        };
        let Self { memory, plan, group, failed, .. } = self;
        memory[bucket]
            .get_or_insert_with(|| back.unwrap_or_else(|| new(plan, bucket, group, failed)))
    }

    /// Memory of a bucket that holds no gradients. The bucket's own is taken, unless micro-batches of the next step are
    /// there already.
    fn free_memory(&mut self, bucket: usize) -> Memory {
        let Self { memory, plan, group, failed, is_used, .. } = self;
        let is_free = plan.buckets[bucket].parameters.iter().all(|&member| !is_used[member]);
        let own = if is_free { memory[bucket].take() } else { None };
        own.unwrap_or_else(|| new(plan, bucket, group, failed))
    }

    /// Memory for this rank's block of a bucket.
    fn part(&mut self, bucket: usize) -> Memory {
        let own = self.parts[bucket].take().or_else(|| self.home.take(bucket));
        own.unwrap_or_else(|| {
            let elements = self.plan.own_block(bucket).all.len();
            Memory::private(&self.plan.buckets[bucket], elements, self.plan.wire)
        })
    }

    fn launch(&mut self, buckets: Range<usize>) {
        for bucket in buckets {
            let bytes = self.plan.gradient_bytes(bucket);
            self.stats.buckets_launched += 1;
            self.stats.bytes += bytes as u64;
            self.clock.launched(bucket);
            let plan = self.plan.clone();
            let Some(mut memory) = self.memory[bucket].take() else { continue };
            for &member in &plan.buckets[bucket].parameters {
                memory.set_mark(plan.slot(member).mark, self.is_used[member].into());
            }
            for block in plan.blocks(bucket) {
                if let Some(mark) = block.fault_mark {
                    memory.set_mark(mark, (!self.faults.is_empty()).into());
                }
                if let Some(marks) = block.active_marks.clone() {
                    activity::write(&mut memory, marks, self.group.rank(), self.is_active);
                }
            }
            if self.group.world_size() == 1 {
                self.memory[bucket] = Some(memory);
                continue;
            }
            let part = plan.owners.is_some().then(|| self.part(bucket));
            let upper = &self.upper[bucket];
            let op = plan.shards.as_ref().map_or(Some(ReduceOp::Avg), |shards| shards.op);
            self.in_flight.launch(&self.group, "bucket", (bucket, bytes), |group| {
                match (part, op, &plan.shards) {
                    (part, None, Some(shards)) => {
                        let upper = &upper[..shards.nodes[group.rank()] - 1];
                        memory.add_nodes(upper, part, plan.counts(bucket), shards, group)
                    }
                    (None, op, _) => memory.all_reduce(op.unwrap_or(ReduceOp::Avg), group),
                    (Some(part), op, _) => {
                        let (counts, op) = (plan.counts(bucket), op.unwrap_or(ReduceOp::Avg));
                        memory.reduce_scatter(part, &counts, op, group)
                    }
                }
            });
        }
    }
}

/// New memory for a bucket. After an error, the step goes on with memory that no neighbour reaches, until it returns the
/// error.
fn new(plan: &Plan, bucket: usize, group: &ProcessGroup, failed: &mut Option<Error>) -> Memory {
    let (bucket, elements) = (&plan.buckets[bucket], plan.all_elements(bucket));
    Memory::new(bucket, elements, plan.wire, group).unwrap_or_else(|error| {
        failed.get_or_insert(error);
        Memory::private(bucket, elements, plan.wire)
    })
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
