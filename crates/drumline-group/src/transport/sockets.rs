//! Streams that are sockets, and how a rank sleeps until one of them has news.

use std::{
    collections::BTreeMap,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use drumline_engine::{
    Cause, CollectiveError,
    executor::{Header, History, Machine, Memory, Stretch},
    membership::Membership,
    transport::{Connections, Ended, Point, StreamKind, Streams, Transport, Waits},
};
use drumline_schedule::step::Rank;
use drumline_shm::{PidFd, SpinLimit, spin};
use rustix::{
    buffer::spare_capacity,
    event::{EventfdFlags, Timespec, epoll, eventfd},
    io::Errno,
};

use super::{Far, Lingering, far::Met, mesh::Near, stream::PeerStream};
use crate::{Error, Result, config::STREAMS_MAX, engine};

/// The sockets of one rank, and one place to sleep on for all of them, for the processes of
/// neighbours, their doorbell, peers that come, and wake-ups from other threads.
#[derive(Debug)]
pub(crate) struct Sockets {
    streams: Streams<PeerStream>,
    /// Peers on other hosts.
    far: Option<Far>,
    processes: Vec<(Rank, PidFd)>,
    waker: Waker,
    epoll: Arc<OwnedFd>,
    /// When this rank last made the kernels of other hosts answer.
    last_beat: Option<Instant>,
    /// What the set waits for, by the number that a stream has in it.
    armed: BTreeMap<u64, epoll::EventFlags>,
}

/// Ends a rank's sleep from another thread.
#[derive(Clone, Debug)]
pub(crate) struct Waker(Arc<OwnedFd>);

/// What belongs to one peer has consecutive numbers in the set: its process, and its streams.
const KINDS: u64 = 32;
const PROCESS: u64 = 0;
const CONTROL: u64 = 1;
const POINTS: u64 = 2;
const FIRST_DATA: u64 = 3;
const _: () = assert!(FIRST_DATA + STREAMS_MAX as u64 <= KINDS);

/// The number of a peer's stream.
fn key(rank: Rank, kind: StreamKind) -> u64 {
    let kind = match kind {
        StreamKind::Control => CONTROL,
        StreamKind::Points => POINTS,
        StreamKind::Data(number) => FIRST_DATA + number as u64,
    };
    rank as u64 * KINDS + kind
}
const WAKER: u64 = u64::MAX;
const DOORBELL: u64 = u64::MAX - 1;
const FAR: u64 = u64::MAX - 2;

impl Waker {
    pub(crate) fn new() -> io::Result<Waker> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Waker(Arc::new(bell)))
    }

    pub(crate) fn wake(&self) {
        // It fails only when the counter is full, and then it is readable anyway.
        let _ = rustix::io::write(&self.0, &1_u64.to_ne_bytes());
    }

    pub(crate) fn drain(&self) {
        // It fails only when there is nothing to drain.
        let _ = rustix::io::read(&self.0, &mut [0; 8]);
    }
}

