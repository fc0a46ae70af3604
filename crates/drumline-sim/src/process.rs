//! One rank's process: its members of the groups, and where its program stands.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

use drumline_engine::{Error, executor::Progress};

use crate::member::{
    Member, Outcome, Own, Prepared,
    posting::{Posted, Side},
};
use drumline_launch::Ending;
use fastrand::Rng;

use crate::{
    network::{Network, SimStream},
    scenario::{Instruction, Scenario},
    time::Nanos,
};

/// What all processes of a job share.
#[derive(Clone, Debug)]
pub(crate) struct View {
    pub(crate) scenario: Arc<Scenario>,
    pub(crate) network: Arc<Network>,
}

/// A simulated process.
#[derive(Debug, Default)]
pub(crate) struct Process {
    pub(crate) rank: usize,
    pub(crate) groups: Vec<GroupState>,
    /// Index of the next instruction of its program.
    at: usize,
    activity: Activity,
    pub(crate) records: Vec<Record>,
    pub(crate) steps: u32,
    pub(crate) stopped_until: Nanos,
    /// Until this time the process computes and notices nothing.
    pub(crate) busy_until: Nanos,
    /// When its next step is scheduled.
    pub(crate) next_look: Option<Nanos>,
    pub(crate) killed: Arc<AtomicU64>,
    pub(crate) ended: Option<(Nanos, Ending)>,
    /// Messages that were unfinished when the process ended: group, side, and time of the post.
    pub(crate) abandoned: Vec<(usize, Side, Nanos)>,
}

/// A process's part in a group.
#[derive(Debug, Default)]
pub(crate) struct GroupState {
    /// `None` once the process has ended.
    pub(crate) member: Option<Member<SimStream>>,
    asleep_until: Option<Nanos>,
    /// Asynchronous calls: index, start, result.
    unfinished: VecDeque<(usize, Nanos, Outcome)>,
    /// Unfinished messages: index, side, start, result.
    posted: Vec<(usize, Side, Nanos, Posted)>,
    pub(crate) failed: bool,
    pub(crate) closing_since: Option<Nanos>,
    pub(crate) closed: bool,
}

#[derive(Debug, Default)]
enum Activity {
    #[default]
    Next,
    Computing(Nanos),
    Calling {
        group: usize,
        call: usize,
        started: Nanos,
        collective: Prepared,
    },
    Waiting {
        group: usize,
    },
    Closing {
        group: usize,
        started: Nanos,
    },
}

/// A call, a message or the closing of a group, and how it ended.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) group: usize,
    pub(crate) kind: RecordKind,
    pub(crate) started: Nanos,
    pub(crate) blocking: bool,
    pub(crate) ended: Nanos,
    pub(crate) error: Option<Error>,
}

#[derive(Debug)]
pub(crate) enum RecordKind {
    /// A call: its index, its buffer, which no rank may write to any more, and a copy of it.
    Call { index: usize, buffer: Option<(Own, Vec<u8>)> },
    /// A message: its index, its side, the peer unless it failed, and its bytes.
    Message { index: usize, side: Side, peer: Option<usize>, bytes: Vec<u8> },
    /// The closing of the group.
    End,
}

impl Record {
    /// The index of the call, unless this is no call.
    pub(crate) fn call(&self) -> Option<usize> {
        match self.kind {
            RecordKind::Call { index, .. } => Some(index),
            RecordKind::Message { .. } | RecordKind::End => None,
        }
    }

    /// The bytes of the call's buffer when the call ended.
    pub(crate) fn bytes(&self) -> Option<&Vec<u8>> {
        match &self.kind {
            RecordKind::Call { buffer, .. } => buffer.as_ref().map(|(_, bytes)| bytes),
            RecordKind::Message { .. } | RecordKind::End => None,
        }
    }
}

impl Process {
    pub(crate) fn new(rank: usize) -> Process {
        Process { rank, ..Process::default() }
    }

