//! A process group's end on a device.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use drumline_device::{self as device, Device, Event, Identity, Stream};
use drumline_error::ErrorOrigin;
use drumline_group::{DType, GroupOptions, ProcessGroup, Rank, ReduceOp};
use drumline_shm::OwnThread;

use crate::agreement::{self, Agreed};
use crate::direct::Direct;
use crate::inbox::{Body, Call, Closing, Shared};
use crate::options::Planted;
use crate::ring::Ring;
use crate::watcher::Watcher;
use crate::work::Promise;
use crate::{DeviceOptions, DeviceSlice, DeviceWork, Error, Result, Wanted, Way, error};

/// The ranks of a group, each with a device: collectives on the memory of the devices.
///
/// Calls return when they are queued. They begin when the caller's stream has come to where it was when they were
/// called. A [`DeviceWork`] has streams or the host wait for the end. All ranks make the same calls in the same order.
///
/// The device group has a process group of its own, so the process group that it was made of may be used for other
/// calls meanwhile. When a call fails, the device group is poisoned on all ranks, and nothing else.
///
/// Clones are one group. When the last is dropped, calls that are under way are still done.
#[derive(Clone)]
pub struct DeviceGroup(Arc<Handle>);

struct Handle {
    shared: Arc<Shared>,
    agreed: Agreed,
    watcher: Mutex<Running>,
}

#[derive(Default)]
enum Running {
    /// It begins with the first call.
    Idle(Box<Watcher>),
    Runs(OwnThread<Result<()>>),
    #[default]
    Ended,
}

/// How often both ways are tried.
const TRIES: usize = 5;

impl DeviceGroup {
    /// Makes the device group. All ranks of `group` call this together, each with its device. Several ranks may share
    /// one.
    ///
    /// # Errors
    ///
    /// [`Mismatch`](drumline_error::ErrorKind::Mismatch) names an option that differs;
    /// [`Device`](drumline_error::ErrorKind::Device) what the driver of this rank says; otherwise the error names the
    /// rank at fault, and what its driver says.
    pub fn new(
        group: &ProcessGroup,
        device: Arc<dyn Device>,
        options: &DeviceOptions,
    ) -> Result<DeviceGroup> {
        options.check()?;
        let ranks: Vec<Rank> = (0..group.world_size()).collect();
        let own = group.new_group(&ranks, &GroupOptions::default().name("device"))?;
        let shared = Shared::new(own, device, options.clone());
        let made = DeviceGroup::set_up(&shared).and_then(|on| {
            if on.options().way == Wanted::Auto {
                on.try_both()?;
            }
            Ok(on)
        });
        made.inspect_err(|error| shared.fail(error.clone()))
    }

    /// Times an all-reduce of one window each way, where both can be gone, and takes the faster one on all ranks.
    fn try_both(&self) -> Result<()> {
        let agreed = &self.0.agreed;
        if agreed.joined().is_none() {
            return Ok(());
        }
        let failed = error::of("DeviceGroup::new");
        let bytes = self.options().window_bytes;
        let memory = self.device().memory(bytes).map_err(&failed)?;
        let data = DeviceSlice::new(memory.place(), DType::F32);
        let stream = self.device().stream().map_err(&failed)?;
        let mut micros = [u64::MAX; 2];
        for (way, micros) in [false, true].into_iter().zip(&mut micros) {
            agreed.choose(way, "it is tried".to_owned());
            let mut times = Vec::new();
            for _ in 0..=TRIES {
                let began = Instant::now();
                self.all_reduce_on(&stream, data, ReduceOp::Sum)?.wait()?;
                times.push(began.elapsed().as_micros() as u64);
            }
            // The first one sets up what the others use.
            let times = &mut times[1..];
            times.sort_unstable();
            *micros = times[times.len() / 2];
        }
        self.group().all_reduce(&mut micros, ReduceOp::Max)?;
        let [host, direct] = micros;
        let figures = format!(
            "an all_reduce of {bytes} bytes took {direct} us by NCCL, and {host} us through the host, when the group was made"
        );
        agreed.choose(direct <= host, figures);
        Ok(())
    }

