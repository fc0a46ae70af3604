//! Streams, and the copies in them.

use std::any::Any;
use std::fmt;
use std::ptr::null_mut;
use std::sync::Arc;

use drumline_device::{Error, Event, Flight, Gate, Part, Pinned, Place, Refused, Result, Stream};

use crate::event::CudaEvent;
use crate::gate::{CudaGate, clear_aside};
use crate::opened::Opened;
use crate::table::Handle;

pub(crate) struct CudaStream {
    device: Arc<Opened>,
    handle: Handle,
    /// Whether it is destroyed on drop.
    is_own: bool,
}

// SAFETY: the stream is a handle that any thread may use.
unsafe impl Send for CudaStream {}
// SAFETY: as above: the driver takes calls of any thread.
unsafe impl Sync for CudaStream {}

/// It does not wait for the legacy default stream.
const NON_BLOCKING: u32 = 1;

/// A copy between host and device.
#[derive(Clone, Copy)]
enum Way {
    Out,
    In,
}

impl CudaStream {
    pub(crate) fn new(device: Arc<Opened>) -> Result<CudaStream> {
        let mut handle = null_mut();
        device.run("cuStreamCreate", |functions| {
            // SAFETY: the place is there to be written.
            unsafe { (functions.stream_create)(&raw mut handle, NON_BLOCKING) }
        })?;
        Ok(CudaStream { device, handle, is_own: true })
    }

    pub(crate) fn foreign(device: Arc<Opened>, handle: Handle) -> CudaStream {
        CudaStream { device, handle, is_own: false }
    }

    /// A stream of `device`, for a library that queues work there.
    pub(crate) fn handle_on(stream: &dyn Stream, device: &Opened) -> Result<Handle> {
        let problem = match stream.as_any().downcast_ref::<CudaStream>() {
            Some(stream) if stream.device.context == device.context => return Ok(stream.handle),
            Some(stream) => {
                format!("the stream is of {}, not of {}", stream.device.name, device.name)
            }
            None => "the stream is of another driver".to_owned(),
        };
        Err(Error::Argument { problem })
    }

    /// Queues the copies, and an event behind them.
    fn copy(
        &self,
        way: Way,
        parts: &[Part],
        memory: Flight<Pinned>,
    ) -> Result<Flight<Pinned>, Refused<Flight<Pinned>>> {
        let queued = parts.iter().try_for_each(|part| self.queue(way, part, memory.held()));
        // Also after an error: what was queued before it goes on.
        let event = match CudaEvent::record(&self.device, self.handle) {
            Ok(event) => event,
            Err(error) => {
                // Nobody will tell when these copies have ended.
                let synchronized = self.device.run("cuStreamSynchronize", |functions| {
                    // SAFETY: the stream lives.
                    unsafe { (functions.stream_synchronize)(self.handle) }
                });
                let memory = match synchronized {
                    Ok(()) => memory,
                    Err(_) => memory.until(Arc::new(Never(error.clone())), ()),
                };
                return Err(Box::new((queued.err().unwrap_or(error), memory)));
            }
        };
        let windows: Vec<_> = parts.iter().filter_map(|part| part.window.clone()).collect();
        let memory = memory.until(Arc::new(event), windows);
        match queued {
            Ok(()) => Ok(memory),
            Err(error) => Err(Box::new((error, memory))),
        }
    }

