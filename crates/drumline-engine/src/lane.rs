//! The calls of one group: collectives one after another, with sends and receives beside them. A lane knows
//! which call runs, which calls wait for their turn, and which one failed.
//!
//! A lane has no thread, no lock and no clock, and never blocks. A blocking call, the progress
//! thread and the simulator all drive it in the same way.

mod closing;
mod outcome;
mod patience;
mod plans;
mod points;
mod state;
mod waiting;

use std::{
    collections::{BTreeSet, HashMap, VecDeque},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use plans::Plans;
pub use state::{Job, Lane};
use state::{Running, State};

use drumline_schedule::{
    Chooser, Collective, Counts, Schedule, Topology, price::Prices, slice_holders, step::Rank,
};

use crate::{
    Cause, CollectiveError, DType, Error, Reason, ReduceOp, Result, Settings,
    call::Call,
    choice::{Choice, choose},
    deadline::bounded,
    executor::{Flags, Layout, Machine, Now, Plan, Pool, Progress, Seats, Shape, Spin, drive},
    explain::{self, Explanation},
    handoff::Drivable,
    host::Host,
    membership::Membership,
    operation::Operation,
    operator::OperatorKind,
    panics::{panic_text, shielded},
    recorder::{Category, Recorder, What},
    transport::{Connections, Lack, Point},
    usage::Usage,
};

/// A collective on fewer bytes takes about as long as a look at the clock. So most of them are not timed.
const SHORT_BYTES: u64 = 64 << 10;

/// Of this number of short collectives, one is timed, and its time counts for all. A collective that has to
/// wait is timed separately.
const TIMED: u32 = 64;

impl Lane {
    /// The lane of a group whose messages `transport` carries. `host` is the memory that the ranks of this
    /// host share, if they do.
    pub fn new(
        member: Membership,
        topology: Topology,
        settings: &Settings,
        transport: Box<dyn Connections>,
        host: Option<Host>,
        aborted: Arc<AtomicBool>,
    ) -> Lane {
        let recorder = Recorder::of(&member.name, member.rank);
        let machine = Machine::new(host.as_ref().map_or_else(Flags::default, Host::flags));
        Lane {
            member,
            topology,
            chooser: Chooser::default(),
            settings: settings.clone().bounded(),
            transport,
            host,
            aborted,
            without_goodbye: false,
            sequence: 0,
            machine,
            plans: Plans::new(),
            schedules: HashMap::new(),
            pool: Pool::default(),
            queue: VecDeque::new(),
            running: None,
            points: 0,
            points_due: None,
            points_followed: false,
            points_awaited: BTreeSet::new(),
            points_looked_at: None,
            told: None,
            peers_looked_at: None,
            asleep: false,
            state: State::Open,
            closing: None,
            usage: Arc::default(),
            recorder,
        }
    }

    /// The same lane, which chooses algorithms over links by `prices`.
    pub fn priced_by(mut self, prices: Prices) -> Lane {
        self.set_prices(prices);
        self
    }

    /// Chooses by `prices` from now on. All ranks must change them between the same two calls.
    pub fn set_prices(&mut self, prices: Prices) {
        self.chooser = Chooser::by(prices);
        // The plans follow from choices by the old prices.
        self.plans = Plans::new();
    }

    /// Which algorithm a call would take, and why.
    pub fn explain(&mut self, call: &Call, registered: bool) -> Result<Explanation> {
        let host = self.host.as_ref();
        let registered = registered && host.is_some();
        let situation = call.situation(&self.topology, host.map(Host::long_bytes), registered);
        let chosen = choose(call, &situation, &mut self.chooser, &self.settings)?.algorithm;
        let named = situation.collective == Collective::AllReduce
            && self.settings.all_reduce.as_deref() == Some(chosen.name);
        Ok(explain::explain(&situation, self.chooser.prices(), chosen, named))
    }

    /// The ranks of this host that hold the slices of a [`Collective::ReduceSlices`] of this type, in their order.
    /// `None` where ranks share no memory, or no algorithm leaves slices of this type.
    pub fn slice_holders(&mut self, dtype: DType) -> Option<Vec<Rank>> {
        self.host.as_ref()?;
        let operator = Some(OperatorKind::Builtin(ReduceOp::Sum));
        let call = Call { operator, ..Call::new(Collective::ReduceSlices, dtype, Counts::Even(1)) };
        self.explain(&call, true).ok()?;
        Some(slice_holders(&self.topology, self.member.rank).to_vec())
    }

    /// The memory that ranks of this host share.
    pub fn host(&self) -> Option<&Host> {
        self.host.as_ref()
    }

    /// The same lane, whose calls `recorder` records.
    pub fn recorded_by(mut self, recorder: Recorder) -> Lane {
        self.recorder = recorder;
        self
    }

    /// What the calls of this rank have taken so far. It can be read while the lane is driven.
    pub fn usage(&self) -> &Arc<Usage> {
        &self.usage
    }

    /// The number of the next collective.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    /// Whether a call has failed.
    pub fn has_failed(&self) -> bool {
        matches!(self.state, State::Failed(_))
    }

    /// The rank, by its number in the job, whose end has broken this group off, as this rank has noticed itself.
    #[inline]
    pub fn has_lost(&self) -> Option<Rank> {
        let State::Failed(by) = &self.state else { return None };
        lost(by).map(|rank| self.member.global.of(rank))
    }

    /// Adds a call at the end of the queue.
    pub fn submit(&mut self, job: Job) {
        self.queue.push_back(job);
    }

    /// Whether any call is not complete.
    pub fn is_busy(&self) -> bool {
        self.has_jobs() || self.has_points() || self.is_to_abort()
    }

    /// Whether any asynchronous collective is not complete.
    pub fn has_jobs(&self) -> bool {
        !self.queue.is_empty()
    }

    fn is_to_abort(&self) -> bool {
        self.aborted.load(Ordering::SeqCst) && matches!(self.state, State::Open)
    }

    /// Fails if the group is to be aborted. A collective that is under way learns of it in its next step.
    pub fn obey(&mut self) {
        if self.is_to_abort() {
            self.fail("abort".to_owned(), self.sequence, Duration::ZERO, Cause::Aborted);
        }
    }

    /// Brings all calls as far as possible without waiting, other than by spinning.
    pub fn progress(&mut self, now: Instant, spin: Spin) -> Progress {
        if self.running.is_none() {
            self.obey();
        }
        let points = self.progress_points(now);
        let jobs = self.progress_jobs(now, spin);
        match (points, jobs) {
            (Progress::Moved, _) | (_, Progress::Moved) => Progress::Moved,
            (Progress::Done, Progress::Done) => Progress::Done,
            _ => Progress::Stuck,
        }
    }

    fn progress_jobs(&mut self, now: Instant, spin: Spin) -> Progress {
        let now = Now::at(now);
        while let Some(mut job) = self.queue.pop_front() {
            // The buffers of a job are the caller's. If its code panics, the thread that happens to drive the
            // lane must go on.
            let step = catch_unwind(AssertUnwindSafe(|| self.step(&mut job, &now, spin)));
            let result = match step {
                Ok(Ok(Progress::Done)) => Ok(()),
                Ok(Ok(progress)) => {
                    self.queue.push_front(job);
                    return progress;
                }
                Ok(Err(error)) => Err(error),
                Err(panic) => {
                    let call = job.call().collective.name();
                    let error = self.on_panic(call, panic_text(&*panic));
                    shielded(|| {
                        job.release(&mut self.pool);
                        if let Some(host) = &self.host {
                            job.detach(host);
                        }
                    });
                    Err(error)
                }
            };
            shielded(|| job.end(result));
        }
        Progress::Done
    }

    /// Brings one collective as far as possible without waiting, other than by spinning. Call it with the
    /// same collective until that is complete or has failed.
    pub fn step(
        &mut self,
        operation: &mut Operation<'_>,
        now: &Now,
        spin: Spin,
    ) -> Result<Progress> {
        if self.running.is_none() {
            self.start(operation, now)?;
        }
        let _inside = self.running.as_ref().and_then(|running| running.open.enter());
        if let State::Failed(by) = &self.state {
            // A send or receive has failed while this collective ran.
            let error = by.poisoned(operation.call().collective.name());
            self.end(operation, now);
            if let Some(host) = &self.host {
                operation.detach(host);
            }
            return Err(error);
        }
        let result = match self.aborted.load(Ordering::SeqCst) {
            true => Err(Box::new(Cause::Aborted)),
            false => {
                let (transport, host) = (&mut *self.transport, self.host.as_mut());
                drive(&mut self.machine, transport, host, operation.memory(), now, spin)
            }
        };
        let result = match result {
            Ok(Progress::Done) => self.may_succeed(operation, now),
            other => other,
        };
        match result {
            Ok(Progress::Done) => {
                self.note_end(operation, now);
                if let Some(running) = self.running.as_ref().filter(|running| running.failure > 0) {
                    self.member.seen.go_on(running.failure);
                }
                self.end(operation, now);
                self.retract(now);
                Ok(Progress::Done)
            }
            Ok(Progress::Moved) => Ok(Progress::Moved),
            Ok(Progress::Stuck) => {
                self.be_patient(operation, now.get());
                Ok(Progress::Stuck)
            }
            Err(cause) if self.looks_again(&cause, now.get()) => {
                self.be_patient(operation, now.get());
                Ok(Progress::Stuck)
            }
            Err(cause) => {
                let is_late = matches!(*cause, Cause::Timeout { .. });
                let is_open = is_late && self.give_up(operation.call().collective);
                let is_own_limit = self.is_own_limit();
                let cause = self.trace(*cause, Lack::Call, now.get());
                let description = self.name_of(operation);
                let started = self.running.as_ref().and_then(|running| running.started);
                let elapsed = now.get().saturating_duration_since(started.unwrap_or(now.get()));
                self.end(operation, now);
                // A slow neighbour may still work on the call in this rank's buffer.
                if let Some(host) = &self.host {
                    operation.detach(host);
                }
                let sequence = self.sequence - 1;
                let failure =
                    CollectiveError::new(&self.member, sequence, description, elapsed, cause);
                Err(self.fail_as(CollectiveError { is_own_limit, is_open, ..failure }))
            }
        }
    }

    fn start(&mut self, operation: &mut Operation<'_>, now: &Now) -> Result<()> {
        let call = operation.call();
        self.check_open(|| call.collective.name())?;
        if call.collective == Collective::MonitoredBarrier
            && let Err(cause) = self.hear(now.get())
        {
            let operation = call.collective.name().to_owned();
            return Err(self.fail(operation, self.sequence, Duration::ZERO, cause));
        }
        let registered = self.host.as_ref().and_then(|host| operation.registered(host));
        let index = match self.plans.find(call, registered.is_some()) {
            Some(index) => index,
            None => {
                let plan = self.plan(call, registered.is_some())?;
                self.plans.keep(call.clone(), registered.is_some(), plan)
            }
        };
        let plan = self.plans.at(index);
        let (rank, sequence, collective) = (self.member.rank, self.sequence, call.collective);
        let limit = call.timeout.map_or(self.settings.timeout, bounded);
        let bytes = (call.counts.of(rank) * call.dtype.size()) as u64;
        let open = self.recorder.begin(|| What {
            category: Category::Collective,
            name: call.collective.name(),
            sequence: Some(sequence),
            bytes: Some(bytes),
            algorithm: Some(plan.schedule.algorithm),
            ..What::default()
        });
        let (started, stands_for) = match now.known() {
            None if bytes >= SHORT_BYTES => (Some(now.get()), 1),
            None if sequence.is_multiple_of(TIMED.into()) => (Some(now.get()), TIMED),
            known => (known, 1),
        };
        if let (Some(_), Some(host)) = (started, &self.host) {
            // A rank that is always last never spins, and spinning is where ranks say on which core they run.
            // So it says it here.
            host.stand_here();
        }
        operation.prepare(plan, &mut self.pool);
        let registered = registered.filter(|_| plan.registered);
        let failure = self.member.seen.newest();
        self.machine.begin(plan, sequence, registered, limit, started);
        self.sequence += 1;
        self.running =
            Some(Running { started, patience: None, stands_for, collective, bytes, open, failure });
        Ok(())
    }

    /// Makes the plan of calls like this one.
    fn plan(&mut self, call: &Call, registered: bool) -> Result<Plan> {
        let host = self.host.as_ref();
        let situation = call.situation(&self.topology, host.map(Host::long_bytes), registered);
        let choice = choose(call, &situation, &mut self.chooser, &self.settings)?;
        let slot_bytes = choice.staged.then(|| host.map_or(0, Host::slot_bytes));
        let slot = slot_bytes.map(|bytes| bytes / choice.element_bytes);
        let schedule = self.schedule(&choice, call)?;
        let layout = Layout::new(&schedule, call.counts.clone(), slot);
        let layout = match schedule.is_pipelined() {
            true => layout
                .within(schedule.window_of_bytes(self.settings.window_bytes, choice.element_bytes)),
            false => layout,
        };
        let alone = Seats::default();
        Ok(Plan::new(Shape {
            schedule,
            seats: self.host.as_ref().map_or(&alone, Host::seats),
            description: call.describe(self.member.digest, 0, choice.algorithm.name),
            layout,
            kernels: if choice.wide { call.dtype.accumulator() } else { call.dtype }.kernels(),
            sum_bytes: choice.sum_bytes,
            wide: choice.wide,
            cache_bytes: self.host.as_ref().map(Host::cache_bytes),
        }))
    }

    fn end(&mut self, operation: &mut Operation<'_>, now: &Now) {
        operation.release(&mut self.pool);
        self.machine.end();
        let Some(Running { started, patience, stands_for, collective, bytes, open, .. }) =
            self.running.take()
        else {
            return;
        };
        drop(open);
        let Some(started) = started else {
            return self.usage.of(collective).add(bytes, Duration::ZERO);
        };
        // `now` is the time at which this turn began, which may be long before its end.
        let ended = if patience.is_none() { now.fresh() } else { now.get() };
        let time = ended.saturating_duration_since(started);
        let time = if patience.is_none() { time * stands_for } else { time };
        self.usage.of(collective).add(bytes, time);
        // The neighbours have just said on which cores they run.
        if let Some(host) = &mut self.host {
            host.spread_out(self.member.rank, ended, self.settings.spread_over_cores);
        }
    }

    /// The schedule of `call` for this rank. It is made once and kept.
    fn schedule(&mut self, choice: &Choice, call: &Call) -> Result<Arc<Schedule>> {
        let Choice { algorithm, narrow, .. } = *choice;
        let root = call.root.unwrap_or(0);
        let key = (call.collective.name(), algorithm.name, root, narrow && algorithm.sums_apart);
        if let Some(schedule) = self.schedules.get(&key) {
            return Ok(schedule.clone());
        }
        let rank = self.member.rank;
        let schedule = match narrow {
            true => algorithm.narrow_schedule(&self.topology, rank, root),
            false => algorithm.schedule(&self.topology, rank, root),
        };
        let schedule = schedule.map_err(|error| Error::argument(call.collective.name(), error))?;
        let schedule = Arc::new(schedule);
        self.schedules.insert(key, schedule.clone());
        Ok(schedule)
    }

    /// Refuses `attempted` on a group that has failed or was closed.
    fn check_open(&self, attempted: impl FnOnce() -> &'static str) -> Result<()> {
        match &self.state {
            State::Open => Ok(()),
            State::Failed(by) => Err(by.poisoned(attempted())),
            State::Left => Err(Error::argument(attempted(), "the group has been destroyed")),
        }
    }

    /// Poisons the group and tells the peers why.
    fn fail(&mut self, operation: String, sequence: u64, elapsed: Duration, cause: Cause) -> Error {
        let failure = CollectiveError::new(&self.member, sequence, operation, elapsed, cause);
        let is_own_limit = self.settings.is_own_timeout;
        self.fail_as(CollectiveError { is_own_limit, ..failure })
    }

    fn fail_as(&mut self, failure: CollectiveError) -> Error {
        let failure = Arc::new(failure);
        self.fail_with(failure.clone());
        failure.error()
    }

    /// Poisons the group with a failure that this rank has found elsewhere, and tells the peers. A group that
    /// has failed or was closed stays as it is.
    pub fn fail_with(&mut self, failure: Arc<CollectiveError>) {
        if matches!(self.state, State::Open) {
            tracing::debug!("{failure}");
            self.recorder.mark("failed", &failure);
            self.break_off(failure);
        }
    }

    fn break_off(&mut self, failure: Arc<CollectiveError>) {
        if let Some(host) = &self.host {
            let first = self.sequence - u64::from(self.running.is_some());
            host.fail(first.min(failure.sequence));
        }
        self.transport.abort(&failure);
        let ended = match failure.cause {
            // A rank that tells of its own failure lives.
            Cause::Reported { by, culprit: Some(culprit), reason: Reason::Other, .. } => {
                (by != culprit && culprit != self.member.rank).then_some(culprit)
            }
            _ => lost(&failure),
        };
        self.member.seen.note(failure.seen(), ended.map(|rank| self.member.global.of(rank)));
        self.told = None;
        self.usage.fail();
        self.state = State::Failed(failure.clone());
        self.poison_points(&failure);
    }

    /// A call has panicked, so the state of the group is unknown: poisons the group.
    pub fn on_panic(&mut self, operation: &'static str, text: &str) -> Error {
        let first = self.sequence - u64::from(self.running.take().is_some());
        if let Err(error) = self.check_open(|| operation) {
            return error;
        }
        if let Some(host) = &self.host {
            host.fail(first);
        }
        let cause = Cause::Panicked { text: text.to_owned() };
        self.fail(operation.to_owned(), self.sequence, Duration::ZERO, cause)
    }

    /// When the lane has something to do even if no peer does anything.
    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let running = self.running.as_ref().and_then(|running| running.due(&self.machine));
        let transport = self.transport.next_deadline(now);
        let closing = self.closing.map(|closing| closing.due(now));
        let own = [running, self.points_due, self.tell_due(), closing];
        own.into_iter().flatten().chain(transport).min()
    }

    /// Takes in what has happened, without waiting. It also takes in wake-ups, so the caller must look
    /// afterwards at what they may be for.
    pub fn look(&mut self, now: Instant) {
        self.transport.wait(now, now);
    }

    /// When to call [`Lane::look`] although no call is under way.
    pub fn look_again_at(&self) -> Option<Instant> {
        self.transport.idle_deadline()
    }

    /// Finds out whether a peer has failed, also when no call is under way. Of the collectives, only the
    /// monitored barrier asks; others need not know while they find all that they need.
    pub fn hear(&mut self, now: Instant) -> Result<(), Cause> {
        self.look(now);
        if self.has_points() {
            // The driver of the sends and receives listens to the peers.
            return Ok(());
        }
        self.transport.progress_points(false, now, &mut Vec::new()).map(drop)
    }

    /// Fails if the group has failed, which this rank may only find out now: the peers hear of it then. `attempted`
    /// began at `began` outside of the lane.
    pub fn check(&mut self, attempted: &'static str, began: Instant, now: Instant) -> Result<()> {
        match &self.state {
            State::Failed(by) => return Err(by.poisoned(attempted)),
            State::Left => return Ok(()),
            State::Open => {}
        }
        let elapsed = now.saturating_duration_since(began);
        self.hear(now)
            .map_err(|cause| self.fail(attempted.to_owned(), self.sequence, elapsed, cause))
    }

    /// Connects to all peers, so that [`Lane::hear`] hears each of them. Returns whether all have been met. Call
    /// it until then on all ranks.
    pub fn meet_all(&mut self, now: Instant) -> bool {
        let all: Vec<Rank> = (0..self.member.world_size).collect();
        self.transport.want(&all);
        // Also begins the calls to those that are wanted now.
        self.hear(now).is_err() || self.transport.has_met_all()
    }

    /// Why a peer that has left the group in good order can take no part any more. `None`: it is not known to have
    /// left.
    pub fn left(&self, peer: Rank) -> Option<Cause> {
        self.transport.left(peer)
    }

    /// Why `peer` can take no part any more, as this rank has heard from the peer or its host.
    pub fn lost(&mut self, peer: Rank, now: Instant) -> Option<Cause> {
        self.look(now);
        self.transport.lost(peer)
    }

    /// Sleeps on the caller's thread until the lane has something to do, but not beyond `limit`.
    pub fn sleep(&mut self, now: Instant, limit: Option<Instant>) {
        if let Some(until) = self.next_deadline(now).into_iter().chain(limit).min() {
            self.sleep_until(until, now);
        }
    }

    /// Sleeps on the caller's thread until peers have news, but not beyond `until`. `now` is the time.
    pub fn sleep_until(&mut self, until: Instant, now: Instant) {
        if self.fall_asleep() {
            self.transport.wait(until, now);
        }
        self.wake_up();
    }

    /// Prepares for a sleep outside of this lane, at most until the returned time. Call [`Lane::wake_up`] and
    /// [`Lane::look`] after it. `None`: do not sleep, there is something to do.
    pub fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        if !self.fall_asleep() {
            self.wake_up();
            return None;
        }
        self.transport.arm();
        self.next_deadline(now)
    }

    /// Asks the neighbours to ring the doorbell, then looks once more. Returns whether there is nothing to
    /// do.
    ///
    /// The neighbours are asked even if this rank awaits none of them. Then [`Lane::wake_up`] silences the
    /// doorbell: a ring may come late, after the sleep for which it was meant.
    fn fall_asleep(&mut self) -> bool {
        let Some(host) = &self.host else { return true };
        if !std::mem::replace(&mut self.asleep, true) {
            host.begin_sleep();
        }
        // A rank whose part is done waits for no post, but for the word of a neighbour that has failed.
        self.running.is_none() || self.machine.is_done() || !host.has_news(&self.machine)
    }

    /// A driver calls this when it takes over a lane that may have slept.
    pub fn wake_up(&mut self) {
        if let Some(host) = &self.host
            && std::mem::take(&mut self.asleep)
        {
            host.end_sleep();
        }
    }

    /// Whether this rank has failed and has not yet told every peer why.
    pub fn has_unsent(&self) -> bool {
        matches!(self.state, State::Failed(_)) && self.transport.has_unsent()
    }
}

