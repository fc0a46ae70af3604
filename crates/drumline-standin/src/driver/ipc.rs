//! CUDA IPC: memory of a device that another process opens.

use std::ffi::{c_int, c_uint};

use crate::code::Code;
use crate::ipc::Handle;
use crate::out::Out;
use crate::world::{World, call};

/// `CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS`, without which a handle is refused.
const LAZY_PEERS: c_uint = 1;

fn supported(world: &World) -> Result<(), Code> {
    if world.settings.ipc { Ok(()) } else { Err(Code::NOT_SUPPORTED) }
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcGetMemHandle(handle: Out<Handle>, pointer: usize) -> c_int {
    call("cuIpcGetMemHandle", |world| {
        world.current()?;
        supported(world)?;
        let range = *world.memory.find(pointer).ok_or(Code::INVALID_VALUE)?;
        let number = world.devices.get(range.device).ok_or(Code::INVALID_VALUE)?.number;
        handle.set(world.memory.lend(pointer, number)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcOpenMemHandle_v2(
    pointer: Out<usize>,
    handle: Handle,
    flags: c_uint,
) -> c_int {
    call("cuIpcOpenMemHandle_v2", |world| {
        let current = world.current()?;
        supported(world)?;
        if flags != LAZY_PEERS || pointer.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        let lent = handle.read().ok_or(Code::INVALID_HANDLE)?;
        if lent.is_of_this_process() {
            return Err(Code::INVALID_CONTEXT);
        }
        let owner = world.devices.iter().position(|it| it.number == lent.device);
        let owner = owner.ok_or(Code::INVALID_DEVICE)?;
        if owner != current.device && !world.settings.peers {
            return Err(Code::PEER_ACCESS_UNSUPPORTED);
        }
        pointer.set(world.memory.open(&handle, &lent, current.context, owner)?)
    })
}

#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn cuIpcCloseMemHandle(pointer: usize) -> c_int {
    call("cuIpcCloseMemHandle", |world| {
        world.current_of_any()?;
        let closed = world.memory.close(pointer)?;
        if let Some(range) = closed {
            world.was_released(&range, "cuIpcCloseMemHandle");
            world.works(range.device)?;
        }
        Ok(())
    })
}
