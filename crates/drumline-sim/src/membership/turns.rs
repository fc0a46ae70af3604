//! What workers do in a history: they start, are held, fail and end.

use std::time::Duration;

use drumline_launch::{
    Ending,
    membership::{End, Event, Failure, How, Local, Outcome, WorldPlan},
};

use super::{
    draw::KEEPERS,
    history::{Happening, History},
    launcher::LauncherEnd,
    workers::{Turn, Workers, World},
};
use crate::time::{MS, Nanos, SECOND};

impl History {
    pub(super) fn plan_turn(&mut self, launcher: usize, max: Nanos, turn: Turn) {
        let at = self.soon(max);
        if let Some(workers) = &self.launchers[launcher].workers {
            let world = workers.world;
            self.at(at, Happening::Workers { launcher, world, turn });
        }
    }

    pub(super) fn start(&mut self, launcher: usize, plan: WorldPlan) -> Result<(), String> {
        self.no_workers(launcher)?;
        let world = self.worlds.entry(plan.world).or_insert_with(|| World::new(plan.clone()));
        if world.plan.members != plan.members {
            return Err(format!("world {} has two sets of members", plan.world));
        }
        let first_rank = plan.members.get(plan.place).map_or(0, |it| it.first_rank);
        self.launchers[launcher].workers = Some(Workers {
            world: plan.world,
            first_rank,
            since: None,
            is_ending: false,
            held: None,
            regroup: false,
            are_dead: false,
            dead_keepers: [false; KEEPERS],
        });
        self.plan_turn(launcher, 300 * MS, Turn::Run);
        Ok(())
    }

    pub(super) fn stop_at(&mut self, launcher: usize, step: u64) -> Result<(), String> {
        let Some(workers) = &self.launchers[launcher].workers else { return Ok(()) };
        let held = workers.held;
        let Some(world) = self.worlds.get_mut(&workers.world) else { return Ok(()) };
        let wanted = world.begun.map_or(0, |begun| begun + 1);
        if held.is_none() || step != wanted || *world.stops_at.get_or_insert(step) != step {
            return Err(format!("workers held at {held:?} should stop at {step}, not {wanted}"));
        }
        self.plan_turn(launcher, 800 * MS, Turn::Stop);
        Ok(())
    }

    /// The launcher ends its workers.
    pub(super) fn abandon(&mut self, launcher: usize, within: Nanos) -> Result<(), String> {
        let Some(workers) = &mut self.launchers[launcher].workers else { return Ok(()) };
        if workers.since.is_none() {
            return self.gone(launcher, How::Abandoned);
        }
        workers.is_ending = true;
        self.plan_turn(launcher, within, Turn::Go { failed: false });
        Ok(())
    }

    /// All workers of a host die at once. Its launcher may hear of it later.
    pub(super) fn kill(&mut self, launcher: usize) {
        let Some(workers) = &mut self.launchers[launcher].workers else { return };
        if std::mem::replace(&mut workers.are_dead, true) {
            return;
        }
        let world = workers.world;
        if workers.since.is_some() {
            self.peers_notice(launcher, world);
        }
    }

    /// Workers of other hosts may fail, because they lose their peers.
    fn peers_notice(&mut self, launcher: usize, world: u64) {
        for peer in 0..self.launchers.len() {
            let workers = &self.launchers[peer].workers;
            let is_peer = workers
                .as_ref()
                .is_some_and(|it| it.world == world && it.since.is_some() && !it.regroup);
            if peer != launcher
                && is_peer
                && self.rng.u32(0..100) < self.scenario.program.reacts_percent
            {
                let ending = match self.rng.bool() {
                    true => Ending::Code(1),
                    false => Ending::Signal { number: 6, core_dumped: false },
                };
                self.plan_turn(peer, 500 * MS, Turn::Fail(ending));
            }
        }
    }

