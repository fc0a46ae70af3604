//! Copies and fills.

use std::ffi::{c_int, c_uchar};

use crate::code::Code;
use crate::memory::Span;
use crate::streams::LEGACY;
use crate::work::{Action, Engine, Source};
use crate::world::{Awaited, World, call, call_and_wait};

/// Which ends of a copy must be memory that a device can reach.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ends {
    Any,
    HostToDevice,
    DeviceToHost,
    Device,
}

/// Queues a copy. Some(..): the caller must wait, as one end is pageable host memory, which no device can reach later.
fn copy(
    world: &mut World,
    (to, from): (usize, usize),
    len: usize,
    ends: Ends,
    stream: usize,
) -> Result<Option<Awaited>, Code> {
    world.current()?;
    let stream = world.open_stream(stream)?;
    if len == 0 {
        return Ok(None);
    }
    let (to, from) = (world.memory.span(to, len)?, world.memory.span(from, len)?);
    let fits = |span: &Span, device: bool| {
        if device { !span.is_pageable() } else { span.device.is_none() }
    };
    let fit = match ends {
        Ends::Any => true,
        Ends::HostToDevice => fits(&to, true) && fits(&from, false),
        Ends::DeviceToHost => fits(&to, false) && fits(&from, true),
        Ends::Device => fits(&to, true) && fits(&from, true),
    };
    if !fit {
        return Err(Code::INVALID_VALUE);
    }
    if to.overlaps(&from) {
        world.violate(format!(
            "a copy of {len} bytes from {:#x} to {:#x}, which overlap",
            from.address, to.address
        ));
    }
    for device in [to.device, from.device].into_iter().flatten() {
        world.works(device)?;
    }
    let engine = match (from.device, to.device) {
        (None, None) => None,
        (None, Some(_)) => Some(Engine::CopyIn),
        (Some(from), Some(to)) if from == to => Some(Engine::Compute),
        (Some(_), _) => Some(Engine::CopyOut),
    };
    // The driver puts pageable bytes aside at once. It waits until it has written pageable ones.
    let must_wait = to.is_pageable();
    let from = if from.is_pageable() && !must_wait {
        let mut bytes = vec![0; len];
        if !world.memory.read(&from, &mut bytes) {
            return Err(Code::INVALID_VALUE);
        }
        Source::Staged(bytes)
    } else {
        Source::Span(from)
    };
    let op = world.queue(stream, &[], Action::Copy { to, from, engine, done: 0 })?;
    let device = world.streams.get(stream)?.device;
    Ok(must_wait.then(|| Awaited { ops: vec![op], device }))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyAsync(
    to: usize,
    from: usize,
    len: usize,
    stream: usize,
) -> c_int {
    call_and_wait("cuMemcpyAsync", |world| copy(world, (to, from), len, Ends::Any, stream))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyHtoDAsync_v2(
    to: usize,
    from: usize,
    len: usize,
    stream: usize,
) -> c_int {
    call_and_wait("cuMemcpyHtoDAsync_v2", |world| {
        copy(world, (to, from), len, Ends::HostToDevice, stream)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyDtoHAsync_v2(
    to: usize,
    from: usize,
    len: usize,
    stream: usize,
) -> c_int {
    call_and_wait("cuMemcpyDtoHAsync_v2", |world| {
        copy(world, (to, from), len, Ends::DeviceToHost, stream)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyDtoDAsync_v2(
    to: usize,
    from: usize,
    len: usize,
    stream: usize,
) -> c_int {
    call_and_wait("cuMemcpyDtoDAsync_v2", |world| {
        copy(world, (to, from), len, Ends::Device, stream)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyPeerAsync(
    to: usize,
    to_context: usize,
    from: usize,
    from_context: usize,
    len: usize,
    stream: usize,
) -> c_int {
    call_and_wait("cuMemcpyPeerAsync", |world| {
        for (pointer, context) in [(to, to_context), (from, from_context)] {
            let device = world.device_of(context)?;
            if len > 0 && world.memory.span(pointer, len)?.device != Some(device) {
                return Err(Code::INVALID_VALUE);
            }
        }
        copy(world, (to, from), len, Ends::Device, stream)
    })
}

/// A copy of the legacy stream; the caller waits for its end.
fn copy_now(
    world: &mut World,
    ends: (usize, usize),
    len: usize,
    kinds: Ends,
) -> Result<Option<Awaited>, Code> {
    copy(world, ends, len, kinds, LEGACY)?;
    let stream = world.stream(LEGACY)?;
    world.awaited(stream).map(Some)
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyHtoD_v2(to: usize, from: usize, len: usize) -> c_int {
    call_and_wait("cuMemcpyHtoD_v2", |world| copy_now(world, (to, from), len, Ends::HostToDevice))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemcpyDtoH_v2(to: usize, from: usize, len: usize) -> c_int {
    call_and_wait("cuMemcpyDtoH_v2", |world| copy_now(world, (to, from), len, Ends::DeviceToHost))
}

fn fill(
    world: &mut World,
    to: usize,
    value: c_uchar,
    len: usize,
    stream: usize,
) -> Result<(), Code> {
    world.current()?;
    let stream = world.open_stream(stream)?;
    if len == 0 {
        return Ok(());
    }
    let to = world.memory.span(to, len)?;
    if to.is_pageable() {
        return Err(Code::INVALID_VALUE);
    }
    world.queue(stream, &[], Action::Fill { to, value }).map(|_| ())
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemsetD8Async(
    to: usize,
    value: c_uchar,
    len: usize,
    stream: usize,
) -> c_int {
    call("cuMemsetD8Async", |world| fill(world, to, value, len, stream))
}

/// Returns before the device has done it, as for all memory of devices.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemsetD8_v2(to: usize, value: c_uchar, len: usize) -> c_int {
    call("cuMemsetD8_v2", |world| fill(world, to, value, len, LEGACY))
}
