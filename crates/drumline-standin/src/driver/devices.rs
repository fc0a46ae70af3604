//! Initialisation, errors, devices, contexts.

use std::ffi::{c_char, c_int, c_uint};

use crate::code::{Code, words};
use crate::out::Out;
use crate::world::{Awaited, call, call_and_wait, with_contexts};

/// 12.4
const VERSION: c_int = 12_040;

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuInit(flags: c_uint) -> c_int {
    call("cuInit", |world| if flags == 0 { world.init() } else { Err(Code::INVALID_VALUE) })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDriverGetVersion(version: Out<c_int>) -> c_int {
    call("cuDriverGetVersion", |_| version.set(VERSION))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorName(code: c_int, text: Out<*const c_char>) -> c_int {
    call("cuGetErrorName", |_| match words(code) {
        Some((name, _)) => text.set(name.as_ptr().cast()),
        None => text.set(std::ptr::null()).and(Err(Code::INVALID_VALUE)),
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuGetErrorString(code: c_int, text: Out<*const c_char>) -> c_int {
    call("cuGetErrorString", |_| match words(code) {
        Some((_, about)) => text.set(about.as_ptr().cast()),
        None => text.set(std::ptr::null()).and(Err(Code::INVALID_VALUE)),
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetCount(count: Out<c_int>) -> c_int {
    call("cuDeviceGetCount", |world| {
        world.ready()?;
        count.set(world.devices.len() as c_int)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGet(device: Out<c_int>, ordinal: c_int) -> c_int {
    call("cuDeviceGet", |world| {
        world.device(ordinal)?;
        device.set(ordinal)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetName(
    name: Out<c_char>,
    len: c_int,
    device: c_int,
) -> c_int {
    call("cuDeviceGetName", |world| name.text(&world.device(device)?.name(), len))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetUuid_v2(uuid: Out<[u8; 16]>, device: c_int) -> c_int {
    call("cuDeviceGetUuid_v2", |world| uuid.set(world.device(device)?.uuid()))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetPCIBusId(
    id: Out<c_char>,
    len: c_int,
    device: c_int,
) -> c_int {
    call("cuDeviceGetPCIBusId", |world| id.text(&world.device(device)?.pci(), len))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceGetAttribute(
    value: Out<c_int>,
    attribute: c_int,
    device: c_int,
) -> c_int {
    call("cuDeviceGetAttribute", |world| {
        let settings = world.settings.clone();
        value.set(world.device(device)?.attribute(attribute, &settings)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceTotalMem_v2(bytes: Out<usize>, device: c_int) -> c_int {
    call("cuDeviceTotalMem_v2", |world| {
        world.device(device)?;
        bytes.set(world.settings.memory)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDeviceCanAccessPeer(
    can: Out<c_int>,
    device: c_int,
    peer: c_int,
) -> c_int {
    call("cuDeviceCanAccessPeer", |world| {
        world.device(device)?;
        world.device(peer)?;
        can.set(c_int::from(device != peer && world.settings.peers))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxEnablePeerAccess(context: usize, flags: c_uint) -> c_int {
    call("cuCtxEnablePeerAccess", |world| {
        let current = world.current()?;
        let peer = world.device_of(context)?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        if peer == current.device || !world.settings.peers {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        let peers = &mut world.devices[current.device].peers;
        if peers.contains(&peer) {
            return Err(Code::PEER_ACCESS_ALREADY_ENABLED);
        }
        peers.push(peer);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRetain(
    context: Out<usize>,
    device: c_int,
) -> c_int {
    call("cuDevicePrimaryCtxRetain", |world| {
        let device = world.device(device)?;
        device.broken.map_or(Ok(()), Err)?;
        context.set(device.context)?;
        device.retained += 1;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int {
    call("cuDevicePrimaryCtxRelease_v2", |world| {
        let ordinal = device as usize;
        let device = world.device(device)?;
        if device.retained == 0 {
            return Err(Code::INVALID_CONTEXT);
        }
        device.retained -= 1;
        if device.retained > 0 {
            return Ok(());
        }
        // The last owner is gone, and takes all with him. The next context of the device begins unbroken.
        let context = device.context;
        device.broken = None;
        device.peers.clear();
        world.work.drop_device(ordinal);
        let ranges = world.memory.of_context(context);
        for range in &ranges {
            world.memory.release(range.start, |_| true);
        }
        world.abandoned += ranges.len() + world.streams.drop_context(context);
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetCurrent(context: Out<usize>) -> c_int {
    call("cuCtxGetCurrent", |world| {
        world.ready()?;
        context.set(with_contexts(|all| all.last().copied()).unwrap_or(0))
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSetCurrent(context: usize) -> c_int {
    call("cuCtxSetCurrent", |world| {
        world.ready()?;
        if context != 0 {
            world.device_of(context)?;
        }
        with_contexts(|all| {
            all.pop();
            all.extend((context != 0).then_some(context));
        });
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxPushCurrent_v2(context: usize) -> c_int {
    call("cuCtxPushCurrent_v2", |world| {
        world.device_of(context)?;
        with_contexts(|all| all.push(context));
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxPopCurrent_v2(context: Out<usize>) -> c_int {
    call("cuCtxPopCurrent_v2", |world| {
        world.ready()?;
        let popped = with_contexts(Vec::pop).ok_or(Code::INVALID_CONTEXT)?;
        if context.is_null() { Ok(()) } else { context.set(popped) }
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxGetDevice(device: Out<c_int>) -> c_int {
    call("cuCtxGetDevice", |world| device.set(world.current_of_any()?.device as c_int))
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuCtxSynchronize() -> c_int {
    call_and_wait("cuCtxSynchronize", |world| {
        let device = world.current()?.device;
        Ok(Some(Awaited { ops: world.work.of_device(device), device }))
    })
}
