//! One rank's process: its members of the groups, and where its program stands.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use drumline_engine::Error;

use crate::member::{Member, Outcome, Posted, Prepared, Progress, Side};
use drumline_launch::Ending;
use fastrand::Rng;

use crate::{
    network::{Nanos, Stream},
    plan::{Instruction, Plan},
};

/// What every process can see.
#[derive(Clone, Copy, Debug)]
pub(crate) struct World<'a> {
    pub(crate) plan: &'a Plan,
    pub(crate) epoch: Epoch,
    pub(crate) now: Nanos,
    pub(crate) trace: bool,
}

impl World<'_> {
    fn instant(&self) -> Instant {
        self.epoch.instant(self.now)
    }

    /// Tells what happens, if anybody wants to know.
    #[expect(clippy::print_stderr, reason = "the trace is for people")]
    pub(crate) fn note(&self, text: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:>12.3} ms  {}", self.now as f64 / 1e6, text());
        }
    }
}

/// A simulated process.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) rank: usize,
    /// By group.
    pub(crate) lanes: Vec<Lane>,
    at: usize,
    doing: Doing,
    pub(crate) records: Vec<Record>,
    pub(crate) steps: u32,
    pub(crate) stopped_until: Nanos,
    /// It works until then and looks at nothing.
    pub(crate) busy_until: Nanos,
    /// When it will look again of its own accord.
    pub(crate) next_look: Option<Nanos>,
    pub(crate) killed: Arc<AtomicU64>,
    pub(crate) ended: Option<(Nanos, Ending)>,
    /// Messages that were under way when it ended: in which group, which side, since when.
    pub(crate) abandoned: Vec<(usize, Side, Nanos)>,
}

/// A member of a group, and whether anybody drives it at the moment.
#[derive(Debug)]
pub(crate) struct Lane {
    pub(crate) member: Option<Member<Stream>>,
    asleep_until: Option<Nanos>,
    unfinished: VecDeque<(usize, Nanos, Outcome)>,
    /// Messages that are under way.
    posted: Vec<(usize, Side, Nanos, Posted)>,
    pub(crate) failed: bool,
    pub(crate) closing_since: Option<Nanos>,
    pub(crate) closed: bool,
}

#[derive(Debug)]
enum Doing {
    Next,
    Computing(Nanos),
    Calling { group: usize, call: usize, started: Nanos, collective: Prepared },
    Waiting { group: usize },
    Closing { group: usize, started: Nanos },
}

/// What became of something that a process has called.
#[derive(Debug)]
pub(crate) struct Record {
    pub(crate) group: usize,
    pub(crate) what: What,
    pub(crate) started: Nanos,
    pub(crate) blocking: bool,
    pub(crate) ended: Nanos,
    pub(crate) error: Option<Error>,
}

#[derive(Debug)]
pub(crate) enum What {
    /// A call with that index in the plan; its buffer, which nobody may touch from now on, and
    /// what it held.
    Call { index: usize, buffer: Option<(Prepared, Vec<u8>)> },
    /// A message of those with that index; with whom, if it was not in vain, and what it held.
    Message { index: usize, side: Side, peer: Option<usize>, bytes: Vec<u8> },
    /// The end of the group.
    End,
}

impl Record {
    /// The index of the call, if it is one.
    pub(crate) fn call(&self) -> Option<usize> {
        match self.what {
            What::Call { index, .. } => Some(index),
            What::Message { .. } | What::End => None,
        }
    }

    /// What the buffer of the call held.
    pub(crate) fn bytes(&self) -> Option<&Vec<u8>> {
        match &self.what {
            What::Call { buffer, .. } => buffer.as_ref().map(|(_, bytes)| bytes),
            What::Message { .. } | What::End => None,
        }
    }
}

/// The clock of the virtual world, for code that wants instants.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Epoch(pub(crate) Instant);

impl Epoch {
    pub(crate) fn instant(self, at: Nanos) -> Instant {
        self.0 + Duration::from_nanos(at)
    }

    fn nanos(self, at: Instant) -> Nanos {
        at.saturating_duration_since(self.0).as_nanos() as Nanos
    }
}

