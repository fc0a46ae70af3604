//! Calls that are under way.

use std::fmt;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use drumline_device::{self as device, Device, Gate, Stream};
use drumline_group::Rank;

use crate::{Error, Result, error};

/// A call on the memory of a device, which has been queued.
///
/// Until it has ended, the device memory that it got must stay allocated, and must not be written; nor may its results
/// be read. [`join`](DeviceWork::join) has a stream wait for that, [`wait`](DeviceWork::wait) the host. Dropping a
/// `DeviceWork` does not stop its call, because the other ranks take part in it.
#[derive(Clone)]
pub struct DeviceWork {
    operation: &'static str,
    ending: Arc<Ending>,
    device: Arc<dyn Device>,
}

/// Where a call leaves its result.
struct Ending {
    state: Mutex<State>,
    ended: Condvar,
}

#[derive(Default)]
struct State {
    result: Option<Result<()>>,
    source: Option<Rank>,
    /// Where streams wait for the end. One is enough for all of them.
    gate: Option<Arc<dyn Gate>>,
}

/// The call's end of a [`DeviceWork`].
pub(crate) struct Promise {
    operation: &'static str,
    ending: Arc<Ending>,
}

impl Promise {
    pub(crate) fn new(operation: &'static str, device: &Arc<dyn Device>) -> (Promise, DeviceWork) {
        let ending = Arc::new(Ending { state: Mutex::default(), ended: Condvar::new() });
        let work = DeviceWork { operation, ending: ending.clone(), device: device.clone() };
        (Promise { operation, ending }, work)
    }

    pub(crate) fn operation(&self) -> &'static str {
        self.operation
    }

    /// Says who has sent a message, before it completes.
    pub(crate) fn came_from(&self, source: Option<Rank>) {
        self.ending.lock().source = source;
    }

    /// Tells all who wait, hosts and streams. Only the first result counts.
    pub(crate) fn complete(&self, result: Result<()>) {
        let mut state = self.ending.lock();
        state.result.get_or_insert(result);
        if let Some(gate) = state.gate.take() {
            gate.open();
        }
        drop(state);
        self.ending.ended.notify_all();
    }
}

impl Drop for Promise {
    /// Nobody waits for ever, whatever became of the thread that had the call.
    fn drop(&mut self) {
        let problem = "the call was given up before it ended";
        self.complete(Err(Error::argument(self.operation, problem)));
    }
}

impl DeviceWork {
    /// Has what is queued in the stream from now on wait for the end of the call. The caller does not wait, unless
    /// the device's streams cannot wait for memory of the host.
    ///
    /// If the call fails, the stream goes on, and [`wait`](DeviceWork::wait) says why.
    ///
    /// # Errors
    ///
    /// The call's, if it has failed already; what the driver says.
    pub fn join(&self, stream: &Arc<dyn Stream>) -> Result<()> {
        let Some(gate) = self.gate()? else { return self.wait() };
        match stream.wait_gate(&gate) {
            Err(device::Error::Unsupported { .. }) => self.wait(),
            joined => joined.map_err(error::of(self.operation)),
        }
    }

    /// An error that tests plant: streams that join the call do not wait.
    pub(crate) fn opens_early(&self) {
        if let Ok(Some(gate)) = self.gate() {
            gate.open();
        }
    }

    /// The gate of this call. `None`: the call has ended, or there are no gates.
    fn gate(&self) -> Result<Option<Arc<dyn Gate>>> {
        let mut state = self.ending.lock();
        if let Some(result) = &state.result {
            return result.clone().map(|()| None);
        }
        if state.gate.is_none() {
            state.gate = match self.device.gate() {
                Ok(gate) => Some(gate),
                Err(device::Error::Unsupported { .. }) => None,
                Err(error) => return Err(error::of(self.operation)(error)),
            };
        }
        Ok(state.gate.clone())
    }

    /// Waits on the host for the end of the call.
    ///
    /// # Errors
    ///
    /// Why the call has failed.
    pub fn wait(&self) -> Result<()> {
        let mut state = self.ending.lock();
        loop {
            if let Some(result) = &state.result {
                return result.clone();
            }
            state = self.ending.ended.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Waits at most for `timeout`: whether the call has ended. If not, it goes on.
    ///
    /// # Errors
    ///
    /// Why the call has failed.
    pub fn wait_timeout(&self, timeout: Duration) -> Result<bool> {
        let deadline = Instant::now().checked_add(timeout);
        let mut state = self.ending.lock();
        loop {
            if let Some(result) = &state.result {
                return result.clone().map(|()| true);
            }
            let left = deadline.map(|it| it.saturating_duration_since(Instant::now()));
            let left = left.unwrap_or(Duration::MAX);
            if left.is_zero() {
                return Ok(false);
            }
            let waited = self.ending.ended.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// The rank that has sent the message of a [`recv_any_on`](crate::DeviceMessages::recv_any_on) which has ended.
    pub fn source(&self) -> Option<Rank> {
        self.ending.lock().source
    }

    /// Why the call has failed, if it has.
    pub fn error(&self) -> Option<Error> {
        self.ending.lock().result.clone().and_then(Result::err)
    }

    /// Whether the call has ended, successfully or not.
    pub fn is_done(&self) -> bool {
        self.ending.lock().result.is_some()
    }
}

impl Ending {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for DeviceWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceWork")
            .field("operation", &self.operation)
            .field("is_done", &self.is_done())
            .finish_non_exhaustive()
    }
}
