//! The life of this host in the job: waits for everything at once, and does what the membership says.

use std::time::{Duration, Instant};

use drumline::{Error as StoreError, Section, steps::keys};

use super::{
    background::{Arrival, Background, Heard, Message, Request, Round, Told},
    keys::{HOST, WORLD, key},
    steps::{self, Holding},
};
use crate::{
    Ending, Error, Result,
    attempt::{Attempt, Ended},
    clock::milliseconds_since_1970,
    ending::{signal_exit_code, signal_name},
    events::Source,
    job::Meeting,
    launch::Launch,
    lease::BootTime,
    listener::{Listener, TURN},
    membership::{
        self, Action, End, Event, Failure, Host, How, Local, Membership, Named, Outcome, Plan,
        Report, TEXT_BYTES_MAX, Terms, Timing, Value as _, View, Why, WorldPlan,
    },
    outcome,
    output::{self, Patience, say},
    prefix::host_name,
    report,
    restarts::Next,
    stores::{Announcement, Stores},
    supervisor,
    tell::tell,
    world::World,
};

/// Runs this host's part of the job, and returns the exit code, which is the same on every host.
pub(crate) fn run<'l>(
    launch: &Launch<'_>,
    meeting: &Meeting,
    listener: &mut Listener<'l>,
) -> Result<u8> {
    if !launch.secret.is_shared() {
        return Err(Error::meeting(
            "the hosts of a job know each other by a secret, and this one has none: make one with `drumline secret \
             FILE`, copy it to every host, and start each launcher with DRUMLINE_SECRET_FILE=FILE",
        ));
    }
    let deadline = Instant::now() + launch.job.joining.join_timeout;
    let background = Background::start(launch, meeting, deadline)?;
    listener.events.add(&background, Source::Hosts)?;
    let session = Session {
        launch,
        meeting,
        listener,
        background,
        began: BootTime::now(),
        arrive_at: None,
        arrival: None,
        membership: None,
        is_out: false,
        told: None,
        missed_at: None,
        unreached: None,
        stage: Stage::Idle,
        attempts: 0,
        outcome: outcome::Outcome::default(),
        kept: None,
        end: None,
    };
    session.run()
}

struct Session<'s, 'j, 'l> {
    launch: &'s Launch<'j>,
    meeting: &'s Meeting,
    listener: &'s mut Listener<'l>,
    background: Background,
    /// The membership counts its time from here.
    began: BootTime,
    /// When to ask for a number.
    arrive_at: Option<Duration>,
    arrival: Option<Arrival>,
    membership: Option<Membership>,
    /// Whether a round is under way.
    is_out: bool,
    /// The last report that was written, without its beat.
    told: Option<Vec<u8>>,
    /// When a round last failed. What it wrote may come later than what was written since.
    missed_at: Option<Instant>,
    /// Since when the store does not answer.
    unreached: Option<Instant>,
    stage: Stage,
    /// How many worlds have run on this host.
    attempts: u32,
    /// How the last of them ended.
    outcome: outcome::Outcome,
    /// The stores of the last world: ranks of other hosts may still use them.
    kept: Option<Stores>,
    end: Option<End>,
}

/// What this host does at the moment.
enum Stage {
    /// No workers.
    Idle,
    /// Waits until the first host has told where the ranks meet.
    Awaits(Box<WorldPlan>, Instant),
    /// Workers run.
    Runs(Box<Running>),
    /// Workers have ended, and the rest of their output is being read. The patience is that of somebody who has been
    /// told to end.
    Prints(Box<Ended>, How, Patience),
}

struct Running {
    attempt: Attempt,
    /// Whether the membership knows that all workers run.
    has_started: bool,
    /// Since when it is known that a worker has failed.
    failed: Option<Instant>,
    /// Whether the membership knows.
    has_told: bool,
    /// Ranks that are held, or are about to be.
    holding: Option<Holding>,
    /// Whether the membership knows that the ranks go on when others die.
    regroups: bool,
}

/// How long the store may be out of reach before a host whose store ends with another host gives up. A connection is
/// tried again until then.
const UNREACHED_MAX: Duration = Duration::from_secs(5);

/// The pause before another attempt to get a number.
const ARRIVE_EVERY: Duration = Duration::from_millis(200);

/// How long a host tries to reach the stores of a world.
const MEET_MAX: Duration = Duration::from_secs(10);

