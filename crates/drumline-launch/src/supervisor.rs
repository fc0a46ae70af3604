//! Decides when to end which worker: a state machine without processes and without a clock.
//!
//! ```text
//!          first failure           100 ms: SIGTERM         kill_after
//!  Running ─────────────► Failing ─────────────────► Ending ─────────► Killed ─────► given up
//!     │   or a worker hangs                            ▲    or Ctrl-C          10 s
//!     └────────────────────────────────────────────────┘
//!       SIGINT, SIGTERM, SIGHUP, SIGQUIT: passed on;
//!       shutdown_timeout or another Ctrl-C kills
//! ```
//!
//! A worker is *lost* if it fails and has told before that the others [go on without it](Event::Regroups). Then nothing
//! is sent, and the phase stays `Running`.
//!
//! For 100 ms after the first failure the supervisor sends nothing. In that time the other workers
//! notice that a peer is gone and report it themselves. Who was first follows from [what each worker has
//! told](Event::Said) and from how it ended, before the supervisor's own signals caused more endings: see
//! `drumline::blame`.
//!
//! The caller hands in every [`Event`] with its time, and carries out the [`Order`]s that come back.
//! The job is over when [`Supervisor::verdict`] is `Some`: when the last worker has exited, or when a
//! worker outlives SIGKILL because it is stuck in the kernel.
//!
//! ```
//! use std::time::Duration;
//! use drumline_launch::{Ending, supervisor::{Event, Order, Policy, Signal, Supervisor, Verdict}};
//!
//! let mut supervisor = Supervisor::new(2, Policy::default());
//! let at = Duration::from_millis;
//! supervisor.handle(at(9_000), Event::Exited(&[(1, Ending::Code(3))]));
//! assert_eq!(supervisor.deadline(), Some(at(9_100)));
//!
//! let orders = supervisor.handle(at(9_100), Event::Tick);
//! assert_eq!(orders, [Order { worker: 0, signal: Signal::TERM }]);
//! assert_eq!(supervisor.deadline(), Some(at(9_500)));
//!
//! supervisor.handle(at(9_200), Event::Exited(&[(0, Ending::Code(0))]));
//! assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 1 }));
//! ```

use std::time::Duration;

pub use drumline::blame::Words;
pub use rustix::process::Signal;

use drumline::blame::{Account, End, culprit};

use crate::Ending;

/// How long workers may take to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The time from the first failure to SIGKILL for the other workers, which get SIGTERM after 100 ms. It
    /// is short, so that the whole job ends within a second.
    pub kill_after: Duration,
    /// The time from a signal to the launcher, which the workers get as well, to SIGKILL. It is long enough
    /// to write a checkpoint.
    pub shutdown_timeout: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Policy { kill_after: Duration::from_millis(500), shutdown_timeout: Duration::from_secs(30) }
    }
}

/// An event of the launcher.
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// These workers exited since the last event, in this order.
    Exited(&'a [(usize, Ending)]),
    /// When these workers fail, the others go on, while so many workers run or have ended well. Due before
    /// [`Event::Exited`] of such a worker, while nobody has failed.
    Regroups(&'a [(usize, usize)]),
    /// What these workers have told of their failures so far. Due before anything is sent that ends workers, and again
    /// when the rest of their output is read: what a worker tells after it was told to end does not count.
    Said(&'a [(usize, Words)]),
    /// The kernel takes these workers down: it writes their memory to a file after a crash, or frees it. No signal changes
    /// any more how they end. The others may have noticed it long ago. Due when [`Supervisor::asks_for_words`], and before
    /// anything is killed.
    GoingDown(&'a [usize]),
    /// The launcher has found out that this worker hangs, and ends it with this signal. The job has failed, even if
    /// the worker outlives the signal.
    Hung {
        /// The worker's index.
        worker: usize,
        /// The signal.
        signal: Signal,
    },
    /// The others go on without this worker, which still runs.
    LeftBehind(usize),
    /// The launcher got this signal, which means that the job ends.
    End(Signal),
    /// The launcher got this signal, which only the workers understand.
    PassOn(Signal),
    /// The workers of other hosts have ended or are about to: these must end within this time, too.
    Abandon {
        /// The time from SIGTERM to SIGKILL.
        within: Duration,
    },
    /// The lease of this host has run out, or other hosts go on without it: its workers are killed. Keepers may have
    /// done that already.
    CutOff,
    /// Only time has passed. Due at [`Supervisor::deadline`].
    Tick,
}

/// The order to send `signal` to a worker that has not exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// The worker's index: its local rank.
    pub worker: usize,
    /// The signal to send.
    pub signal: Signal,
}

/// How the job went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All workers exited with code 0, but for those that were lost.
    Success,
    /// A worker failed; the others were ended.
    Failed {
        /// The worker that failed first.
        worker: usize,
    },
    /// The launcher got this signal and ended the workers.
    Stopped(Signal),
    /// The workers were ended because of another host.
    Abandoned,
}

/// The end of one worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// How it ended.
    pub ending: Ending,
    /// When it ended, by the caller's time.
    pub at: Duration,
    /// The last signal that was sent to it to end it.
    pub told: Option<Signal>,
    /// Whether it failed, and the others went on without it.
    pub is_lost: bool,
}