    pub(super) fn check_lease(&mut self, launcher: usize, keeper: usize) {
        self.launchers[launcher].lease_is_watched[keeper] = false;
        if self.guards(launcher, keeper).is_none() {
            return;
        }
        if self.lease_is_over(launcher) {
            self.tell(|_| {
                format!("keeper {keeper} kills the workers of launcher {launcher}: no lease")
            });
            self.kill(launcher);
        } else {
            self.watch_lease(launcher);
        }
    }

    fn lease_is_over(&self, launcher: usize) -> bool {
        let shown = self.clock(launcher);
        self.launchers[launcher].lease.is_none_or(|lease| shown >= lease)
    }

    fn watch_lease(&mut self, launcher: usize) {
        let Some(lease) = self.launchers[launcher].lease else { return };
        for keeper in 0..KEEPERS {
            if !std::mem::replace(&mut self.launchers[launcher].lease_is_watched[keeper], true) {
                let at = self.machine(launcher).clock.moment(lease);
                self.at(at.max(self.now), Happening::Lease { launcher, keeper });
            }
        }
    }

    /// Whether the host with this number has workers that may live.
    pub(super) fn runs_as(&self, number: u64) -> bool {
        (0..self.launchers.len())
            .any(|at| self.launchers[at].number == Some(number) && self.running(at).is_some())
    }

    /// The world whose workers run on a host. Those that are stopped do not.
    pub(super) fn running(&self, launcher: usize) -> Option<u64> {
        self.living(launcher).filter(|_| self.ranks_stand_until(launcher) <= self.now)
    }

    /// The world whose workers are alive on a host.
    fn living(&self, launcher: usize) -> Option<u64> {
        let workers = self.launchers[launcher].workers.as_ref()?;
        (workers.since.is_some() && !workers.are_dead).then_some(workers.world)
    }

    /// Until when the workers of a launcher are stopped. If all that guard them are stopped, so are they: that is the
    /// whole machine.
    pub(super) fn ranks_stand_until(&self, launcher: usize) -> Nanos {
        let it = &self.launchers[launcher];
        let state = &self.machines[it.machine];
        let dead = it.workers.as_ref().map_or([false; KEEPERS], |it| it.dead_keepers);
        let keepers = state.keepers_until.into_iter().zip(dead).filter(|(_, is_dead)| !is_dead);
        let launcher = it.end.is_none().then_some(state.stopped_until);
        let guards = keepers.map(|(until, _)| until).chain(launcher);
        state.ranks_until.max(guards.min().unwrap_or(0))
    }

    pub(super) fn turn(&mut self, launcher: usize, turn: Turn) -> Result<(), String> {
        let Some(workers) = self.launchers[launcher].workers.clone() else { return Ok(()) };
        if workers.are_dead {
            return Ok(());
        }
        let is_calm = workers.since.is_some() && !workers.is_ending;
        match turn {
            Turn::Run => self.begins(launcher, workers.world),
            Turn::Regroup if is_calm => self.regroups(launcher),
            Turn::Succeed if is_calm && workers.held.is_none() => self.gone(launcher, How::Success),
            Turn::Fail(ending) if is_calm => self.fails(launcher, &workers, ending),
            Turn::Hold if is_calm => self.holds(launcher, workers.world),
            Turn::Stop if is_calm => {
                let steps = self.scenario.program.steps;
                self.gone(launcher, if steps { How::StoppedAtStep } else { How::Abandoned })
            }
            Turn::Go { failed: true } => self.gone(launcher, How::Failed),
            Turn::Go { failed: false } => self.gone(launcher, How::Abandoned),
            _ => Ok(()),
        }
    }