/// How long the other hosts wait for the last words of a worker that has failed. A process that it has started may keep
/// its stderr open.
const LAST_WORDS_MAX: Duration = Duration::from_millis(200);

/// How late a write may come that nobody waits for any more.
const LATE_MAX: Duration = Duration::from_secs(60);

/// How often ranks are asked whether they are held.
const LOOK_EVERY: Duration = Duration::from_millis(10);

impl Session<'_, '_, '_> {
    fn run(mut self) -> Result<u8> {
        loop {
            let ready = self.listener.events.wait(Some(self.timeout()))?;
            self.hear_signals();
            // The keeper kills workers when the lease has run out. They have not failed then.
            let deadline = self.membership.as_ref().and_then(Membership::deadline);
            if deadline.is_some_and(|at| at <= self.now()) {
                self.handle(Event::Tick);
            }
            if let Stage::Runs(running) = &mut self.stage {
                let turned = running.attempt.turn(self.launch, &ready);
                self.go_on_after(turned);
            }
            while let Some(message) = self.background.told() {
                self.hear(message)?;
            }
            self.watch_workers()?;
            let is_tired = match &mut self.stage {
                Stage::Prints(.., patience) => self.listener.is_told() && patience.is_over(),
                _ => false,
            };
            if ready.contains(&Source::Output) || is_tired {
                self.have_printed()?;
            }
            if let (Some(end), Stage::Idle) = (&self.end, &self.stage) {
                return Ok(self.finish(end));
            }
            self.ask();
        }
    }

    fn now(&self) -> Duration {
        BootTime::now().since(self.began)
    }

    /// The time until something is due.
    fn timeout(&self) -> Duration {
        let now = self.now();
        let due = self.membership.as_ref().into_iter().flat_map(|membership| {
            let poll = (!self.is_out).then(|| membership.poll_at());
            [poll, membership.deadline()].into_iter().flatten().map(|at| at.saturating_sub(now))
        });
        let workers = match &self.stage {
            Stage::Runs(running) if running.waits() => Some(LOOK_EVERY),
            Stage::Runs(running) => Some(running.attempt.timeout()),
            Stage::Prints(..) => self.listener.is_told().then_some(TURN),
            Stage::Idle | Stage::Awaits(..) => None,
        };
        let arrive = self.arrive_at.filter(|_| matches!(self.stage, Stage::Idle));
        let arrive = arrive.map(|at| at.saturating_sub(now));
        due.chain(workers).chain(arrive).min().unwrap_or(Duration::from_secs(3600))
    }

    fn hear_signals(&mut self) {
        let attempt = match &mut self.stage {
            Stage::Runs(running) => Some(&mut running.attempt),
            _ => None,
        };
        let Some(signal) = self.listener.hear_signals(attempt) else { return };
        match &self.membership {
            Some(_) => {
                self.handle(Event::Local(Local::Leaving(signal.as_raw())));
                // It has no workers whose end would tell that it can leave.
                if let Stage::Awaits(..) = self.stage {
                    self.have_ended(Outcome::NEVER_RAN);
                }
            }
            // Nobody knows of this host yet.
            None => self.end = Some(End::Left(signal.as_raw())),
        }
    }

    /// Begins a round when one is due.
    fn ask(&mut self) {
        let now = self.now();
        // Workers that still run, or print, belong to this host's last number.
        if self.arrive_at.is_some_and(|at| at <= now) && matches!(self.stage, Stage::Idle) {
            self.arrive_at = None;
            self.background.ask(Request::Arrive);
        }
        let Some(membership) = &mut self.membership else { return };
        if self.is_out || membership.poll_at() > now {
            return;
        }
        let poll = membership.poll(now);
        let report = Report { beat: 0, ..poll.report.clone() }.encode();
        let may_be_old = self.missed_at.is_some_and(|at| at.elapsed() < LATE_MAX);
        let is_news = may_be_old || self.told.as_ref() != Some(&report);
        self.background.ask(Request::Round(Round {
            report: is_news.then(|| report.clone()),
            beat: poll.report.beat,
            counts: poll.count,
            hosts: poll.hosts,
            reports: poll.reports,
            announcement_of: match &self.stage {
                Stage::Awaits(world, _) => Some(world.world),
                _ => None,
            },
        }));
        self.told = Some(report);
        self.is_out = true;
    }

    fn hear(&mut self, message: Message) -> Result<()> {
        match message {
            Message::Opened(opened) => {
                opened?;
                self.arrive_at = Some(Duration::ZERO);
            }
            Message::Arrived(Ok(arrival)) => self.arrive(arrival),
            Message::Arrived(Err(error)) => {
                self.miss(error)?;
                self.arrive_at = Some(self.now() + ARRIVE_EVERY);
            }
            Message::Heard(Ok(heard)) => {
                self.is_out = false;
                if let Some(since) = self.unreached.take() {
                    tracing::info!("the store answers again after {:?}", since.elapsed());
                }
                self.polled(heard)?;
            }
            Message::Planned(Ok(plan)) => {
                if let Some(plan) = plan {
                    let plan = self.decode_plan(&plan)?;
                    self.handle(Event::Planned(plan));
                }
            }
            Message::Heard(Err(error)) => {
                self.is_out = false;
                self.missed_at = Some(Instant::now());
                self.miss(error)?;
            }
            Message::Planned(Err(error)) => self.miss(error)?,
        }
        Ok(())
    }

    /// This host has got a number: it says who it is.
    fn arrive(&mut self, arrival: Arrival) {
        let job = self.launch.job;
        let host = Host {
            terms: Terms {
                version: env!("CARGO_PKG_VERSION").into(),
                run_id: self.launch.run_id.clone(),
                backend: backend(self.meeting).into(),
                hosts: job.hosts,
                restarts: job.restarts,
            },
            node_rank: job.joining.node_rank,
            ranks: job.nproc_per_node.get(),
            name: host_name(),
            address: arrival.address.to_string(),
            keeps_store: arrival.is_hosted,
        };
        tracing::info!(
            "this host is number {} at {}, and reached at {}",
            arrival.number,
            arrival.name,
            arrival.address
        );
        self.background.ask(Request::Write(key(HOST, arrival.number), host.encode()));
        let timing = Timing::of(&job.joining);
        let timing = Timing {
            poll: timing.poll.max(arrival.beat_every),
            poll_waiting: timing.poll_waiting.max(arrival.beat_every / 2),
            ..timing
        };
        self.membership = Some(Membership::new(arrival.number, host, timing));
        self.arrival = Some(arrival);
        self.told = None;
    }

    fn polled(&mut self, heard: Heard) -> Result<()> {
        let readable = |host, bytes: &[u8]| {
            let key = format!("host/{host}");
            (host, Host::decode(&key, bytes).map_err(|error| error.to_string()))
        };
        let report = |(host, told): (u64, Option<Told>)| {
            let report = told.and_then(|(bytes, beat)| {
                let report = Report::decode(&format!("report/{host}"), &bytes);
                let report = report.inspect_err(|error| tracing::warn!("{error}")).ok()?;
                Some(Report { beat, ..report })
            });
            (host, report)
        };
        let plan = heard.plan.as_deref().map(|plan| self.decode_plan(plan)).transpose()?;
        let view = View {
            began: heard.began.since(self.began),
            plan,
            count: heard.count,
            hosts: heard.hosts.iter().map(|(host, bytes)| readable(*host, bytes)).collect(),
            reports: heard.reports.into_iter().map(report).collect(),
        };
        self.handle(Event::Polled(view));
        let lease = self.lease();
        if let (Stage::Runs(running), Some(lease)) = (&mut self.stage, lease) {
            let extended = running.attempt.keeper.lease.run_out_at(lease);
            self.go_on_after(extended);
        }
        if let Some(text) = heard.announcement {
            self.meet_at(&text);
        }
        Ok(())
    }

    fn decode_plan(&self, bytes: &[u8]) -> Result<Plan> {
        Plan::decode("plan", bytes).map_err(|error| Error::meeting(error.to_string()))
    }

    fn lease(&self) -> Option<BootTime> {
        let lease = self.membership.as_ref()?.lease()?;
        Some(self.began.after(lease))
    }

    /// The store does not answer. If it ended with another host, the job ends.
    fn miss(&mut self, error: StoreError) -> Result<()> {
        let since = self.unreached.get_or_insert_with(|| {
            tracing::warn!("where the hosts meet does not answer: {error}");
            Instant::now()
        });
        let may_return = matches!(self.meeting, Meeting::Etcd(_) | Meeting::File(_));
        let patience = match may_return {
            true => self.launch.job.joining.join_timeout,
            false => UNREACHED_MAX,
        };
        if since.elapsed() < patience {
            return Ok(());
        }
        let place = self.arrival.as_ref().map_or("", |arrival| &arrival.name);
        Err(Error::meeting(match may_return {
            true => format!("{place} does not answer for {patience:?}: {error}"),
            false => format!(
                "the first host of the job is lost, and with it the store in which the hosts meet ({place}): {error}; \
                 look at the output there; over etcd or a file a job survives the loss of its first host"
            ),
        }))
    }

    /// Tells the membership what has happened, and does what it says.
    fn handle(&mut self, event: Event) {
        let now = self.now();
        let Some(membership) = &mut self.membership else { return };
        for action in membership.handle(now, event) {
            self.act(action);
        }
    }

    fn act(&mut self, action: Action) {
        match action {
            Action::WritePlan { expected, plan } => {
                let expected = expected.map(|plan| plan.encode());
                self.background.ask(Request::WritePlan { expected, plan: plan.encode() });
            }
            Action::Start(world) => self.start(world),
            Action::Hold => self.hold(),
            Action::StopAt(step) => self.stop_at(step),
            Action::Abandon(why) => self.abandon(&why),
            Action::Note(text) => say(&text),
            Action::Rejoin => {
                say("this host was cut off from the others, and joins anew");
                self.membership = None;
                if let Stage::Awaits(..) = self.stage {
                    self.stage = Stage::Idle;
                }
                self.arrive_at = Some(self.now());
            }
            Action::End(end) => self.end = Some(end),
        }
    }

    /// Starts the workers of a world, if this host is the first, or waits for word from the first.
    fn start(&mut self, world: WorldPlan) {
        self.kept = None;
        if world.place > 0 {
            self.stage = Stage::Awaits(Box::new(world), Instant::now());
            return;
        }
        let Some(arrival) = &self.arrival else { return };
        match self.launch.stores_of_first(arrival.address) {
            Ok((stores, announcement)) => {
                let text = announcement.to_text().into_bytes();
                self.background.ask(Request::Write(key(WORLD, world.world), text));
                self.start_workers(&world, stores);
            }
            Err(error) => self.cannot_start(world.first_rank(), &error),
        }
    }

    /// The first host has told where the ranks meet.
    fn meet_at(&mut self, text: &[u8]) {
        let Stage::Awaits(world, since) = &self.stage else { return };
        let (world, since) = (WorldPlan::clone(world), *since);
        let announcement = str::from_utf8(text).ok().and_then(Announcement::from_text);
        let Some(announcement) = announcement else {
            let error = Error::meeting("the first host does not say where the ranks meet");
            return self.cannot_start(world.first_rank(), &error);
        };
        let Some(arrival) = &self.arrival else { return };
        match self.launch.stores_at(&announcement, arrival.address) {
            Ok(stores) => self.start_workers(&world, stores),
            // The next round tries again.
            Err(error) if since.elapsed() < MEET_MAX => {
                tracing::info!("cannot reach the stores of the first host yet: {error}");
            }
            Err(error) => self.cannot_start(world.first_rank(), &error),
        }
    }

    fn start_workers(&mut self, plan: &WorldPlan, stores: Stores) {
        let Some(member) = plan.members.get(plan.place) else { return };
        let Some(lease) = self.lease().filter(|lease| !lease.left().is_zero()) else {
            // The membership says so, too.
            return self.have_ended(Outcome::NEVER_RAN);
        };
        let world = World {
            attempt: self.attempts,
            restart: plan.restart,
            first_rank: member.first_rank,
            local_size: member.ranks,
            size: plan.size,
            host: plan.place,
            hosts: plan.members.len(),
        };
        self.listener.ranks_run();
        let events = &self.listener.events;
        match Attempt::start(self.launch, world, stores, Some(lease), events) {
            Ok(attempt) => {
                self.attempts += 1;
                self.stage = Stage::Runs(Box::new(Running {
                    attempt,
                    has_started: false,
                    failed: None,
                    has_told: false,
                    holding: None,
                    regroups: false,
                }));
            }
            Err(error) => self.cannot_start(member.first_rank, &error),
        }
    }

    /// If a worker cannot be started, or the keeper is lost, all workers of this host are ended, and the world has
    /// failed.
    fn go_on_after(&mut self, done: Result<()>) {
        let Err(error) = done else { return };
        let Some(running) = self.take_running() else { return };
        running.attempt.abandon();
        let first_rank = running.attempt.world.first_rank;
        drop(running);
        self.cannot_start(first_rank, &error);
    }

    /// The workers that run. This host has none any more.
    fn take_running(&mut self) -> Option<Box<Running>> {
        match std::mem::replace(&mut self.stage, Stage::Idle) {
            Stage::Runs(running) => Some(running),
            other => {
                self.stage = other;
                None
            }
        }
    }

    /// The workers of this host cannot start: for the job that is a failure of the first of them.
    fn cannot_start(&mut self, first_rank: usize, error: &Error) {
        say(&error.to_string());
        let failure = Failure {
            rank: first_rank,
            local_rank: 0,
            pid: 0,
            ending: Ending::Code(error.exit_code().into()),
            has_only_heard: false,
            time: milliseconds_since_1970(),
            text: error.to_string(),
        };
        self.handle(Event::Local(Local::Failed(failure)));
        self.have_ended(Outcome { how: How::Failed, ..Outcome::NEVER_RAN });
    }

    fn have_ended(&mut self, outcome: Outcome) {
        self.stage = Stage::Idle;
        self.listener.no_rank_runs();
        self.handle(Event::Local(Local::Ended(outcome)));
    }

    fn hold(&mut self) {
        let Stage::Runs(running) = &mut self.stage else { return };
        match Holding::begin(&running.attempt) {
            Ok(Some(holding)) => running.holding = Some(holding),
            Ok(None) => self.handle(Event::Local(Local::Held(None))),
            Err(error) => {
                tracing::warn!("cannot hold the ranks: {error}");
                self.handle(Event::Local(Local::Held(None)));
            }
        }
    }

    fn stop_at(&mut self, step: u64) {
        let within = self.launch.job.policy.shutdown_timeout;
        let Stage::Runs(running) = &mut self.stage else { return };
        let stores = &running.attempt.stores;
        let makes_steps = stores.has_stepped(running.attempt.world.local_size);
        if !makes_steps || stores.tell(keys::STOP, &step.to_string()).is_err() {
            say(
                "a host joins the job: the ranks, which never call drumline.step, get SIGTERM and start again with it",
            );
            running.attempt.handle(supervisor::Event::Abandon { within });
        } else {
            say(&format!(
                "a host joins the job: all ranks stop before step {step} and start again with it"
            ));
        }
    }

    fn abandon(&mut self, why: &Why) {
        use supervisor::Event;
        let soon = Event::Abandon { within: self.launch.job.policy.kill_after };
        let (event, text) = match why {
            Why::Failed => (soon, "a rank of another host has failed".to_owned()),
            Why::Lost(host) => (soon, format!("{} is lost", shown(host))),
            Why::Left(host, signal) => {
                let signal = signal_name(*signal);
                let within = self.launch.job.policy.shutdown_timeout;
                let text = format!("the launcher of {} got {signal}", shown(host));
                (Event::Abandon { within }, text)
            }
            Why::CutOff => (
                Event::CutOff,
                "this host does not reach the place where the hosts meet, so the others go on without it".into(),
            ),
        };
        match &mut self.stage {
            Stage::Runs(running) => {
                say(&format!("{text}: the ranks of this host end"));
                running.attempt.handle(event);
            }
            Stage::Awaits(..) => self.have_ended(Outcome::NEVER_RAN),
            Stage::Idle | Stage::Prints(..) => {}
        }
    }

    /// Tells what has happened to the workers.
    fn watch_workers(&mut self) -> Result<()> {
        let Stage::Runs(running) = &mut self.stage else { return Ok(()) };
        if running.attempt.has_started() && !std::mem::replace(&mut running.has_started, true) {
            self.handle(Event::Local(Local::Started));
        }
        let Stage::Runs(running) = &mut self.stage else { return Ok(()) };
        let regroups = || steps::regroups(&running.attempt);
        let regroups = (!running.regroups).then(regroups).flatten();
        running.regroups |= regroups.is_some();
        let held = running.holding.as_ref().and_then(|it| it.answer(&running.attempt));
        if held.is_some() {
            running.holding = None;
        }
        let failure = running.failure();
        let is_over = running.attempt.verdict().is_some();
        if let Some(ranks) = regroups {
            self.handle(Event::Local(Local::Regroups(ranks)));
        }
        if let Some(step) = held {
            self.handle(Event::Local(Local::Held(step)));
        }
        if let Some(failure) = failure {
            self.handle(Event::Local(Local::Failed(failure)));
        }
        // A failure is told before the end.
        if is_over && !self.waits() {
            self.print_rest()?;
        }
        Ok(())
    }

    fn waits(&self) -> bool {
        matches!(&self.stage, Stage::Runs(running) if running.waits())
    }

    /// All workers have ended: reads the rest of their output.
    fn print_rest(&mut self) -> Result<()> {
        let Some(running) = self.take_running() else { return Ok(()) };
        let mut ended = running.attempt.end(&self.listener.events)?;
        let Attempt { stores, world, .. } = &ended.attempt;
        let how = match ended.verdict() {
            supervisor::Verdict::Failed { .. } => How::Failed,
            supervisor::Verdict::Stopped(_) | supervisor::Verdict::Abandoned => How::Abandoned,
            supervisor::Verdict::Success if stores.has_any(keys::STOPPED, world.local_size) => {
                How::StoppedAtStep
            }
            supervisor::Verdict::Success => How::Success,
        };
        ended.attempt.console.finish();
        self.listener.events.add(ended.attempt.console.finished(), Source::Output)?;
        self.stage = Stage::Prints(Box::new(ended), how, Patience::begin());
        Ok(())
    }

    /// All output of a world is read.
    fn have_printed(&mut self) -> Result<()> {
        let stage = std::mem::replace(&mut self.stage, Stage::Idle);
        let Stage::Prints(mut ended, how, _) = stage else {
            self.stage = stage;
            return Ok(());
        };
        self.listener.no_rank_runs();
        self.listener.events.remove(ended.attempt.console.finished())?;
        ended.has_read_all();
        tell(self.launch, &ended);
        self.outcome = outcome::write(self.launch.job, self.attempts.saturating_sub(1), &ended);
        let Ended { lived, stepped, attempt, .. } = *ended;
        self.kept = Some(attempt.into_stores());
        self.have_ended(Outcome { how, lived, stepped });
        Ok(())
    }

    /// Says how the job has ended, and returns the exit code.
    fn finish(&self, end: &End) -> u8 {
        let me = self.arrival.as_ref().map(|arrival| arrival.number);
        outcome::write_end(self.launch.job, me, end, self.outcome.clone());
        match end {
            End::Over(membership::Verdict::Finished, _) => {}
            End::Left(signal) => {
                say(&format!("stopped by {}", signal_name(*signal)));
                return signal_exit_code(*signal);
            }
            end => {
                say(&format!("{end} {}", Section::SeveralHosts));
                self.quote(end);
                if let End::Over(membership::Verdict::Failed(why), _) = end
                    && let Some(line) = report::no_restart(Next::End(*why))
                {
                    say(&line);
                }
            }
        }
        end.exit_code()
    }

    /// What the host of the first failure says about it. That host itself has said it already.
    fn quote(&self, end: &End) {
        let End::Over(_, Some(origin)) = end else { return };
        if self.arrival.as_ref().is_some_and(|arrival| arrival.number == origin.host) {
            return;
        }
        for line in origin.failure.text.lines() {
            output::report(format!("    {line}\n").as_bytes());
        }
    }
}

