//! A group on a foreign backend.
//!
//! The backend carries out single calls. The library's other promises are kept here: collectives run in the
//! order of the calls, blocking or not; sends and receives run beside them; and a failure poisons the group.
//!
//! Every collective draws a ticket when it is called and waits for its turn. Calls in the background wait in
//! queues: one queue for collectives, and one for the messages of each rank, direction and tag, so that a
//! receive never holds up a send. A queue has a thread while it is not empty.

use std::{
    any::Any,
    collections::{BTreeSet, HashMap, VecDeque, hash_map::Entry},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use drumline_engine::{
    Cause, CollectiveError, Error, Result,
    deadline::after,
    lane::Job,
    membership::Membership,
    operation::Operation,
    panics::{panic_text, shielded},
    recorder::{Category, What},
    transport::{Direction, Point},
    usage::Usage,
};
use drumline_schedule::step::Rank;

use super::{family::FamilyCell, guard::Warden, round::Word};
use crate::{
    backend::{Backend, Call, Label, Outgoing, Request, Signature, Wanted},
    interrupt,
    trace::GroupTrace,
};

/// What carries a foreign group.
pub(super) struct Carried<'a> {
    pub(super) backend: Arc<dyn Backend>,
    /// The name of the backend.
    pub(super) name: &'a str,
    /// Set if the backend has asked for a guard.
    pub(super) guard: Option<Arc<Warden>>,
}

pub(super) struct Foreign {
    backend: Arc<dyn Backend>,
    guard: Option<Arc<Warden>>,
    /// The name of the backend.
    name: String,
    member: Membership,
    timeout: Duration,
    recorder: GroupTrace,
    /// Keeps the store alive while calls run, because this process may host it for others.
    _family: FamilyCell,
    state: Mutex<State>,
    /// Notified when a turn has come or a queue has ended.
    moved: Condvar,
    /// Changed with `state` locked.
    usage: Usage,
}

#[derive(Default)]
struct State {
    /// The number of the next ticket, and of the ticket whose turn it is.
    ticket: u64,
    turn: u64,
    /// Tickets whose callers do not wait for their turn any more.
    given_up: BTreeSet<u64>,
    /// The thread whose turn it is, and its call.
    inside: Option<(ThreadId, &'static str)>,
    /// The number of the next collective.
    sequence: u64,
    queues: HashMap<Queue, VecDeque<Task>>,
    ended: Option<Ended>,
}

enum Ended {
    Left,
    Failed(Arc<CollectiveError>),
}

/// Tasks in one queue are carried out one after another.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Queue {
    Collectives,
    Sends(Rank, u64),
    Receives(Option<Rank>, u64),
}

enum Task {
    Collective(u64, Job),
    Message(Point),
}

/// The most queues that have threads at a time.
const QUEUES_MAX: usize = 1_024;

/// The turn of a ticket. When it is dropped, the next ticket has its turn.
struct Turn<'a>(&'a Foreign);

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.inside = None;
        state.turn += 1;
        state.pass_over();
        let others_wait = state.turn < state.ticket;
        drop(state);
        // A call of the system, even if nobody waits.
        if others_wait {
            self.0.moved.notify_all();
        }
    }
}

impl Foreign {
    pub(super) fn on_device(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        self.backend.on_device()
    }

    pub(super) fn new(
        Carried { backend, name, guard }: Carried<'_>,
        member: Membership,
        timeout: Duration,
        recorder: GroupTrace,
        family: FamilyCell,
    ) -> Arc<Foreign> {
        let (state, moved) = (Mutex::default(), Condvar::new());
        let name = name.to_owned();
        Arc::new(Foreign {
            backend,
            guard,
            name,
            member,
            timeout,
            recorder,
            _family: family,
            state,
            moved,
            usage: Usage::default(),
        })
    }

    /// Carries out a call on the caller's thread, after all calls that were made before.
    pub(super) fn run(&self, operation: &mut Operation<'_>) -> Result<()> {
        let ticket = self.draw(&mut self.lock(), operation.call().collective.name())?;
        self.collective(ticket, operation)
    }

    /// The ticket of a call of this thread.
    fn draw(&self, state: &mut State, attempted: &'static str) -> Result<u64> {
        match state.inside.filter(|(thread, _)| interrupt::is_this(*thread)) {
            None => Ok(state.draw()),
            Some((_, call)) => Err(interrupt::inside(attempted, call, &self.member.name)),
        }
    }

