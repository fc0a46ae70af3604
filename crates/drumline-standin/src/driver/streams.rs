//! Streams: what they hold, wait for and write; capture.

use std::ffi::{c_int, c_uint};

use crate::code::Code;
use crate::out::Out;
use crate::streams::Capture;
use crate::work::{Action, HostFunction};
use crate::world::{World, call, call_and_wait};

fn create(world: &mut World, stream: Out<usize>, flags: c_uint) -> Result<(), Code> {
    let current = world.current()?;
    if flags > 1 || stream.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let handle = world.handle();
    world.streams.create(handle, current.context, current.device, flags & 1 == 0);
    stream.set(handle)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamCreate(stream: Out<usize>, flags: c_uint) -> c_int {
    call("cuStreamCreate", |world| create(world, stream, flags))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamCreateWithPriority(
    stream: Out<usize>,
    flags: c_uint,
    _priority: c_int,
) -> c_int {
    call("cuStreamCreateWithPriority", |world| create(world, stream, flags))
}

/// What the stream holds is still carried out.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamDestroy_v2(stream: usize) -> c_int {
    call("cuStreamDestroy_v2", |world| {
        world.ready()?;
        let gone = world.streams.destroy(stream)?;
        world.works(gone.device)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamSynchronize(stream: usize) -> c_int {
    call_and_wait("cuStreamSynchronize", |world| {
        let stream = world.open_stream(stream)?;
        world.awaited(stream).map(Some)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamQuery(stream: usize) -> c_int {
    call("cuStreamQuery", |world| {
        let stream = world.open_stream(stream)?;
        if world.is_over(&world.awaited(stream)?)? { Ok(()) } else { Err(Code::NOT_READY) }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamWaitEvent(
    stream: usize,
    event: usize,
    flags: c_uint,
) -> c_int {
    call("cuStreamWaitEvent", |world| {
        let stream = world.open_stream(stream)?;
        let event = world.streams.event(event)?.clone();
        world.works(event.device)?;
        match (flags > 1, event.captured) {
            (true, _) => Err(Code::INVALID_VALUE),
            (_, true) => Err(Code::STREAM_CAPTURE_UNSUPPORTED),
            _ => world.queue(stream, &[event.op], Action::Mark(None)).map(|_| ()),
        }
    })
}

/// The word of a wait or a write, and the stream.
fn word(
    world: &mut World,
    stream: usize,
    address: usize,
) -> Result<(usize, crate::memory::Span), Code> {
    let stream = world.open_stream(stream)?;
    if !world.settings.stream_memory {
        return Err(Code::NOT_SUPPORTED);
    }
    let word = world.memory.span(address, 4)?;
    if word.is_pageable() || !address.is_multiple_of(4) {
        Err(Code::INVALID_VALUE)
    } else {
        Ok((stream, word))
    }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamWaitValue32_v2(
    stream: usize,
    address: usize,
    value: u32,
    flags: c_uint,
) -> c_int {
    call("cuStreamWaitValue32_v2", |world| {
        let (stream, word) = word(world, stream, address)?;
        // Flushing needs hardware that can.
        if flags > 3 {
            return Err(if flags & !(1 << 30) > 3 {
                Code::INVALID_VALUE
            } else {
                Code::NOT_SUPPORTED
            });
        }
        world.queue(stream, &[], Action::Wait { word, value, how: flags }).map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamWriteValue32_v2(
    stream: usize,
    address: usize,
    value: u32,
    flags: c_uint,
) -> c_int {
    call("cuStreamWriteValue32_v2", |world| {
        let (stream, word) = word(world, stream, address)?;
        if flags > 1 {
            return Err(Code::INVALID_VALUE);
        }
        world.queue(stream, &[], Action::Write { word, value }).map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamGetCtx(stream: usize, context: Out<usize>) -> c_int {
    call("cuStreamGetCtx", |world| {
        let stream = world.stream(stream)?;
        context.set(world.streams.get(stream)?.context)
    })
}

/// The function is called by a thread that is in a call of this library, outside of its lock.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuLaunchHostFunc(
    stream: usize,
    function: Option<HostFunction>,
    data: usize,
) -> c_int {
    call("cuLaunchHostFunc", |world| {
        let stream = world.open_stream(stream)?;
        let function = function.ok_or(Code::INVALID_VALUE)?;
        world.queue(stream, &[], Action::Host { function, data }).map(|_| ())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamIsCapturing(stream: usize, status: Out<c_int>) -> c_int {
    call("cuStreamIsCapturing", |world| {
        let stream = world.stream(stream)?;
        if world.streams.meets_capture(stream)? {
            return Err(Code::STREAM_CAPTURE_IMPLICIT);
        }
        status.set(match world.streams.get(stream)?.capture {
            Capture::None => 0,
            Capture::Active => 1,
            Capture::Invalid => 2,
        })
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamBeginCapture_v2(stream: usize, mode: c_int) -> c_int {
    call("cuStreamBeginCapture_v2", |world| {
        let stream = world.stream(stream)?;
        if !(0..3).contains(&mode) {
            return Err(Code::INVALID_VALUE);
        }
        if world.streams.is_legacy(stream) {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        match &mut world.streams.get_mut(stream)?.capture {
            capture @ Capture::None => *capture = Capture::Active,
            _ => return Err(Code::ILLEGAL_STATE),
        }
        Ok(())
    })
}

/// There are no graphs: the handle of one that holds nothing comes out.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuStreamEndCapture(stream: usize, graph: Out<usize>) -> c_int {
    call("cuStreamEndCapture", |world| {
        let stream = world.stream(stream)?;
        let handle = world.handle();
        let capture = &mut world.streams.get_mut(stream)?.capture;
        match std::mem::replace(capture, Capture::None) {
            Capture::Active => graph.set(handle),
            Capture::Invalid => graph.set(0).and(Err(Code::STREAM_CAPTURE_INVALIDATED)),
            Capture::None => Err(Code::STREAM_CAPTURE_UNMATCHED),
        }
    })
}
