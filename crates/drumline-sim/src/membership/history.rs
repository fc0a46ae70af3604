//! One history, event by event.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BinaryHeap},
    time::Duration,
};

use drumline_launch::{
    Ending,
    membership::{Action, Event, Host, How, Local, Membership, Plan, Why},
};
use fastrand::Rng;

use super::{
    checks::{self, Promises},
    draw::{Fault, KEEPERS, Machine, Scenario, Who},
    launcher::{Launcher, LauncherEnd, Polling},
    network::Fate,
    store::{Answer, Request, Store},
    workers::{Turn, World},
};
use crate::time::{MS, Nanos, SECOND};

/// How long a launcher waits for an answer of the store.
const PATIENCE: Nanos = SECOND;

/// No history has so many events, unless it makes some without end.
const EVENTS_MAX: u64 = 2_000_000;

/// How long the keeper of a launcher may say nothing while it is stopped.
const KEEPER_ANSWERS: Nanos = 3 * SECOND;

/// How long a launcher tries to reach a store that has ended.
const STORE_GONE_AFTER: Nanos = 10 * SECOND;

/// One history.
#[derive(Debug)]
pub(super) struct History {
    pub(super) rng: Rng,
    pub(super) scenario: Scenario,
    promises: Promises,
    trace: bool,
    pub(super) now: Nanos,
    pub(super) events: u64,
    queue: BinaryHeap<Reverse<(Nanos, u64)>>,
    due: BTreeMap<u64, Happening>,
    /// What has been put into the queue, in all.
    numbers: u64,
    pub(super) store: Store,
    /// When the host with the store has ended.
    store_ended_at: Option<Nanos>,
    pub(super) machines: Vec<State>,
    pub(super) launchers: Vec<Launcher>,
    /// What each number stands for.
    hosts: BTreeMap<u64, Host>,
    pub(super) worlds: BTreeMap<u64, World>,
}

/// What is wrong with a machine.
#[derive(Clone, Debug, Default)]
pub(super) struct State {
    /// The launcher is stopped until then, ...
    pub(super) stopped_until: Nanos,
    /// ... each keeper until then, ...
    pub(super) keepers_until: [Nanos; KEEPERS],
    /// ... and the workers until then.
    pub(super) ranks_until: Nanos,
    cut_until: Nanos,
    launcher: Option<usize>,
}

#[derive(Debug)]
pub(super) enum Happening {
    Launch(usize),
    Wake(usize),
    Arrives {
        launcher: usize,
        id: u64,
        request: Request,
    },
    Answered {
        launcher: usize,
        id: u64,
        answer: Answer,
    },
    Impatient {
        launcher: usize,
        id: u64,
    },
    Fault(Fault),
    /// The lease of a launcher may have run out, as one of its keepers sees it.
    Lease {
        launcher: usize,
        keeper: usize,
    },
    /// A keeper hears that its launcher, or another keeper, is gone.
    Orphaned {
        launcher: usize,
        world: u64,
        keeper: usize,
    },
    /// A launcher notices that its keepers are gone, or that the one is stopped that answers.
    Unkept {
        launcher: usize,
        world: u64,
    },
    Workers {
        launcher: usize,
        world: u64,
        turn: Turn,
    },
    StoreGone,
}

impl History {
    pub(super) fn new(rng: Rng, scenario: Scenario, trace: bool) -> History {
        let mut history = History {
            rng,
            promises: Promises::of(&scenario),
            trace,
            now: 0,
            events: 0,
            queue: BinaryHeap::new(),
            due: BTreeMap::new(),
            numbers: 0,
            store: Store::default(),
            store_ended_at: None,
            machines: vec![State::default(); scenario.machines.len()],
            launchers: Vec::new(),
            hosts: BTreeMap::new(),
            worlds: BTreeMap::new(),
            scenario,
        };
        history.tell(|it| format!("{:#?}", it.scenario));
        for at in 0..history.machines.len() {
            history.at(history.scenario.machines[at].starts_at, Happening::Launch(at));
        }
        for (at, fault) in history.scenario.faults.clone() {
            history.at(at, Happening::Fault(fault));
        }
        history
    }

