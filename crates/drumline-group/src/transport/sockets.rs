//! The sockets of a rank, and the epoll set on which it sleeps until one of them has news.

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
    membership::{Membership, SeenFailure},
    transport::{Connections, Ended, Point, StreamKind, Streams, Transport, Waits},
};
use drumline_schedule::step::Rank;
use drumline_shm::{PidFd, SpinLimit, named, spin};
use drumline_store::net::poll::{self, Deadline};
use rustix::{event::epoll, io::Errno};

use super::{Far, Lingering, Waker, far::Met, mesh::Near, stream::PeerStream};
use crate::{Error, Result, config::STREAMS_MAX, progress_thread};

/// The sockets of one rank and its epoll set. The set also has the processes of neighbours, their doorbell,
/// the listeners for peers of other hosts, and the waker for other threads.
#[derive(Debug)]
pub(crate) struct Sockets {
    streams: Streams<PeerStream>,
    /// Peers on other hosts.
    far: Option<Far>,
    processes: Vec<(Rank, PidFd)>,
    waker: Waker,
    epoll: Arc<OwnedFd>,
    /// When this rank last sent a beat to other hosts.
    last_beat: Option<Instant>,
    /// The flags of each stream in the set, by its key.
    armed: BTreeMap<u64, epoll::EventFlags>,
    /// Why this rank might not hear a peer.
    poll_failed: Option<Cause>,
}

/// The number of keys in the set for one peer. They are consecutive: one for its process, and one for each stream.
const KINDS: u64 = 32;
const PROCESS: u64 = 0;
const CONTROL: u64 = 1;
const POINTS: u64 = 2;
const FIRST_DATA: u64 = 3;
const _: () = assert!(FIRST_DATA + STREAMS_MAX as u64 <= KINDS);

/// The key of a peer's stream.
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