    /// Carries out a call in the background, after all calls that were made before.
    pub(super) fn submit(self: &Arc<Self>, job: Job) {
        let mut state = self.lock();
        match self.draw(&mut state, job.call().collective.name()) {
            Ok(ticket) => self.enqueue(state, Queue::Collectives, Task::Collective(ticket, job)),
            Err(error) => {
                drop(state);
                job.end(Err(error));
            }
        }
    }

    /// Sends or receives in the background.
    pub(super) fn post(self: &Arc<Self>, point: Point) {
        if !self.backend.has_messages() {
            let problem = format!("backend {:?} carries no messages from rank to rank", self.name);
            let operation = point.call.name();
            return point.complete(Err(Error::argument(operation, problem)));
        }
        let queue = match (point.call.direction, point.call.peer) {
            (Direction::Send, peer) => Queue::Sends(peer.unwrap_or_default(), point.call.tag),
            (Direction::Receive, peer) => Queue::Receives(peer, point.call.tag),
        };
        let state = self.lock();
        if state.queues.len() >= QUEUES_MAX && !state.queues.contains_key(&queue) {
            drop(state);
            let problem = format!(
                "messages of {QUEUES_MAX} ranks and tags are under way already: wait for some"
            );
            let operation = point.call.name();
            return point.complete(Err(Error::argument(operation, problem)));
        }
        self.enqueue(state, queue, Task::Message(point));
    }

    /// What the calls of this rank have taken, and whether one has failed.
    pub(super) fn usage(&self) -> &Usage {
        &self.usage
    }

    /// See [`ProcessGroup::abort`](super::ProcessGroup::abort).
    pub(super) fn abort(&self) {
        self.fail_because("abort", Cause::Aborted);
    }

    /// Poisons the group for a cause that this rank has found elsewhere, and tells the peers.
    pub(super) fn fail_because(&self, operation: &str, cause: Cause) {
        let sequence = self.lock().sequence;
        self.fail(operation, operation.to_owned(), sequence, Instant::now(), cause);
    }

    /// Fails if the group has failed, also if no call is under way. `attempted` began at `began`.
    pub(super) fn check(&self, attempted: &'static str, began: Instant) -> Result<()> {
        let heard = self.guard.as_ref().map_or(Ok(()), |guard| guard.hear());
        let sequence = self.lock().sequence;
        heard.map_err(|cause| self.fail(attempted, attempted.to_owned(), sequence, began, cause))
    }

    /// A panic drops the group: the peers will see this rank as dead.
    pub(super) fn forsake(&self) {
        if let Some(guard) = &self.guard {
            guard.forsake();
        }
    }

