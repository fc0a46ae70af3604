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
//! For 100 ms after the first failure the supervisor sends nothing. In that time the other workers
//! notice that a peer is gone and report it themselves. Of several failures in that time the supervisor
//! picks the likeliest origin, before its own signals cause more endings.
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

pub use rustix::process::Signal;

use crate::Ending;

/// How long workers may take to end.
///
/// ```
/// use std::time::Duration;
///
/// use drumline_launch::{Ending, supervisor::{Event, Policy, Supervisor}};
///
/// let policy = Policy { kill_after: Duration::from_secs(2), ..Policy::default() };
/// let mut supervisor = Supervisor::new(2, policy);
/// let at = Duration::from_millis;
/// supervisor.handle(at(0), Event::Exited(&[(1, Ending::Code(3))]));
/// supervisor.handle(at(100), Event::Tick); // SIGTERM for the other one
/// assert_eq!(supervisor.deadline(), Some(at(2_000))); // SIGKILL
/// ```
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
///
/// ```
/// use std::time::Duration;
///
/// use drumline_launch::supervisor::{Event, Order, Policy, Signal, Supervisor};
///
/// let mut supervisor = Supervisor::new(2, Policy::default());
/// let orders = supervisor.handle(Duration::ZERO, Event::End(Signal::INT)); // Ctrl-C
/// assert_eq!(orders, [0, 1].map(|worker| Order { worker, signal: Signal::INT }));
/// ```
#[derive(Clone, Copy, Debug)]
pub enum Event<'a> {
    /// These workers exited since the last event, in this order.
    Exited(&'a [(usize, Ending)]),
    /// The launcher has found out that this worker hangs, and ends it with this signal. The job has failed, even if
    /// the worker outlives the signal.
    Hung {
        /// The worker's index.
        worker: usize,
        /// The signal.
        signal: Signal,
    },
    /// The launcher got this signal, which means that the job ends.
    End(Signal),
    /// The launcher got this signal, which only the workers understand.
    PassOn(Signal),
    /// The workers of other hosts have ended or are about to: these must end within this time, too.
    Abandon {
        /// The time from SIGTERM to SIGKILL.
        within: Duration,
    },
    /// Only time has passed. Due at [`Supervisor::deadline`].
    Tick,
}

/// The order to send `signal` to a worker that has not exited.
///
/// ```
/// use std::time::Duration;
///
/// use drumline_launch::{Ending, supervisor::{Event, Order, Policy, Signal, Supervisor}};
///
/// let mut supervisor = Supervisor::new(2, Policy::default());
/// supervisor.handle(Duration::ZERO, Event::Exited(&[(0, Ending::Code(0))]));
/// let orders = supervisor.handle(Duration::ZERO, Event::End(Signal::TERM));
/// assert_eq!(orders, [Order { worker: 1, signal: Signal::TERM }]); // the other one has gone
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Order {
    /// The worker's index: its local rank.
    pub worker: usize,
    /// The signal to send.
    pub signal: Signal,
}

/// How the job went.
///
/// ```
/// use std::time::Duration;
///
/// use drumline_launch::{Ending, supervisor::{Event, Policy, Signal, Supervisor, Verdict}};
///
/// let mut supervisor = Supervisor::new(2, Policy::default());
/// let at = Duration::from_secs;
/// supervisor.handle(at(1), Event::End(Signal::TERM));
/// let ends = [0, 1].map(|worker| (worker, Ending::Code(0)));
/// supervisor.handle(at(2), Event::Exited(&ends));
/// assert_eq!(supervisor.verdict(), Some(Verdict::Stopped(Signal::TERM)));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// All workers exited with code 0.
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
///
/// ```
/// use std::time::Duration;
///
/// use drumline_launch::{Ending, supervisor::{Event, Exit, Policy, Supervisor}};
///
/// let mut supervisor = Supervisor::new(2, Policy::default());
/// let at = Duration::from_secs;
/// supervisor.handle(at(7), Event::Exited(&[(1, Ending::Code(0))]));
/// let wanted = Exit { ending: Ending::Code(0), at: at(7), told: None };
/// assert!(supervisor.exits().eq([None, Some(wanted)]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exit {
    /// How it ended.
    pub ending: Ending,
    /// When it ended, by the caller's time.
    pub at: Duration,
    /// The last signal that was sent to it to end it.
    pub told: Option<Signal>,
}

