//! What the leader decides: the next plan follows from the last one and from what it knows of the hosts.

use std::{collections::BTreeMap, time::Duration};

use crate::{EndedWorld, Next, supervisor::RECENT};

use super::{
    order::{self, Standing},
    sightings::{Knowledge, Sightings},
    values::{How, Member, Named, Origin, Outcome, Phase, Plan, Report, State, Verdict, Why},
};

/// The clocks of a leader. A new leader starts them anew.
#[derive(Clone, Debug, Default)]
pub(super) struct Leader {
    since: BTreeMap<Clock, Duration>,
}

/// What the leader measures the time of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Clock {
    /// There are too few hosts.
    TooFew,
    /// There are enough, and there may be more.
    LastCall,
    /// A failed job waits before it starts again.
    Pause,
    /// A host has come while a world runs.
    Newcomers,
    /// A worker has failed.
    Failure,
}

/// How much longer a world waits for another failure if the first one only tells the end of another rank.
const VICTIM_SETTLES: u32 = 5;

impl Leader {
    /// The plan that follows `plan`: the same one, if there is nothing to decide.
    pub(super) fn next(&mut self, it: Knowledge<'_>, plan: &Plan) -> Plan {
        let mut next = Plan { leader: it.me, ..plan.clone() };
        if !matches!(plan.phase, Phase::Over(_)) {
            let standing = order::standing(&it, plan);
            next.refused = standing.refused.clone();
            self.decide(it, &standing, &mut next);
            hand_over(it, &standing, &mut next);
        }
        if next != *plan {
            next.version += 1;
        }
        next
    }

    fn decide(&mut self, it: Knowledge<'_>, standing: &Standing, next: &mut Plan) {
        // A new leader has heard of the old one alone.
        if next.members.iter().any(|member| it.seen.is_stranger(member.host)) {
            return;
        }
        // A host that leaves may be lost before its workers have ended.
        let leaver = match &next.phase {
            Phase::Ending(Why::Left(leaver, signal)) => Some((leaver.clone(), *signal)),
            _ => standing.leaver.clone(),
        };
        if next.runs() {
            self.world(it, standing, next);
        }
        let pause = match next.phase {
            Phase::Pausing(pause) => Some(pause),
            _ => None,
        };
        let waited = self.elapsed(it.now, Clock::Pause, pause.is_some());
        if pause.zip(waited).is_some_and(|(pause, waited)| waited >= pause) {
            next.phase = Phase::Gathering;
        }
        self.gather(it, standing, leaver, next);
    }

    /// How long `holds` has been true.
    fn elapsed(&mut self, now: Duration, clock: Clock, holds: bool) -> Option<Duration> {
        if !holds {
            self.since.remove(&clock);
            return None;
        }
        let since = *self.since.entry(clock).or_insert(now);
        Some(now.saturating_sub(since))
    }

    /// Watches a world until all its members have ended.
    fn world(&mut self, it: Knowledge<'_>, standing: &Standing, next: &mut Plan) {
        let goes_on = go_on_without(it, next);
        if !goes_on && take_out_lost(it, next) {
            // The plan names the lost host before anything follows from it.
            return;
        }
        let outcomes = outcomes(it, next);
        let is_over = outcomes.len() == next.present().count();
        if goes_on {
            self.elapsed(it.now, Clock::Failure, false);
        } else {
            self.failure(it, next, is_over);
            leave(it, next);
        }
        if is_over {
            self.since.clear();
            conclude(next, &outcomes);
            return;
        }
        self.newcomers(it, standing, next);
        if next.phase == Phase::Holding
            && let Some(step) = step_to_stop_at(it, next)
        {
            next.phase = Phase::StoppingAt(step);
        }
    }

    /// Ends a world in which a worker has failed. Failures of one moment may have one origin, so it waits a little. If
    /// the first one only told the end of another rank, that one may still come up.
    fn failure(&mut self, it: Knowledge<'_>, next: &mut Plan, is_over: bool) {
        let has_only_heard = next.failure.as_ref().is_some_and(|it| it.failure.has_only_heard);
        if matches!(&next.phase, Phase::Ending(why) if *why != Why::Failed || !has_only_heard) {
            return;
        }
        // The ranks that are left did not go on for long without those that were lost just before.
        let failed_at = |member: &&Member| it.seen.failed_at(member.host, next.world);
        let may_count = next.present().any(|member| failed_at(&member).is_some());
        let failures = next.members.iter().filter_map(|member| {
            let is_recent = |at: &Duration| !next.has_lost(member.host) || it.now <= *at + RECENT;
            let at = failed_at(&member).filter(|at| may_count && is_recent(at))?;
            Some((member.host, at, it.seen.report_of(member.host)?.failure.as_ref()?))
        });
        // Of equal ones this is the first.
        let origin = failures
            .min_by_key(|(_, at, failure)| {
                let is_reaction = !failure.ending.is_never_a_reaction();
                (failure.has_only_heard, is_reaction, *at, failure.time)
            })
            .map(|(host, _, failure)| Origin {
                host,
                name: it.seen.named(host).name,
                failure: failure.clone(),
            });
        let waited = self.elapsed(it.now, Clock::Failure, origin.is_some());
        let is_victim = origin.as_ref().is_some_and(|it| it.failure.has_only_heard);
        let settle = it.timing.settle * if is_victim { VICTIM_SETTLES } else { 1 };
        if waited.is_some_and(|waited| waited >= settle || is_over) {
            next.failure = origin;
            next.phase = Phase::Ending(Why::Failed);
        }
    }