impl AsFd for Waker {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Sockets {
    /// Takes over the connections to the peers of this host, with their processes, and how to
    /// reach the others.
    ///
    /// # Errors
    ///
    /// When the process has no descriptor left.
    pub(crate) fn new(
        member: &Membership,
        near: Vec<(Near, Option<PidFd>)>,
        far: Option<Far>,
    ) -> Result<Sockets> {
        let failed = |error: rustix::io::Errno| Error::io("cannot wait for peers", error.into());
        let waker = Waker::new().map_err(|error| Error::io("cannot create an eventfd", error))?;
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?);
        let add = |fd: BorrowedFd<'_>, key| {
            let key = epoll::EventData::new_u64(key);
            epoll::add(&epoll, fd, key, epoll::EventFlags::IN).map_err(failed)
        };
        add(waker.0.as_fd(), WAKER)?;
        if let Some(far) = &far {
            add(far.as_fd(), FAR)?;
        }
        let (mut peers, mut processes) = (Vec::new(), Vec::new());
        for (Near { rank, streams }, process) in near {
            if let Some(process) = process {
                add(process.as_fd(), rank as u64 * KINDS + PROCESS)?;
                processes.push((rank, process));
            }
            peers.push((rank, streams));
        }
        let streams = Streams::new(member.rank, member.world_size, peers);
        let armed = BTreeMap::new();
        Ok(Sockets { streams, far, processes, waker, epoll, last_beat: None, armed })
    }

    pub(crate) fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Readable when there is news of peers, or somebody wakes this rank.
    pub(crate) fn readiness(&self) -> Arc<OwnedFd> {
        self.epoll.clone()
    }

    /// Readable when a peer on another host comes or answers; `None` where all are on this one.
    pub(crate) fn door(&self) -> Option<Arc<OwnedFd>> {
        self.far.as_ref().map(Far::readiness)
    }

    /// Adds the doorbell that neighbours in shared memory ring.
    pub(crate) fn add_doorbell(&mut self, doorbell: BorrowedFd<'_>) -> Result<()> {
        let key = epoll::EventData::new_u64(DOORBELL);
        epoll::add(&self.epoll, doorbell, key, epoll::EventFlags::IN)
            .map_err(|error| Error::io("cannot wait for neighbours", error.into()))
    }

    /// Makes the kernels of other hosts answer, now and then: one that does not is noticed by
    /// the limit on unacknowledged data that control connections have. Returns when to come back.
    fn beat(&mut self, now: Instant) -> Option<Instant> {
        if self.far.is_none() || !self.streams.has_far() {
            return None;
        }
        let due = self.last_beat.is_none_or(|last| now >= last + BEAT_EVERY);
        if due {
            self.last_beat = Some(now);
            self.streams.beat();
        }
        self.last_beat.map(|last| last + BEAT_EVERY)
    }

    /// Calls the peers on other hosts that are newly needed.
    fn call_wanted(&mut self, now: Instant) {
        let wanted = self.streams.take_wanted();
        let Some(far) = &mut self.far else { return };
        let is_any = !wanted.is_empty();
        wanted.into_iter().for_each(|rank| far.call(rank, now));
        if is_any {
            self.meet(now);
        }
    }

    /// Goes on with calls, and lets in who comes.
    fn meet(&mut self, now: Instant) {
        let Sockets { far: Some(far), streams, armed, .. } = self else { return };
        for met in far.progress(|rank| streams.is_calling(rank), now) {
            match met {
                Met::Called(rank, bundle) => streams.called(rank, bundle),
                Met::Came(rank, bundle) => {
                    if streams.came(rank, bundle) {
                        // Those that were in the set are closed.
                        armed.retain(|key, _| key / KINDS != rank as u64);
                    }
                }
                Met::Unreachable(rank, cause) => {
                    streams.unreachable(rank, cause);
                }
            }
        }
    }

    /// Waits for so long at most for something to happen, and adds it to `events`; whether anything
    /// has.
    fn has_events(&self, events: &mut Vec<epoll::Event>, longest: Duration) -> bool {
        // A day at a time keeps the conversion from overflowing.
        let longest = longest.min(Duration::from_secs(86_400));
        let timeout =
            Timespec { tv_sec: longest.as_secs() as i64, tv_nsec: longest.subsec_nanos().into() };
        match epoll::wait(&self.epoll, spare_capacity(events), Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => tracing::warn!(%error, "cannot wait for peers"),
        }
        !events.is_empty()
    }

    fn on_event(&mut self, key: u64, now: Instant) {
        match key {
            WAKER => self.waker.drain(),
            // Whoever slept on it drains it.
            DOORBELL => {}
            FAR => self.meet(now),
            _ => {
                let rank = (key / KINDS) as Rank;
                let kind = match key % KINDS {
                    PROCESS => {
                        self.streams.on_exit(rank);
                        // Closing a process descriptor takes it out of the set.
                        self.processes.retain(|(of, _)| *of != rank);
                        return;
                    }
                    CONTROL => StreamKind::Control,
                    POINTS => StreamKind::Points,
                    data => StreamKind::Data((data - FIRST_DATA) as usize),
                };
                self.streams.on_readable(rank, kind);
            }
        }
    }
}

impl Drop for Sockets {
    fn drop(&mut self) {
        // Peers that are not connected could not be told that this rank leaves, or why it failed.
        if let (Some(far), Some(word)) = (self.far.take(), self.streams.farewell())
            && let Ok(engine) = engine::get()
        {
            engine.linger(Lingering::new(far, word.clone()));
        }
    }
}

impl Transport for Sockets {
    fn begin(&mut self, machine: &mut Machine) -> Result<(), Cause> {
        self.streams.begin(machine)
    }

    fn send(&mut self, to: Rank, header: Header, src: Stretch) {
        self.streams.send(to, header, src);
    }

    fn receive(&mut self, from: Rank, dst: Stretch) {
        self.streams.receive(from, dst);
    }

    fn progress(
        &mut self,
        machine: &mut Machine,
        memory: &mut dyn Memory,
        now: Instant,
    ) -> Result<bool, Cause> {
        let moved = self.streams.progress(machine, memory, now)?;
        self.call_wanted(now);
        Ok(moved)
    }