    pub(super) fn run(mut self) -> Result<History, String> {
        while let Some(Reverse((at, number))) = self.queue.pop() {
            if at > self.scenario.deadline {
                break;
            }
            self.now = at;
            self.events += 1;
            if self.events > EVENTS_MAX {
                return Err(format!("{} ms: there is no end of events", at / MS));
            }
            if let Some(happening) = self.due.remove(&number) {
                self.happen(happening).map_err(|problem| format!("{} ms: {problem}", at / MS))?;
            }
            if self.launchers.iter().all(|it| it.end.is_some()) && self.is_over() {
                break;
            }
        }
        checks::at_the_end(&self.launchers, self.store.plan.as_ref())?;
        let is_left = |at: &usize| self.launchers[*at].end.is_some() && self.running(*at).is_some();
        if let Some(left) = (0..self.launchers.len()).find(is_left) {
            return Err(format!("launcher {left} has ended, and its workers run"));
        }
        Ok(self)
    }

    /// Whether no launcher will come any more.
    fn is_over(&self) -> bool {
        let comes = |it: &Happening| {
            use Happening::{Fault, Launch, Orphaned};
            matches!(it, Launch(_) | Fault(_) | Orphaned { .. })
        };
        !self.due.values().any(comes)
    }

    #[expect(clippy::print_stderr, reason = "the trace is for people")]
    pub(super) fn tell(&self, what: impl FnOnce(&History) -> String) {
        if self.trace {
            eprintln!("{:>9.3} ms  {}", self.now as f64 / MS as f64, what(self));
        }
    }

    pub(super) fn at(&mut self, at: Nanos, happening: Happening) {
        self.numbers += 1;
        let number = self.numbers;
        self.queue.push(Reverse((at, number)));
        self.due.insert(number, happening);
    }

    pub(super) fn soon(&mut self, max: Nanos) -> Nanos {
        self.now + self.rng.u64(1..=max)
    }

    pub(super) fn machine(&self, launcher: usize) -> &Machine {
        &self.scenario.machines[self.launchers[launcher].machine]
    }

    pub(super) fn clock(&self, launcher: usize) -> Duration {
        self.machine(launcher).clock.shows(self.now)
    }

    fn is_quiet(&self) -> bool {
        self.now >= self.scenario.quiet_at
    }

    fn happen(&mut self, happening: Happening) -> Result<(), String> {
        // A stopped process hears of everything when it goes on.
        let waits_until = match &happening {
            Happening::Wake(launcher)
            | Happening::Answered { launcher, .. }
            | Happening::Impatient { launcher, .. }
            | Happening::Unkept { launcher, .. }
            | Happening::Workers { launcher, turn: Turn::Run, .. } => {
                self.machines[self.launchers[*launcher].machine].stopped_until
            }
            Happening::Lease { launcher, keeper }
            | Happening::Orphaned { launcher, keeper, .. } => {
                self.machines[self.launchers[*launcher].machine].keepers_until[*keeper]
            }
            Happening::Workers { launcher, .. } => self.ranks_stand_until(*launcher),
            Happening::Arrives { .. } => self.store_waits_until(),
            Happening::Launch(_) | Happening::Fault(_) | Happening::StoreGone => 0,
        };
        if waits_until > self.now {
            self.at(waits_until, happening);
            return Ok(());
        }
        match happening {
            Happening::Launch(machine) => self.launch(machine),
            Happening::Wake(launcher) => {
                if self.launchers[launcher].wakes_at == Some(self.now) {
                    self.launchers[launcher].wakes_at = None;
                }
                return self.wake(launcher);
            }
            Happening::Arrives { launcher, id, request } => {
                return self.arrives(launcher, id, request);
            }
            Happening::Answered { launcher, id, answer } => {
                return self.answered(launcher, id, answer);
            }
            Happening::Impatient { launcher, id } => self.impatient(launcher, id),
            Happening::Fault(fault) => return self.fault(fault),
            Happening::Lease { launcher, keeper } => self.check_lease(launcher, keeper),
            Happening::Orphaned { launcher, world, keeper } => {
                if self.guards(launcher, keeper).is_some_and(|it| it == world) {
                    self.tell(|_| {
                        format!("keeper {keeper} of launcher {launcher} ends its workers")
                    });
                    self.kill(launcher);
                }
            }
            Happening::Unkept { launcher, world } => return self.unkept(launcher, world),
            Happening::Workers { launcher, world, turn } => {
                let workers = &self.launchers[launcher].workers;
                if workers.as_ref().is_some_and(|it| it.world == world) {
                    return self.turn(launcher, turn);
                }
            }
            Happening::StoreGone => self.give_up(),
        }
        Ok(())
    }

