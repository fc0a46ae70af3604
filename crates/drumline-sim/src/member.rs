//! One rank of a group without sockets, threads and a clock: whoever has it decides what arrives
//! when, and what time it is. For simulators; no part of the public API.

mod messages;

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
    Cause, CollectiveError, DType, Element, ReduceOp, Result, Settings,
    any_call::{AnyCall, Job},
    call::Call,
    executor::{self, Header, History, Machine, Memory, Now, Spin, Stretch},
    host::Host,
    lane::Lane,
    membership::Membership,
    registered::RegisteredBuffer,
    transport::{
        self, Bundle, Connections, Duplex, Point, StreamKind, Streams, Striped, Transport, Waits,
    },
    typed_call::TypedCall,
};
use drumline_schedule::{Collective, Counts, Topology, step::Rank};
use drumline_shm::{Arena, PeerSegment, Segment};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

pub use self::messages::{MessageOrder, Posted, Side};

/// A stream of bytes in both directions that never blocks.
pub trait Connection: Duplex + 'static {
    /// Whether a read would not block.
    fn is_readable(&self) -> bool;
    /// Whether a write would not block.
    fn is_writable(&self) -> bool;
}

/// One rank of one group.
pub struct Member<S> {
    lane: Lane,
    streams: Shared<S>,
    aborted: Arc<AtomicBool>,
    arena: Option<Arena>,
    doorbell: Option<OwnedFd>,
}

/// Who a [`Member`] is.
#[derive(Clone, Debug)]
pub struct Identity {
    /// Name of the group.
    pub group: String,
    /// The rank.
    pub rank: Rank,
    /// A number that only this group's ranks have.
    pub digest: u64,
}

/// The memory that a rank shares with the others of its host. All ranks of a group have it, even
/// without neighbours, as soon as two of them share a host.
#[derive(Debug)]
pub struct SharedMemory {
    /// The rank's own.
    pub segment: Segment,
    /// Those of its neighbours.
    pub neighbours: BTreeMap<Rank, PeerSegment>,
    /// How many bytes of each slot are used: the same on all ranks.
    pub slot_bytes: usize,
}

/// The streams between two ranks.
#[derive(Debug)]
pub struct PeerStreams<S> {
    /// Leave-taking and failures.
    pub control: S,
    /// Messages of collectives: at least one stream, in the same order at both ends.
    pub data: Vec<S>,
    /// How many bytes each of them carries before the next one's turn: the same at both ends.
    pub block_bytes: usize,
    /// Messages from rank to rank.
    pub points: S,
}

impl<S> PeerStreams<S> {
    fn bundle(self) -> Bundle<S> {
        let PeerStreams { control, data, block_bytes, points } = self;
        Bundle { control, data: Striped::in_blocks_of(block_bytes, data), points }
    }
}

/// How far a rank's operations have come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// They are complete.
    Done,
    /// Something moved; there may be more.
    Moved,
    /// Nothing can be done before a peer or the clock moves.
    Stuck,
}