impl Process {
    pub(crate) fn new(
        rank: usize,
        members: Vec<Member<Stream>>,
        killed: Arc<AtomicU64>,
    ) -> Process {
        let lane = |member| Lane {
            member: Some(member),
            asleep_until: None,
            unfinished: VecDeque::new(),
            posted: Vec::new(),
            failed: false,
            closing_since: None,
            closed: false,
        };
        Process {
            rank,
            lanes: members.into_iter().map(lane).collect(),
            at: 0,
            doing: Doing::Next,
            records: Vec::new(),
            steps: 0,
            stopped_until: 0,
            busy_until: 0,
            next_look: None,
            killed,
            ended: None,
            abandoned: Vec::new(),
        }
    }

    /// The process ends. The kernel closes what it leaves open.
    pub(crate) fn end(&mut self, now: Nanos, ending: Ending) {
        if self.ended.is_some() {
            return;
        }
        if !matches!(ending, Ending::Code(0 | 1)) {
            self.killed.store(1, Ordering::Relaxed);
        }
        self.ended = Some((now, ending));
        self.doing = Doing::Next;
        for (group, lane) in self.lanes.iter_mut().enumerate() {
            lane.unfinished.clear();
            let posted = lane.posted.drain(..).map(|(_, side, started, _)| (group, side, started));
            self.abandoned.extend(posted);
            lane.member = None;
        }
    }

    /// Whether there is anything to do.
    pub(crate) fn has_reason(&self, now: Nanos) -> bool {
        let program = match self.doing {
            Doing::Next => true,
            Doing::Computing(until) => until <= now,
            Doing::Calling { .. } | Doing::Waiting { .. } | Doing::Closing { .. } => false,
        };
        program || self.driven().any(|lane| lane.has_reason(now))
    }

    /// Does what can be done now. Returns when there is something to do again even if nothing
    /// happens; `None` for never.
    pub(crate) fn step(&mut self, world: &World<'_>, rng: &mut Rng) -> Option<Nanos> {
        self.steps += 1;
        for lane in &mut self.lanes {
            lane.wake_up(world);
        }
        // The progress thread and the program take turns in any order.
        let program_first = rng.bool();
        if program_first {
            self.run_program(world);
        }
        let own = self.doing.group();
        for group in 0..self.lanes.len() {
            if Some(group) != own && self.ended.is_none() {
                self.drive_queue(group, world, true);
            }
        }
        if !program_first {
            self.run_program(world);
        }
        self.next_step(world.now, rng)
    }

    /// When there is something to do even if nothing happens.
    fn next_step(&self, now: Nanos, rng: &mut Rng) -> Option<Nanos> {
        if self.ended.is_some() {
            return None;
        }
        match self.has_reason(now) {
            true => Some(now + rng.u64(200..20_000)),
            false => self.asleep_until().map(|at| at.max(now + 1)),
        }
    }

    /// When there is something to do of which there is no [reason](Process::has_reason) yet.
    pub(crate) fn asleep_until(&self) -> Option<Nanos> {
        let program = match self.doing {
            Doing::Computing(until) => Some(until),
            _ => None,
        };
        self.driven().filter_map(|lane| lane.asleep_until).chain(program).min()
    }

    /// The groups that have something to do, and that which the program waits for.
    fn driven(&self) -> impl Iterator<Item = &Lane> {
        let own = self.doing.group();
        let lanes = self.lanes.iter().enumerate().filter(move |(group, lane)| {
            Some(*group) == own || lane.member.as_ref().is_some_and(Member::is_busy)
        });
        lanes.map(|(_, lane)| lane)
    }

    /// Brings what a group has to do in the background on. Whether its calls are complete, and its
    /// messages, if those are asked for.
    fn drive_queue(&mut self, group: usize, world: &World<'_>, messages: bool) -> bool {
        let lane = &mut self.lanes[group];
        let Some(member) = &mut lane.member else { return true };
        let is_complete = |member: &Member<Stream>| match messages {
            true => !member.is_busy(),
            false => !member.has_calls(),
        };
        if lane.asleep_until.is_none() && !is_complete(member) {
            let progress = member.progress(world.instant());
            if progress == Progress::Stuck {
                lane.fall_asleep(world);
            }
        }
        let lane = &self.lanes[group];
        let complete = lane.asleep_until.is_none() && lane.member.as_ref().is_none_or(is_complete);
        self.look_at_outcomes(group, world);
        complete
    }