    // Machines

    fn launch(&mut self, machine: usize) {
        // Another start may have come first, if one was killed and its machine lost power.
        if self.launcher_of(machine).is_some() {
            return;
        }
        let launcher = self.launchers.len();
        self.launchers.push(Launcher::new(machine));
        self.machines[machine].launcher = Some(launcher);
        self.tell(|_| format!("launcher {launcher} starts on machine {machine}"));
        match self.store_ended_at {
            Some(_) => self.launchers[launcher].end = Some(LauncherEnd::StoreGone),
            None => self.join(launcher),
        }
    }

    /// The launcher of this machine that lives.
    fn launcher_of(&self, machine: usize) -> Option<usize> {
        self.machines[machine].launcher.filter(|at| self.launchers[*at].end.is_none())
    }

    fn fault(&mut self, fault: Fault) -> Result<(), String> {
        self.tell(|_| format!("{fault:?}"));
        let now = self.now;
        let keeps_store =
            |it: &History, machine: usize| it.scenario.machines[machine].host.keeps_store;
        match fault {
            Fault::Crash { machine, again } if !keeps_store(self, machine) => {
                if let Some(launcher) = self.machines[machine].launcher {
                    if self.launcher_of(machine).is_some() {
                        self.kill(launcher);
                        self.launchers[launcher].workers = None;
                        self.launchers[launcher].end = Some(LauncherEnd::Crashed);
                    }
                    self.machines[machine] = State::default();
                    if let Some(again) = again {
                        self.at(now + again, Happening::Launch(machine));
                    }
                }
            }
            Fault::Stop { machine, lasts, who } => self.stop(machine, now + lasts, who),
            Fault::Kill { machine, who, again } => {
                if let Some(launcher) = self.launcher_of(machine) {
                    let ends = who.launcher && !keeps_store(self, machine);
                    self.kill_some(launcher, Who { launcher: ends, ..who });
                    if let Some(again) = again.filter(|_| ends) {
                        self.at(now + again, Happening::Launch(machine));
                    }
                }
            }
            Fault::Cut { machine, lasts } if !keeps_store(self, machine) => {
                let state = &mut self.machines[machine];
                state.cut_until = state.cut_until.max(now + lasts);
            }
            Fault::CutAll { lasts } => {
                for machine in 0..self.machines.len() {
                    if !keeps_store(self, machine) {
                        let state = &mut self.machines[machine];
                        state.cut_until = state.cut_until.max(now + lasts);
                    }
                }
            }
            Fault::Leave { machine, signal } => {
                if let Some(launcher) = self.launcher_of(machine) {
                    return self.told_to_end(launcher, signal);
                }
            }
            Fault::Fail { machine, ending } => {
                if let Some(launcher) = self.launcher_of(machine)
                    && let Some(workers) = &self.launchers[launcher].workers
                {
                    let world = workers.world;
                    self.at(now, Happening::Workers { launcher, world, turn: Turn::Fail(ending) });
                }
            }
            Fault::Crash { .. } | Fault::Cut { .. } => {}
        }
        Ok(())
    }

    fn stop(&mut self, machine: usize, until: Nanos, who: Who) {
        let state = &mut self.machines[machine];
        let stop = |stopped: &mut Nanos, is_hit: bool| {
            *stopped = if is_hit { (*stopped).max(until) } else { *stopped };
        };
        stop(&mut state.stopped_until, who.launcher);
        stop(&mut state.ranks_until, who.ranks);
        for (keeper, is_hit) in state.keepers_until.iter_mut().zip(who.keepers) {
            stop(keeper, is_hit);
        }
        if let Some(launcher) = state.launcher
            && let Some(workers) = &self.launchers[launcher].workers
            && who.keepers[KEEPERS - 1]
            && until > self.now + KEEPER_ANSWERS
        {
            let world = workers.world;
            self.at(self.now + KEEPER_ANSWERS, Happening::Unkept { launcher, world });
        }
    }

