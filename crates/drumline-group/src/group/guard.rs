//! The guard of a foreign group: a small built-in group of the same ranks, which notices what the backend does not.
//!
//! For every collective there is a *round*: an all-gather of words that say which call each rank makes. A round begins
//! before the backend gets the call, and is over before the call returns. In between, the backend drives the lane: each
//! look at the guard is a turn. So no other thread is woken, and the words travel beside the data.
//!
//! One thread at a time drives the lane. Others that look meanwhile find a cause that it has noted, or nothing.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use drumline_engine::{
    Cause, CollectiveError, Reason,
    executor::{Now, Progress, Spin},
    lane::Lane,
    membership::Membership,
};
use drumline_schedule::step::Rank;

use super::{
    at_exit,
    drive::Driven,
    round::{Round, Word},
};
use crate::{
    Error, Result,
    backend::{Guard, Guards, Watch},
    interrupt,
};

/// How often the guard asks the system for news.
const LOOK_EVERY: Duration = Duration::from_micros(100);

/// How long the backend has to take in what a peer sent before it died or failed.
const GRACE: Duration = Duration::from_millis(20);

/// How long after the backend has failed a peer's death may show here. While many processes want a core, the kernel takes long
/// to end one that holds much memory, and an MPI hears of its end from its launcher before.
const SHOWN_WITHIN: Duration = Duration::from_secs(2);

/// The most ranks that all listen to each other. In a larger group a rank listens to those that it exchanges
/// words with, and a failure is told from rank to rank.
const HEARD_MAX: usize = 64;

pub(super) struct Warden {
    member: Membership,
    driven: Arc<Driven>,
    round: Mutex<Round>,
    /// Whether a round is not over.
    in_round: AtomicBool,
    /// The first failure.
    failed: OnceLock<Cause>,
    /// Whether a round has shown that ranks make different calls.
    disagrees: AtomicBool,
    clock: Instant,
    /// When to ask the system for news, and the program for an interruption, on `clock`.
    look: Due,
    ask: Due,
}

/// A time that comes again and again. Of several threads, one is told that it has come.
struct Due {
    next: AtomicU64,
    every: Duration,
}

impl Due {
    const fn every(every: Duration) -> Due {
        Due { next: AtomicU64::new(0), every }
    }

    fn has_come(&self, clock: Duration) -> bool {
        let next = self.next.load(Ordering::Relaxed);
        let micros = |time: Duration| u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let then = micros(clock.saturating_add(self.every));
        let order = Ordering::Relaxed;
        micros(clock) >= next && self.next.compare_exchange(next, then, order, order).is_ok()
    }
}

impl Warden {
    fn new(member: Membership, driven: Arc<Driven>, deadline: Instant) -> Warden {
        if member.world_size <= HEARD_MAX {
            driven.meet_all(deadline);
        }
        Warden {
            round: Mutex::new(Round::new(member.world_size)),
            member,
            driven,
            in_round: AtomicBool::new(false),
            failed: OnceLock::new(),
            disagrees: AtomicBool::new(false),
            clock: Instant::now(),
            look: Due::every(LOOK_EVERY),
            ask: Due::every(interrupt::ASK_EVERY),
        }
    }

    /// Begins a round in which this rank says `word`. The round before must be over.
    pub(super) fn begin(&self, word: Word, timeout: Duration) -> Result<(), Cause> {
        self.known()?;
        let mut lane = self.driven.drive("round").map_err(|error| cause_of(&error))?;
        self.round().begin(word, timeout);
        self.in_round.store(true, Ordering::Release);
        self.turn(&mut lane, &Now::lazy(Instant::now), Spin::No).map(drop)
    }

    /// Waits until the round is over, or until `limit`. Returns whether it is over.
    pub(super) fn finish(&self, limit: Option<Instant>) -> Result<bool, Cause> {
        loop {
            let limit_has_passed = limit.is_some_and(|limit| Instant::now() >= limit);
            if !self.in_round() || limit_has_passed {
                self.known()?;
                return Ok(!self.in_round());
            }
            let turn = |lane: &mut Lane| {
                self.turn(lane, &Now::lazy(Instant::now), Spin::Yes).unwrap_or(Progress::Done)
            };
            if !self.driven.drive_until(limit, turn) {
                // Another thread drives the lane for a moment.
                std::thread::yield_now();
            }
        }
    }

    /// Brings the round as far as possible. `Done`: it is over.
    fn turn(&self, lane: &mut Lane, now: &Now, spin: Spin) -> Result<Progress, Cause> {
        let mut round = self.round();
        if !self.in_round() {
            return self.known().map(|()| Progress::Done);
        }
        let result = match lane.step(&mut round.exchange, now, spin) {
            Ok(Progress::Done) => {
                let same = round.compare(self.member.rank);
                self.disagrees.store(same.is_err(), Ordering::Relaxed);
                same.map(|()| Progress::Done)
            }
            Ok(progress) => return Ok(progress),
            Err(error) => Err(at_first_hand(cause_of(&error), lane)),
        };
        let result = result.map_err(|cause| self.note(cause));
        // Whoever sees that the round is over also sees how it has ended.
        self.in_round.store(false, Ordering::Release);
        result
    }

    /// Finds out what has happened to the peers.
    fn watch(&self, lane: &mut Lane, now: Instant) -> Result<(), Cause> {
        let Err(cause) = lane.hear(now) else { return Ok(()) };
        let since = *self.round().lost_since.get_or_insert(now);
        match now >= since + GRACE {
            true => Err(self.note(at_first_hand(cause, lane))),
            false => Ok(()),
        }
    }