    fn set_up(shared: &Arc<Shared>) -> Result<DeviceGroup> {
        let stream = || shared.device.stream().map_err(error::of("DeviceGroup::new"));
        let streams = [stream()?, stream()?];
        let (agreed, parts) = agreement::agree(&shared.group, &shared.device, &shared.options)?;
        let mut ring = Ring::new(parts.pipeline, parts.slots, parts.neighbours, streams.clone());
        ring.plant(shared.options.planted);
        let direct = match agreed.joined() {
            Some(direct) => Some((direct.clone(), stream()?)),
            None => None,
        };
        Ok(DeviceGroup::of_parts(shared.clone(), agreed, ring, streams, direct))
    }

    pub(crate) fn of_parts(
        shared: Arc<Shared>,
        agreed: Agreed,
        ring: Ring,
        streams: [Arc<dyn Stream>; 2],
        direct: Option<(Arc<Direct>, Arc<dyn Stream>)>,
    ) -> DeviceGroup {
        let watcher = Watcher::new(shared.clone(), ring, streams, direct);
        let watcher = Mutex::new(Running::Idle(Box::new(watcher)));
        DeviceGroup(Arc::new(Handle { shared, agreed, watcher }))
    }

    /// A device group of some of these ranks, which all call this together. They are numbered in their old order. It
    /// takes the same options, and a way of its own.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::new_group`] and [`DeviceGroup::new`].
    pub fn new_group(&self, ranks: &[Rank]) -> Result<DeviceGroup> {
        let group = self.group().new_group(ranks, &GroupOptions::default())?;
        DeviceGroup::new(&group, self.device().clone(), self.options())
    }

    /// This process's number in the group.
    pub fn rank(&self) -> Rank {
        self.0.shared.group.rank()
    }

    /// The number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.0.shared.group.world_size()
    }

    /// The device of this rank.
    pub fn device(&self) -> &Arc<dyn Device> {
        &self.0.shared.device
    }

    /// What the device of this rank is.
    pub fn identity(&self) -> &Identity {
        self.0.shared.device.identity()
    }

    /// The options with which the group was made.
    pub fn options(&self) -> &DeviceOptions {
        &self.0.shared.options
    }

    /// Which way an all-reduce of this type takes, and why. The same on all ranks of a host.
    pub fn explain(&self, dtype: DType) -> Way {
        self.0.agreed.way(&self.0.shared.group, dtype)
    }

    /// Whether a call of this group has failed, so that all later ones fail, too.
    pub fn has_failed(&self) -> bool {
        self.0.shared.failure().is_some()
    }

    /// Why calls go by NCCL, or through the host: what is missing, or how long an all-reduce took each way.
    pub fn why(&self) -> String {
        self.0.agreed.why()
    }

    /// Fails all calls of this group, on this rank at once. The other ranks hear that this rank has aborted.
    pub fn abort(&self) {
        let problem = "the program has aborted the group of this device";
        self.0.shared.fail(Error::argument("abort", problem));
    }

    /// Closes the group when all calls have ended and all ranks have called this.
    ///
    /// # Errors
    ///
    /// The first failure of the group; as for [`ProcessGroup::destroy`].
    pub fn destroy(self) -> Result<()> {
        self.0.close(Closing::Destroy)
    }

    /// Like [`destroy`](DeviceGroup::destroy), but waits at most `patience` for ranks that have not called it.
    ///
    /// # Errors
    ///
    /// The first failure of the group; as for [`ProcessGroup::leave`].
    pub fn leave(self, patience: Duration) -> Result<()> {
        self.0.close(Closing::Leave(patience))
    }

    pub(crate) fn group(&self) -> &ProcessGroup {
        &self.0.shared.group
    }

    pub(crate) fn direct(&self) -> Option<&Arc<Direct>> {
        self.0.agreed.direct()
    }

    pub(crate) fn holders(&self, dtype: DType) -> Option<Arc<[Rank]>> {
        self.0.agreed.holders(dtype)
    }

    /// What a driver says about an argument. If it is the driver that has failed, the call cannot be made, while other
    /// ranks make it: so they must hear.
    pub(crate) fn heed(&self, error: Error) -> Error {
        if let Some(device::Error::Driver { .. }) = error.detail() {
            self.0.shared.fail(error.clone());
        }
        error
    }

    /// Queues a call behind what the stream does now. Its arguments have been checked.
    pub(crate) fn submit(
        &self,
        operation: &'static str,
        stream: &Arc<dyn Stream>,
        body: Body,
    ) -> Result<DeviceWork> {
        let after = self.event_of(operation, stream)?;
        self.submit_after(operation, after, body)
    }

    /// What comes when a stream has done what it is asked for until now.
    #[doc(hidden)]
    pub fn event_of(
        &self,
        operation: &'static str,
        stream: &Arc<dyn Stream>,
    ) -> Result<Arc<dyn Event>> {
        let failed = |error| self.heed(error::of(operation)(error));
        if stream.is_capturing().map_err(failed)? {
            return Err(error::of(operation)(device::Error::Capture));
        }
        stream.record().map_err(failed)
    }

    /// Queues a call behind an event.
    pub(crate) fn submit_after(
        &self,
        operation: &'static str,
        after: Arc<dyn Event>,
        body: Body,
    ) -> Result<DeviceWork> {
        let shared = &self.0.shared;
        self.0.start(operation)?;
        let (promise, work) = Promise::new(operation, &shared.device);
        if shared.options.has(Planted::OpensEarly) {
            work.opens_early();
        }
        let call = Call { promise, after, body };
        shared.tell(|inbox| match &inbox.failed {
            Some(by) => Err(error::poisoned(operation, by)),
            None => {
                inbox.calls.push(call);
                Ok(work)
            }
        })
    }
}