    /// Kills a launcher, keepers of its workers, or both at once.
    fn kill_some(&mut self, launcher: usize, who: Who) {
        if who.launcher {
            self.launchers[launcher].end = Some(LauncherEnd::Crashed);
        }
        let Some(workers) = &mut self.launchers[launcher].workers else { return };
        let world = workers.world;
        for (dead, is_hit) in workers.dead_keepers.iter_mut().zip(who.keepers) {
            *dead |= is_hit;
        }
        if !who.launcher && !who.keepers.contains(&true) {
            return;
        }
        for keeper in 0..KEEPERS {
            let at = self.soon(50 * MS);
            self.at(at, Happening::Orphaned { launcher, world, keeper });
        }
        // The kernel kills the workers with their parent.
        if who.keepers[KEEPERS - 1] && self.scenario.keepers == KEEPERS {
            self.kill(launcher);
        }
        let at = self.soon(300 * MS);
        self.at(at, Happening::Unkept { launcher, world });
    }

    /// The world whose workers this keeper guards.
    pub(super) fn guards(&self, launcher: usize, keeper: usize) -> Option<u64> {
        let workers = self.launchers[launcher].workers.as_ref()?;
        let lives = !workers.dead_keepers[keeper] && keeper < self.scenario.keepers;
        lives.then_some(workers.world)
    }

    /// A launcher without keepers, or without answers of them, ends its workers: they have failed.
    fn unkept(&mut self, launcher: usize, world: u64) -> Result<(), String> {
        let is_stopped = {
            let state = &self.machines[self.launchers[launcher].machine];
            state.keepers_until[KEEPERS - 1] > self.now
        };
        let it = &self.launchers[launcher];
        let Some(workers) = it.workers.clone().filter(|it| it.world == world) else {
            return Ok(());
        };
        if it.end.is_some() || !(is_stopped || workers.dead_keepers.contains(&true)) {
            return Ok(());
        }
        self.kill(launcher);
        self.fails(launcher, &workers, Ending::Code(1))?;
        self.gone(launcher, How::Failed)
    }

    fn told_to_end(&mut self, launcher: usize, signal: i32) -> Result<(), String> {
        if self.launchers[launcher].leaves.is_some() {
            return Ok(());
        }
        self.launchers[launcher].leaves = Some(signal);
        if self.launchers[launcher].membership.is_none() {
            self.launchers[launcher].end = Some(LauncherEnd::Left);
            self.ended(launcher);
            return Ok(());
        }
        self.handle(launcher, Event::Local(Local::Leaving(signal)))?;
        self.abandon(launcher, SECOND)
    }

    // Requests

    fn store_waits_until(&self) -> Nanos {
        let keeper = self.scenario.machines.iter().position(|it| it.host.keeps_store);
        keeper.map_or(0, |keeper| self.machines[keeper].stopped_until)
    }

    fn send(&mut self, launcher: usize, request: Request) -> u64 {
        let id = self.launchers[launcher].id();
        let quiet = self.is_quiet();
        let fate = self.scenario.network.message(&mut self.rng, quiet);
        let cut_until = self.machines[self.launchers[launcher].machine].cut_until;
        let fate = match fate {
            // What is sent on a connection that is cut may arrive when it is mended.
            Fate::Arrives(after) if cut_until > self.now => match self.rng.u8(0..3) {
                0 => Fate::Arrives(cut_until - self.now + after),
                _ => Fate::Lost,
            },
            fate => fate,
        };
        if let Fate::Arrives(after) = fate {
            self.at(self.now + after, Happening::Arrives { launcher, id, request });
        }
        self.at(self.now + PATIENCE, Happening::Impatient { launcher, id });
        id
    }