impl Running {
    /// Whether something is looked for that no event tells.
    fn waits(&self) -> bool {
        self.holding.is_some() || (self.failed.is_some() && !self.has_told)
    }

    /// The failure of a worker, once. Its last words may still be on their way.
    fn failure(&mut self) -> Option<Failure> {
        let worker = self.attempt.supervisor.failed().filter(|_| !self.has_told)?;
        let since = *self.failed.get_or_insert_with(Instant::now);
        if !self.attempt.console.has_read_all(worker) && since.elapsed() < LAST_WORDS_MAX {
            return None;
        }
        self.has_told = true;
        self.attempt.hear_words();
        let worker = self.attempt.supervisor.failed()?;
        let (pid, ending, text) = self.attempt.about_failed(worker)?;
        let mut text = String::from_utf8_lossy(&text).into_owned();
        text.truncate(text.floor_char_boundary(TEXT_BYTES_MAX));
        Some(Failure {
            rank: self.attempt.world.first_rank + worker,
            local_rank: worker,
            pid: pid.as_raw_pid().unsigned_abs(),
            ending,
            has_only_heard: self.attempt.supervisor.has_only_heard(),
            time: milliseconds_since_1970(),
            text,
        })
    }
}

fn backend(meeting: &Meeting) -> &'static str {
    match meeting {
        Meeting::Static { .. } => "static",
        Meeting::Drumline { .. } => "drumline",
        Meeting::File(_) => "file",
        Meeting::Etcd(_) => "etcd",
    }
}

fn shown(host: &Named) -> String {
    format!("host {} ({})", host.name, host.address)
}
