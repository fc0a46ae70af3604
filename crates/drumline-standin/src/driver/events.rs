//! Events.

use std::ffi::{c_int, c_uint};

use crate::code::Code;
use crate::out::Out;
use crate::streams::{Capture, Event};
use crate::work::Action;
use crate::world::{Awaited, World, call, call_and_wait};

const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventCreate(event: Out<usize>, flags: c_uint) -> c_int {
    call("cuEventCreate", |world| {
        let current = world.current()?;
        let timed = flags & DISABLE_TIMING == 0;
        if flags > 7 || event.is_null() || (timed && flags & INTERPROCESS != 0) {
            return Err(Code::INVALID_VALUE);
        }
        let handle = world.handle();
        world.streams.create_event(handle, current.context, current.device, timed);
        event.set(handle)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventRecord(event: usize, stream: usize) -> c_int {
    call("cuEventRecord", |world| {
        let given = stream;
        let stream = world.stream(given)?;
        let context = world.streams.get(stream)?.context;
        if world.streams.event(event)?.context != context {
            return Err(Code::INVALID_HANDLE);
        }
        // In a stream that is captured, the event is a node of its graph, and nothing to wait for.
        if world.streams.get(stream)?.capture == Capture::Active {
            world.streams.event_mut(event)?.captured = true;
            return Ok(());
        }
        let stream = world.open_stream(given)?;
        let op = world.queue(stream, &[], Action::Mark(Some(event)))?;
        let event = world.streams.event_mut(event)?;
        (event.op, event.recorded, event.captured) = (op, true, false);
        Ok(())
    })
}

/// The event, if it may be asked whether it has come.
fn open_event(world: &World, event: usize) -> Result<Event, Code> {
    world.ready()?;
    let event = world.streams.event(event)?.clone();
    world.works(event.device)?;
    if event.captured { Err(Code::STREAM_CAPTURE_UNSUPPORTED) } else { Ok(event) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventQuery(event: usize) -> c_int {
    call("cuEventQuery", |world| {
        let event = open_event(world, event)?;
        if world.work.is_pending(event.op) { Err(Code::NOT_READY) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventSynchronize(event: usize) -> c_int {
    call_and_wait("cuEventSynchronize", |world| {
        let event = open_event(world, event)?;
        Ok(Some(Awaited { ops: vec![event.op], device: event.device }))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventDestroy_v2(event: usize) -> c_int {
    call("cuEventDestroy_v2", |world| {
        world.ready()?;
        let gone = world.streams.destroy_event(event)?;
        world.works(gone.device)
    })
}

/// An operation takes a microsecond.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuEventElapsedTime(
    milliseconds: Out<f32>,
    start: usize,
    end: usize,
) -> c_int {
    call("cuEventElapsedTime", |world| {
        let (start, end) = (open_event(world, start)?, open_event(world, end)?);
        if !(start.timed && end.timed && start.recorded && end.recorded) {
            return Err(Code::INVALID_HANDLE);
        }
        if world.work.is_pending(start.op) || world.work.is_pending(end.op) {
            return Err(Code::NOT_READY);
        }
        milliseconds.set((end.at as f32 - start.at as f32) / 1000.0)
    })
}