impl<S: Connection> Member<S> {
    /// A rank with its streams to near peers. The others are to be called when they are
    /// [wanted](Member::take_wanted).
    ///
    /// # Errors
    ///
    /// When there is no descriptor left.
    pub fn new(
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

    /// A collective on buffers of its own, of which `data` and `input` are the bytes.
    ///
    /// # Errors
    ///
    /// When there is no room for a registered buffer.
    pub fn collective(&self, order: &Order<'_>) -> Result<Prepared> {
        fn make<T: Element>(order: &Order<'_>, arena: Option<&Arena>) -> Result<Prepared> {
            let call = Call::new(order.collective, T::DTYPE, order.counts.clone());
            let call = order.root.into_iter().fold(call, Call::rooted);
            let buffer = |bytes: &[u8]| {
                let mut buffer =
                    RegisteredBuffer::<T>::allocate(arena, bytes.len() / size_of::<T>())?;
                bytemuck::cast_slice_mut(&mut buffer).copy_from_slice(bytes);
                Ok::<_, drumline_engine::Error>(buffer)
            };
            let (data, input) = match order.is_out_of_place() {
                // As `all_reduce_into` and `reduce_into` do.
                true => (buffer(order.input)?, buffer(&[])?),
                false => (buffer(order.data)?, buffer(order.input)?),
            };
            Ok(Prepared(Box::new(TypedCall::<T, _, _>::new(
                call,
                order.reduce_op.map(Into::into),
                data,
                input,
            ))))
        }
        let arena = self.arena.as_ref().filter(|_| order.registered);
        match order.dtype {
            DType::U8 => make::<u8>(order, arena),
            DType::U16 => make::<u16>(order, arena),
            DType::U32 => make::<u32>(order, arena),
            DType::U64 => make::<u64>(order, arena),
            DType::I8 => make::<i8>(order, arena),
            DType::I16 => make::<i16>(order, arena),
            DType::I32 => make::<i32>(order, arena),
            DType::I64 => make::<i64>(order, arena),
            DType::F16 => make::<drumline_kernels::f16>(order, arena),
            DType::Bf16 => make::<drumline_kernels::bf16>(order, arena),
            DType::F32 => make::<f32>(order, arena),
            DType::F64 => make::<f64>(order, arena),
            DType::Bool => make::<drumline_kernels::Bool>(order, arena),
            DType::Complex64 => make::<drumline_kernels::Complex<f32>>(order, arena),
            DType::Complex128 => make::<drumline_kernels::Complex<f64>>(order, arena),
            DType::F8E4M3 => make::<drumline_kernels::F8E4M3>(order, arena),
            DType::F8E5M2 => make::<drumline_kernels::F8E5M2>(order, arena),
            other => unreachable!("there is no Rust type for {other}"),
        }
    }

    /// Brings a blocking call as far as possible, and messages beside it. To be called with the
    /// same collective until it is done or has failed, and only when no calls are queued.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_reduce`](crate::ProcessGroup::all_reduce).
    pub fn step(&mut self, collective: &mut Prepared, now: Instant) -> Result<Progress> {
        let messages = self.lane.progress_points(now);
        match self.lane.step(collective.0.operation(), &Now::at(now), Spin::No)? {
            executor::Progress::Stuck if messages == executor::Progress::Moved => {
                Ok(Progress::Moved)
            }
            progress => Ok(progress.into()),
        }
    }

    /// Adds an asynchronous call behind all others.
    pub fn submit(&mut self, collective: Prepared) -> Outcome {
        let outcome = Outcome::default();
        self.lane.submit(Box::new(Submitted { collective, outcome: outcome.clone() }));
        outcome
    }

    /// Brings the queued calls and messages as far as possible.
    pub fn progress(&mut self, now: Instant) -> Progress {
        self.lane.progress(now, Spin::No).into()
    }

    /// Whether queued calls or messages are unfinished.
    pub fn is_busy(&self) -> bool {
        self.lane.is_busy()
    }

    /// Whether queued calls are unfinished.
    pub fn has_calls(&self) -> bool {
        self.lane.has_jobs()
    }

    /// Prepares for a sleep until the returned time or [`Member::has_news`]; `None`: there is
    /// something to do.
    pub fn prepare_sleep(&mut self, now: Instant) -> Option<Instant> {
        self.lane.prepare_sleep(now)
    }

    /// Ends a sleep; it is `now`.
    pub fn end_sleep(&mut self, now: Instant) {
        self.lane.wake_up();
        self.lane.look(now);
    }

    /// Whether something has happened that should end a sleep.
    pub fn has_news(&self) -> bool {
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

    /// The peers that are needed now and have no streams: each is to be called, which ends in
    /// [`Member::called`] or [`Member::unreachable`].
    pub fn take_wanted(&mut self) -> Vec<Rank> {
        self.streams.lock().streams.take_wanted()
    }

    /// These streams to the peer are open.
    pub fn called(&mut self, peer: Rank, streams: PeerStreams<S>) {
        self.streams.lock().streams.called(peer, streams.bundle());
    }

    /// The peer has opened these streams. Whether they are in use now.
    pub fn came(&mut self, peer: Rank, streams: PeerStreams<S>) -> bool {
        self.streams.lock().streams.came(peer, streams.bundle())
    }

    /// The peer could not be called. Whether streams that it has opened meanwhile are in use now.
    pub fn unreachable(&mut self, peer: Rank, problem: &str) -> bool {
        let cause = Cause::Unreachable { peer, problem: problem.to_owned() };
        self.streams.lock().streams.unreachable(peer, cause)
    }

    /// The process of a peer on the same host has ended.
    pub fn on_exit(&mut self, peer: Rank) {
        self.streams.lock().exits.push(peer);
    }

    /// See [`ProcessGroup::abort`](crate::ProcessGroup::abort).
    pub fn abort(&mut self, now: Instant) {
        self.aborted.store(true, Ordering::SeqCst);
        self.lane.progress(now, Spin::No);
    }

    /// Begins to close the group: call [`Member::closed`] until it says so.
    ///
    /// # Errors
    ///
    /// When the group has failed or was closed.
    pub fn close(&mut self) -> Result<()> {
        self.lane.close()
    }

    /// Whether all ranks have left, after [`Member::close`] at `started`.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::destroy`](crate::ProcessGroup::destroy).
    pub fn closed(&mut self, started: Instant, now: Instant) -> Result<bool> {
        self.lane.closed(started, now)
    }
}

impl<S: fmt::Debug> fmt::Debug for Member<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Member").field("streams", &self.streams).finish_non_exhaustive()
    }
}

