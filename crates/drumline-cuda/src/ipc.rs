//! Memory of a device that another process of the host opens: CUDA IPC.
//!
//! Drumline itself does not use it. Measurements compare with it.

use std::fmt;
use std::sync::Arc;

use drumline_device::{Device, Error, Place, Result};

use crate::device::CudaDevice;
use crate::memory::DeviceMemory;
use crate::opened::Opened;
use crate::table::{Ipc, IpcHandle};

/// What another process needs to open [`DeviceMemory`]: bytes to be sent there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryHandle([u8; MemoryHandle::BYTES]);

impl MemoryHandle {
    /// The length of a handle.
    pub const BYTES: usize = 64;

    /// The bytes.
    pub const fn to_bytes(self) -> [u8; MemoryHandle::BYTES] {
        self.0
    }

    /// What [`MemoryHandle::to_bytes`] gave in the other process.
    pub const fn from_bytes(bytes: [u8; MemoryHandle::BYTES]) -> MemoryHandle {
        MemoryHandle(bytes)
    }
}

/// Flag of the driver's function, which takes no other: devices reach each other's memory when it is opened.
const LAZY_PEERS: u32 = 1;

impl DeviceMemory {
    /// Lets other processes open this memory. It must not be freed before they have closed it: what their copies find
    /// then is undefined.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the driver has no such function; what the driver says.
    pub fn handle(&self) -> Result<MemoryHandle> {
        let (device, place) = (self.device(), self.place());
        let ipc = functions_of(device)?;
        let mut handle = IpcHandle([0; MemoryHandle::BYTES]);
        device.run("cuIpcGetMemHandle", |_| {
            // SAFETY: the place is there to be written.
            unsafe { (ipc.lend)(&raw mut handle, place.address) }
        })?;
        Ok(MemoryHandle(handle.0))
    }
}

impl CudaDevice {
    /// Opens the first `bytes` bytes of memory that another process of this host has lent.
    ///
    /// # Errors
    ///
    /// [`Error::Unsupported`] if the driver has no such function; what the driver says: mostly that the memory is freed,
    /// or of this process; [`Error::Place`] if there are fewer bytes.
    pub fn open_memory(&self, handle: &MemoryHandle, bytes: usize) -> Result<OpenedMemory> {
        let device = self.opened().clone();
        let ipc = functions_of(&device)?;
        let mut address = 0;
        device.run("cuIpcOpenMemHandle", |_| {
            // SAFETY: the place is there to be written. Any bytes may be a handle: the driver refuses what it has not
            // made.
            unsafe { (ipc.open)(&raw mut address, IpcHandle(handle.0), LAZY_PEERS) }
        })?;
        let memory = OpenedMemory { device, close: ipc.close, place: Place { address, bytes } };
        self.check(memory.place)?;
        Ok(memory)
    }
}

fn functions_of(device: &Opened) -> Result<Ipc> {
    let what = "lend memory to other processes";
    device.functions().ipc.ok_or_else(|| Error::Unsupported { device: device.name.clone(), what })
}

/// Memory that another process has lent. It is closed on drop.
pub struct OpenedMemory {
    device: Arc<Opened>,
    close: unsafe extern "C" fn(u64) -> std::ffi::c_int,
    place: Place,
}

impl OpenedMemory {
    /// Where it lies in this process.
    pub fn place(&self) -> Place {
        self.place
    }
}

impl Drop for OpenedMemory {
    fn drop(&mut self) {
        // SAFETY: it was opened once by this value, and is closed once.
        self.device.give_back(|_| unsafe { (self.close)(self.place.address) });
    }
}

impl fmt::Debug for OpenedMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpenedMemory").field("place", &self.place).finish()
    }
}
