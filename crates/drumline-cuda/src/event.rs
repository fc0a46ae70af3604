//! Events, without times.

use std::any::Any;
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;

use drumline_device::{Event, Result};

use crate::loaded::NOT_READY;
use crate::opened::Opened;
use crate::table::Handle;

pub(crate) struct CudaEvent {
    device: Arc<Opened>,
    pub(crate) handle: Handle,
}

// SAFETY: the event is a handle that any thread may use.
unsafe impl Send for CudaEvent {}
// SAFETY: as above: the driver takes calls of any thread.
unsafe impl Sync for CudaEvent {}

const WITHOUT_TIME: u32 = 2;

impl CudaEvent {
    /// Records a new event in a stream of the device.
    pub(crate) fn record(device: &Arc<Opened>, stream: Handle) -> Result<CudaEvent> {
        let mut handle = null_mut();
        device.run("cuEventCreate", |functions| {
            // SAFETY: the place is there to be written.
            unsafe { (functions.event_create)(&raw mut handle, WITHOUT_TIME) }
        })?;
        let event = CudaEvent { device: device.clone(), handle };
        device.run("cuEventRecord", |functions| {
            // SAFETY: the event lives, and so does the stream, as the caller holds it.
            unsafe { (functions.event_record)(handle, stream) }
        })?;
        Ok(event)
    }
}

impl Event for CudaEvent {
    fn has_come(&self) -> Result<bool> {
        let code = self.device.inside(|functions| {
            // SAFETY: the event lives.
            unsafe { (functions.event_query)(self.handle) }
        })?;
        match code {
            NOT_READY => Ok(false),
            code => self.device.done("cuEventQuery", code).map(|()| true),
        }
    }

    fn wait(&self) -> Result<()> {
        self.device.run("cuEventSynchronize", |functions| {
            // SAFETY: the event lives.
            unsafe { (functions.event_synchronize)(self.handle) }
        })
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: it was created, and is destroyed once. The driver keeps what streams still wait for.
        self.device.give_back(|functions| unsafe { (functions.event_destroy)(self.handle) });
    }
}

impl fmt::Debug for CudaEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaEvent").field(&self.handle).finish()
    }
}