/// The rank that has ended, as the rank that fails has noticed itself.
fn lost(failure: &CollectiveError) -> Option<Rank> {
    match failure.cause {
        Cause::PeerExited { peer } | Cause::HostSilent { peer } => Some(peer),
        _ => None,
    }
}

impl Drivable for Lane {
    type Job = Job;
    type Point = Point;
    type Errand = Box<dyn FnOnce(&mut Lane) + Send>;

    fn submit(&mut self, job: Job) {
        self.submit(job);
    }

    fn post(&mut self, point: Point) {
        self.post(point);
    }

    fn carry_out(&mut self, errand: Box<dyn FnOnce(&mut Lane) + Send>) {
        errand(self);
    }

    fn is_busy(&self) -> bool {
        self.is_busy()
    }

    fn wake_up(&mut self) {
        self.wake_up();
    }

    fn on_panic(&mut self) {
        self.on_panic("a call", "its message stands in the output of this rank");
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // A neighbour that is about to complete the call may still read this rank's buffer. If the pages went
        // back to the kernel now, it would read zeros.
        if let (Some(mut job), Some(_), Some(host)) =
            (self.queue.pop_front(), self.running.take(), &self.host)
        {
            shielded(|| {
                job.release(&mut self.pool);
                job.detach(host);
            });
        }
        // A rank that panics must not say goodbye: its peers must see that it died.
        let panics = self.without_goodbye || std::thread::panicking();
        if matches!(self.state, State::Open) && !panics {
            self.transport.take_leave(self.member.seen());
        }
    }
}