    pub(crate) fn join(&mut self, member: Member<SimStream>) {
        self.groups.push(GroupState { member: Some(member), ..GroupState::default() });
    }

    /// Ends the process. As the kernel does, this closes what the process leaves open.
    pub(crate) fn end(&mut self, now: Nanos, ending: Ending) {
        if self.ended.is_some() {
            return;
        }
        if !matches!(ending, Ending::Code(0 | 1)) {
            self.killed.store(1, Ordering::Relaxed);
        }
        self.ended = Some((now, ending));
        self.activity = Activity::Next;
        for (group, state) in self.groups.iter_mut().enumerate() {
            state.unfinished.clear();
            let posted = state.posted.drain(..).map(|(_, side, started, _)| (group, side, started));
            self.abandoned.extend(posted);
            state.member = None;
        }
    }

    /// Whether a step can make progress.
    pub(crate) fn has_reason(&self, now: Nanos) -> bool {
        let program = match self.activity {
            Activity::Next => true,
            Activity::Computing(until) => until <= now,
            Activity::Calling { .. } | Activity::Waiting { .. } | Activity::Closing { .. } => false,
        };
        program || self.driven().any(|state| state.has_reason(now))
    }

    /// Does what can be done now. Returns when the next step is due even if nothing happens until
    /// then; `None` for never.
    pub(crate) fn step(&mut self, view: &View, rng: &mut Rng) -> Option<Nanos> {
        self.steps += 1;
        for state in &mut self.groups {
            state.wake_up(view);
        }
        // Either the program or the progress thread comes first.
        let program_first = rng.bool();
        if program_first {
            self.run_program(view);
        }
        let own = self.activity.group();
        for group in 0..self.groups.len() {
            if Some(group) != own && self.ended.is_none() {
                self.drive_queue(group, view, true);
            }
        }
        if !program_first {
            self.run_program(view);
        }
        self.next_step(view.network.now(), rng)
    }

    fn next_step(&self, now: Nanos, rng: &mut Rng) -> Option<Nanos> {
        if self.ended.is_some() {
            return None;
        }
        match self.has_reason(now) {
            true => Some(now + rng.u64(200..20_000)),
            false => self.asleep_until().map(|at| at.max(now + 1)),
        }
    }

    /// When the process will have a [reason](Process::has_reason) even if nothing happens.
    pub(crate) fn asleep_until(&self) -> Option<Nanos> {
        let program = match self.activity {
            Activity::Computing(until) => Some(until),
            _ => None,
        };
        self.driven().filter_map(|state| state.asleep_until).chain(program).min()
    }

    /// The groups with unfinished work, and the group for which the program waits.
    fn driven(&self) -> impl Iterator<Item = &GroupState> {
        let own = self.activity.group();
        let groups = self.groups.iter().enumerate().filter(move |(group, state)| {
            Some(*group) == own || state.member.as_ref().is_some_and(Member::is_busy)
        });
        groups.map(|(_, state)| state)
    }

    /// Drives a group's background work. Returns whether its asynchronous calls are complete; with
    /// `messages`, also its messages.
    fn drive_queue(&mut self, group: usize, view: &View, messages: bool) -> bool {
        let state = &mut self.groups[group];
        let Some(member) = &mut state.member else { return true };
        let is_complete = |member: &Member<SimStream>| match messages {
            true => !member.is_busy(),
            false => !member.has_calls(),
        };
        if state.asleep_until.is_none() && !is_complete(member) {
            let progress = member.progress(view.network.instant());
            if progress == Progress::Stuck {
                state.fall_asleep(view);
            }
        }
        let state = &self.groups[group];
        let complete =
            state.asleep_until.is_none() && state.member.as_ref().is_none_or(is_complete);
        self.look_at_outcomes(group, view);
        complete
    }

