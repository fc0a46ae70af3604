//! Connections between simulated processes: bytes arrive late, in pieces, or not at all.

use std::{
    collections::VecDeque,
    io::{self, ErrorKind, Read, Write},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use drumline_engine::transport::Duplex;

use crate::member::Connection;
use fastrand::Rng;

use crate::time::Nanos;

/// What all streams of a simulation share: the clock, and the times at which processes must take a step.
#[derive(Debug)]
pub(crate) struct Network {
    now: AtomicU64,
    /// The instant at which virtual time is 0. Only differences from it matter.
    epoch: Instant,
    trace: bool,
    wakes: Mutex<Vec<(Nanos, usize)>>,
}

impl Network {
    pub(crate) fn new(trace: bool) -> Arc<Network> {
        let (now, epoch, wakes) = (AtomicU64::new(0), Instant::now(), Mutex::default());
        Arc::new(Network { now, epoch, trace, wakes })
    }

    /// Prints an event, if the simulation is traced.
    #[expect(clippy::print_stderr, reason = "the trace is for people")]
    pub(crate) fn note(&self, text: impl FnOnce() -> String) {
        if self.trace {
            eprintln!("{:>12.3} ms  {}", self.now() as f64 / 1e6, text());
        }
    }

    /// The present time as an instant.
    pub(crate) fn instant(&self) -> Instant {
        self.instant_at(self.now())
    }

    pub(crate) fn instant_at(&self, at: Nanos) -> Instant {
        self.epoch + Duration::from_nanos(at)
    }

    pub(crate) fn nanos(&self, at: Instant) -> Nanos {
        at.saturating_duration_since(self.epoch).as_nanos() as Nanos
    }

    pub(crate) fn now(&self) -> Nanos {
        self.now.load(Ordering::Relaxed)
    }

    pub(crate) fn set_now(&self, now: Nanos) {
        self.now.store(now, Ordering::Relaxed);
    }

    /// The times at which something changes for a process, gathered since the last call, with the process.
    pub(crate) fn take_wakes(&self) -> Vec<(Nanos, usize)> {
        std::mem::take(&mut self.wakes.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn wake(&self, process: usize, at: Nanos) {
        self.wakes.lock().unwrap_or_else(PoisonError::into_inner).push((at, process));
    }
}

/// How one direction of a connection behaves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinkQuality {
    pub(crate) latency_ns: Nanos,
    pub(crate) jitter_ns: Nanos,
    pub(crate) ns_per_byte: Nanos,
    /// Bytes that fit between writer and reader.
    pub(crate) capacity: usize,
    /// Percentage of reads and writes that find no bytes or no room for a moment.
    pub(crate) stalls_percent: u32,
}

/// How one direction of a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PipeEnd {
    /// The writer closed it.
    Closed,
    /// Either end reset it.
    Reset,
    /// The kernel gave up on a silent host.
    TimedOut,
}

/// One direction of a connection.
#[derive(Debug)]
pub(crate) struct Pipe {
    writer: usize,
    reader: usize,
    quality: LinkQuality,
    rng: Rng,
    /// Unread bytes, by time of arrival.
    chunks: VecDeque<(Nanos, VecDeque<u8>)>,
    held: usize,
    last_arrival: Nanos,
    end: Option<(Nanos, PipeEnd)>,
    /// When the writer learns that its bytes are no longer read.
    unread_since: Option<Nanos>,
    /// Bytes that would arrive after this time are lost.
    silent_since: Option<Nanos>,
    read_stalled_until: Nanos,
    write_stalled_until: Nanos,
}

impl Pipe {
    fn new(writer: usize, reader: usize, quality: LinkQuality, rng: Rng) -> Pipe {
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

    /// When `bytes` that are written now arrive. Bytes never overtake each other.
    fn arrival(&mut self, now: Nanos, bytes: usize) -> Nanos {
        let jitter = self.rng.u64(0..=self.quality.jitter_ns);
        let earliest = now + self.quality.latency_ns + jitter;
        self.last_arrival =
            earliest.max(self.last_arrival) + bytes as u64 * self.quality.ns_per_byte;
        self.last_arrival
    }

    fn finish(&mut self, network: &Network, end: PipeEnd) {
        if self.end.is_none() {
            let at = self.arrival(network.now(), 0);
            self.end = Some((at, end));
            network.wake(self.reader, at);
        }
    }

    /// When the last byte written so far arrives.
    pub(crate) fn last_arrival(&self) -> Nanos {
        self.last_arrival
    }

    /// Nothing arrives from now on. The kernel gives up at `noticed`.
    pub(crate) fn fall_silent(&mut self, network: &Network, noticed: Nanos) {
        let now = network.now();
        self.silent_since.get_or_insert(now);
        self.chunks.retain(|(at, _)| *at <= now);
        if self.end.is_none_or(|(at, _)| at > now) {
            self.end = Some((noticed, PipeEnd::TimedOut));
            self.unread_since.get_or_insert(noticed);
            network.wake(self.reader, noticed);
            network.wake(self.writer, noticed);
        }
    }

    /// Breaks the connection now. Bytes on their way are lost.
    pub(crate) fn cut(&mut self, network: &Network, end: PipeEnd) {
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
                    PipeEnd::Closed => Ok(0),
                    PipeEnd::Reset => Err(ErrorKind::ConnectionReset.into()),
                    PipeEnd::TimedOut => Err(ErrorKind::TimedOut.into()),
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
                Some((_, PipeEnd::TimedOut)) => ErrorKind::TimedOut.into(),
                Some((_, PipeEnd::Reset)) => ErrorKind::ConnectionReset.into(),
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

/// How many of `bytes` a read or write moves: all, one or a number in between.
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
pub(crate) struct SimStream {
    network: Arc<Network>,
    incoming: SharedPipe,
    outgoing: SharedPipe,
    /// Not 0 once the process was killed. From then on it writes nothing.
    killed: Arc<AtomicU64>,
}

/// Connects two processes, each given with its kill switch. Returns both ends, and both directions.
pub(crate) fn connect(
    network: &Arc<Network>,
    ends: [(usize, &Arc<AtomicU64>); 2],
    quality: LinkQuality,
    rng: &mut Rng,
) -> ([SimStream; 2], [SharedPipe; 2]) {
    let [(a, a_killed), (b, b_killed)] = ends;
    let there = Arc::new(Mutex::new(Pipe::new(a, b, quality, rng.fork())));
    let back = Arc::new(Mutex::new(Pipe::new(b, a, quality, rng.fork())));
    let end = |incoming: &SharedPipe, outgoing: &SharedPipe, killed: &Arc<AtomicU64>| SimStream {
        network: network.clone(),
        incoming: incoming.clone(),
        outgoing: outgoing.clone(),
        killed: killed.clone(),
    };
    ([end(&back, &there, a_killed), end(&there, &back, b_killed)], [there, back])
}

impl SimStream {
    fn is_killed(&self) -> bool {
        self.killed.load(Ordering::Relaxed) != 0
    }
}

impl Read for SimStream {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        lock(&self.incoming).read(&self.network, bytes)
    }
}

impl Write for SimStream {
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

impl Duplex for SimStream {
    fn end(&mut self) -> io::Result<()> {
        if !self.is_killed() {
            lock(&self.outgoing).finish(&self.network, PipeEnd::Closed);
        }
        Ok(())
    }
}

impl Connection for SimStream {
    fn is_readable(&self) -> bool {
        lock(&self.incoming).is_readable(self.network.now())
    }

    fn is_writable(&self) -> bool {
        lock(&self.outgoing).is_writable(self.network.now())
    }
}

impl Drop for SimStream {
    /// As in the kernel, closing with unread bytes is a reset.
    fn drop(&mut self) {
        let unread = {
            let mut incoming = lock(&self.incoming);
            incoming.abandon(&self.network);
            incoming.held > 0 || incoming.rng.bool()
        };
        let end = if unread { PipeEnd::Reset } else { PipeEnd::Closed };
        lock(&self.outgoing).finish(&self.network, end);
    }
}
