//! Connections between simulated processes: bytes arrive late, in pieces, or not at all.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use drumline_engine::transport::Duplex;

use crate::member::Connection;
use fastrand::Rng;

/// Virtual time, in nanoseconds since the start.
pub(crate) type Nanos = u64;

/// What all streams of a simulation share: the clock, and who should look at what when.
#[derive(Debug, Default)]
pub(crate) struct Network {
    now: AtomicU64,
    wakes: Mutex<Vec<(Nanos, usize)>>,
}

impl Network {
    pub(crate) fn now(&self) -> Nanos {
        self.now.load(Ordering::Relaxed)
    }

    pub(crate) fn set_now(&self, now: Nanos) {
        self.now.store(now, Ordering::Relaxed);
    }

    /// Moments at which something changes for a process, gathered since the last call.
    pub(crate) fn take_wakes(&self) -> Vec<(Nanos, usize)> {
        std::mem::take(&mut self.wakes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn wake(&self, process: usize, at: Nanos) {
        self.wakes.lock().unwrap_or_else(PoisonError::into_inner).push((at, process));
    }
}

/// How a direction of a connection behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Quality {
    pub(crate) latency_ns: Nanos,
    pub(crate) jitter_ns: Nanos,
    pub(crate) ns_per_byte: Nanos,
    pub(crate) capacity: usize,
    /// Of a hundred reads or writes, how many find nothing for a moment.
    pub(crate) stalls_percent: u32,
}

/// How the bytes of a direction end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The writer has closed it.
    Closed,
    /// It was reset.
    Reset,
    /// The kernel has given up on a host that does not answer.
    TimedOut,
}

/// One direction of a connection.
#[derive(Debug)]
pub(crate) struct Pipe {
    writer: usize,
    reader: usize,
    quality: Quality,
    rng: Rng,
    /// Bytes on their way or arrived, with their time of arrival.
    chunks: VecDeque<(Nanos, VecDeque<u8>)>,
    held: usize,
    last_arrival: Nanos,
    end: Option<(Nanos, End)>,
    /// Nobody reads any more, and the writer knows from then on.
    unread_since: Option<Nanos>,
    /// What would arrive later than this is lost.
    silent_since: Option<Nanos>,
    read_stalled_until: Nanos,
    write_stalled_until: Nanos,
}

impl Pipe {
    fn new(writer: usize, reader: usize, quality: Quality, rng: Rng) -> Pipe {
        Pipe {
            writer,
            reader,
            quality,
            rng,
            chunks: VecDeque::new(),
            held: 0,
            last_arrival: 0,
            end: None,
            unread_since: None,
            silent_since: None,
            read_stalled_until: 0,
            write_stalled_until: 0,
        }
    }

    /// When what is written now arrives, behind everything before it.
    fn arrival(&mut self, now: Nanos, bytes: usize) -> Nanos {
        let jitter = self.rng.u64(0..=self.quality.jitter_ns);
        let earliest = now + self.quality.latency_ns + jitter;
        self.last_arrival =
            earliest.max(self.last_arrival) + bytes as u64 * self.quality.ns_per_byte;
        self.last_arrival
    }

    fn finish(&mut self, network: &Network, end: End) {
        if self.end.is_none() {
            let at = self.arrival(network.now(), 0);
            self.end = Some((at, end));
            network.wake(self.reader, at);
        }
    }

    /// When the last byte that was written arrives.
    pub(crate) fn last_arrival(&self) -> Nanos {
        self.last_arrival
    }

    /// From now on nothing arrives; at `noticed` the kernel gives up.
    pub(crate) fn fall_silent(&mut self, network: &Network, noticed: Nanos) {
        let now = network.now();
        self.silent_since.get_or_insert(now);
        self.chunks.retain(|(at, _)| *at <= now);
        if self.end.is_none_or(|(at, _)| at > now) {
            self.end = Some((noticed, End::TimedOut));
            self.unread_since.get_or_insert(noticed);
            network.wake(self.reader, noticed);
            network.wake(self.writer, noticed);
        }
    }

    /// Breaks now; what is on its way is lost.
    pub(crate) fn cut(&mut self, network: &Network, end: End) {
        let now = network.now();
        self.chunks.retain(|(at, _)| *at <= now);
        if self.end.is_none_or(|(at, _)| at > now) {
            self.end = Some((now, end));
        }
        self.silent_since.get_or_insert(now);
        self.unread_since.get_or_insert(now);
        network.wake(self.reader, now);
        network.wake(self.writer, now);
    }

    fn read(&mut self, network: &Network, bytes: &mut [u8]) -> io::Result<usize> {
        let now = network.now();
        if now < self.read_stalled_until {
            return Err(ErrorKind::WouldBlock.into());
        }
        let arrived = self.chunks.front_mut().filter(|(at, _)| *at <= now);
        let Some((_, chunk)) = arrived else {
            return match self.end {
                Some((at, end)) if at <= now => match end {
                    End::Closed => Ok(0),
                    End::Reset => Err(ErrorKind::ConnectionReset.into()),
                    End::TimedOut => Err(ErrorKind::TimedOut.into()),
                },
                _ => Err(ErrorKind::WouldBlock.into()),
            };
        };
        if self.rng.u32(0..100) < self.quality.stalls_percent {
            self.read_stalled_until = now + self.rng.u64(1..20_000);
            network.wake(self.reader, self.read_stalled_until);
            return Err(ErrorKind::WouldBlock.into());
        }
        let some = some_of(&mut self.rng, chunk.len().min(bytes.len()));
        for (to, from) in bytes.iter_mut().zip(chunk.drain(..some)) {
            *to = from;
        }
        if chunk.is_empty() {
            self.chunks.pop_front();
        }
        self.held -= some;
        network.wake(self.writer, now + self.quality.latency_ns);
        Ok(some)
    }