impl Sockets {
    /// `near` are the connections to the peers of this host, with their processes. `far` reaches the other peers.
    ///
    /// # Errors
    ///
    /// The process has no descriptor left.
    pub(crate) fn new(
        member: &Membership,
        near: Vec<(Near, Option<PidFd>)>,
        far: Option<Far>,
    ) -> Result<Sockets> {
        let failed = |error| Error::io("cannot wait for peers", error);
        let waker = Waker::new().map_err(|error| Error::io("cannot create an eventfd", error))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
        let epoll = Arc::new(epoll.map_err(named("epoll_create1")).map_err(failed)?);
        let add = |fd: BorrowedFd<'_>, key| {
            let key = epoll::EventData::new_u64(key);
            epoll::add(&epoll, fd, key, epoll::EventFlags::IN)
                .map_err(named("epoll_ctl"))
                .map_err(failed)
        };
        add(waker.as_fd(), WAKER)?;
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
        Ok(Sockets {
            streams,
            far,
            processes,
            waker,
            epoll,
            last_beat: None,
            armed,
            poll_failed: None,
        })
    }

    pub(crate) fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Readable when there is news of peers, or another thread wakes this rank.
    pub(crate) fn readiness(&self) -> Arc<OwnedFd> {
        self.epoll.clone()
    }

    /// Readable when a peer on another host calls or answers; `None` if all peers are on this one.
    pub(crate) fn door(&self) -> Option<Arc<OwnedFd>> {
        self.far.as_ref().map(Far::readiness)
    }

    /// Adds the doorbell that neighbours in shared memory ring.
    pub(crate) fn add_doorbell(&mut self, doorbell: BorrowedFd<'_>) -> Result<()> {
        let key = epoll::EventData::new_u64(DOORBELL);
        epoll::add(&self.epoll, doorbell, key, epoll::EventFlags::IN)
            .map_err(|error| Error::io("cannot wait for neighbours", error))
    }

    /// Sends a beat on the control connections to other hosts when it is due. A kernel that does not acknowledge it in
    /// time ends the connection, so a silent host is noticed. Returns when the next beat is due.
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
        wanted.into_iter().for_each(|rank| far.call(rank, self.streams.is_called_again(rank), now));
        if is_any {
            self.meet(now);
        }
    }

    /// Goes on with calls to peers on other hosts, and accepts peers that call.
    fn meet(&mut self, now: Instant) {
        let Sockets { far: Some(far), streams, armed, .. } = self else { return };
        for met in far.progress(|rank| streams.is_calling(rank), now) {
            match met {
                Met::Called(rank, bundle) => {
                    if streams.called(rank, bundle) {
                        armed.remove(&key(rank, StreamKind::Control));
                    }
                }
                Met::Came(rank, bundle) => {
                    if streams.came(rank, bundle) {
                        // The peer's earlier streams are closed, which has removed them from the set.
                        armed.retain(|key, _| key / KINDS != rank as u64);
                    }
                }
                Met::Unreachable { rank, cause, refused } => {
                    streams.unreachable(rank, cause, refused);
                }
                Met::Lives(rank) => streams.lives(rank),
            }
        }
    }

    /// Fails if this rank might not hear a peer: it could wait for ever.
    fn check_hearing(&self) -> Result<(), Cause> {
        self.poll_failed.clone().map_or(Ok(()), Err)
    }

    fn on_event(&mut self, key: u64, now: Instant) {
        match key {
            WAKER => self.waker.drain(),
            // The memory of the host silences it when the sleep ends.
            DOORBELL => {}
            FAR => self.meet(now),
            _ => {
                let rank = (key / KINDS) as Rank;
                let kind = match key % KINDS {
                    PROCESS => {
                        self.streams.on_exit(rank);
                        // Closing the descriptor removes it from the set.
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
        // Peers without a connection do not know that this rank leaves, or why it failed.
        if let (Some(far), Some(word)) = (self.far.take(), self.streams.farewell())
            && let Ok(thread) = progress_thread::get()
        {
            thread.linger(Box::new(Lingering::new(far, word.clone())));
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
        memory: &mut Memory<'_>,
        now: Instant,
    ) -> Result<bool, Cause> {
        self.check_hearing()?;
        let moved = self.streams.progress(machine, memory, now)?;
        self.call_wanted(now);
        Ok(moved)
    }

    fn abort(&mut self, failure: &CollectiveError) {
        self.streams.abort(failure);
    }

    fn take_leave(&mut self, seen: Option<SeenFailure>) {
        self.streams.take_leave(seen);
    }

    fn still_present(&mut self, history: &History) -> Result<Vec<Rank>, Cause> {
        self.check_hearing()?;
        self.streams.still_present(history)
    }

    fn arm(&mut self) {
        self.call_wanted(Instant::now());
        for (interest, stream) in self.streams.interests() {
            let mut wanted = epoll::EventFlags::empty();
            wanted.set(epoll::EventFlags::IN, interest.readable);
            wanted.set(epoll::EventFlags::OUT, interest.writable);
            let key = key(interest.rank, interest.kind);
            let armed = self.armed.entry(key).or_insert(epoll::EventFlags::empty());
            if *armed != wanted {
                match change(&self.epoll, stream, key, wanted) {
                    Ok(()) => *armed = wanted,
                    Err(error) => self.poll_failed = Some(poll_failed(&error.into())),
                }
            }
        }
    }

    fn wait(&mut self, until: Instant, now: Instant) {
        self.arm();
        let until = self.beat(now).map_or(until, |next| until.min(next));
        let far = self.far.as_ref().and_then(Far::deadline);
        let until = far.map_or(until, |far| until.min(far));
        let until = if self.poll_failed.is_some() { now } else { until };
        let mut events = Vec::with_capacity(EVENTS_MAX);
        let sleeps = until > now;
        let mut heard = Ok(());
        // A message that is on its way arrives faster than a sleeping thread wakes up.
        if sleeps && self.streams.is_pending() {
            let mut has_events = || {
                heard = poll::wait_events(&*self.epoll, &mut events, Deadline::Now);
                heard.is_err() || !events.is_empty()
            };
            spin(SPIN, &mut has_events, || false);
        }
        if events.is_empty() && heard.is_ok() {
            let until = if sleeps { until.into() } else { Deadline::Now };
            heard = poll::wait_events(&*self.epoll, &mut events, until);
        }
        if let Err(error) = heard {
            self.poll_failed = Some(poll_failed(&error));
        }
        let now = if sleeps { Instant::now() } else { now };
        for event in events {
            self.on_event(event.data.u64(), now);
        }
        if far.is_some_and(|far| now >= far) {
            self.meet(now);
        }
    }
}

/// How a rank looks for messages before it sleeps: for about 50 us if no other thread wants its core. It
/// yields after each look, because the peer may need this very core to send.
const SPIN: SpinLimit = SpinLimit { looks: 1, yields: 100 };

/// How often a rank that waits sends a beat to other hosts.
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
        self.check_hearing()?;
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
        // This rank has waited for long. A process that has crashed keeps its connections until its core is written.
        for (rank, _) in self.processes.iter().filter(|(_, process)| process.dumps_core()) {
            self.streams.on_exit(*rank);
        }
        self.streams.tell(waits, now);
    }

    fn told(&mut self, now: Instant, answer: Duration) -> BTreeMap<Rank, Waits> {
        self.streams.told(now, answer)
    }

    fn left(&self, rank: Rank) -> Option<Cause> {
        self.streams.left(rank)
    }

    fn has_met_all(&mut self) -> bool {
        self.streams.has_met_all()
    }

    fn lost(&mut self, rank: Rank) -> Option<Cause> {
        self.streams.lost(rank)
    }

    fn has_unsent(&self) -> bool {
        let is_calling = self.far.as_ref().is_some_and(Far::is_calling);
        self.streams.farewell().is_some() && (is_calling || self.streams.has_unsent())
    }

    fn idle_deadline(&self) -> Option<Instant> {
        self.far.as_ref().and_then(Far::deadline)
    }

    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let beat = (self.far.is_some() && self.streams.has_far())
            .then(|| self.last_beat.map_or(now, |at| at + BEAT_EVERY));
        let far = self.far.as_ref().and_then(Far::deadline);
        // If this rank might not hear a peer, it fails at once.
        let poll_failed = self.poll_failed.as_ref().map(|_| now);
        self.streams.next_deadline(now).into_iter().chain(beat).chain(far).chain(poll_failed).min()
    }
}

/// Events that one wait reports. The next wait reports the others.
const EVENTS_MAX: usize = 64;

fn change(
    epoll: &OwnedFd,
    stream: impl AsFd,
    key: u64,
    flags: epoll::EventFlags,
) -> Result<(), Errno> {
    // An ended stream in the set reports its end again and again, even without flags.
    let key = epoll::EventData::new_u64(key);
    match flags.is_empty() {
        true => epoll::delete(epoll, stream),
        false => match epoll::modify(epoll, &stream, key, flags) {
            Err(Errno::NOENT) => epoll::add(epoll, stream, key, flags),
            result => result,
        },
    }
}

fn poll_failed(error: &io::Error) -> Cause {
    Cause::System { problem: format!("cannot wait for peers: {error}") }
}