    /// Holds a world in which there is room for the hosts that have come. It waits a little, so that several that
    /// come together are taken in together.
    fn newcomers(&mut self, it: Knowledge<'_>, standing: &Standing, next: &mut Plan) {
        let running = |it: &Sightings, member: &Member| {
            it.state_in(member.host, next.world) == State::Running
        };
        let has_come = next.phase == Phase::Running
            && next.present().count() < it.host.terms.hosts.max.get()
            && standing.ready.iter().any(|host| next.place(*host).is_none())
            && next.present().all(|member| running(it.seen, member));
        let waited = self.elapsed(it.now, Clock::Newcomers, has_come);
        if waited.is_some_and(|waited| waited >= it.timing.newcomers) {
            next.phase = Phase::Holding;
        }
    }

    /// Starts the next world once there are enough hosts.
    fn gather(
        &mut self,
        it: Knowledge<'_>,
        standing: &Standing,
        leaver: Option<(Named, i32)>,
        next: &mut Plan,
    ) {
        if !matches!(next.phase, Phase::Gathering) {
            self.elapsed(it.now, Clock::TooFew, false);
            self.elapsed(it.now, Clock::LastCall, false);
            return;
        }
        let hosts = it.host.terms.hosts;
        let here = standing.ready.len();
        let is_enough = here >= hosts.min.get();
        let waited = self.elapsed(it.now, Clock::TooFew, !is_enough);
        let called = self.elapsed(it.now, Clock::LastCall, is_enough);
        if standing.is_unsure {
            return;
        }
        if let Some((leaver, signal)) = leaver
            && (!is_enough || it.seen.host_of(leaver.host).is_some_and(|it| it.keeps_store))
        {
            next.phase = Phase::Over(Verdict::Stopped(leaver, signal));
            return;
        }
        let has_called =
            next.world > 0 || called.is_some_and(|called| called >= it.timing.last_call);
        if here >= hosts.max.get() || (is_enough && has_called) {
            start(it, standing, next);
        } else if waited.is_some_and(|waited| waited >= it.timing.join_timeout) {
            let came = standing.ready.iter().map(|host| it.seen.named(*host)).collect();
            next.phase = Phase::Over(Verdict::NoQuorum { came, needed: hosts.min.get() });
        }
    }
}

/// Loses the hosts that take no more part in a world whose ranks [regroup](Report::regroups), if the ranks of the others go
/// on without them. Returns whether they do.
fn go_on_without(it: Knowledge<'_>, next: &mut Plan) -> bool {
    let state = |host| it.seen.state_in(host, next.world);
    let report = |host| it.seen.report_of(host).filter(|report| report.world == next.world);
    let is_silent =
        |host| it.seen.is_silent(host, it.timing) && !matches!(state(host), State::Ended(_));
    let has_failed = |host| {
        let has_told = |it: &Report| it.failure.is_some() || it.leaves.is_some();
        let ended = |it: State| matches!(it, State::Ended(it) if it.how != How::Success);
        report(host).is_some_and(has_told) || ended(state(host))
    };
    let (gone, left): (Vec<&Member>, Vec<&Member>) =
        next.present().partition(|it| is_silent(it.host) || has_failed(it.host));
    let needed = left.iter().map(|member| match state(member.host) {
        State::Ended(_) => Some(1),
        State::Waiting | State::Running => report(member.host)?.regroups,
    });
    let ranks: usize = left.iter().map(|member| member.ranks).sum();
    let needed = needed.collect::<Option<Vec<usize>>>().and_then(|it| it.into_iter().max());
    let is_enough = needed.is_some_and(|needed| ranks >= needed);
    if next.phase != Phase::Running || !is_enough || is_store_lost(it, next) {
        return false;
    }
    // A host whose workers still end is not lost yet.
    let has_gone = |host: &u64| is_silent(*host) || matches!(state(*host), State::Ended(_));
    let lost: Vec<u64> = gone.iter().map(|member| member.host).filter(has_gone).collect();
    next.lost.extend(lost.into_iter().map(|host| it.seen.named(host)));
    true
}

/// Whether ranks that have lost others could not meet any more: their store is on their first host, also if that has no
/// ranks left, and that of the launchers ends with one of them.
fn is_store_lost(it: Knowledge<'_>, next: &Plan) -> bool {
    let leaves = |host| it.seen.report_of(host).is_some_and(|report| report.leaves.is_some());
    let keeps_store = |host| it.seen.host_of(host).is_some_and(|host| host.keeps_store);
    let is_lost = |(place, member): (usize, &Member)| {
        let is_first = place == 0;
        (is_first && it.seen.is_silent(member.host, it.timing))
            || ((is_first || keeps_store(member.host)) && leaves(member.host))
    };
    next.members.iter().enumerate().any(is_lost)
}

