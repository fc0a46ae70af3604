//! Allocations and registrations.

use std::ffi::{c_int, c_uint};

use crate::code::Code;
use crate::memory::Kind;
use crate::out::Out;
use crate::world::{World, call};

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemGetInfo_v2(free: Out<usize>, total: Out<usize>) -> c_int {
    call("cuMemGetInfo_v2", |world| {
        let used = world.memory.used(world.current()?.device);
        free.set(world.settings.memory - used)?;
        total.set(world.settings.memory)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemAlloc_v2(pointer: Out<usize>, len: usize) -> c_int {
    call("cuMemAlloc_v2", |world| {
        let current = world.current()?;
        if len == 0 || pointer.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        if len > world.settings.memory - world.memory.used(current.device) {
            return Err(Code::OUT_OF_MEMORY);
        }
        pointer.set(world.memory.allocate(len, current.context, current.device)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFree_v2(pointer: usize) -> c_int {
    call("cuMemFree_v2", |world| {
        if pointer == 0 {
            return world.ready();
        }
        release(world, pointer, "cuMemFree", Code::INVALID_VALUE, |it| {
            matches!(it, Kind::Device { .. })
        })
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostAlloc(
    pointer: Out<usize>,
    len: usize,
    flags: c_uint,
) -> c_int {
    call("cuMemHostAlloc", |world| {
        let current = world.current()?;
        if len == 0 || pointer.is_null() || flags > 7 {
            return Err(Code::INVALID_VALUE);
        }
        pointer.set(world.memory.allocate_host(len, current.context, current.device)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemFreeHost(pointer: usize) -> c_int {
    call("cuMemFreeHost", |world| {
        release(world, pointer, "cuMemFreeHost", Code::INVALID_VALUE, |it| it == Kind::HostAlloc)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostRegister_v2(
    pointer: usize,
    len: usize,
    flags: c_uint,
) -> c_int {
    call("cuMemHostRegister_v2", |world| {
        let current = world.current()?;
        if flags > 15 {
            return Err(Code::INVALID_VALUE);
        }
        if !world.settings.host_register {
            return Err(Code::NOT_SUPPORTED);
        }
        world.memory.register(pointer, len, current.context, current.device)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostUnregister(pointer: usize) -> c_int {
    call("cuMemHostUnregister", |world| {
        let none = Code::HOST_MEMORY_NOT_REGISTERED;
        release(world, pointer, "cuMemHostUnregister", none, |it| it == Kind::Registered)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuMemHostGetDevicePointer_v2(
    pointer: Out<usize>,
    host: usize,
    flags: c_uint,
) -> c_int {
    call("cuMemHostGetDevicePointer_v2", |world| {
        world.current()?;
        match world.memory.find(host) {
            // One address space: the device knows pinned memory by the host's addresses.
            Some(range) if !range.is_device() && flags == 0 => pointer.set(host),
            _ => Err(Code::INVALID_VALUE),
        }
    })
}

/// Memory of a broken device goes too. The caller hears of the device all the same.
fn release(
    world: &mut World,
    pointer: usize,
    how: &str,
    none: Code,
    fits: impl Fn(Kind) -> bool,
) -> Result<(), Code> {
    world.current_of_any()?;
    let range = world.memory.release(pointer, fits).ok_or(none)?;
    world.was_released(&range, how);
    world.works(range.device)
}