/// The state machine: see the [module](self).
#[derive(Clone, Debug)]
pub struct Supervisor {
    policy: Policy,
    workers: Vec<Watched>,
    phase: Phase,
    /// Why the job ends; `None` while it runs.
    cause: Option<Cause>,
    last_noticed: Duration,
    /// When the latest signal arrived that asks the job to end.
    asked_at: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Watched {
    exit: Option<Exit>,
    /// The time of that. Of several exits of one moment the first has the earliest.
    noticed: Duration,
    told: Option<Signal>,
    words: Words,
    /// The number of workers with which the others go on when this one fails.
    regroups: Option<usize>,
    /// Whether the others went on without it while it ran.
    is_left_behind: bool,
    /// Since when the kernel takes it down, if that is known.
    going_down: Option<Duration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Cause {
    /// A worker has failed. Which one was the first may show up later.
    Failed,
    /// This worker hung. No other one can be the origin then.
    Hung(usize),
    /// The launcher got this signal.
    Stopped(Signal),
    /// Another host.
    Abandoned,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Running,
    Failing { tell_at: Duration, kill_at: Duration },
    Ending { deadline: Duration },
    Killed { deadline: Duration },
    GivenUp,
}

/// How long the other workers get to notice a failure by themselves. Exits within this time may have one
/// origin, and may be reported in any order: a dying process closes its sockets; its peer exits with an error
/// about that; and only then the kernel reports the first process as exited.
const SETTLE: Duration = Duration::from_millis(100);

/// So long ago a worker may have told the failure of which it still ends, or a worker may have been lost whose end is the
/// reason for a failure now.
pub(crate) const RECENT: Duration = Duration::from_secs(10);

/// After SIGKILL a process ends at once, unless it hangs in the kernel (because of a dead disk or device).
/// Then the supervisor gives up after this time, so that the launcher does not hang.
const GIVE_UP_AFTER: Duration = Duration::from_secs(10);

/// How long the kernel gets to take a worker down: to write its memory to a file, and to free it.
const GOES_DOWN_WITHIN: Duration = Duration::from_secs(60);

/// `timeout` and systemd send two signals at once. A second signal within this time is ignored.
const ECHO: Duration = Duration::from_millis(100);

impl Supervisor {
    /// Watches `workers` running processes.
    pub fn new(workers: usize, policy: Policy) -> Self {
        Supervisor {
            policy,
            workers: vec![Watched::default(); workers],
            phase: Phase::Running,
            cause: None,
            last_noticed: Duration::ZERO,
            asked_at: None,
        }
    }

    /// Handles `event`, which happened at `now`, and returns what to do. `now` never runs backwards.
    ///
    /// Returns nothing once there is a [`verdict`](Self::verdict). Only [`Event::Said`] may still change which worker it
    /// names.
    pub fn handle(&mut self, now: Duration, event: Event<'_>) -> Vec<Order> {
        match event {
            Event::Said(told) => self.hear(told),
            _ if self.is_over() => {}
            Event::GoingDown(workers) => {
                for &index in workers {
                    if let Some(worker) = self.workers.get_mut(index) {
                        worker.going_down.get_or_insert(now);
                    }
                }
            }
            Event::Regroups(told) => {
                for &(index, ranks) in told {
                    if let Some(worker) = self.workers.get_mut(index) {
                        worker.regroups = Some(ranks);
                    }
                }
            }
            Event::Exited(batch) => self.exited(now, batch),
            Event::Hung { worker, signal } => return self.hangs(now, worker, signal),
            Event::LeftBehind(worker) => return self.left_behind(worker),
            Event::End(signal) => return self.asked_to_end(now, signal),
            Event::PassOn(signal) => return self.order(signal),
            Event::Abandon { within } => return self.abandon(now, now.saturating_add(within)),
            Event::CutOff => {
                self.abandon(now, now);
                return self.kill_all(now);
            }
            Event::Tick => match self.phase {
                Phase::Failing { tell_at, kill_at } if now >= tell_at => {
                    return self.end(Signal::TERM, kill_at);
                }
                Phase::Ending { deadline } if now >= deadline => return self.kill(now),
                Phase::Killed { deadline } if now >= deadline => match self.goes_down_until(now) {
                    Some(deadline) => self.phase = Phase::Killed { deadline },
                    None if self.spares_any() => return self.kill_all(now),
                    None => self.phase = Phase::GivenUp,
                },
                _ => {}
            },
        }
        Vec::new()
    }

    /// Only the first `workers` have been started, and the others never will be.
    pub fn limit(&mut self, workers: usize) {
        self.workers.truncate(workers);
    }

    /// Whether all workers were told to end.
    pub fn is_told(&self) -> bool {
        matches!(self.phase, Phase::Ending { .. } | Phase::Killed { .. } | Phase::GivenUp)
    }

    /// When the next [`Event::Tick`] is due, if ever.
    pub fn deadline(&self) -> Option<Duration> {
        match self.phase {
            Phase::Failing { tell_at: deadline, .. }
            | Phase::Ending { deadline }
            | Phase::Killed { deadline } => Some(deadline),
            Phase::Running | Phase::GivenUp => None,
        }
    }

    /// Whether [`Event::Said`] is due before this event.
    pub fn asks_for_words(&self, now: Duration, event: &Event<'_>) -> bool {
        match (self.phase, event) {
            (Phase::Failing { tell_at, .. }, Event::Tick) => now >= tell_at,
            (Phase::Failing { .. }, Event::End(_)) => true,
            (Phase::Failing { .. } | Phase::Running, Event::Abandon { .. } | Event::CutOff) => true,
            _ => false,
        }
    }

    /// Whether [`Event::GoingDown`] is due before this event, as far as it is true of workers.
    pub fn asks_who_goes_down(&self, now: Duration, event: &Event<'_>) -> bool {
        let is_due = match (self.phase, event) {
            (Phase::Ending { deadline } | Phase::Killed { deadline }, Event::Tick) => {
                now >= deadline
            }
            _ => false,
        };
        // A worker that a keeper has killed goes down, too.
        is_due || !matches!(event, Event::CutOff) && self.asks_for_words(now, event)
    }

    fn is_over(&self) -> bool {
        self.phase == Phase::GivenUp || self.workers.iter().all(|w| w.exit.is_some())
    }

    /// How the job went, as soon as it is over.
    pub fn verdict(&self) -> Option<Verdict> {
        self.is_over().then(|| match self.cause {
            None => Verdict::Success,
            Some(Cause::Failed | Cause::Hung(_)) => {
                Verdict::Failed { worker: self.first().unwrap_or(0) }
            }
            Some(Cause::Stopped(signal)) => Verdict::Stopped(signal),
            Some(Cause::Abandoned) => Verdict::Abandoned,
        })
    }

    /// The worker that has failed first, once no likelier origin can come up.
    pub fn failed(&self) -> Option<usize> {
        let may_come = matches!(self.phase, Phase::Failing { .. })
            || self.workers.iter().any(|worker| worker.is_spared() && worker.told.is_none());
        if may_come && !self.is_over() { None } else { self.first() }
    }

    /// How that worker ended. If it was told to end first, or does not end, the signal says nothing about it: then its
    /// exit code counts, or how the first one ended that was not told to.
    pub fn failure(&self) -> Option<Ending> {
        let exit = |worker: usize| self.workers.get(worker)?.exit;
        let own = exit(self.first()?);
        let failed = Exit::is_failure;
        let others = self.exits().flatten().filter(failed).min_by_key(|exit| exit.at);
        let told = match self.cause? {
            Cause::Hung(_) => own,
            _ => own.filter(failed).or(others).or(own.filter(|exit| exit.ending.is_code())),
        };
        let ending = told.map(|exit| exit.ending).filter(|ending| !ending.is_success());
        Some(ending.unwrap_or(Ending::Code(1)))
    }

    /// Whether the worker that has failed first only tells the end of another rank, which is none of this host.
    pub fn has_only_heard(&self) -> bool {
        let is_victim = |worker| Some(self.words(self.workers.get(worker)?).is_of_another(worker));
        self.cause == Some(Cause::Failed) && self.first().and_then(is_victim).unwrap_or(false)
    }

    /// Of the workers that have failed, the likeliest origin.
    fn first(&self) -> Option<usize> {
        match self.cause? {
            Cause::Hung(worker) => Some(worker),
            Cause::Failed => {
                let account = |it: &Watched| Account { end: it.end(), words: self.words(it) };
                let accounts: Vec<Account> = self.workers.iter().map(account).collect();
                culprit(&accounts)
            }
            Cause::Stopped(_) | Cause::Abandoned => None,
        }
    }

    /// What this worker has told of its failure. The loss of a worker, which it has survived, is no reason for it.
    fn words(&self, worker: &Watched) -> Words {
        match worker.words {
            Words::Heard { of: Some(of), .. } if self.is_lost(of) => Words::None,
            words => words,
        }
    }

    /// Whether this worker failed, and the others went on without it.
    pub fn is_lost(&self, worker: usize) -> bool {
        let exit = self.workers.get(worker).and_then(|worker| worker.exit);
        exit.is_some_and(|exit| exit.is_lost)
    }

    /// The end of each worker, `None` for those that have not exited.
    pub fn exits(&self) -> impl ExactSizeIterator<Item = Option<Exit>> {
        self.workers.iter().map(|worker| worker.exit)
    }

    fn hear(&mut self, told: &[(usize, Words)]) {
        for &(index, words) in told {
            if let Some(worker) = self.workers.get_mut(index)
                && worker.may_still_tell()
            {
                worker.words = words;
            }
        }
    }

    fn exited(&mut self, now: Duration, batch: &[(usize, Ending)]) {
        for &(index, ending) in batch {
            if let Some(worker) = self.workers.get_mut(index)
                && worker.exit.is_none()
            {
                let Watched { told, is_left_behind: is_lost, .. } = *worker;
                worker.exit = Some(Exit { ending, at: now, told, is_lost });
                worker.noticed = now.max(self.last_noticed + Duration::from_nanos(1));
                self.last_noticed = worker.noticed;
            }
        }
        let left = self.workers.iter().filter(|it| it.exit.is_none_or(|it| it.ending.is_success()));
        let (left, is_running) = (left.count(), self.phase == Phase::Running);
        let mut has_failed = false;
        for worker in batch.iter().map(|&(index, _)| index) {
            let Some(worker) = self.workers.get_mut(worker) else { continue };
            let goes_on = worker.regroups.is_some_and(|ranks| left >= ranks.max(1));
            match &mut worker.exit {
                Some(exit) if exit.is_failure() && is_running && goes_on => exit.is_lost = true,
                exit => has_failed |= exit.is_some_and(|exit| exit.is_failure()),
            }
        }
        if is_running && has_failed {
            self.cause = Some(Cause::Failed);
            self.fail(now);
            // The others did not go on for long without those that were lost just before.
            for exit in self.workers.iter_mut().filter_map(|worker| worker.exit.as_mut()) {
                exit.is_lost &= now > exit.at.saturating_add(RECENT);
            }
        } else if self.cause == Some(Cause::Abandoned) && has_failed {
            // It went down before another host ended the job.
            self.cause = Some(Cause::Failed);
        }
    }

    fn left_behind(&mut self, index: usize) -> Vec<Order> {
        match self.workers.get_mut(index) {
            Some(it) if self.phase == Phase::Running && it.exit.is_none() && it.told.is_none() => {
                (it.told, it.is_left_behind) = (Some(Signal::KILL), true);
                vec![Order { worker: index, signal: Signal::KILL }]
            }
            _ => Vec::new(),
        }
    }

    fn hangs(&mut self, now: Duration, index: usize, signal: Signal) -> Vec<Order> {
        match self.workers.get_mut(index) {
            Some(worker) if self.phase == Phase::Running && worker.exit.is_none() => {
                worker.told = Some(signal);
            }
            _ => return Vec::new(),
        }
        self.cause = Some(Cause::Hung(index));
        self.fail(now);
        vec![Order { worker: index, signal }]
    }

    fn fail(&mut self, now: Duration) {
        let kill_at = now.saturating_add(self.policy.kill_after);
        self.phase = Phase::Failing { tell_at: kill_at.min(now.saturating_add(SETTLE)), kill_at };
    }

    fn asked_to_end(&mut self, now: Duration, signal: Signal) -> Vec<Order> {
        let previous = self.asked_at.replace(now);
        match self.phase {
            Phase::Running => {
                self.cause = Some(Cause::Stopped(signal));
                self.end(signal, now.saturating_add(self.policy.shutdown_timeout))
            }
            Phase::Failing { .. } | Phase::Ending { .. }
                if previous.is_some_and(|at| now < at.saturating_add(ECHO)) =>
            {
                Vec::new()
            }
            Phase::Failing { .. } | Phase::Ending { .. } if signal == Signal::INT => {
                self.kill_all(now)
            }
            Phase::Killed { .. } if signal == Signal::INT && self.spares_any() => {
                self.kill_all(now)
            }
            Phase::Failing { kill_at: deadline, .. } | Phase::Ending { deadline } => {
                self.end(signal, deadline)
            }
            Phase::Killed { .. } | Phase::GivenUp => Vec::new(),
        }
    }

    /// A failure or a signal of this host that came before stays the cause, also that of a worker that has told it and
    /// has not ended yet.
    fn abandon(&mut self, now: Duration, deadline: Duration) -> Vec<Order> {
        match self.phase {
            Phase::Running => {
                let has_failed = self.workers.iter().any(|it| it.is_failing(now));
                self.cause = Some(if has_failed { Cause::Failed } else { Cause::Abandoned });
                self.end(Signal::TERM, deadline)
            }
            Phase::Failing { kill_at: at, .. } => self.end(Signal::TERM, at.min(deadline)),
            Phase::Ending { deadline: at } => {
                self.phase = Phase::Ending { deadline: at.min(deadline) };
                Vec::new()
            }
            Phase::Killed { .. } | Phase::GivenUp => Vec::new(),
        }
    }

    fn end(&mut self, signal: Signal, deadline: Duration) -> Vec<Order> {
        self.phase = Phase::Ending { deadline };
        let told = self.workers.iter_mut().filter(|worker| !worker.is_spared());
        told.for_each(|worker| worker.told = Some(signal));
        self.order(signal)
    }

    /// Kills the workers that the kernel does not take down already. These get their time.
    fn kill(&mut self, now: Duration) -> Vec<Order> {
        let Some(deadline) = self.goes_down_until(now) else { return self.kill_all(now) };
        let orders = self.end(Signal::KILL, now);
        self.phase = Phase::Killed { deadline };
        orders
    }

    fn kill_all(&mut self, now: Duration) -> Vec<Order> {
        self.workers.iter_mut().for_each(|worker| worker.going_down = None);
        let orders = self.end(Signal::KILL, now);
        self.phase = Phase::Killed { deadline: now.saturating_add(GIVE_UP_AFTER) };
        orders
    }

    fn spares_any(&self) -> bool {
        self.workers.iter().any(Watched::is_spared)
    }

    /// When the last worker should have ended that the kernel takes down, if that is still to come.
    fn goes_down_until(&self, now: Duration) -> Option<Duration> {
        let spared = self.workers.iter().filter(|worker| worker.is_spared());
        let until = spared.filter_map(|it| Some(it.going_down?.saturating_add(GOES_DOWN_WITHIN)));
        until.max().filter(|until| *until > now)
    }

    /// Orders `signal` for all living workers that it reaches.
    fn order(&self, signal: Signal) -> Vec<Order> {
        let living = self.workers.iter().enumerate();
        let living = living.filter(|(_, it)| it.exit.is_none() && !it.is_spared());
        living.map(|(worker, _)| Order { worker, signal }).collect()
    }
}

impl Exit {
    /// Whether it failed by itself, and the others did not go on without it.
    fn is_failure(&self) -> bool {
        self.told.is_none() && !self.is_lost && !self.ending.is_success()
    }
}

impl Watched {
    /// Whether it gets no signal, because the kernel takes it down already.
    fn is_spared(&self) -> bool {
        self.exit.is_none() && self.going_down.is_some()
    }

    /// What it tells now is not because it was told to end.
    fn may_still_tell(&self) -> bool {
        self.exit.map_or(self.told, |exit| exit.told).is_none()
    }

    /// Whether it has told a failure of its own, and takes its time to end. What was told long ago, it has survived.
    fn is_failing(&self, now: Duration) -> bool {
        let is_recent = |at| now <= Duration::saturating_add(at, RECENT);
        self.exit.is_none() && matches!(self.words, Words::Own { at } if is_recent(at))
    }

    fn end(&self) -> End {
        match self.exit {
            Some(exit) if exit.is_failure() => {
                let is_never_a_reaction = exit.ending.is_never_a_reaction();
                End::Failure { at: self.noticed, is_never_a_reaction }
            }
            // Without a lost one the job has gone well.
            Some(Exit { told: None, .. }) => End::Success,
            Some(Exit { told: Some(_), .. }) | None => End::Open,
        }
    }
}

#[cfg(test)]
mod tests;