/// Takes out members that are silent, and ends the world without them. What a member has said at its end stays true
/// when it is silent. Returns whether there were any.
fn take_out_lost(it: Knowledge<'_>, next: &mut Plan) -> bool {
    let world = next.world;
    let is_lost = |member: &Member| {
        it.seen.is_silent(member.host, it.timing)
            && !matches!(it.seen.state_in(member.host, world), State::Ended(_))
    };
    let Some(first) = next.present().find(|member| is_lost(member)) else { return false };
    let lost = it.seen.named(first.host);
    next.members.retain(|member| !is_lost(member));
    // Workers fail when they lose their peers, long before the host is known to be lost.
    let is_reaction =
        next.failure.as_ref().is_some_and(|it| !it.failure.ending.is_never_a_reaction());
    match next.phase {
        Phase::Ending(Why::Failed) if is_reaction => next.failure = None,
        Phase::Ending(_) => return true,
        _ => {}
    }
    next.phase = Phase::Ending(Why::Lost(lost));
    true
}

/// Ends a world when the launcher of a member was told to end.
fn leave(it: Knowledge<'_>, next: &mut Plan) {
    let leaver = next.present().find_map(|member| {
        let signal = it.seen.report_of(member.host)?.leaves?;
        Some((it.seen.named(member.host), signal))
    });
    if let Some((leaver, signal)) = leaver
        && !matches!(next.phase, Phase::Ending(_))
    {
        next.phase = Phase::Ending(Why::Left(leaver, signal));
    }
}

/// How the members ended that have.
fn outcomes(it: Knowledge<'_>, next: &Plan) -> Vec<Outcome> {
    let outcome = |member: &Member| match it.seen.state_in(member.host, next.world) {
        State::Ended(outcome) => Some(outcome),
        State::Waiting | State::Running => None,
    };
    next.present().filter_map(outcome).collect()
}

/// What follows a world, once all its members have ended.
fn conclude(next: &mut Plan, outcomes: &[Outcome]) {
    if !matches!(next.phase, Phase::Ending(_)) && outcomes.iter().all(|it| it.how == How::Success) {
        next.phase = Phase::Over(Verdict::Finished);
        return;
    }
    let lived = outcomes.iter().map(|it| it.lived).max().unwrap_or_default();
    let stepped = outcomes.iter().any(|it| it.stepped);
    next.phase = match (&next.phase, &next.failure) {
        (Phase::Ending(Why::Failed), Some(origin)) => {
            let world = EndedWorld { ending: origin.failure.ending, lived, stepped };
            match next.budget.after(world) {
                Next::End(why) => Phase::Over(Verdict::Failed(why)),
                Next::Restart(pause) => {
                    next.restart += 1;
                    Phase::Pausing(pause)
                }
            }
        }
        (Phase::Ending(Why::Lost(_)), _) => match next.budget.after_loss(lived, stepped) {
            Ok(()) => Phase::Gathering,
            Err(why) => {
                next.failure = None;
                Phase::Over(Verdict::Failed(why))
            }
        },
        _ => Phase::Gathering,
    };
}

/// The step before which all workers can stop, once all members hold theirs.
fn step_to_stop_at(it: Knowledge<'_>, next: &Plan) -> Option<u64> {
    let held = next.present().map(|member| match it.seen.state_in(member.host, next.world) {
        State::Ended(_) => Some(None),
        State::Waiting | State::Running => Some(it.seen.report_of(member.host)?.held?.begun),
    });
    let begun: Option<Vec<Option<u64>>> = held.collect();
    Some(begun?.into_iter().max().flatten().map_or(0, |step| step.saturating_add(1)))
}

fn start(it: Knowledge<'_>, standing: &Standing, next: &mut Plan) {
    let hosts = order::of_ranks(&it, &standing.ready, next);
    let mut first_rank = 0;
    next.members = hosts
        .into_iter()
        .filter_map(|host| {
            let ranks = it.seen.host_of(host)?.ranks;
            let member = Member { host, first_rank, ranks };
            first_rank += ranks;
            Some(member)
        })
        .collect();
    next.lost.clear();
    next.world += 1;
    next.phase = Phase::Running;
}

/// A leader that leaves gives the plan to another host, once its workers have ended.
fn hand_over(it: Knowledge<'_>, standing: &Standing, next: &mut Plan) {
    let leaves = it.seen.report_of(it.me).is_some_and(|report| report.leaves.is_some());
    let is_needed = next.runs() && next.present().any(|member| member.host == it.me);
    if leaves
        && !is_needed
        && !matches!(next.phase, Phase::Over(_))
        && let Some(host) = order::of_ranks(&it, &standing.ready, next).first()
    {
        next.leader = *host;
    }
}