    /// Writes down what has ended in the background.
    fn look_at_outcomes(&mut self, group: usize, world: &World<'_>) {
        while let Some((index, started, outcome)) = self.lanes[group].unfinished.front() {
            let Some((result, collective)) = outcome.take() else { break };
            let (index, started) = (*index, *started);
            self.lanes[group].unfinished.pop_front();
            self.record(world, group, What::of_call(index, collective), started, false, result);
        }
        for (index, side, started, posted) in std::mem::take(&mut self.lanes[group].posted) {
            match posted.take() {
                Some((result, bytes)) => {
                    let peer = result.as_ref().ok().copied();
                    let what = What::Message { index, side, peer, bytes };
                    self.record(world, group, what, started, false, result.map(drop));
                }
                None => self.lanes[group].posted.push((index, side, started, posted)),
            }
        }
    }

    /// Runs the program until it has to wait.
    fn run_program(&mut self, world: &World<'_>) {
        while self.ended.is_none() {
            match &self.doing {
                Doing::Computing(until) if *until > world.now => return,
                Doing::Computing(_) => self.doing = Doing::Next,
                Doing::Next => self.begin(world),
                Doing::Waiting { group } => {
                    let group = *group;
                    if !self.drive_queue(group, world, true) {
                        return;
                    }
                    self.doing = Doing::Next;
                }
                Doing::Calling { group, .. } | Doing::Closing { group, .. } => {
                    let group = *group;
                    let messages = matches!(self.doing, Doing::Closing { .. });
                    if !self.drive_queue(group, world, messages) {
                        return;
                    }
                    let over = self.go_on(group, world);
                    self.look_at_outcomes(group, world);
                    if !over {
                        return;
                    }
                }
            }
            if !world.plan.goes_on && self.lanes.iter().any(|lane| lane.failed) {
                self.end(world.now, Ending::Code(1));
            }
        }
    }

    fn begin(&mut self, world: &World<'_>) {
        let Some(instruction) = world.plan.scripts[self.rank].get(self.at) else {
            let failed = self.lanes.iter().any(|lane| lane.failed);
            return self.end(world.now, Ending::Code(i32::from(failed)));
        };
        self.at += 1;
        match *instruction {
            Instruction::Compute(time) => self.doing = Doing::Computing(world.now + time),
            Instruction::Wait { group } => self.doing = Doing::Waiting { group },
            Instruction::Close { group } => {
                self.doing = Doing::Closing { group, started: world.now };
            }
            Instruction::Post { messages: index, side } => {
                let messages = &world.plan.messages[index];
                let lane = &mut self.lanes[messages.group];
                let Some(member) = &mut lane.member else { return };
                let posted = member.post(messages.order(self.rank, side), world.instant());
                lane.posted.push((index, side, world.now, posted));
                lane.wake(world);
                self.look_at_outcomes(messages.group, world);
            }
            Instruction::Call { call: index, blocking } => {
                let call = &world.plan.calls[index];
                let buffers = call.buffers(self.rank, world.plan.world_size);
                let order = call.order(self.rank, world.plan.world_size, &buffers);
                let group = call.group;
                let lane = &mut self.lanes[group];
                let Some(member) = &mut lane.member else { return };
                match member.collective(&order) {
                    Ok(collective) if blocking => {
                        lane.wake(world);
                        let started = world.now;
                        self.doing = Doing::Calling { group, call: index, started, collective };
                    }
                    Ok(collective) => {
                        let outcome = member.submit(collective);
                        lane.unfinished.push_back((index, world.now, outcome));
                        lane.wake(world);
                    }
                    Err(error) => {
                        let what = What::Call { index, buffer: None };
                        self.record(world, group, what, world.now, true, Err(error));
                    }
                }
            }
        }
    }

