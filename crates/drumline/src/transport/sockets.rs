//! Streams that are sockets, and how a rank sleeps until one of them has news.

use std::{
    collections::BTreeMap,
    io,
    net::Shutdown,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::Arc,
    time::{Duration, Instant},
};

use drumline_schedule::step::{Loc, Rank};
use drumline_shm::PidFd;
use rustix::{
    buffer::spare_capacity,
    event::{EventfdFlags, Timespec, epoll, eventfd},
    io::Errno,
};

use super::{
    Connections, Ended, Point, Streams, Transport, Waits, mesh::Connected, streams::Duplex,
};
use crate::{
    Error, Result,
    error::{Cause, CollectiveError},
    executor::{Header, History, Machine, Memory},
    net::stream::Stream,
};

impl Duplex for Stream {
    fn end(&mut self) -> io::Result<()> {
        self.shutdown(Shutdown::Write)
    }
}

/// The sockets of one rank, and one place to sleep on for all of them, for the processes of
/// neighbours, their doorbell, and wake-ups from other threads.
#[derive(Debug)]
pub(crate) struct Sockets {
    streams: Streams<Stream>,
    processes: Vec<(Rank, PidFd)>,
    waker: Waker,
    epoll: Arc<OwnedFd>,
    /// The peers on other hosts, and when this rank last made their kernels answer.
    far: Vec<Rank>,
    last_beat: Option<Instant>,
    /// What the set waits for, in the order of the peers, by kind of stream.
    interests: Vec<[epoll::EventFlags; STREAMS]>,
}

/// Ends a rank's sleep from another thread.
#[derive(Clone, Debug)]
pub(crate) struct Waker(Arc<OwnedFd>);

const CONTROL: u64 = 0;
const DATA: u64 = 1;
const POINTS: u64 = 2;
const STREAMS: usize = 3;
const PROCESS: u64 = 3;
const KINDS: u64 = 4;
const WAKER: u64 = u64::MAX;
const DOORBELL: u64 = u64::MAX - 1;

impl Waker {
    pub(crate) fn new() -> Result<Waker> {
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|error| Error::io("cannot create an eventfd", error.into()))?;
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
    /// Takes over the connections to all peers.
    ///
    /// # Errors
    ///
    /// When the process has no descriptor left.
    pub(crate) fn new(connections: Vec<(Connected, Option<PidFd>)>) -> Result<Sockets> {
        let failed = |error: rustix::io::Errno| Error::io("cannot wait for peers", error.into());
        let waker = Waker::new()?;
        let epoll = Arc::new(epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?);
        let add = |fd: BorrowedFd<'_>, key, flags| {
            epoll::add(&epoll, fd, epoll::EventData::new_u64(key), flags).map_err(failed)
        };
        add(waker.0.as_fd(), WAKER, epoll::EventFlags::IN)?;
        let (mut peers, mut processes, mut far) = (Vec::new(), Vec::new(), Vec::new());
        for (Connected { rank, control, data, points, same_host, .. }, process) in connections {
            let key = rank as u64 * KINDS;
            add(control.as_fd(), key + CONTROL, epoll::EventFlags::IN)?;
            add(data.as_fd(), key + DATA, epoll::EventFlags::IN)?;
            add(points.as_fd(), key + POINTS, epoll::EventFlags::IN)?;
            if let Some(process) = process {
                add(process.as_fd(), key + PROCESS, epoll::EventFlags::IN)?;
                processes.push((rank, process));
            }
            if !same_host {
                far.push(rank);
            }
            peers.push((rank, control, data, points));
        }
        let interests = vec![[epoll::EventFlags::IN; STREAMS]; peers.len()];
        let streams = Streams::new(peers);
        Ok(Sockets { streams, processes, waker, epoll, far, last_beat: None, interests })
    }

    pub(crate) fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// Readable when there is news of peers, or somebody wakes this rank.
    pub(crate) fn readiness(&self) -> Arc<OwnedFd> {
        self.epoll.clone()
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
        if self.far.is_empty() {
            return None;
        }
        let due = self.last_beat.is_none_or(|last| now >= last + BEAT_EVERY);
        if due {
            self.last_beat = Some(now);
            for &rank in &self.far {
                self.streams.peer(rank).control.beat();
            }
        }
        self.last_beat.map(|last| last + BEAT_EVERY)
    }

    fn on_event(&mut self, key: u64) {
        if key == WAKER {
            self.waker.drain();
            return;
        }
        if key == DOORBELL {
            // Whoever slept on it drains it.
            return;
        }
        let rank = (key / KINDS) as Rank;
        let peer = self.streams.peer(rank);
        match key % KINDS {
            CONTROL => peer.control.on_readable(),
            DATA => peer.data.on_readable(),
            POINTS => peer.points.on_readable(),
            _ => {
                peer.control.on_exit();
                // Closing a process descriptor takes it out of the set.
                self.processes.retain(|(of, _)| *of != rank);
            }
        }
    }
}

