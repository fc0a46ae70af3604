//! A communicator: how it comes to be, what is queued on it, and how it ends.

use std::ffi::{c_int, c_void};
use std::fmt;
use std::ptr::null;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use drumline_device::{Error, Place, Result, Stream};
use drumline_kernels::DType;

use crate::device::CudaDevice;
use crate::nccl::functions::{Config, Functions, IN_PROGRESS, NO_COLOR, SUCCESS};
use crate::nccl::handle::Keeper;
use crate::nccl::library::Nccl;
use crate::nccl::patience::Patience;
use crate::nccl::queue::Queue;
use crate::nccl::shape::Seat;
use crate::nccl::steps::{Step, steps};
use crate::nccl::unique_id::UniqueId;
use crate::opened::Opened;
use crate::stream::CudaStream;
use crate::table::Handle;
use drumline_device::fabric::{Call, Operator};

/// Whether a communicator can be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum State {
    /// What was asked of it is done or queued.
    Ready,
    /// It connects to other ranks.
    InProgress,
}

/// One rank's end of a group of GPUs. Any thread may use it; what is queued runs in the order of the calls.
///
/// Operations queue work on a stream of the communicator's device and return. They wait until the communicator is
/// [ready](State::Ready): the first operation waits for all ranks to come. A stream that is captured into a graph may
/// be used.
///
/// To drop it ends it: the work that is queued has 30 s to come to its end. After a failure it is aborted.
pub struct Communicator {
    nccl: Nccl,
    device: Arc<Opened>,
    seat: Seat,
    keeper: Keeper,
    /// Where NCCL puts the handle, at times in a thread of its own.
    slot: Option<Slot>,
    /// Whoever holds it may queue.
    turn: Mutex<()>,
    was_ready: AtomicBool,
    has_failed: AtomicBool,
}

type Slot = Box<AtomicPtr<c_void>>;

/// So long what is queued may take, once the communicator is dropped.
const LAST_WORK: Duration = Duration::from_secs(30);

impl Communicator {
    /// Begins to make a communicator of `size` ranks, all of which call this with the same id. It returns at once;
    /// [`Communicator::state`] tells when all ranks have come.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when there is no such rank; what NCCL says. Later, as a state: that two ranks are on one GPU
    /// (see [`same_gpu_hint`](crate::nccl::same_gpu_hint)).
    pub fn new(
        nccl: &Nccl,
        device: &CudaDevice,
        id: &UniqueId,
        rank: usize,
        size: usize,
    ) -> Result<Communicator> {
        let seat = Seat { rank, size };
        seat.check(rank).map_err(|problem| Error::Argument { problem })?;
        let ranks = c_int::try_from(size).map_err(|_| {
            let problem = format!("{size} ranks are more than NCCL can count");
            Error::Argument { problem }
        })?;
        let (slot, device) = (Slot::default(), device.opened().clone());
        let code = device.inside(|_| {
            let (init, config) = (nccl.functions().init, Config::NON_BLOCKING);
            // SAFETY: the slot outlives the communicator, and NCCL copies the configuration.
            unsafe { init(slot.as_ptr(), ranks, id.clone(), rank as c_int, &raw const config) }
        })?;
        let made = Communicator::of(nccl.clone(), device, seat, slot);
        made.done("ncclCommInitRankConfig", code)?;
        Ok(made)
    }

    fn of(nccl: Nccl, device: Arc<Opened>, seat: Seat, slot: Slot) -> Communicator {
        Communicator {
            nccl,
            device,
            seat,
            keeper: Keeper::new(slot.load(Ordering::Acquire)),
            slot: Some(slot),
            turn: Mutex::new(()),
            was_ready: AtomicBool::new(false),
            has_failed: AtomicBool::new(false),
        }
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.seat.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.seat.size
    }