    fn arrives(&mut self, launcher: usize, id: u64, request: Request) -> Result<(), String> {
        if self.store_ended_at.is_some() {
            return Ok(());
        }
        let (answer, replaced) = self.store.handle(request);
        if let Some(old) = replaced {
            self.plan_changed(old)?;
        }
        let is_cut = self.machines[self.launchers[launcher].machine].cut_until > self.now;
        let quiet = self.is_quiet();
        match self.scenario.network.message(&mut self.rng, quiet) {
            Fate::Arrives(after) if !is_cut => {
                self.at(self.now + after, Happening::Answered { launcher, id, answer });
            }
            _ => {}
        }
        Ok(())
    }

    fn plan_changed(&mut self, old: Option<Plan>) -> Result<(), String> {
        let Some(new) = self.store.plan.clone() else { return Ok(()) };
        self.tell(|_| format!("plan: {new:?}"));
        let hosts = &self.hosts;
        self.promises.plan(&self.scenario, hosts, &self.worlds, old.as_ref(), &new)?;
        for gone in old.iter().flat_map(|it| &it.members) {
            let is_out = new.place(gone.host).is_none()
                && old.as_ref().map(|it| it.world) == Some(new.world);
            let is_lost = |plan: &Plan| plan.lost.iter().any(|it| it.host == gone.host);
            let is_out = is_out || (is_lost(&new) && !old.as_ref().is_some_and(is_lost));
            let is_next = old.as_ref().is_some_and(|it| it.world < new.world);
            if (is_out || is_next) && self.runs_as(gone.host) {
                return Err(format!("host {} is out while its workers run", gone.host));
            }
        }
        Ok(())
    }

    fn answered(&mut self, launcher: usize, id: u64, answer: Answer) -> Result<(), String> {
        if self.launchers[launcher].end.is_some() {
            return Ok(());
        }
        let asked = &mut self.launchers[launcher].asked;
        if asked.join == Some(id) {
            asked.join = None;
            if let Answer::Number(number) = answer {
                self.launchers[launcher].number = Some(number);
                self.hosts.insert(number, self.machine(launcher).host.clone());
                self.tell(|_| format!("launcher {launcher} is host {number}"));
                self.join(launcher);
            } else if let Some(number) = self.launchers[launcher].number {
                let host = self.machine(launcher).host.clone();
                let membership = Membership::new(number, host, self.scenario.timing);
                self.launchers[launcher].membership = Some(membership);
                self.launchers[launcher].joined_at = self.now;
                return self.wake(launcher);
            }
        } else if asked.plan == Some(id) {
            asked.plan = None;
            if let Answer::Planned(Some(plan)) = answer {
                return self.handle(launcher, Event::Planned(plan));
            }
        } else if let Some(mut polling) = asked.poll.take_if(|it| it.id == id) {
            if let Answer::View(view) = answer {
                polling.add(view);
            }
            match polling.rest.pop() {
                Some(request) => {
                    polling.id = self.send(launcher, request);
                    self.launchers[launcher].asked.poll = Some(polling);
                }
                None => return self.handle(launcher, Event::Polled(polling.view)),
            }
        }
        Ok(())
    }

    fn impatient(&mut self, launcher: usize, id: u64) {
        if self.launchers[launcher].end.is_some() {
            return;
        }
        let asked = &mut self.launchers[launcher].asked;
        if asked.join == Some(id) {
            self.join(launcher);
        } else if asked.plan == Some(id) {
            asked.plan = None;
        } else if asked.poll.as_ref().is_some_and(|it| it.id == id) {
            asked.poll = None;
            self.wake_soon(launcher);
        }
    }

    /// A launcher gets its number, and then writes who it is.
    fn join(&mut self, launcher: usize) {
        let request = match self.launchers[launcher].number {
            None => Request::Number,
            Some(number) => Request::Host(number, self.machine(launcher).host.clone()),
        };
        self.launchers[launcher].asked.join = Some(self.send(launcher, request));
    }

    // Launchers