    fn queue(&self, way: Way, part: &Part, memory: &Pinned) -> Result<()> {
        let Part { place, at, window } = part;
        let Place { address, bytes } = *place;
        let (start, len) = match window {
            Some(window) => (window.window().address(), window.window().len()),
            None => (memory.as_ref().as_ptr(), memory.as_ref().len()),
        };
        if at.checked_add(bytes).is_none_or(|end| end > len) {
            let problem =
                format!("{bytes} bytes from byte {at} on do not lie in {len} bytes of the host");
            return Err(Error::Argument { problem });
        }
        if bytes == 0 {
            return Ok(());
        }
        self.device.check(*place)?;
        let host = start.wrapping_add(*at).cast_mut();
        // The place is memory of this device, as `check` has seen. The bytes of the host lie in pinned memory, which the
        // flight keeps until the event behind this copy has come: it owns `memory`, so no reference of this process
        // points there meanwhile, and it holds the window's mapping. The device accesses both as another process would.
        match way {
            Way::Out => self.device.run("cuMemcpyDtoHAsync", |functions| {
                // SAFETY: see above.
                unsafe { (functions.copy_out)(host.cast(), address, bytes, self.handle) }
            }),
            Way::In => self.device.run("cuMemcpyHtoDAsync", |functions| {
                // SAFETY: see above.
                unsafe {
                    (functions.copy_in)(address, host.cast_const().cast(), bytes, self.handle)
                }
            }),
        }
    }
}

impl Stream for CudaStream {
    fn copy_out(
        &self,
        parts: &[Part],
        memory: Flight<Pinned>,
    ) -> Result<Flight<Pinned>, Refused<Flight<Pinned>>> {
        if parts.iter().any(|part| part.window.is_some()) {
            let problem = "a device does not write to the memory of a neighbour".to_owned();
            return Err(Box::new((Error::Argument { problem }, memory)));
        }
        self.copy(Way::Out, parts, memory)
    }

    fn copy_in(
        &self,
        parts: &[Part],
        memory: Flight<Pinned>,
    ) -> Result<Flight<Pinned>, Refused<Flight<Pinned>>> {
        self.copy(Way::In, parts, memory)
    }

    fn copy_within(&self, from: Place, to: Place) -> Result<()> {
        if from.bytes != to.bytes {
            let problem = format!("{from} do not fit {to}");
            return Err(Error::Argument { problem });
        }
        self.device.check(from)?;
        self.device.check(to)?;
        if from.bytes == 0 {
            return Ok(());
        }
        self.device.run("cuMemcpyDtoDAsync", |functions| {
            // SAFETY: both places are memory of this device.
            unsafe { (functions.copy_within)(to.address, from.address, from.bytes, self.handle) }
        })
    }

    fn record(&self) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(CudaEvent::record(&self.device, self.handle)?))
    }

    fn wait(&self, event: &dyn Event) -> Result<()> {
        let Some(event) = event.as_any().downcast_ref::<CudaEvent>() else {
            let problem = "the event is of another driver".to_owned();
            return Err(Error::Argument { problem });
        };
        self.device.run("cuStreamWaitEvent", |functions| {
            // SAFETY: the stream and the event live. The driver keeps what it needs of the event.
            unsafe { (functions.stream_wait)(self.handle, event.handle, 0) }
        })
    }

    fn wait_gate(&self, gate: &Arc<dyn Gate>) -> Result<()> {
        let Some(gate) = gate.as_any().downcast_ref::<CudaGate>() else {
            let problem = "the gate is of another driver".to_owned();
            return Err(Error::Argument { problem });
        };
        gate.hold(&self.device, self.handle)
    }

    fn is_capturing(&self) -> Result<bool> {
        let mut status = 0;
        self.device.run("cuStreamIsCapturing", |functions| {
            // SAFETY: the stream lives, and the place is there to be written.
            unsafe { (functions.stream_is_capturing)(self.handle, &raw mut status) }
        })?;
        Ok(status != 0)
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        if self.is_own {
            // SAFETY: it was created, and is destroyed once. What is queued in it goes on.
            self.device.give_back(|functions| unsafe { (functions.stream_destroy)(self.handle) });
        }
        clear_aside();
    }
}

impl fmt::Debug for CudaStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaStream").field(&self.handle).finish()
    }
}

/// Comes never: its stream has failed.
#[derive(Debug)]
struct Never(Error);

impl Event for Never {
    fn has_come(&self) -> Result<bool> {
        Err(self.0.clone())
    }

    fn wait(&self) -> Result<()> {
        Err(self.0.clone())
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}