impl Transport for Sockets {
    fn begin(&mut self, machine: &mut Machine) -> Result<(), Cause> {
        self.streams.begin(machine)
    }

    fn send(&mut self, to: Rank, header: Header, src: Loc) {
        self.streams.send(to, header, src);
    }

    fn receive(&mut self, from: Rank, dst: Loc) {
        self.streams.receive(from, dst);
    }

    fn progress(
        &mut self,
        machine: &mut Machine,
        memory: &mut dyn Memory,
        now: Instant,
    ) -> Result<bool, Cause> {
        self.streams.progress(machine, memory, now)
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
        let peers = self.streams.interests().zip(self.streams.streams());
        for ((interest, [control, data, points]), now) in peers.zip(&mut self.interests) {
            let flags = |readable, writable| {
                let mut flags = epoll::EventFlags::empty();
                flags.set(epoll::EventFlags::IN, readable);
                flags.set(epoll::EventFlags::OUT, writable);
                flags
            };
            let key = interest.rank as u64 * KINDS;
            for (kind, stream, wanted) in [
                (CONTROL, control, flags(interest.control, false)),
                (DATA, data, flags(interest.data_in, interest.data_out)),
                (POINTS, points, flags(interest.points_in, interest.points_out)),
            ] {
                let now = &mut now[kind as usize];
                if *now != wanted {
                    *now = wanted;
                    change(&self.epoll, stream, key + kind, wanted);
                }
            }
        }
    }

    fn wait(&mut self, until: Instant, now: Instant) {
        self.arm();
        let until = self.beat(now).map_or(until, |next| until.min(next));
        // A day at a time keeps the conversion from overflowing.
        let left = until.saturating_duration_since(now).min(Duration::from_secs(86_400));
        let timeout =
            Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
        let mut events = Vec::with_capacity(EVENTS_MAX);
        match epoll::wait(&self.epoll, spare_capacity(&mut events), Some(&timeout)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => tracing::warn!(%error, "cannot wait for peers"),
        }
        for event in events {
            self.on_event(event.data.u64());
        }
    }
}

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
        self.streams.progress_points(idle, now, ended)
    }

    fn for_each_point(&mut self, look: &mut dyn FnMut(&mut Point)) {
        self.streams.points_mut().for_each(look);
    }

    fn take_points(&mut self) -> Vec<Point> {
        self.streams.take_points()
    }

    fn tell(&mut self, waits: &Waits) {
        self.streams.tell(waits);
    }

    fn told(&self) -> BTreeMap<Rank, Waits> {
        self.streams.told()
    }

    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let beat =
            (!self.far.is_empty()).then(|| self.last_beat.map_or(now, |last| last + BEAT_EVERY));
        self.streams.next_deadline(now).into_iter().chain(beat).min()
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