    fn abort(&mut self, failure: &CollectiveError) {
        self.streams.abort(failure);
    }

    fn take_leave(&mut self) {
        self.streams.take_leave();
    }

    fn still_present(&mut self, history: &History) -> Result<Vec<Rank>, Cause> {
        self.streams.still_present(history)
    }

    fn arm(&mut self) {
        for (interest, stream) in self.streams.interests() {
            let mut wanted = epoll::EventFlags::empty();
            wanted.set(epoll::EventFlags::IN, interest.readable);
            wanted.set(epoll::EventFlags::OUT, interest.writable);
            let key = key(interest.rank, interest.kind);
            let armed = self.armed.entry(key).or_insert(epoll::EventFlags::empty());
            if *armed != wanted {
                *armed = wanted;
                change(&self.epoll, stream, key, wanted);
            }
        }
    }

    fn wait(&mut self, until: Instant, now: Instant) {
        self.arm();
        let until = self.beat(now).map_or(until, |next| until.min(next));
        let far = self.far.as_ref().and_then(Far::deadline);
        let until = far.map_or(until, |far| until.min(far));
        let mut events = Vec::with_capacity(EVENTS_MAX);
        // Sleeping and being woken takes far longer than what is awaited, if that is on its way.
        if until > now && self.streams.is_pending() {
            spin(SPIN, || self.has_events(&mut events, Duration::ZERO), || false);
        }
        if events.is_empty() {
            self.has_events(&mut events, until.saturating_duration_since(now));
        }
        let now = if until > now { Instant::now() } else { now };
        for event in events {
            self.on_event(event.data.u64(), now);
        }
        if far.is_some_and(|far| now >= far) {
            self.meet(now);
        }
    }
}

/// How a rank looks for messages before it sleeps: some 50 us if nobody else wants its core. The
/// peer may be about to send from that very core, so each look leaves it.
const SPIN: SpinLimit = SpinLimit { looks: 1, yields: 100 };

/// How often a rank that waits makes other hosts answer.
const BEAT_EVERY: Duration = Duration::from_millis(100);

impl Connections for Sockets {
    fn post(&mut self, point: Point, ended: &mut Vec<Ended>) {
        self.streams.post(point, ended);
    }

    fn progress_points(
        &mut self,
        idle: bool,
        now: Instant,
        ended: &mut Vec<Ended>,
    ) -> Result<bool, Cause> {
        let moved = self.streams.progress_points(idle, now, ended)?;
        self.call_wanted(now);
        Ok(moved)
    }

    fn for_each_point(&mut self, look: &mut dyn FnMut(&mut Point)) {
        self.streams.points_mut().for_each(look);
    }

    fn take_points(&mut self) -> Vec<Point> {
        self.streams.take_points()
    }

    fn want(&mut self, ranks: &[Rank]) {
        if self.far.is_some() {
            self.streams.want(ranks.iter().copied());
        }
    }

    fn tell(&mut self, waits: &Waits, now: Instant) {
        self.streams.tell(waits, now);
    }

    fn told(&mut self, now: Instant, answer: Duration) -> BTreeMap<Rank, Waits> {
        self.streams.told(now, answer)
    }

    fn has_left(&self, rank: Rank) -> bool {
        self.streams.has_left(rank)
    }

    fn owes_word(&self) -> bool {
        self.streams.farewell().is_some() && self.far.as_ref().is_some_and(Far::is_calling)
    }

    fn idle_deadline(&self) -> Option<Instant> {
        self.far.as_ref().and_then(Far::deadline)
    }

    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let beat = (self.far.is_some() && self.streams.has_far())
            .then(|| self.last_beat.map_or(now, |at| at + BEAT_EVERY));
        let far = self.far.as_ref().and_then(Far::deadline);
        self.streams.next_deadline(now).into_iter().chain(beat).chain(far).min()
    }
}

/// Events that one wait reports. The next wait reports the others.
const EVENTS_MAX: usize = 64;

fn change(epoll: &OwnedFd, stream: impl AsFd, key: u64, flags: epoll::EventFlags) {
    // An ended stream without interests would still report its end, again and again.
    let key = epoll::EventData::new_u64(key);
    let result = match flags.is_empty() {
        true => epoll::delete(epoll, stream),
        false => match epoll::modify(epoll, &stream, key, flags) {
            Err(Errno::NOENT) => epoll::add(epoll, stream, key, flags),
            result => result,
        },
    };
    if let Err(error) = result {
        tracing::warn!(%error, "cannot choose what to wait for");
    }
}