    fn write(&mut self, network: &Network, bytes: &[u8]) -> io::Result<usize> {
        let now = network.now();
        if self.unread_since.is_some_and(|since| now >= since) {
            return Err(match self.end {
                Some((_, End::TimedOut)) => ErrorKind::TimedOut.into(),
                Some((_, End::Reset)) => ErrorKind::ConnectionReset.into(),
                _ => ErrorKind::BrokenPipe.into(),
            });
        }
        let room = self.quality.capacity - self.held;
        if now < self.write_stalled_until || room == 0 {
            return Err(ErrorKind::WouldBlock.into());
        }
        if self.rng.u32(0..100) < self.quality.stalls_percent {
            self.write_stalled_until = now + self.rng.u64(1..20_000);
            network.wake(self.writer, self.write_stalled_until);
            return Err(ErrorKind::WouldBlock.into());
        }
        let some = some_of(&mut self.rng, room.min(bytes.len()));
        self.held += some;
        let at = self.arrival(now, some);
        if self.silent_since.is_none() && self.end.is_none() {
            self.chunks.push_back((at, bytes[..some].iter().copied().collect()));
            network.wake(self.reader, at);
        }
        Ok(some)
    }

    fn is_readable(&self, now: Nanos) -> bool {
        let arrived = self.chunks.front().is_some_and(|(at, _)| *at <= now);
        let ended = self.chunks.is_empty() && self.end.is_some_and(|(at, _)| at <= now);
        now >= self.read_stalled_until && (arrived || ended)
    }

    fn is_writable(&self, now: Nanos) -> bool {
        let broken = self.unread_since.is_some_and(|since| now >= since);
        broken || (now >= self.write_stalled_until && self.held < self.quality.capacity)
    }

    /// The reader's process has closed its end.
    fn abandon(&mut self, network: &Network) {
        let at = network.now() + self.quality.latency_ns;
        self.unread_since.get_or_insert(at);
        network.wake(self.writer, at);
    }
}

/// Often all, often one, sometimes something between; at least one of several.
fn some_of(rng: &mut Rng, bytes: usize) -> usize {
    match rng.u8(0..4) {
        _ if bytes < 2 => bytes,
        0 => 1,
        1 => rng.usize(1..=bytes),
        _ => bytes,
    }
}

pub(crate) type SharedPipe = Arc<Mutex<Pipe>>;

pub(crate) fn lock(pipe: &SharedPipe) -> MutexGuard<'_, Pipe> {
    pipe.lock().unwrap_or_else(PoisonError::into_inner)
}

/// One end of a connection.
#[derive(Debug)]
pub(crate) struct Stream {
    network: Arc<Network>,
    incoming: SharedPipe,
    outgoing: SharedPipe,
    /// Set once the process was killed: what it would still say is never said.
    killed: Arc<AtomicU64>,
}

/// A connection between two processes, each with its kill switch: both ends, and both directions.
pub(crate) fn connect(
    network: &Arc<Network>,
    ends: [(usize, &Arc<AtomicU64>); 2],
    quality: Quality,
    rng: &mut Rng,
) -> ([Stream; 2], [SharedPipe; 2]) {
    let [(a, a_killed), (b, b_killed)] = ends;
    let there = Arc::new(Mutex::new(Pipe::new(a, b, quality, rng.fork())));
    let back = Arc::new(Mutex::new(Pipe::new(b, a, quality, rng.fork())));
    let end = |incoming: &SharedPipe, outgoing: &SharedPipe, killed: &Arc<AtomicU64>| Stream {
        network: network.clone(),
        incoming: incoming.clone(),
        outgoing: outgoing.clone(),
        killed: killed.clone(),
    };
    ([end(&back, &there, a_killed), end(&there, &back, b_killed)], [there, back])
}

impl Stream {
    fn is_killed(&self) -> bool {
        self.killed.load(Ordering::Relaxed) != 0
    }
}

impl Read for Stream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        lock(&self.incoming).read(&self.network, bytes)
    }
}

impl Write for Stream {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.is_killed() {
            return Err(ErrorKind::BrokenPipe.into());
        }
        lock(&self.outgoing).write(&self.network, bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Duplex for Stream {
    fn end(&mut self) -> io::Result<()> {
        if !self.is_killed() {
            lock(&self.outgoing).finish(&self.network, End::Closed);
        }
        Ok(())
    }
}

impl Connection for Stream {
    fn is_readable(&self) -> bool {
        lock(&self.incoming).is_readable(self.network.now())
    }

    fn is_writable(&self) -> bool {
        lock(&self.outgoing).is_writable(self.network.now())
    }
}

impl Drop for Stream {
    /// What the kernel does: a close with unread data is a reset.
    fn drop(&mut self) {
        let unread = {
            let mut incoming = lock(&self.incoming);
            incoming.abandon(&self.network);
            incoming.held > 0 || incoming.rng.bool()
        };
        let end = if unread { End::Reset } else { End::Closed };
        lock(&self.outgoing).finish(&self.network, end);
    }
}