    /// How far NCCL is. It is asked while other threads are in calls.
    ///
    /// # Errors
    ///
    /// What has gone wrong since, as far as NCCL tells: a lost connection, but no rank that has died on this host.
    pub fn state(&self) -> Result<State> {
        let mut state = SUCCESS;
        self.call("ncclCommGetAsyncError", |functions, handle| {
            // SAFETY: the communicator lives, and the place is there to be written.
            unsafe { (functions.async_error)(handle, &raw mut state) }
        })?;
        if state == IN_PROGRESS {
            return Ok(State::InProgress);
        }
        self.done("ncclCommGetAsyncError", state)?;
        self.was_ready.store(true, Ordering::Release);
        Ok(State::Ready)
    }

    /// A communicator for those ranks that name the same color, in the order of their keys. All ranks call it; one that
    /// names no color gets none. It waits for all of them. Work that is queued on this communicator goes on.
    ///
    /// # Errors
    ///
    /// What NCCL says. [`Error::Aborted`] when another thread aborts this communicator meanwhile.
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Communicator>> {
        let color = match color {
            None => NO_COLOR,
            Some(color) => c_int::try_from(color).map_err(|_| {
                let problem = format!("NCCL takes colors up to {}, not {color}", c_int::MAX);
                Error::Argument { problem }
            })?,
        };
        let _turn = self.turn();
        self.settle(self)?;
        let slot = Slot::default();
        let split = self
            .call("ncclCommSplit", |functions, handle| {
                // SAFETY: the communicator lives, and is ready. The slot outlives what NCCL does with it.
                unsafe { (functions.split)(handle, color, key, slot.as_ptr(), null()) }
            })
            // NCCL may fill the slot as late as this.
            .and_then(|()| self.settle(self));
        let seat = Seat { rank: 0, size: 1 };
        let mut made = Communicator::of(self.nccl.clone(), self.device.clone(), seat, slot);
        split?;
        if color == NO_COLOR {
            made.was_ready.store(true, Ordering::Release); // there is nothing that could still be written
            return Ok(None);
        }
        made.settle(self)?;
        made.seat = Seat { rank: made.number(Number::Rank)?, size: made.number(Number::Size)? };
        Ok(Some(made))
    }

    fn number(&self, number: Number) -> Result<usize> {
        let mut value = 0;
        let name = match number {
            Number::Rank => "ncclCommUserRank",
            Number::Size => "ncclCommCount",
        };
        self.call(name, |functions, handle| {
            let function = match number {
                Number::Rank => functions.user_rank,
                Number::Size => functions.count,
            };
            // SAFETY: the communicator lives, and the place is there to be written.
            unsafe { function(handle, &raw mut value) }
        })?;
        Ok(usize::try_from(value).unwrap_or(0))
    }

    /// Ends what is queued, in whatever state, and refuses all later calls. Other threads that wait in a call of this
    /// communicator get [`Error::Aborted`]. Streams go on; what was to be written is undefined. Later aborts do
    /// nothing. Communicators that this one was split into go on: they are aborted one by one.
    ///
    /// # Errors
    ///
    /// What NCCL says. The communicator is not usable then, either.
    pub fn abort(&self) -> Result<()> {
        let Some(handle) = self.keeper.close() else { return Ok(()) };
        let mut code = SUCCESS;
        // SAFETY: the keeper gives the handle to one caller. Calls have ended, or this is what frees them.
        self.device.give_back(|_| unsafe {
            code = (self.nccl.functions().abort)(handle);
            code
        });
        self.nccl.done(&self.device.name, "ncclCommAbort", code)
    }

    /// Queues calls on a stream, as one operation if they are several. Calls of a rank with its peers that wait for each
    /// other must be queued together.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] and [`Error::Place`]: nothing is queued then, and no rank has heard of it. What NCCL says.
    /// [`Error::Aborted`].
    pub fn queue(&self, calls: &[Call], stream: &dyn Stream) -> Result<()> {
        let stream = CudaStream::handle_on(stream, &self.device)?;
        let steps = self.steps(calls)?;
        if steps.is_empty() {
            return Ok(());
        }
        let _turn = self.turn();
        self.settle(self)?;
        let queued = self.using(|_, communicator| {
            let queue = Queue { nccl: &self.nccl, device: &self.device.name, communicator, stream };
            // SAFETY: the communicator lives and is ready, and this thread has the turn. The caller holds the stream,
            // which is of the current device. The places were looked up.
            unsafe { queue.queue(&steps) }
        })?;
        self.noted(queued)
    }