    /// Finds out whether a peer has failed while no call is under way.
    pub(super) fn hear(&self) -> Result<(), Cause> {
        self.known()?;
        match self.driven.try_lane() {
            Some(mut lane) if !self.in_round() => self.watch(&mut lane, Instant::now()),
            _ => Ok(()),
        }
    }

    /// Explains why the backend has failed with `cause`: a peer's death may show here a moment later than in
    /// the backend, which cannot name it. Nor need the backend know which ranks are late.
    pub(super) fn explain(&self, cause: Cause) -> Cause {
        if matches!(&cause, Cause::Timeout { waiting_for } if waiting_for.is_empty()) {
            return Cause::Timeout { waiting_for: self.late() };
        }
        let is_vague = matches!(cause, Cause::Backend { .. } | Cause::Disconnected { .. });
        let until = Instant::now() + SHOWN_WITHIN;
        while is_vague && Instant::now() < until {
            if let Err(cause) = self.check() {
                return cause;
            }
            std::thread::sleep(LOOK_EVERY);
        }
        self.failed.get().cloned().unwrap_or(cause)
    }

    /// This rank has failed: tells the peers why.
    pub(super) fn fail(&self, failure: &Arc<CollectiveError>) {
        self.note(failure.cause.clone());
        // Ranks that disagree have all made a call, and each finds out itself. A word may still be on its way to
        // some, and they should hear both calls.
        if !self.disagrees.load(Ordering::Relaxed) {
            self.driven.fail_with(failure);
        }
    }

    /// Says goodbye, and waits until all ranks have.
    pub(super) fn close(&self, started: Instant) -> Result<(), Cause> {
        self.driven.close(started, None).map(drop).map_err(|error| cause_of(&error))
    }

    /// Says goodbye without waiting. Until the process ends it must hear whether the others come to their end.
    pub(super) fn leave(&self) {
        self.driven.take_leave();
        let Membership { rank, world_size, .. } = self.member;
        at_exit::keep(&self.driven, (0..world_size).filter(|peer| *peer != rank).collect());
    }

    /// A panic drops the group: the peers will see this rank as dead.
    pub(super) fn forsake(&self) {
        self.driven.forsake();
    }

    fn note(&self, cause: Cause) -> Cause {
        self.failed.get_or_init(|| cause).clone()
    }

    fn known(&self) -> Result<(), Cause> {
        self.failed.get().map_or(Ok(()), |cause| Err(cause.clone()))
    }

    fn in_round(&self) -> bool {
        self.in_round.load(Ordering::Acquire)
    }

    /// Lock the lane first.
    fn round(&self) -> MutexGuard<'_, Round> {
        self.round.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Watch for Warden {
    fn check(&self) -> Result<(), Cause> {
        self.known()?;
        let now = Instant::now();
        let clock = now.saturating_duration_since(self.clock);
        let looks = self.look.has_come(clock);
        if looks && self.ask.has_come(clock) && interrupt::is_wanted() {
            return Err(Cause::Aborted);
        }
        if !looks && !self.in_round() {
            return Ok(());
        }
        let Some(mut lane) = self.driven.try_lane() else { return Ok(()) };
        match self.in_round() {
            true if looks => lane.look(now),
            true => {}
            false => return self.watch(&mut lane, now),
        }
        self.turn(&mut lane, &Now::at(now), Spin::No).map(drop)
    }

    fn late(&self) -> Vec<Rank> {
        self.driven.ask(|lane| lane.late(Instant::now())).unwrap_or_default()
    }

    fn has_left(&self, peer: Rank) -> bool {
        self.driven.ask(move |lane| lane.left(peer).is_some()).unwrap_or(false)
    }
}

impl fmt::Debug for Warden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Guard").field("group", &self.member.name).finish_non_exhaustive()
    }
}

/// A peer may report that another has ended or left before this rank hears of it, because a process that ends closes
/// one connection after the other.
fn at_first_hand(cause: Cause, lane: &mut Lane) -> Cause {
    let Cause::Reported { by, culprit: Some(culprit), reason: Reason::Other, .. } = cause else {
        return cause;
    };
    let (mut now, until) = (Instant::now(), Instant::now() + GRACE);
    while by != culprit && now < until {
        if let Some(own) = lane.lost(culprit, now) {
            return own;
        }
        if let Some(left) = lane.left(culprit) {
            return left;
        }
        lane.sleep_until(until, now);
        now = Instant::now();
    }
    cause
}

fn cause_of(error: &Error) -> Cause {
    error.cause().cloned().unwrap_or_else(|| Cause::Backend { problem: error.to_string() })
}

type Connect = dyn Fn() -> Result<Arc<Driven>> + Send + Sync;

/// Connects the guard of one group when the backend asks for it. All ranks must ask.
pub(super) struct Wardens {
    member: Membership,
    deadline: Instant,
    connect: Box<Connect>,
    made: Mutex<Option<Arc<Warden>>>,
}

impl Wardens {
    pub(super) fn new(
        member: Membership,
        deadline: Instant,
        connect: impl Fn() -> Result<Arc<Driven>> + Send + Sync + 'static,
    ) -> Wardens {
        Wardens { member, deadline, connect: Box::new(connect), made: Mutex::default() }
    }

    /// The guard, if the backend has asked for one.
    pub(super) fn made(&self) -> Option<Arc<Warden>> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<Warden>>> {
        self.made.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Guards for Wardens {
    fn guard(&self) -> Result<Guard> {
        let mut made = self.lock();
        let warden = match &*made {
            Some(warden) => warden.clone(),
            None => {
                let driven = (self.connect)()?;
                Arc::new(Warden::new(self.member.clone(), driven, self.deadline))
            }
        };
        *made = Some(warden.clone());
        Ok(Guard(warden))
    }
}

impl fmt::Debug for Wardens {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Wardens").field("group", &self.member.name).finish_non_exhaustive()
    }
}
