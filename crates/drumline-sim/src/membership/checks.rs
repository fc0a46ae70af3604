//! What must hold after every change of the plan, and at the end.

use std::collections::BTreeMap;

use drumline_launch::{
    NoRestart,
    membership::{End, Host, Phase, Plan, Verdict, Why},
};

use super::{
    draw::{Fault, Scenario},
    launcher::{Launcher, LauncherEnd},
    workers::World,
};

/// What follows from a scenario.
#[derive(Clone, Copy, Debug)]
pub(super) struct Promises {
    /// A host may be lost: something goes wrong that is not about workers.
    may_lose: bool,
    /// The job may start again after a failure.
    may_restart: bool,
}

impl Promises {
    pub(super) fn of(scenario: &Scenario) -> Promises {
        let any = |which: fn(&Fault) -> bool| scenario.faults.iter().any(|(_, fault)| which(fault));
        let may_lose = !scenario.network.is_good()
            || any(|it| !matches!(it, Fault::Fail { .. } | Fault::Leave { .. }));
        let may_restart = any(|it| match it {
            Fault::Fail { .. } | Fault::Leave { .. } | Fault::Kill { .. } => true,
            Fault::Stop { who, .. } => who.keepers.contains(&true),
            Fault::Crash { .. } | Fault::Cut { .. } | Fault::CutAll { .. } => false,
        });
        Promises { may_lose, may_restart }
    }

    /// A plan was written in the place of another.
    pub(super) fn plan(
        self,
        scenario: &Scenario,
        hosts: &BTreeMap<u64, Host>,
        worlds: &BTreeMap<u64, World>,
        old: Option<&Plan>,
        new: &Plan,
    ) -> Result<(), String> {
        let fail = |what: &str| Err(format!("{what}\n    old: {old:?}\n    new: {new:?}"));
        if new.version != old.map_or(0, |it| it.version) + 1 {
            return fail("the version is not the next one");
        }
        if old.is_some_and(|it| matches!(it.phase, Phase::Over(_))) {
            return fail("something follows the end");
        }
        if new.restart > scenario.terms.restarts.max || (new.restart > 0 && !self.may_restart) {
            return fail("there are too many restarts");
        }
        if !self.may_lose && matches!(new.phase, Phase::Ending(Why::Lost(_))) {
            return fail("a host is lost for no reason");
        }
        let last = old.map_or(0, |it| it.world);
        let old_order = old.map_or(Vec::new(), |old| old.members.clone());
        if new.world == last {
            let mut rest = old_order.iter();
            if !new.members.iter().all(|member| rest.any(|it| it == member)) {
                return fail("the members of a world have changed");
            }
        } else if new.world == last + 1 && new.phase == Phase::Running {
            let mut next = 0;
            for member in &new.members {
                let ranks = hosts.get(&member.host).map(|it| it.ranks);
                if member.first_rank != next || Some(member.ranks) != ranks {
                    return fail("ranks have gaps");
                }
                next += member.ranks;
            }
            let range = scenario.terms.hosts;
            let range = range.min.get()..=range.max.get();
            if !range.contains(&new.members.len()) {
                return fail("a world has too few hosts, or too many");
            }
            let order: Vec<u64> = new.members.iter().map(|it| it.host).collect();
            let node_ranks: Vec<_> = order.iter().map(|it| hosts[it].node_rank).collect();
            let staying = |it: &&u64| old_order.iter().any(|old| old.host == **it);
            let stay: Vec<u64> = order.iter().filter(staying).copied().collect();
            let stayed: Vec<u64> =
                old_order.iter().map(|it| it.host).filter(|it| order.contains(it)).collect();
            let is_ordered = match node_ranks[0] {
                Some(_) => node_ranks.is_sorted(),
                None => stay == stayed && order.starts_with(&stay),
            };
            if !is_ordered {
                return fail("hosts have lost their order");
            }
        } else {
            return fail("the world is not the next one");
        }
        let world = worlds.get(&new.world);
        let was_lost = old.map_or(&[][..], |it| if it.world == new.world { &it.lost } else { &[] });
        let runs_nowhere = new.phase == Phase::Running && new.present().next().is_none();
        if !new.lost.starts_with(was_lost) || runs_nowhere {
            return fail("a world that goes on without hosts gets one back, or has none");
        }
        let is_true = match &new.phase {
            Phase::Over(Verdict::Finished) => world.is_some_and(|it| {
                let has_succeeded = |host: u64| it.succeeded.contains(&host);
                new.present().all(|member| has_succeeded(member.host))
                    && new.present().next().is_some()
            }),
            Phase::Over(Verdict::Failed(NoRestart::HostsLost(_))) => self.may_lose,
            Phase::Ending(Why::Failed) | Phase::Over(Verdict::Failed(_)) => {
                let origin = new.failure.as_ref().map(|it| it.host);
                world.zip(origin).is_some_and(|(world, host)| world.failed.contains(&host))
            }
            _ => true,
        };
        if is_true { Ok(()) } else { fail("the plan tells something that did not happen") }
    }
}

/// How all launchers ended.
pub(super) fn at_the_end(launchers: &[Launcher], store: Option<&Plan>) -> Result<(), String> {
    let mut code = None;
    for (at, launcher) in launchers.iter().enumerate() {
        let who = format!("launcher {at} on machine {}", launcher.machine);
        match &launcher.end {
            None => {
                let plan = launcher.membership.as_ref().map(|it| it.plan());
                return Err(format!("{who} has not ended: it knows {plan:?}, there is {store:?}"));
            }
            Some(LauncherEnd::Part(End::Forgotten)) => {
                return Err(format!("{who} thinks that the store has lost the plan"));
            }
            Some(LauncherEnd::Part(End::Refused(why))) if why.contains("node rank") => {
                return Err(format!("{who} is refused: {why}"));
            }
            Some(LauncherEnd::Part(end @ End::Over(..))) => {
                let other = *code.get_or_insert(end.exit_code());
                if other != end.exit_code() {
                    return Err(format!(
                        "{who} ends with {}, others with {other}",
                        end.exit_code()
                    ));
                }
            }
            Some(_) => {}
        }
    }
    Ok(())
}