impl Handle {
    fn start(&self, operation: &'static str) -> Result<()> {
        let mut running = self.running();
        *running = match std::mem::take(&mut *running) {
            Running::Idle(watcher) => {
                let shared = self.shared.clone();
                let run = move || {
                    let ended = catch_unwind(AssertUnwindSafe(|| watcher.run()));
                    ended.unwrap_or_else(|_| {
                        let problem = "the thread that watches the device has panicked: its message stands in the \
                                       output of this rank"
                            .to_owned();
                        let error = Error::argument("device", problem).of_origin(ErrorOrigin::Bug);
                        shared.fail(error.clone());
                        Err(error)
                    })
                };
                let name = "drumline-device".to_owned();
                match thread::Builder::new().name(name).spawn(run) {
                    Ok(thread) => Running::Runs(OwnThread::new(thread)),
                    Err(error) => {
                        let what = "cannot start the thread that watches the device".to_owned();
                        let error = Error::io(what, error);
                        self.shared.fail(error.clone());
                        return Err(error);
                    }
                }
            }
            Running::Ended => {
                let problem = "the group of this device has been destroyed";
                return Err(Error::argument(operation, problem));
            }
            running => running,
        };
        Ok(())
    }

    fn close(&self, closing: Closing) -> Result<()> {
        let running = std::mem::take(&mut *self.running());
        match running {
            Running::Idle(watcher) => watcher.close(closing),
            Running::Runs(thread) => {
                self.shared.tell(|inbox| inbox.closing = Some(closing));
                let panicked = |_| {
                    let problem = "the thread that watches the device has panicked";
                    Err(Error::argument("destroy", problem).of_origin(ErrorOrigin::Bug))
                };
                // In a fork there is no thread, and nothing ends.
                thread.join().map_or(Ok(()), |ended| ended.unwrap_or_else(panicked))
            }
            Running::Ended => Ok(()),
        }
    }

    fn running(&self) -> MutexGuard<'_, Running> {
        self.watcher.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Handle {
    /// Waits for nobody: the thread frees all memory when the last call has ended.
    fn drop(&mut self) {
        if thread::panicking() {
            let problem = "a thread of this rank has panicked";
            self.shared.fail(Error::argument("drop", problem));
        }
        self.shared.tell(|inbox| *inbox.closing.get_or_insert(Closing::Drop));
    }
}

impl fmt::Debug for DeviceGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceGroup")
            .field("group", &self.0.shared.group)
            .field("device", &self.identity().to_string())
            .finish_non_exhaustive()
    }
}