    /// Goes on with the blocking call, or the end of the group. Whether that is over.
    fn go_on(&mut self, group: usize, world: &World<'_>) -> bool {
        let lane = &mut self.lanes[group];
        let Some(member) = &mut lane.member else { return true };
        if lane.asleep_until.is_some() {
            return false;
        }
        match &mut self.doing {
            Doing::Calling { collective, started, .. } => {
                let started = *started;
                let result = match member.step(collective, world.instant()) {
                    Ok(Progress::Done) => Ok(()),
                    Ok(Progress::Moved) => return false,
                    Ok(Progress::Stuck) => {
                        lane.fall_asleep(world);
                        return false;
                    }
                    Err(error) => Err(error),
                };
                let Doing::Calling { call, collective, .. } =
                    std::mem::replace(&mut self.doing, Doing::Next)
                else {
                    return true;
                };
                self.record(world, group, What::of_call(call, collective), started, true, result);
            }
            Doing::Closing { started, .. } => {
                let started = *started;
                let (begun, now) = (world.epoch.instant(started), world.instant());
                let result = match lane.closing_since {
                    None => member.close().and_then(|()| member.closed(begun, now)),
                    Some(_) => member.closed(begun, now),
                };
                lane.closing_since.get_or_insert(world.now);
                let result = match result {
                    Ok(true) => {
                        lane.closed = true;
                        Ok(())
                    }
                    Ok(false) => {
                        lane.fall_asleep(world);
                        return false;
                    }
                    Err(error) => Err(error),
                };
                self.doing = Doing::Next;
                self.record(world, group, What::End, started, true, result);
            }
            Doing::Next | Doing::Computing(_) | Doing::Waiting { .. } => {}
        }
        true
    }

    fn record(
        &mut self,
        world: &World<'_>,
        group: usize,
        what: What,
        started: Nanos,
        blocking: bool,
        result: drumline_engine::Result<()>,
    ) {
        world.note(|| match (&result, &what) {
            (Ok(()), What::Call { index, .. }) => {
                format!("rank {}: done: {:?}", self.rank, world.plan.calls[*index])
            }
            (Ok(()), What::Message { index, side, .. }) => {
                format!("rank {}: {side:?} of messages {index} is done", self.rank)
            }
            (Ok(()), What::End) => format!("rank {}: group {group} is closed", self.rank),
            (Err(error), _) => format!("rank {}: failed: {error}", self.rank),
        });
        self.lanes[group].failed |= result.is_err();
        let (ended, error) = (world.now, result.err());
        self.records.push(Record { group, what, started, blocking, ended, error });
    }
}

impl What {
    fn of_call(index: usize, mut collective: Prepared) -> What {
        collective.overwrite_input();
        let bytes = collective.bytes().to_vec();
        What::Call { index, buffer: Some((collective, bytes)) }
    }
}

impl Doing {
    /// The group that the program itself drives.
    fn group(&self) -> Option<usize> {
        match self {
            Doing::Calling { group, .. }
            | Doing::Waiting { group }
            | Doing::Closing { group, .. } => Some(*group),
            Doing::Next | Doing::Computing(_) => None,
        }
    }
}

impl Lane {
    fn has_reason(&self, now: Nanos) -> bool {
        let Some(member) = &self.member else { return true };
        self.asleep_until.is_none_or(|until| now >= until || member.has_news())
    }

    /// Ends a sleep if there is a reason.
    fn wake_up(&mut self, world: &World<'_>) {
        if self.has_reason(world.now) {
            self.wake(world);
        }
    }

    fn wake(&mut self, world: &World<'_>) {
        if self.asleep_until.take().is_some()
            && let Some(member) = &mut self.member
        {
            member.end_sleep(world.instant());
        }
    }

    /// Somebody in its own process wants it to look.
    pub(crate) fn interrupt(&mut self, world: &World<'_>) {
        self.wake(world);
    }

    /// Sleeps until there is news, or until the member or the caller wants to look again.
    fn fall_asleep(&mut self, world: &World<'_>) {
        let Some(member) = &mut self.member else { return };
        self.asleep_until = member.prepare_sleep(world.instant()).map(|at| world.epoch.nanos(at));
    }
}