    /// [`Call::AllReduce`].
    ///
    /// # Errors
    ///
    /// See [`Communicator::queue`].
    pub fn all_reduce(
        &self,
        from: Place,
        to: Place,
        dtype: DType,
        operator: impl Into<Operator>,
        stream: &dyn Stream,
    ) -> Result<()> {
        self.queue(&[Call::AllReduce { from, to, dtype, operator: operator.into() }], stream)
    }

    /// [`Call::Reduce`].
    ///
    /// # Errors
    ///
    /// See [`Communicator::queue`].
    pub fn reduce(
        &self,
        from: Place,
        to: Option<Place>,
        dtype: DType,
        operator: impl Into<Operator>,
        root: usize,
        stream: &dyn Stream,
    ) -> Result<()> {
        self.queue(&[Call::Reduce { from, to, dtype, operator: operator.into(), root }], stream)
    }

    /// [`Call::ReduceScatter`].
    ///
    /// # Errors
    ///
    /// See [`Communicator::queue`].
    pub fn reduce_scatter(
        &self,
        from: Place,
        to: Place,
        dtype: DType,
        operator: impl Into<Operator>,
        stream: &dyn Stream,
    ) -> Result<()> {
        self.queue(&[Call::ReduceScatter { from, to, dtype, operator: operator.into() }], stream)
    }

    /// [`Call::Broadcast`].
    ///
    /// # Errors
    ///
    /// See [`Communicator::queue`].
    pub fn broadcast(&self, place: Place, root: usize, stream: &dyn Stream) -> Result<()> {
        self.queue(&[Call::Broadcast { place, root }], stream)
    }

    /// [`Call::AllGather`].
    ///
    /// # Errors
    ///
    /// See [`Communicator::queue`].
    pub fn all_gather(&self, from: Place, to: Place, stream: &dyn Stream) -> Result<()> {
        self.queue(&[Call::AllGather { from, to }], stream)
    }

    /// [`Call::Gather`].
    ///
    /// # Errors
    ///
    /// See [`Communicator::queue`].
    pub fn gather(
        &self,
        from: Place,
        to: Option<Place>,
        root: usize,
        stream: &dyn Stream,
    ) -> Result<()> {
        self.queue(&[Call::Gather { from, to, root }], stream)
    }

    /// [`Call::Scatter`].
    ///
    /// # Errors
    ///
    /// See [`Communicator::queue`].
    pub fn scatter(
        &self,
        from: Option<Place>,
        to: Place,
        root: usize,
        stream: &dyn Stream,
    ) -> Result<()> {
        self.queue(&[Call::Scatter { from, to, root }], stream)
    }

    /// [`Call::AllToAll`].
    ///
    /// # Errors
    ///
    /// See [`Communicator::queue`].
    pub fn all_to_all(&self, from: Place, to: Place, stream: &dyn Stream) -> Result<()> {
        self.queue(&[Call::AllToAll { from, to }], stream)
    }

    /// [`Call::Send`].
    ///
    /// # Errors
    ///
    /// See [`Communicator::queue`].
    pub fn send(&self, from: Place, peer: usize, stream: &dyn Stream) -> Result<()> {
        self.queue(&[Call::Send { from, peer }], stream)
    }

    /// [`Call::Receive`].
    ///
    /// # Errors
    ///
    /// See [`Communicator::queue`].
    pub fn recv(&self, to: Place, peer: usize, stream: &dyn Stream) -> Result<()> {
        self.queue(&[Call::Receive { to, peer }], stream)
    }

    /// The steps of all calls, after all arguments were found right.
    fn steps(&self, calls: &[Call]) -> Result<Vec<Step>> {
        let problem = |problem| Error::Argument { problem };
        let mut all = Vec::new();
        for call in calls {
            all.extend(steps(call, self.seat).map_err(problem)?);
        }
        for reduction in all.iter().filter_map(Step::reduction) {
            let work = reduction.operator.work();
            self.nccl.supports(reduction.dtype, work).map_err(problem)?;
        }
        together(all.iter().flat_map(Step::places).collect())
            .into_iter()
            .try_for_each(|place| self.device.check(place))?;
        Ok(all)
    }