    /// Records the asynchronous calls and messages that have ended.
    fn look_at_outcomes(&mut self, group: usize, view: &View) {
        while let Some((index, started, outcome)) = self.groups[group].unfinished.front() {
            let Some((result, own)) = outcome.take() else { break };
            let (index, started) = (*index, *started);
            self.groups[group].unfinished.pop_front();
            self.record(view, group, RecordKind::of_call(index, own), started, false, result);
        }
        for (index, side, started, posted) in std::mem::take(&mut self.groups[group].posted) {
            match posted.take() {
                Some((result, bytes)) => {
                    let peer = result.as_ref().ok().copied();
                    let kind = RecordKind::Message { index, side, peer, bytes };
                    self.record(view, group, kind, started, false, result.map(drop));
                }
                None => self.groups[group].posted.push((index, side, started, posted)),
            }
        }
    }

    /// Runs the program until it must wait.
    fn run_program(&mut self, view: &View) {
        while self.ended.is_none() {
            match &self.activity {
                Activity::Computing(until) if *until > view.network.now() => return,
                Activity::Computing(_) => self.activity = Activity::Next,
                Activity::Next => self.begin(view),
                Activity::Waiting { group } => {
                    let group = *group;
                    if !self.drive_queue(group, view, true) {
                        return;
                    }
                    self.activity = Activity::Next;
                }
                Activity::Calling { group, .. } | Activity::Closing { group, .. } => {
                    let group = *group;
                    let messages = matches!(self.activity, Activity::Closing { .. });
                    if !self.drive_queue(group, view, messages) {
                        return;
                    }
                    let over = self.go_on(group, view);
                    self.look_at_outcomes(group, view);
                    if !over {
                        return;
                    }
                }
            }
            if !view.scenario.goes_on && self.groups.iter().any(|state| state.failed) {
                self.end(view.network.now(), Ending::Code(1));
            }
        }
    }

    fn begin(&mut self, view: &View) {
        let Some(instruction) = view.scenario.programs[self.rank].get(self.at) else {
            let failed = self.groups.iter().any(|state| state.failed);
            return self.end(view.network.now(), Ending::Code(i32::from(failed)));
        };
        self.at += 1;
        match *instruction {
            Instruction::Compute(time) => {
                self.activity = Activity::Computing(view.network.now() + time)
            }
            Instruction::Wait { group } => self.activity = Activity::Waiting { group },
            Instruction::Close { group } => {
                self.activity = Activity::Closing { group, started: view.network.now() };
            }
            Instruction::Post { messages: index, side } => {
                let messages = &view.scenario.messages[index];
                let state = &mut self.groups[messages.group];
                let Some(member) = &mut state.member else { return };
                let posted = member.post(messages.order(self.rank, side), view.network.instant());
                state.posted.push((index, side, view.network.now(), posted));
                state.wake(view);
                self.look_at_outcomes(messages.group, view);
            }
            Instruction::Call { call: index, blocking } => {
                let call = &view.scenario.calls[index];
                let buffers = call.buffers(self.rank, view.scenario.world_size);
                let order = call.order(self.rank, view.scenario.world_size, &buffers);
                let group = call.group;
                let state = &mut self.groups[group];
                let Some(member) = &mut state.member else { return };
                match member.collective(&order) {
                    Ok(collective) if blocking => {
                        state.wake(view);
                        let started = view.network.now();
                        self.activity =
                            Activity::Calling { group, call: index, started, collective };
                    }
                    Ok(collective) => {
                        let outcome = member.submit(collective);
                        state.unfinished.push_back((index, view.network.now(), outcome));
                        state.wake(view);
                    }
                    Err(error) => {
                        let kind = RecordKind::Call { index, buffer: None };
                        self.record(view, group, kind, view.network.now(), true, Err(error));
                    }
                }
            }
        }
    }