    fn wake(&mut self, launcher: usize) -> Result<(), String> {
        let shown = self.clock(launcher);
        let Some(membership) = &self.launchers[launcher].membership else { return Ok(()) };
        if self.launchers[launcher].end.is_some() {
            return Ok(());
        }
        if membership.deadline().is_some_and(|it| shown >= it) {
            self.handle(launcher, Event::Tick)?;
        }
        let is_polling = self.launchers[launcher].asked.poll.is_some();
        let it = &mut self.launchers[launcher];
        let (Some(membership), None) = (&mut it.membership, &it.end) else { return Ok(()) };
        if !is_polling && shown >= membership.poll_at() {
            let poll = membership.poll(shown);
            let splits = self.scenario.network.splits;
            let order = splits.then(|| self.rng.u8(0..6));
            let number = it.number.unwrap_or(0);
            let mut polling = Polling::new(0, number, poll, shown, order);
            if let Some(request) = polling.rest.pop() {
                polling.id = self.send(launcher, request);
                self.launchers[launcher].asked.poll = Some(polling);
            }
        }
        self.wake_soon(launcher);
        Ok(())
    }

    /// Wakes a launcher when something is due.
    fn wake_soon(&mut self, launcher: usize) {
        let it = &self.launchers[launcher];
        let (Some(membership), None) = (&it.membership, &it.end) else { return };
        let poll = it.asked.poll.is_none().then(|| membership.poll_at());
        let next = [poll, membership.deadline()].into_iter().flatten().min();
        let Some(next) = next else { return };
        let next = self.machine(launcher).clock.moment(next).max(self.now);
        if it.wakes_at.is_none_or(|it| it > next || it < self.now) {
            self.launchers[launcher].wakes_at = Some(next);
            self.at(next, Happening::Wake(launcher));
        }
    }

    pub(super) fn handle(&mut self, launcher: usize, event: Event) -> Result<(), String> {
        let shown = self.clock(launcher);
        let it = &mut self.launchers[launcher];
        let (Some(membership), None) = (&mut it.membership, &it.end) else { return Ok(()) };
        let actions = membership.handle(shown, event);
        it.lease = membership.lease();
        for action in actions {
            self.act(launcher, action)?;
        }
        self.wake_soon(launcher);
        Ok(())
    }

    fn act(&mut self, launcher: usize, action: Action) -> Result<(), String> {
        if !matches!(action, Action::WritePlan { .. }) {
            self.tell(|it| {
                format!(
                    "launcher {launcher} (host {:?}): {action:?}",
                    it.launchers[launcher].number
                )
            });
        }
        match action {
            Action::WritePlan { expected, plan } => {
                if self.launchers[launcher].asked.plan.is_none() {
                    let id = self.send(launcher, Request::CompareSet { expected, plan });
                    self.launchers[launcher].asked.plan = Some(id);
                }
            }
            Action::Start(world) => return self.start(launcher, world),
            Action::Hold => self.plan_turn(launcher, 100 * MS, Turn::Hold),
            Action::StopAt(step) => return self.stop_at(launcher, step),
            Action::Abandon(Why::CutOff) => {
                self.kill(launcher);
                self.launchers[launcher].workers = None;
            }
            Action::Abandon(_) => return self.abandon(launcher, 600 * MS),
            Action::Note(_) => {}
            Action::Rejoin => {
                self.no_workers(launcher)?;
                let it = &mut self.launchers[launcher];
                let machine = it.machine;
                let next_id = it.next_id;
                *it = Launcher { next_id, ..Launcher::new(machine) };
                self.join(launcher);
            }
            Action::End(end) => {
                self.no_workers(launcher)?;
                self.launchers[launcher].end = Some(LauncherEnd::Part(end));
                self.ended(launcher);
            }
        }
        Ok(())
    }

    pub(super) fn no_workers(&self, launcher: usize) -> Result<(), String> {
        match &self.launchers[launcher].workers {
            Some(workers) => Err(format!("launcher {launcher} ends while it has {workers:?}")),
            None => Ok(()),
        }
    }

    fn ended(&mut self, launcher: usize) {
        if self.machine(launcher).host.keeps_store && self.store_ended_at.is_none() {
            self.store_ended_at = Some(self.now);
            self.at(self.now + STORE_GONE_AFTER, Happening::StoreGone);
        }
    }

    /// Those that are left have not reached the store for long.
    fn give_up(&mut self) {
        for launcher in self.launchers.iter_mut().filter(|it| it.end.is_none()) {
            launcher.end = Some(LauncherEnd::StoreGone);
        }
    }
}