    fn turn(&self) -> impl Drop {
        self.turn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the communicator is ready. An abort of it, or of `parent`, ends the wait.
    fn settle(&self, parent: &Communicator) -> Result<()> {
        let mut patience = Patience::default();
        while self.state()? == State::InProgress {
            if parent.keeper.is_closed() {
                return Err(parent.aborted());
            }
            patience.pause();
        }
        Ok(())
    }

    fn using<R>(&self, call: impl FnOnce(&Functions, Handle) -> R) -> Result<R> {
        let functions = self.nccl.functions();
        self.keeper
            .using(|handle| self.device.inside(|_| call(functions, handle)))
            .unwrap_or_else(|| Err(self.aborted()))
    }

    fn call(
        &self,
        name: &'static str,
        call: impl FnOnce(&Functions, Handle) -> c_int,
    ) -> Result<()> {
        self.done(name, self.using(call)?)
    }

    /// The result of a call that this thread has just made.
    fn done(&self, call: &'static str, code: c_int) -> Result<()> {
        self.noted(self.nccl.done(&self.device.name, call, code))
    }

    fn noted(&self, result: Result<()>) -> Result<()> {
        if result.is_err() {
            self.has_failed.store(true, Ordering::Release);
        }
        result
    }

    fn aborted(&self) -> Error {
        Error::Aborted { device: self.device.name.clone() }
    }

    /// Waits for what is queued, and for NCCL's own last words.
    fn finish(&self) -> Result<()> {
        let until = Instant::now() + LAST_WORK;
        let settle = || {
            let mut patience = Patience::default();
            while self.state()? == State::InProgress {
                if Instant::now() > until {
                    return Err(self.aborted());
                }
                patience.pause();
            }
            Ok(())
        };
        settle()?;
        self.call("ncclCommFinalize", |functions, handle| {
            // SAFETY: the communicator lives, and is ready.
            unsafe { (functions.finalize)(handle) }
        })?;
        settle()
    }
}

/// What a communicator knows about itself.
#[derive(Clone, Copy)]
enum Number {
    Rank,
    Size,
}

/// The same bytes, in as few places as may be: blocks of one buffer are looked up once.
fn together(mut places: Vec<Place>) -> Vec<Place> {
    places.retain(|place| place.bytes > 0);
    places.sort_unstable_by_key(|place| place.address);
    let mut all: Vec<Place> = Vec::new();
    for place in places {
        match all.last_mut() {
            Some(last) if place.address <= last.address.saturating_add(last.bytes as u64) => {
                let reaches = (place.address - last.address) as usize;
                last.bytes = last.bytes.max(reaches.saturating_add(place.bytes));
            }
            _ => all.push(place),
        }
    }
    all
}

impl Drop for Communicator {
    fn drop(&mut self) {
        let was_ready = self.was_ready.load(Ordering::Acquire);
        // In a fork nothing is this process's. Of one that was never ready, NCCL's thread may still write its handle.
        if !self.device.library.is_own_process() || !was_ready {
            self.slot.take().map(Box::leak);
        }
        if !self.device.library.is_own_process() {
            return;
        }
        let is_well = was_ready && !self.has_failed.load(Ordering::Acquire);
        if !is_well || self.finish().is_err() {
            // Nobody could do anything about an error.
            let _ = self.abort();
        } else if let Some(handle) = self.keeper.close() {
            // SAFETY: the keeper gives the handle to one caller, and nothing is queued any more.
            self.device.give_back(|_| unsafe { (self.nccl.functions().destroy)(handle) });
        }
    }
}

/// `Communicator(rank 0 of 2 on cuda:0 (...))`
impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Seat { rank, size } = self.seat;
        write!(f, "Communicator(rank {rank} of {size} on {})", self.device.name)
    }
}