    /// Closes the group once all ranks have called this. Calls that are under way end first; but a handler of a signal
    /// breaks them off, and so does the end of the patience. Returns whether it has left in good order.
    pub(super) fn close(&self, started: Instant, patience: Option<Duration>) -> Result<bool> {
        let break_off = || {
            self.fail_because("destroy", Cause::Aborted);
            Ok(false)
        };
        let give_up_at = after(started, patience.unwrap_or(Duration::MAX));
        let leave_at = patience.map(|_| give_up_at);
        let mut state = self.lock();
        let is_inside = state.inside.is_some_and(|(thread, _)| interrupt::is_this(thread));
        let is_busy = state.turn < state.ticket || !state.queues.is_empty();
        if is_inside || interrupt::is_handling() && is_busy {
            drop(state);
            return break_off();
        }
        let ticket = state.draw();
        drop(state);
        let _turn = match self.await_turn(ticket, "destroy", leave_at) {
            Err(_) if Instant::now() >= give_up_at => return Ok(false),
            turn => turn?,
        };
        let mut state = self.lock();
        // Collectives that were called before this have had their turns, and later ones wait.
        while state.queues.keys().any(|queue| *queue != Queue::Collectives) {
            let left = give_up_at.saturating_duration_since(Instant::now());
            if left.is_zero() {
                drop(state);
                return break_off();
            }
            let waited = self.moved.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        let sequence = state.sequence;
        drop(state);
        self.check_open("destroy")?;
        match self.shut_down(started, patience) {
            Ok(()) => {
                self.lock().ended = Some(Ended::Left);
                Ok(true)
            }
            Err(cause) => Err(self.fail("destroy", "destroy".to_owned(), sequence, started, cause)),
        }
    }

    fn shut_down(&self, started: Instant, patience: Option<Duration>) -> Result<(), Cause> {
        let deadline = after(started, patience.unwrap_or(self.timeout));
        let shut_down = || self.shielded(|| self.backend.shutdown(deadline));
        let Some(guard) = &self.guard else { return shut_down() };
        // All ranks must come before the backend closes its connections.
        let leave_at = patience.map(|_| deadline);
        let limit = patience.map_or(self.timeout, |it| it.max(self.timeout));
        match guard.begin(Word::Destroy, limit).and_then(|()| guard.finish(leave_at)) {
            Ok(true) => {}
            // Some rank does not come, or has dropped its handle. So nobody waits for the others.
            Ok(false) | Err(Cause::PeerLeft { .. }) => {
                tracing::debug!("left a group that not all ranks have destroyed");
                guard.leave();
                return Ok(());
            }
            Err(cause) => return Err(cause),
        }
        shut_down().map_err(|cause| guard.explain(cause))?;
        guard.close(started)
    }

    fn enqueue(self: &Arc<Self>, mut state: MutexGuard<'_, State>, queue: Queue, task: Task) {
        match state.queues.entry(queue) {
            Entry::Occupied(mut waiting) => return waiting.get_mut().push_back(task),
            Entry::Vacant(new) => new.insert(VecDeque::from([task])),
        };
        drop(state);
        let group = self.clone();
        let thread = std::thread::Builder::new().name(format!("drumline-{}", self.name));
        if let Err(error) = thread.spawn(move || group.serve(queue)) {
            // This is slower, but no call is lost.
            tracing::warn!(%error, "no thread for work in the background: the caller does it");
            self.serve(queue);
        }
    }

    /// Carries out the tasks in `queue` until it is empty.
    fn serve(&self, queue: Queue) {
        loop {
            let mut state = self.lock();
            let Some(task) = state.queues.get_mut(&queue).and_then(VecDeque::pop_front) else {
                state.queues.remove(&queue);
                self.moved.notify_all();
                return;
            };
            drop(state);
            match task {
                Task::Collective(ticket, mut job) => {
                    let result = self.collective(ticket, &mut job);
                    shielded(|| job.end(result));
                }
                Task::Message(mut point) => {
                    let result = self.message(&mut point);
                    shielded(|| point.complete(result));
                }
            }
        }
    }

    fn collective(&self, ticket: u64, operation: &mut Operation<'_>) -> Result<()> {
        let call = operation.call().clone();
        let name = call.collective.name();
        let _turn = self.await_turn(ticket, name, None)?;
        self.check_open(name)?;
        self.check_supported(&call)?;
        let sequence = {
            let mut state = self.lock();
            state.sequence += 1;
            state.sequence - 1
        };
        let Membership { rank, world_size, digest, .. } = self.member;
        let bytes = (call.counts.of(rank) * call.dtype.size()) as u64;
        let _open = self.recorder.begin(|| What {
            category: Category::Collective,
            name,
            sequence: Some(sequence),
            bytes: Some(bytes),
            ..What::default()
        });
        let started = Instant::now();
        let signature = Signature(call.describe(digest, sequence, &self.name));
        let timeout = call.timeout.unwrap_or(self.timeout);
        let deadline = after(started, timeout);
        let mut carry_out = || {
            self.shielded(|| {
                operation.carried_by(rank, |call, data, input, reducer| {
                    let call = Call { call, rank, world_size, signature, deadline, reducer };
                    self.backend.collective(&mut Request { data, input, call })
                })
            })
        };
        let result = match &self.guard {
            None => carry_out(),
            Some(guard) => guard
                .begin(Word::Call(signature), timeout)
                .and_then(|()| carry_out().map_err(|cause| guard.explain(cause)))
                .and_then(|()| guard.finish(None).map(drop)),
        };
        let state = self.lock();
        self.usage.of(call.collective).add(bytes, started.elapsed());
        drop(state);
        result.map_err(|cause| self.fail(name, signature.0.to_string(), sequence, started, cause))
    }

    fn message(&self, point: &mut Point) -> Result<()> {
        let call = point.call;
        self.check_open(call.name())?;
        let _open = self.recorder.begin_at(point.started, || What {
            category: Category::Message,
            name: call.name(),
            peer: call.peer,
            tag: Some(call.tag),
            bytes: Some(call.bytes()),
            ..What::default()
        });
        let (started, tag) = (point.started, call.tag);
        let deadline = after(started, point.timeout.unwrap_or(self.timeout));
        let result = self.shielded(|| match call.direction {
            Direction::Send => {
                let (label, bytes) = point.parcel();
                let to = call.peer.unwrap_or_default();
                self.backend.send(&Outgoing { to, tag, label: Label(label), bytes, deadline })
            }
            Direction::Receive => {
                let arrived = self.backend.recv(&Wanted { from: call.peer, tag, deadline })?;
                point.fill(arrived.from, &arrived.label.0, &arrived.bytes)
            }
        });
        let result = result.map_err(|cause| match &self.guard {
            Some(guard) => guard.explain(cause),
            None => cause,
        });
        let state = self.lock();
        if result.is_ok() {
            self.usage.add_message(&point.call, started.elapsed());
        }
        let sequence = state.sequence;
        drop(state);
        result.map_err(|cause| self.fail(call.name(), call.to_string(), sequence, started, cause))
    }

    /// Runs code of a backend or of a user. A panic in it fails the call.
    fn shielded(&self, code: impl FnOnce() -> Result<(), Cause>) -> Result<(), Cause> {
        catch_unwind(AssertUnwindSafe(code))
            .unwrap_or_else(|panic| Err(Cause::Panicked { text: panic_text(&*panic).to_owned() }))
    }

    fn check_open(&self, attempted: &'static str) -> Result<()> {
        match &self.lock().ended {
            None => Ok(()),
            Some(Ended::Failed(by)) => Err(by.poisoned(attempted)),
            Some(Ended::Left) => Err(Error::argument(attempted, "the group has been destroyed")),
        }
    }

    fn check_supported(&self, call: &drumline_engine::call::Call) -> Result<()> {
        let (collective, dtype) = (call.collective, call.dtype);
        let invalid = |problem| Error::argument(collective.name(), problem);
        if let Some(problem) = call.problem() {
            return Err(invalid(problem));
        }
        let operator = call.operator.map(|operator| operator.name());
        if self.backend.supports(collective, dtype, operator) {
            return Ok(());
        }
        let operator = operator.map(|operator| format!("({operator})")).unwrap_or_default();
        let name = &self.name;
        Err(invalid(format!("backend {name:?} has no {}{operator} of {dtype}", collective.name())))
    }

    /// Poisons the group, if it is not poisoned yet, and tells the backend.
    fn fail(
        &self,
        attempted: &str,
        operation: String,
        sequence: u64,
        started: Instant,
        cause: Cause,
    ) -> Error {
        let elapsed = started.elapsed();
        let failure =
            Arc::new(CollectiveError::new(&self.member, sequence, operation, elapsed, cause));
        let mut state = self.lock();
        if let Some(Ended::Failed(by)) = &state.ended {
            return by.poisoned(attempted);
        }
        state.ended = Some(Ended::Failed(failure.clone()));
        drop(state);
        self.usage.fail();
        tracing::debug!("{failure}");
        self.recorder.mark("failed", &failure);
        if let Some(guard) = &self.guard {
            guard.fail(&failure);
        }
        shielded(|| self.backend.abort(&failure));
        failure.error()
    }

    /// Waits for the turn of a ticket. The program may interrupt that.
    ///
    /// # Errors
    ///
    /// It is `leave_at`, or for as long as the time limit of the group no turn has ended: then the group fails.
    fn await_turn(
        &self,
        ticket: u64,
        attempted: &'static str,
        leave_at: Option<Instant>,
    ) -> Result<Turn<'_>> {
        let started = Instant::now();
        let (mut since, mut turn) = (started, None);
        let mut state = self.lock();
        while state.turn != ticket {
            if turn.replace(state.turn) != Some(state.turn) {
                since = Instant::now();
            }
            let limit = after(since, self.timeout);
            let until = interrupt::look_again_at().into_iter().chain(leave_at);
            let until = until.fold(limit, Instant::min);
            let left = until.saturating_duration_since(Instant::now());
            let waited = self.moved.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.turn == ticket || Instant::now() < until {
                continue;
            }
            drop(state);
            let is_aborted =
                interrupt::is_wanted() || leave_at.is_some_and(|at| Instant::now() >= at);
            state = self.lock();
            let is_late = state.turn != ticket && Instant::now() >= limit;
            if is_aborted || is_late {
                let waiting_for = vec![self.member.rank];
                let cause =
                    if is_aborted { Cause::Aborted } else { Cause::Timeout { waiting_for } };
                let holder = state.inside.map_or("another call", |(_, call)| call);
                let call = format!("{attempted}, which waited because this rank is in {holder},");
                state.given_up.insert(ticket);
                state.pass_over();
                let sequence = state.sequence;
                drop(state);
                self.moved.notify_all();
                return Err(self.fail(attempted, call, sequence, started, cause));
            }
        }
        state.inside = Some((thread::current().id(), attempted));
        Ok(Turn(self))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Foreign {
    fn drop(&mut self) {
        if let Some(guard) = &self.guard {
            guard.leave();
        }
    }
}

impl State {
    fn draw(&mut self) -> u64 {
        self.ticket += 1;
        self.ticket - 1
    }

    /// Passes over the turns of callers that have given up.
    fn pass_over(&mut self) {
        while self.given_up.remove(&self.turn) {
            self.turn += 1;
        }
    }
}
