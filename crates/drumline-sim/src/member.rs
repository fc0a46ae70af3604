//! One rank of a group on simulated streams: the engine's lane, which the simulator drives.

pub(crate) mod posting;

use std::{
    collections::BTreeMap,
    fmt,
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use drumline_engine::{
    Cause, CollectiveError, DType, ReduceOp, Result, Settings,
    call::Call,
    executor::{Header, Held, History, Machine, Memory, Now, Progress, Spin, Stretch},
    host::Host,
    lane::Lane,
    membership::{Membership, SeenFailure},
    operation::Operation,
    registered::RegisteredBuffer,
    transport::{
        self, Bundle, Connections, Duplex, Point, StreamKind, Streams, Striped, Transport, Waits,
    },
};
use drumline_schedule::{Collective, Counts, Topology, step::Rank};
use drumline_shm::{Arena, PeerSegment, Segment};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// A stream of bytes in both directions that never blocks.
pub(crate) trait Connection: Duplex + 'static {
    /// Whether a read would not block.
    fn is_readable(&self) -> bool;
    /// Whether a write would not block.
    fn is_writable(&self) -> bool;
}

/// One rank of one group.
pub(crate) struct Member<S> {
    lane: Lane,
    streams: Shared<S>,
    aborted: Arc<AtomicBool>,
    arena: Option<Arena>,
    doorbell: Option<OwnedFd>,
}

/// The group and the rank of a [`Member`].
#[derive(Clone, Debug)]
pub(crate) struct Identity {
    /// Name of the group.
    pub(crate) group: String,
    /// The rank.
    pub(crate) rank: Rank,
    /// A number that tells groups apart.
    pub(crate) digest: u64,
}

/// The memory that a rank shares with its neighbours. If two ranks of a group share a host, every rank of
/// the group has such memory, also a rank without neighbours.
#[derive(Debug)]
pub(crate) struct SharedMemory {
    /// The segment of this rank.
    pub(crate) segment: Segment,
    /// The segments of its neighbours.
    pub(crate) neighbours: BTreeMap<Rank, PeerSegment>,
    /// How many bytes of each slot are used: the same on all ranks.
    pub(crate) slot_bytes: usize,
}

/// The streams between two ranks.
#[derive(Debug)]
pub(crate) struct PeerStreams<S> {
    /// Carries goodbyes and failures.
    pub(crate) control: S,
    /// Messages of collectives: at least one stream, in the same order at both ends.
    pub(crate) data: Vec<S>,
    /// Bytes that a stream carries before the next stream has its turn: the same at both ends.
    pub(crate) block_bytes: usize,
    /// Messages from rank to rank.
    pub(crate) points: S,
}

impl<S> PeerStreams<S> {
    fn bundle(self) -> Bundle<S> {
        let PeerStreams { control, data, block_bytes, points } = self;
        Bundle { control, data: Striped::in_blocks_of(block_bytes, data), points }
    }
}

impl<S: Connection> Member<S> {
    /// A rank with its streams to near peers. It calls other peers when it [wants](Member::take_wanted)
    /// them.
    pub(crate) fn new(
        identity: &Identity,
        topology: &Topology,
        settings: &Settings,
        near: Vec<(Rank, PeerStreams<S>)>,
        memory: Option<SharedMemory>,
    ) -> Result<Member<S>, drumline_shm::Error> {
        let member = Membership {
            name: identity.group.clone(),
            rank: identity.rank,
            world_size: topology.world_size,
            digest: identity.digest,
            global: Default::default(),
            seen: Default::default(),
        };
        let handles = memory.as_ref().map(|it| it.segment.handles()).transpose()?;
        let host =
            memory.map(|it| Host::new(it.segment, it.neighbours).with_slots_of(it.slot_bytes));
        let arena = host.as_ref().map(|host| host.arena().clone());
        let near = near.into_iter().map(|(rank, streams)| (rank, streams.bundle()));
        let streams = Streams::new(member.rank, member.world_size, near);
        let driven = Driven { streams, exits: Vec::new() };
        let streams = Shared(Arc::new(Mutex::new(driven)));
        let aborted = Arc::new(AtomicBool::new(false));
        let transport = Box::new(Shared(streams.0.clone()));
        let lane = Lane::new(member, topology.clone(), settings, transport, host, aborted.clone());
        let doorbell = handles.map(|handles| handles.doorbell);
        Ok(Member { lane, streams, aborted, arena, doorbell })
    }