impl From<executor::Progress> for Progress {
    fn from(progress: executor::Progress) -> Progress {
        match progress {
            executor::Progress::Done => Progress::Done,
            executor::Progress::Moved => Progress::Moved,
            executor::Progress::Stuck => Progress::Stuck,
        }
    }
}

/// A collective to be made.
#[derive(Clone, Debug)]
pub struct Order<'a> {
    /// What it does.
    pub collective: Collective,
    /// The operator, where it reduces.
    pub reduce_op: Option<ReduceOp>,
    /// The root, where it has one.
    pub root: Option<Rank>,
    /// With what.
    pub dtype: DType,
    /// How many elements the blocks have, as this rank knows it.
    pub counts: Counts,
    /// The bytes of the buffer that holds the result in the end.
    pub data: &'a [u8],
    /// The bytes of the buffer that is only read, where there is one: if the collective works in
    /// place, it is called out of place.
    pub input: &'a [u8],
    /// Whether both lie in memory that neighbours reach.
    pub registered: bool,
}

impl Order<'_> {
    fn is_out_of_place(&self) -> bool {
        let in_place = matches!(self.collective, Collective::AllReduce | Collective::Reduce);
        in_place && !self.input.is_empty()
    }
}

/// A collective with its buffers, of any type.
pub struct Prepared(Box<dyn Erased>);

trait Erased: Send {
    fn operation(&mut self) -> &mut dyn AnyCall;
    fn bytes(&self) -> &[u8];
    fn overwrite_input(&mut self);
}

impl<T: Element> Erased for TypedCall<T, RegisteredBuffer<T>, RegisteredBuffer<T>> {
    fn operation(&mut self) -> &mut dyn AnyCall {
        self
    }

    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self.data())
    }

    fn overwrite_input(&mut self) {
        self.input_mut().fill(T::zeroed());
    }
}

impl Prepared {
    /// The bytes of its data, as they are now.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// Does what its owner may do once the call has ended.
    pub fn overwrite_input(&mut self) {
        self.0.overwrite_input();
    }
}

impl fmt::Debug for Prepared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Prepared").finish_non_exhaustive()
    }
}

/// Where an asynchronous call leaves its result and its buffers.
#[derive(Clone, Debug, Default)]
pub struct Outcome(Arc<Mutex<Option<Ended>>>);

/// The result of a call, and its buffers.
type Ended = (Result<()>, Prepared);

impl Outcome {
    /// The result, once there is one.
    pub fn take(&self) -> Option<Ended> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

struct Submitted {
    collective: Prepared,
    outcome: Outcome,
}

impl Job for Submitted {
    fn operation(&mut self) -> &mut dyn AnyCall {
        self.collective.0.operation()
    }

    fn complete(self: Box<Self>, result: Result<()>) {
        let Submitted { collective, outcome } = *self;
        *outcome.0.lock().unwrap_or_else(PoisonError::into_inner) = Some((result, collective));
    }
}

/// Streams that a lane uses, and that whoever drives it can reach.
#[derive(Debug)]
struct Shared<S>(Arc<Mutex<Driven<S>>>);

#[derive(Debug)]
struct Driven<S> {
    streams: Streams<S>,
    /// Neighbours whose processes have ended, not told yet.
    exits: Vec<Rank>,
}

impl<S: Connection> Driven<S> {
    /// The streams that something has happened to, of those that matter.
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
        memory: &mut dyn Memory,
        now: Instant,
    ) -> Result<bool, Cause> {
        self.lock().streams.progress(machine, memory, now)
    }

    fn abort(&mut self, failure: &CollectiveError) {
        self.lock().streams.abort(failure);
    }

    fn take_leave(&mut self) {
        self.lock().streams.take_leave();
    }

    fn still_present(&mut self, history: &History) -> Result<Vec<Rank>, Cause> {
        self.lock().streams.still_present(history)
    }

    fn wait(&mut self, _until: Instant, _now: Instant) {
        // Whoever drives this rank sleeps for it. What is left is to hear what has happened.
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

    fn has_left(&self, rank: Rank) -> bool {
        self.lock().streams.has_left(rank)
    }

    fn next_deadline(&self, now: Instant) -> Option<Instant> {
        self.lock().streams.next_deadline(now)
    }
}