    fn begins(&mut self, launcher: usize, world: u64) -> Result<(), String> {
        if self.lease_is_over(launcher) {
            return self.gone(launcher, How::Abandoned);
        }
        for other in 0..self.launchers.len() {
            if let Some(running) = self.running(other).filter(|it| *it != world) {
                return Err(format!(
                    "worlds {running} and {world} run at once, on launchers {other} and {launcher}"
                ));
            }
        }
        if let Some((last, _)) = self.worlds.last_key_value()
            && self.worlds[last].started.iter().next().is_some()
            && *last > world
        {
            return Err(format!("world {world} starts after world {last}"));
        }
        self.tell(|_| format!("launcher {launcher} runs world {world}"));
        let now = self.now;
        let number = self.launchers[launcher].number.unwrap_or(0);
        if let Some(workers) = &mut self.launchers[launcher].workers {
            workers.since = Some(now);
        }
        self.watch_lease(launcher);
        if let Some(run) = self.worlds.get_mut(&world) {
            run.started.insert(number);
            if run.started.len() == run.plan.members.len() {
                run.complete_at = Some(now);
                for other in 0..self.launchers.len() {
                    let ends = self.scenario.program.lasts + self.rng.u64(0..50 * MS);
                    if self.living(other) == Some(world) {
                        self.plan_turn(other, 300 * MS, Turn::Regroup);
                        let turn = Turn::Succeed;
                        let launcher = other;
                        self.at(now + ends, Happening::Workers { launcher, world, turn });
                    }
                }
            }
        }
        self.handle(launcher, Event::Local(Local::Started))
    }

    fn regroups(&mut self, launcher: usize) -> Result<(), String> {
        let Some(ranks) = self.scenario.program.regroups else { return Ok(()) };
        if let Some(workers) = &mut self.launchers[launcher].workers {
            workers.regroup = true;
        }
        self.handle(launcher, Event::Local(Local::Regroups(ranks)))
    }

    pub(super) fn fails(
        &mut self,
        launcher: usize,
        workers: &Workers,
        ending: Ending,
    ) -> Result<(), String> {
        self.tell(|_| format!("a worker of launcher {launcher} fails: {ending}"));
        let number = self.launchers[launcher].number.unwrap_or(0);
        if let Some(it) = &mut self.launchers[launcher].workers {
            it.is_ending = true;
        }
        if let Some(world) = self.worlds.get_mut(&workers.world) {
            world.failed.insert(number);
        }
        let failure = Failure {
            rank: workers.first_rank,
            local_rank: 0,
            pid: 1000,
            ending,
            has_only_heard: false,
            time: self.rng.u64(..), // clocks jump
            text: String::new(),
        };
        self.plan_turn(launcher, 600 * MS, Turn::Go { failed: true });
        self.peers_notice(launcher, workers.world);
        self.handle(launcher, Event::Local(Local::Failed(failure)))
    }

    fn holds(&mut self, launcher: usize, world: u64) -> Result<(), String> {
        let Some(run) = self.worlds.get_mut(&world) else { return Ok(()) };
        let begun = run.complete_at.filter(|_| self.scenario.program.steps);
        let begun = begun.map(|at| (self.now - at) / (100 * MS) + self.rng.u64(0..2));
        run.begun = run.begun.max(begun);
        if let Some(workers) = &mut self.launchers[launcher].workers {
            workers.held = Some(begun);
        }
        self.handle(launcher, Event::Local(Local::Held(begun)))
    }

    /// None of the workers run any more.
    pub(super) fn gone(&mut self, launcher: usize, how: How) -> Result<(), String> {
        let Some(workers) = self.launchers[launcher].workers.take() else { return Ok(()) };
        self.tell(|_| format!("the workers of launcher {launcher} have ended: {how:?}"));
        let number = self.launchers[launcher].number.unwrap_or(0);
        if let Some(world) = self.worlds.get_mut(&workers.world)
            && how == How::Success
        {
            world.succeeded.insert(number);
        }
        let lived = workers.since.map_or(0, |since| self.now - since);
        let outcome = Outcome {
            how,
            lived: Duration::from_nanos(lived),
            stepped: self.scenario.program.steps && lived > SECOND,
        };
        let result = self.handle(launcher, Event::Local(Local::Ended(outcome)));
        if matches!(&self.launchers[launcher].end, Some(LauncherEnd::Part(End::Left(_)))) {
            self.peers_notice(launcher, workers.world);
        }
        result
    }
}