    /// A call on buffers of its own, filled with the bytes of `order`.
    pub(crate) fn collective(&self, order: &Order<'_>) -> Result<Prepared> {
        let call = Call::new(order.collective, order.dtype, order.counts.clone());
        let call = order.root.into_iter().fold(call, Call::rooted);
        let arena = self.arena.as_ref().filter(|_| order.registered);
        let buffer = |bytes: &[u8]| Buffer::of(bytes, arena);
        let (data, input) = (buffer(order.data)?, buffer(order.input)?);
        let buffers = Box::new(Own { data, input, outcome: Outcome::default() });
        let operation = Operation::held(call, order.reduce_op.map(Into::into), buffers);
        Ok(Prepared(Box::new(operation)))
    }

    /// Takes a blocking call, and messages beside it, as far as possible. The simulator repeats this with
    /// the same call until the call has ended, while no calls are queued.
    pub(crate) fn step(&mut self, collective: &mut Prepared, now: Instant) -> Result<Progress> {
        let messages = self.lane.progress_points(now);
        match self.lane.step(&mut collective.0, &Now::at(now), Spin::No)? {
            Progress::Stuck if messages == Progress::Moved => Ok(Progress::Moved),
            progress => Ok(progress),
        }
    }

    /// Adds an asynchronous call behind all others.
    pub(crate) fn submit(&mut self, mut collective: Prepared) -> Outcome {
        let outcome = collective.outcome();
        self.lane.submit(collective.0);
        outcome
    }

    /// Takes the queued calls and messages as far as possible.
    pub(crate) fn progress(&mut self, now: Instant) -> Progress {
        self.lane.progress(now, Spin::No)
    }

    /// Whether queued calls or messages are unfinished.
    pub(crate) fn is_busy(&self) -> bool {
        self.lane.is_busy()
    }

    /// Whether queued calls are unfinished.
    pub(crate) fn has_calls(&self) -> bool {
        self.lane.has_jobs()
    }

    /// Prepares for a sleep until the returned time or [`Member::has_news`]. `None`: the rank has something
    /// to do.
    pub(crate) fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        self.lane.prepare_sleep(now)
    }

    /// Ends a sleep at the time `now`.
    pub(crate) fn end_sleep(&mut self, now: Instant) {
        self.lane.wake_up();
        self.lane.look(now);
    }

    /// Whether something has happened that should end a sleep.
    pub(crate) fn has_news(&self) -> bool {
        let driven = self.streams.lock();
        let rung = || {
            self.doorbell.as_ref().is_some_and(|doorbell| {
                let mut doorbell = [PollFd::new(doorbell, PollFlags::IN)];
                poll(&mut doorbell, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
            })
        };
        let mut interests = driven.streams.interests();
        !driven.exits.is_empty()
            || interests.any(|(it, stream)| {
                it.readable && stream.is_readable() || it.writable && stream.is_writable()
            })
            || rung()
    }

    /// The peers that this rank needs now and has no streams to. The simulator calls each of them and then
    /// calls [`Member::called`] or [`Member::unreachable`].
    pub(crate) fn take_wanted(&mut self) -> Vec<Rank> {
        self.streams.lock().streams.take_wanted()
    }

    /// Tells this rank that it has opened these streams to the peer.
    pub(crate) fn called(&mut self, peer: Rank, streams: PeerStreams<S>) {
        self.streams.lock().streams.called(peer, streams.bundle());
    }

    /// Tells this rank that the peer has opened these streams. Returns whether this rank uses them now.
    pub(crate) fn came(&mut self, peer: Rank, streams: PeerStreams<S>) -> bool {
        self.streams.lock().streams.came(peer, streams.bundle())
    }

    /// Tells this rank that it could not call the peer. Returns whether it uses the streams that the peer has
    /// opened meanwhile.
    pub(crate) fn unreachable(&mut self, peer: Rank, problem: &str, refused: bool) -> bool {
        let cause = Cause::Unreachable { peer, problem: problem.to_owned() };
        self.streams.lock().streams.unreachable(peer, cause, refused)
    }

    /// Tells this rank that the process of a peer on the same host has ended.
    pub(crate) fn on_exit(&mut self, peer: Rank) {
        self.streams.lock().exits.push(peer);
    }

    /// Aborts the group.
    pub(crate) fn abort(&mut self, now: Instant) {
        self.aborted.store(true, Ordering::SeqCst);
        self.lane.progress(now, Spin::No);
    }

    /// Begins to close the group. [`Member::closed`] says when all ranks have.
    pub(crate) fn close(&mut self) -> Result<()> {
        self.lane.close()
    }

    /// Whether all ranks have left, after [`Member::close`] at `started`.
    pub(crate) fn closed(&mut self, started: Instant, now: Instant) -> Result<bool> {
        self.lane.closed(started, now)
    }
}