    /// Continues the blocking call, or the closing of the group. Returns whether it has ended.
    fn go_on(&mut self, group: usize, view: &View) -> bool {
        let state = &mut self.groups[group];
        let Some(member) = &mut state.member else { return true };
        if state.asleep_until.is_some() {
            return false;
        }
        match &mut self.activity {
            Activity::Calling { collective, started, .. } => {
                let started = *started;
                let result = match member.step(collective, view.network.instant()) {
                    Ok(Progress::Done) => Ok(()),
                    Ok(Progress::Moved) => return false,
                    Ok(Progress::Stuck) => {
                        state.fall_asleep(view);
                        return false;
                    }
                    Err(error) => Err(error),
                };
                let Activity::Calling { call, collective, .. } =
                    std::mem::replace(&mut self.activity, Activity::Next)
                else {
                    return true;
                };
                self.record(
                    view,
                    group,
                    RecordKind::of_call(call, collective.ended()),
                    started,
                    true,
                    result,
                );
            }
            Activity::Closing { started, .. } => {
                let started = *started;
                let now = view.network.instant();
                let begun = view.network.instant_at(started);
                let result = match state.closing_since {
                    None => member.close().and_then(|()| member.closed(begun, now)),
                    Some(_) => member.closed(begun, now),
                };
                state.closing_since.get_or_insert(view.network.now());
                let result = match result {
                    Ok(true) => {
                        state.closed = true;
                        Ok(())
                    }
                    Ok(false) => {
                        state.fall_asleep(view);
                        return false;
                    }
                    Err(error) => Err(error),
                };
                self.activity = Activity::Next;
                self.record(view, group, RecordKind::End, started, true, result);
            }
            Activity::Next | Activity::Computing(_) | Activity::Waiting { .. } => {}
        }
        true
    }

    fn record(
        &mut self,
        view: &View,
        group: usize,
        kind: RecordKind,
        started: Nanos,
        blocking: bool,
        result: drumline_engine::Result<()>,
    ) {
        view.network.note(|| match (&result, &kind) {
            (Ok(()), RecordKind::Call { index, .. }) => {
                format!("rank {}: done: {:?}", self.rank, view.scenario.calls[*index])
            }
            (Ok(()), RecordKind::Message { index, side, .. }) => {
                format!("rank {}: {side:?} of messages {index} is done", self.rank)
            }
            (Ok(()), RecordKind::End) => format!("rank {}: group {group} is closed", self.rank),
            (Err(error), _) => format!("rank {}: failed: {error}", self.rank),
        });
        self.groups[group].failed |= result.is_err();
        let (ended, error) = (view.network.now(), result.err());
        self.records.push(Record { group, kind, started, blocking, ended, error });
    }
}

impl RecordKind {
    fn of_call(index: usize, mut own: Own) -> RecordKind {
        own.overwrite_input();
        let bytes = own.bytes().to_vec();
        RecordKind::Call { index, buffer: Some((own, bytes)) }
    }
}

impl Activity {
    /// The group that the program drives itself.
    fn group(&self) -> Option<usize> {
        match self {
            Activity::Calling { group, .. }
            | Activity::Waiting { group }
            | Activity::Closing { group, .. } => Some(*group),
            Activity::Next | Activity::Computing(_) => None,
        }
    }
}

impl GroupState {
    fn has_reason(&self, now: Nanos) -> bool {
        let Some(member) = &self.member else { return true };
        self.asleep_until.is_none_or(|until| now >= until || member.has_news())
    }

    /// Ends a sleep if there is a reason.
    fn wake_up(&mut self, view: &View) {
        if self.has_reason(view.network.now()) {
            self.wake(view);
        }
    }

    /// Ends a sleep. The process then looks at the group again.
    pub(crate) fn wake(&mut self, view: &View) {
        if self.asleep_until.take().is_some()
            && let Some(member) = &mut self.member
        {
            member.end_sleep(view.network.instant());
        }
    }

    /// Sleeps until there is news, or until the time that the member asks for.
    fn fall_asleep(&mut self, view: &View) {
        let Some(member) = &mut self.member else { return };
        self.asleep_until =
            member.prepare_sleep(view.network.instant()).map(|at| view.network.nanos(at));
    }
}