/// The state machine: see the [module](self).
///
/// ```
/// use std::time::Duration;
///
/// use drumline_launch::{Ending, supervisor::{Event, Policy, Supervisor, Verdict}};
///
/// let mut supervisor = Supervisor::new(2, Policy::default());
/// let at = Duration::from_secs;
/// let crash = Ending::Signal { number: 11, core_dumped: false };
/// supervisor.handle(at(3), Event::Exited(&[(0, Ending::Code(1)), (1, crash)]));
/// // Rank 0 has only lost its peer.
/// assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 1 }));
/// ```
#[derive(Clone, Debug)]
pub struct Supervisor {
    policy: Policy,
    workers: Vec<Watched>,
    phase: Phase,
    /// Why the job ends; `None` while it runs.
    cause: Option<Verdict>,
    /// Whether the cause is a worker that hung. No other worker can be the origin then.
    hung: bool,
    /// When the latest signal arrived that asks the job to end.
    asked_at: Option<Duration>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Watched {
    exit: Option<Exit>,
    told: Option<Signal>,
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

/// After SIGKILL a process ends at once, unless it hangs in the kernel (because of a dead disk or device).
/// Then the supervisor gives up after this time, so that the launcher does not hang.
const GIVE_UP_AFTER: Duration = Duration::from_secs(10);

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
            hung: false,
            asked_at: None,
        }
    }

    /// Handles `event`, which happened at `now`, and returns what to do. `now` never runs backwards.
    ///
    /// Returns nothing once there is a [`verdict`](Self::verdict).
    pub fn handle(&mut self, now: Duration, event: Event<'_>) -> Vec<Order> {
        if self.verdict().is_some() {
            return Vec::new();
        }
        match event {
            Event::Exited(batch) => {
                self.exited(now, batch);
                Vec::new()
            }
            Event::Hung { worker, signal } => self.hangs(now, worker, signal),
            Event::End(signal) => self.asked_to_end(now, signal),
            Event::PassOn(signal) => self.order(signal),
            Event::Abandon { within } => self.abandon(now.saturating_add(within)),
            Event::Tick => match self.phase {
                Phase::Failing { tell_at, kill_at } if now >= tell_at => {
                    self.end(Signal::TERM, kill_at)
                }
                Phase::Ending { deadline } if now >= deadline => self.kill(now),
                Phase::Killed { deadline } if now >= deadline => {
                    self.phase = Phase::GivenUp;
                    Vec::new()
                }
                _ => Vec::new(),
            },
        }
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

    /// How the job went, as soon as it is over.
    pub fn verdict(&self) -> Option<Verdict> {
        let over = self.phase == Phase::GivenUp || self.workers.iter().all(|w| w.exit.is_some());
        over.then_some(self.cause.unwrap_or(Verdict::Success))
    }

    /// The worker that has failed first, once no likelier origin can come up.
    pub fn failed(&self) -> Option<usize> {
        match (self.cause, self.phase) {
            (_, Phase::Failing { .. }) if self.verdict().is_none() => None,
            (Some(Verdict::Failed { worker }), _) => Some(worker),
            _ => None,
        }
    }

    /// The end of each worker, `None` for those that have not exited.
    pub fn exits(&self) -> impl ExactSizeIterator<Item = Option<Exit>> {
        self.workers.iter().map(|worker| worker.exit)
    }

    fn exited(&mut self, now: Duration, batch: &[(usize, Ending)]) {
        for &(index, ending) in batch {
            if let Some(worker) = self.workers.get_mut(index) {
                worker.exit.get_or_insert(Exit { ending, at: now, told: worker.told });
            }
        }
        if self.hung || !matches!(self.phase, Phase::Running | Phase::Failing { .. }) {
            return;
        }
        let known = match self.cause {
            Some(Verdict::Failed { worker }) => Some(worker),
            _ => None,
        };
        let suspects = known.into_iter().chain(batch.iter().map(|&(index, _)| index));
        let endings =
            suspects.filter_map(|index| Some((index, self.workers.get(index)?.exit?.ending)));
        let failures = endings.filter(|(_, ending)| !ending.is_success());
        // `min_by_key` returns the first of equal elements, so this is the first of the likeliest.
        let origin = failures.min_by_key(|(_, ending)| !ending.is_never_a_reaction());
        let Some((worker, _)) = origin else { return };
        self.cause = Some(Verdict::Failed { worker });
        if self.phase == Phase::Running {
            self.fail(now);
        }
    }

    fn hangs(&mut self, now: Duration, index: usize, signal: Signal) -> Vec<Order> {
        match self.workers.get_mut(index) {
            Some(worker) if self.phase == Phase::Running && worker.exit.is_none() => {
                worker.told = Some(signal);
            }
            _ => return Vec::new(),
        }
        self.cause = Some(Verdict::Failed { worker: index });
        self.hung = true;
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
                self.cause = Some(Verdict::Stopped(signal));
                self.end(signal, now.saturating_add(self.policy.shutdown_timeout))
            }
            Phase::Failing { .. } | Phase::Ending { .. }
                if previous.is_some_and(|at| now < at.saturating_add(ECHO)) =>
            {
                Vec::new()
            }
            Phase::Failing { .. } | Phase::Ending { .. } if signal == Signal::INT => self.kill(now),
            Phase::Failing { kill_at: deadline, .. } | Phase::Ending { deadline } => {
                self.end(signal, deadline)
            }
            Phase::Killed { .. } | Phase::GivenUp => Vec::new(),
        }
    }

    /// A failure or a signal of this host that came before stays the cause.
    fn abandon(&mut self, deadline: Duration) -> Vec<Order> {
        match self.phase {
            Phase::Running => {
                self.cause = Some(Verdict::Abandoned);
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
        self.workers.iter_mut().for_each(|worker| worker.told = Some(signal));
        self.order(signal)
    }

    fn kill(&mut self, now: Duration) -> Vec<Order> {
        let orders = self.end(Signal::KILL, now);
        self.phase = Phase::Killed { deadline: now.saturating_add(GIVE_UP_AFTER) };
        orders
    }

    /// Orders `signal` for all living workers.
    fn order(&self, signal: Signal) -> Vec<Order> {
        let living = self.workers.iter().enumerate().filter(|(_, worker)| worker.exit.is_none());
        living.map(|(worker, _)| Order { worker, signal }).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const OK: Ending = Ending::Code(0);
    const SEGV: Ending = Ending::Signal { number: 11, core_dumped: false };
    const ABRT: Ending = Ending::Signal { number: 6, core_dumped: false };

    fn at(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    fn orders(workers: &[usize], signal: Signal) -> Vec<Order> {
        workers.iter().map(|&worker| Order { worker, signal }).collect()
    }

    #[test]
    fn success_needs_all_workers() {
        let mut supervisor = Supervisor::new(2, Policy::default());
        assert_eq!(supervisor.handle(at(1), Event::Exited(&[(1, OK)])), []);
        assert_eq!((supervisor.verdict(), supervisor.deadline()), (None, None));
        assert_eq!(supervisor.handle(at(2), Event::Exited(&[(0, OK)])), []);
        assert_eq!(supervisor.verdict(), Some(Verdict::Success));
    }

    #[test]
    fn a_worker_that_hangs_is_the_origin_whatever_the_others_do() {
        let mut supervisor = Supervisor::new(3, Policy::default());
        let hung = Event::Hung { worker: 1, signal: Signal::TERM };
        assert_eq!(supervisor.handle(at(1_000), hung), orders(&[1], Signal::TERM));
        assert_eq!(supervisor.handle(at(1_001), hung), [], "it is told once");
        supervisor.handle(at(1_050), Event::Exited(&[(0, SEGV)]));
        assert_eq!(supervisor.handle(at(1_100), Event::Tick), orders(&[1, 2], Signal::TERM));
        supervisor.handle(at(1_101), Event::Exited(&[(2, Ending::Code(1))]));
        assert_eq!(supervisor.handle(at(1_500), Event::Tick), orders(&[1], Signal::KILL));
        // It waits in the kernel, and does not end.
        supervisor.handle(at(11_500), Event::Tick);
        assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 1 }));
    }

    #[test]
    fn who_has_ended_or_is_being_ended_does_not_hang() {
        let hung = Event::Hung { worker: 0, signal: Signal::KILL };
        let mut supervisor = Supervisor::new(2, Policy::default());
        supervisor.handle(at(1), Event::Exited(&[(0, OK)]));
        assert_eq!(supervisor.handle(at(2), hung), []);
        assert_eq!(supervisor.handle(at(2), Event::Hung { worker: 7, signal: Signal::KILL }), []);
        supervisor.handle(at(3), Event::Exited(&[(1, OK)]));
        assert_eq!(supervisor.verdict(), Some(Verdict::Success));
        let mut supervisor = Supervisor::new(2, Policy::default());
        supervisor.handle(at(1), Event::End(Signal::TERM));
        assert_eq!(supervisor.handle(at(2), hung), []);
        supervisor.handle(at(3), Event::Exited(&[(0, OK), (1, OK)]));
        assert_eq!(supervisor.verdict(), Some(Verdict::Stopped(Signal::TERM)));
    }

    #[test]
    fn a_failure_ends_then_kills_then_gives_up() {
        let mut supervisor = Supervisor::new(4, Policy::default());
        supervisor.handle(at(1), Event::Exited(&[(3, OK)]));
        supervisor.handle(at(1_000), Event::Exited(&[(1, Ending::Code(7))]));
        assert_eq!(supervisor.handle(at(1_099), Event::Tick), []);
        assert_eq!(supervisor.handle(at(1_100), Event::Tick), orders(&[0, 2], Signal::TERM));

        supervisor.handle(at(1_101), Event::Exited(&[(0, Ending::Code(1))]));
        assert_eq!(supervisor.handle(at(1_499), Event::Tick), []);
        assert_eq!(supervisor.handle(at(1_500), Event::Tick), orders(&[2], Signal::KILL));
        assert_eq!(supervisor.handle(at(1_501), Event::Tick), []);

        assert_eq!(supervisor.deadline(), Some(at(11_500)));
        assert_eq!(supervisor.verdict(), None);
        supervisor.handle(at(11_500), Event::Tick);
        assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 1 }));
        let told: Vec<_> = supervisor.exits().map(|exit| exit.map(|exit| exit.told)).collect();
        assert_eq!(told, [Some(Some(Signal::TERM)), Some(None), None, Some(None)]);
    }

    #[test]
    fn of_one_moment_the_first_counts_unless_a_later_one_is_the_likelier_origin() {
        let first_of = |ends: &[(usize, Ending)]| {
            let mut at_once = Supervisor::new(ends.len(), Policy::default());
            at_once.handle(at(0), Event::Exited(ends));
            let mut one_by_one = Supervisor::new(ends.len(), Policy::default());
            for end in ends {
                one_by_one.handle(at(0), Event::Exited(&[*end]));
            }
            assert_eq!(at_once.verdict(), one_by_one.verdict());
            at_once.verdict()
        };
        let failed = |worker| Some(Verdict::Failed { worker });
        assert_eq!(first_of(&[(2, Ending::Code(1)), (0, Ending::Code(2)), (1, OK)]), failed(2));
        assert_eq!(first_of(&[(2, Ending::Code(1)), (0, SEGV), (1, SEGV)]), failed(0));
        assert_eq!(first_of(&[(1, Ending::Code(1)), (0, ABRT)]), failed(1));
    }

    #[test]
    fn what_ends_after_it_was_told_to_is_no_origin() {
        let mut supervisor = Supervisor::new(2, Policy::default());
        supervisor.handle(at(0), Event::Exited(&[(0, Ending::Code(3))]));
        supervisor.handle(at(100), Event::Tick);
        supervisor.handle(at(101), Event::Exited(&[(1, SEGV)]));
        assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 0 }));
    }

    #[test]
    fn no_patience_is_no_problem() {
        let none = Policy { kill_after: Duration::ZERO, shutdown_timeout: Duration::ZERO };
        let mut supervisor = Supervisor::new(2, none);
        supervisor.handle(at(0), Event::Exited(&[(0, Ending::Code(3))]));
        assert_eq!(supervisor.handle(at(0), Event::Tick), orders(&[1], Signal::TERM));
        assert_eq!(supervisor.handle(at(0), Event::Tick), orders(&[1], Signal::KILL));
    }

    #[test]
    fn signals_are_passed_on_and_an_impatient_operator_is_heard() {
        let mut supervisor = Supervisor::new(2, Policy::default());
        let term = Event::End(Signal::TERM);
        let int = Event::End(Signal::INT);
        assert_eq!(
            supervisor.handle(at(0), Event::PassOn(Signal::USR1)),
            orders(&[0, 1], Signal::USR1)
        );
        assert_eq!(supervisor.deadline(), None);

        assert_eq!(supervisor.handle(at(10), int), orders(&[0, 1], Signal::INT));
        assert_eq!(supervisor.deadline(), Some(at(30_010)));
        assert_eq!(supervisor.handle(at(11), int), [], "an echo");
        assert_eq!(supervisor.handle(at(500), term), orders(&[0, 1], Signal::TERM));
        assert_eq!(supervisor.deadline(), Some(at(30_010)), "asking twice gives no extra time");
        assert_eq!(supervisor.handle(at(1_000), int), orders(&[0, 1], Signal::KILL));
        assert_eq!(supervisor.handle(at(2_000), int), []);

        supervisor.handle(at(2_001), Event::Exited(&[(0, SEGV), (1, OK)]));
        assert_eq!(supervisor.verdict(), Some(Verdict::Stopped(Signal::INT)));
    }

    #[test]
    fn ctrl_c_while_a_failed_job_ends_kills_but_the_failure_stays_the_verdict() {
        let mut supervisor = Supervisor::new(2, Policy::default());
        supervisor.handle(at(0), Event::Exited(&[(0, Ending::Code(3))]));
        let killed = supervisor.handle(at(1), Event::End(Signal::INT));
        assert_eq!(killed, orders(&[1], Signal::KILL));
        supervisor.handle(at(2), Event::Exited(&[(1, SEGV)]));
        assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 0 }));
    }

    #[test]
    fn workers_end_because_of_another_host_unless_they_have_a_reason_of_their_own() {
        let mut supervisor = Supervisor::new(2, Policy::default());
        let abandon = |ms| Event::Abandon { within: at(ms) };
        assert_eq!(supervisor.handle(at(10), abandon(500)), orders(&[0, 1], Signal::TERM));
        assert_eq!(supervisor.deadline(), Some(at(510)));
        assert_eq!(supervisor.handle(at(20), abandon(0)), []);
        assert_eq!(supervisor.handle(at(20), Event::Tick), orders(&[0, 1], Signal::KILL));
        supervisor.handle(at(21), Event::Exited(&[(0, SEGV), (1, OK)]));
        assert_eq!(supervisor.verdict(), Some(Verdict::Abandoned));

        let mut supervisor = Supervisor::new(2, Policy::default());
        supervisor.handle(at(0), Event::Exited(&[(1, SEGV)]));
        assert_eq!(supervisor.failed(), None, "another one may be the origin");
        assert_eq!(supervisor.handle(at(1), abandon(9_000)), orders(&[0], Signal::TERM));
        assert_eq!(supervisor.deadline(), Some(at(500)));
        assert_eq!(supervisor.failed(), Some(1));
        supervisor.handle(at(2), Event::Exited(&[(0, Ending::Code(1))]));
        assert_eq!(supervisor.verdict(), Some(Verdict::Failed { worker: 1 }));
    }

    #[test]
    fn events_after_the_verdict_change_nothing() {
        let mut supervisor = Supervisor::new(1, Policy::default());
        supervisor.handle(at(0), Event::Exited(&[(0, OK)]));
        assert_eq!(supervisor.handle(at(1), Event::End(Signal::INT)), []);
        assert_eq!(supervisor.verdict(), Some(Verdict::Success));
    }

    /// The next event in a test. Exits of workers that are gone are skipped.
    #[derive(Clone, Copy, Debug)]
    enum Happening {
        Exit(usize, Ending),
        Signal(Signal),
        Wait(Duration),
        WaitForDeadline,
    }

    /// Applies `happenings` to `workers` workers, which then live until they are killed. Checks what must
    /// always hold.
    fn check(workers: usize, happenings: &[Happening]) {
        let policy = Policy { kill_after: at(500), shutdown_timeout: at(30_000) };
        let mut supervisor = Supervisor::new(workers, policy);
        let mut living = vec![true; workers];
        let mut now = Duration::ZERO;
        let mut begun: Option<(Verdict, Duration)> = None;
        // The worker that failed first, and how, while a likelier origin may still show up.
        let mut suspect: Option<(Ending, Duration)> = None;
        let mut interrupts = 0;

        let tail = [Happening::WaitForDeadline; 3];
        for happening in happenings.iter().chain(&tail) {
            if supervisor.verdict().is_some() {
                break;
            }
            let orders = match *happening {
                Happening::Exit(worker, ending) => {
                    if !std::mem::take(&mut living[worker]) {
                        continue;
                    }
                    match (begun, suspect) {
                        _ if ending.is_success() => {}
                        (None, _) => {
                            begun = Some((Verdict::Failed { worker }, now + policy.kill_after));
                            suspect = Some((ending, now + SETTLE));
                        }
                        (Some((_, deadline)), Some((first, until)))
                            if now < until && first != SEGV && ending == SEGV =>
                        {
                            begun = Some((Verdict::Failed { worker }, deadline));
                            suspect = None;
                        }
                        _ => {}
                    }
                    supervisor.handle(now, Event::Exited(&[(worker, ending)]))
                }
                Happening::Signal(signal) => {
                    begun.get_or_insert((Verdict::Stopped(signal), now + policy.shutdown_timeout));
                    suspect = None;
                    interrupts += usize::from(signal == Signal::INT);
                    supervisor.handle(now, Event::End(signal))
                }
                Happening::Wait(time) => {
                    now += time;
                    supervisor.handle(now, Event::Tick)
                }
                Happening::WaitForDeadline => {
                    now = supervisor.deadline().unwrap_or(now).max(now);
                    supervisor.handle(now, Event::Tick)
                }
            };
            for order in orders {
                assert!(living[order.worker], "{order:?} to a worker that has exited");
                let (_, deadline) = begun.expect("an order for no reason");
                assert!(order.signal != Signal::KILL || now >= deadline || interrupts > 0);
            }
        }

        let gone: Vec<bool> = supervisor.exits().map(|exit| exit.is_some()).collect();
        assert!(gone.iter().zip(&living).all(|(gone, living)| gone != living));
        match begun {
            Some((verdict, _)) => assert_eq!(supervisor.verdict(), Some(verdict)),
            None if living.contains(&true) => assert_eq!(supervisor.verdict(), None),
            None => assert_eq!(supervisor.verdict(), Some(Verdict::Success)),
        }
    }

    fn alphabet(workers: usize) -> Vec<Happening> {
        let exits = (0..workers)
            .flat_map(|worker| [OK, Ending::Code(1), SEGV].map(|e| Happening::Exit(worker, e)));
        let rest = [
            Happening::Signal(Signal::INT),
            Happening::Signal(Signal::TERM),
            Happening::Wait(at(1)),
            Happening::Wait(at(99)),
            Happening::Wait(at(399)),
            Happening::WaitForDeadline,
        ];
        exits.chain(rest).collect()
    }

    #[test]
    fn all_short_histories_of_two_workers_end_well() {
        let alphabet = alphabet(2);
        for number in 0..alphabet.len().pow(5) {
            let history: [Happening; 5] = std::array::from_fn(|i| {
                alphabet[number / alphabet.len().pow(i as u32) % alphabet.len()]
            });
            check(2, &history);
        }
    }

    proptest! {
        #[test]
        fn random_histories_end_well(
            history in prop::collection::vec(prop::sample::select(alphabet(5)), 0..40)
        ) {
            check(5, &history);
        }
    }
}