impl<S: fmt::Debug> fmt::Debug for Member<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("streams", &self.streams).finish_non_exhaustive()
    }
}

/// The arguments of a call.
#[derive(Clone, Debug)]
pub(crate) struct Order<'a> {
    pub(crate) collective: Collective,
    /// The operator, if the collective reduces.
    pub(crate) reduce_op: Option<ReduceOp>,
    /// The root, if the collective has one.
    pub(crate) root: Option<Rank>,
    /// The type of the elements.
    pub(crate) dtype: DType,
    /// The elements of each block, as far as this rank knows them.
    pub(crate) counts: Counts,
    /// The bytes of the buffer that gets the result.
    pub(crate) data: &'a [u8],
    /// The bytes of the buffer that is only read.
    pub(crate) input: &'a [u8],
    /// Whether both buffers are registered.
    pub(crate) registered: bool,
}

/// A call with its buffers.
#[derive(Debug)]
pub(crate) struct Prepared(Box<Operation<'static>>);

impl Prepared {
    /// The buffers of a call that has ended.
    pub(crate) fn ended(mut self) -> Own {
        let outcome = self.outcome();
        self.0.end(Ok(()));
        match outcome.take() {
            Some((_, own)) => own,
            None => unreachable!("a call that ends leaves its buffers"),
        }
    }

    fn outcome(&mut self) -> Outcome {
        match self.0.buffers_mut().held_mut::<Own>() {
            Some(own) => own.outcome.clone(),
            None => unreachable!("the buffers of each call are its own"),
        }
    }
}

/// The buffers of a call.
#[derive(Debug)]
pub(crate) struct Own {
    data: Buffer,
    input: Buffer,
    outcome: Outcome,
}

impl Own {
    /// The bytes of the buffer that gets the result, as they are now.
    pub(crate) fn bytes(&self) -> &[u8] {
        self.data.bytes()
    }

    /// Overwrites the input, as its owner may once the call has ended.
    pub(crate) fn overwrite_input(&mut self) {
        self.input.words.fill(0);
    }
}

impl Held for Own {
    fn data(&self) -> &[u8] {
        self.data.bytes()
    }

    fn input(&self) -> &[u8] {
        self.input.bytes()
    }

    fn both(&mut self) -> (&mut [u8], &[u8]) {
        (self.data.bytes_mut(), self.input.bytes())
    }

    fn end(self: Box<Self>, result: Result<()>) {
        let outcome = self.outcome.clone();
        *outcome.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((result, *self));
    }
}

/// Registered memory, in words that are aligned for elements of any type.
#[derive(Debug)]
struct Buffer {
    words: RegisteredBuffer<u64>,
    len: usize,
}

impl Buffer {
    fn of(bytes: &[u8], arena: Option<&Arena>) -> Result<Buffer> {
        let len = bytes.len();
        let words = RegisteredBuffer::allocate(arena, len.div_ceil(size_of::<u64>()))?;
        let mut buffer = Buffer { words, len };
        buffer.bytes_mut().copy_from_slice(bytes);
        Ok(buffer)
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

/// The place where an asynchronous call leaves its result and its buffers.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome(Arc<Mutex<Option<Ended>>>);

/// The result of a call, and its buffers.
type Ended = (Result<()>, Own);

impl Outcome {
    /// The result, once there is one.
    pub(crate) fn take(&self) -> Option<Ended> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The streams of a lane. The simulator has access to them, too.
#[derive(Debug)]
struct Shared<S>(Arc<Mutex<Driven<S>>>);

#[derive(Debug)]
struct Driven<S> {
    streams: Streams<S>,
    /// Neighbours whose processes have ended. The lane does not know yet.
    exits: Vec<Rank>,
}

impl<S: Connection> Driven<S> {
    /// The streams in which the lane is interested and that have bytes to read.
    fn news(&self) -> impl Iterator<Item = (Rank, StreamKind)> {
        let readable =
            self.streams.interests().filter(|(it, stream)| it.readable && stream.is_readable());
        readable.map(|(interest, _)| (interest.rank, interest.kind))
    }
}

impl<S> Shared<S> {
    fn lock(&self) -> MutexGuard<'_, Driven<S>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Connection> Transport for Shared<S> {
    fn begin(&mut self, machine: &mut Machine) -> Result<(), Cause> {
        self.lock().streams.begin(machine)
    }

    fn send(&mut self, to: Rank, header: Header, src: Stretch) {
        self.lock().streams.send(to, header, src);
    }

    fn receive(&mut self, from: Rank, dst: Stretch) {
        self.lock().streams.receive(from, dst);
    }

    fn progress(
        &mut self,
        machine: &mut Machine,
        memory: &mut Memory<'_>,
        now: Instant,
    ) -> Result<bool, Cause> {
        self.lock().streams.progress(machine, memory, now)
    }

    fn abort(&mut self, failure: &CollectiveError) {
        self.lock().streams.abort(failure);
    }

    fn take_leave(&mut self, seen: Option<SeenFailure>) {
        self.lock().streams.take_leave(seen);
    }

    fn still_present(&mut self, history: &History) -> Result<Vec<Rank>, Cause> {
        self.lock().streams.still_present(history)
    }

    fn wait(&mut self, _until: Instant, _now: Instant) {
        // The simulator sleeps for this rank. Here the rank hears what has happened.
        let mut driven = self.lock();
        for (rank, kind) in driven.news().collect::<Vec<_>>() {
            driven.streams.on_readable(rank, kind);
        }
        for rank in std::mem::take(&mut driven.exits) {
            driven.streams.on_exit(rank);
        }
    }

    fn arm(&mut self) {}
}

impl<S: Connection> Connections for Shared<S> {
    fn post(&mut self, point: Point, ended: &mut Vec<transport::Ended>) {
        self.lock().streams.post(point, ended);
    }

    fn progress_points(
        &mut self,
        idle: bool,
        now: Instant,
        ended: &mut Vec<transport::Ended>,
    ) -> Result<bool, Cause> {
        self.lock().streams.progress_points(idle, now, ended)
    }

    fn for_each_point(&mut self, look: &mut dyn FnMut(&mut Point)) {
        self.lock().streams.points_mut().for_each(look);
    }

    fn take_points(&mut self) -> Vec<Point> {
        self.lock().streams.take_points()
    }

    fn want(&mut self, ranks: &[Rank]) {
        self.lock().streams.want(ranks.iter().copied());
    }

    fn tell(&mut self, waits: &Waits, now: Instant) {
        self.lock().streams.tell(waits, now);
    }

    fn told(&mut self, now: Instant, answer: Duration) -> BTreeMap<Rank, Waits> {
        self.lock().streams.told(now, answer)
    }

    fn left(&self, rank: Rank) -> Option<Cause> {
        self.lock().streams.left(rank)
    }

    fn has_met_all(&mut self) -> bool {
        self.lock().streams.has_met_all()
    }

    fn lost(&mut self, rank: Rank) -> Option<Cause> {
        self.lock().streams.lost(rank)
    }

    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        self.lock().streams.next_deadline(now)
    }
}
