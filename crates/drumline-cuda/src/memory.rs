//! What a driver allocates: memory of the device, and pinned memory of the host.

use std::fmt;
use std::ptr::{NonNull, null_mut};
use std::slice;
use std::sync::Arc;

use drumline_device::{Error, Place, Result};

use crate::opened::Opened;

/// Memory of a device, which is freed on drop. For tests and measurements: programs have tensors.
pub struct DeviceMemory {
    device: Arc<Opened>,
    place: Place,
}

impl DeviceMemory {
    pub(crate) fn new(device: Arc<Opened>, bytes: usize) -> Result<DeviceMemory> {
        let mut address = 0;
        if bytes > 0 {
            device.run("cuMemAlloc", |functions| {
                // SAFETY: the place is there to be written.
                unsafe { (functions.allocate)(&raw mut address, bytes) }
            })?;
        }
        Ok(DeviceMemory { device, place: Place { address, bytes } })
    }

    /// Where it lies.
    pub fn place(&self) -> Place {
        self.place
    }

    pub(crate) fn device(&self) -> &Opened {
        &self.device
    }

    /// Copies `bytes` to the beginning. Waits until that is done, so that every stream sees it.
    ///
    /// # Errors
    ///
    /// [`Error::Argument`] when there are too many; what the driver says.
    pub fn write(&mut self, bytes: &[u8]) -> Result<()> {
        self.check(bytes.len())?;
        self.device.run("cuMemcpyHtoD", |functions| {
            // SAFETY: the device's memory has as many bytes, and the slice lives until the copy is done.
            unsafe {
                (functions.copy_in_now)(self.place.address, bytes.as_ptr().cast(), bytes.len())
            }
        })?;
        self.settle()
    }

    /// Copies the first bytes. Waits until that is done, but for no stream.
    ///
    /// # Errors
    ///
    /// As for [`DeviceMemory::write`].
    pub fn read(&self, bytes: &mut [u8]) -> Result<()> {
        self.check(bytes.len())?;
        self.device.run("cuMemcpyDtoH", |functions| {
            // SAFETY: the device's memory has as many bytes, and the slice lives until the copy is done.
            unsafe {
                (functions.copy_out_now)(bytes.as_mut_ptr().cast(), self.place.address, bytes.len())
            }
        })
    }

    /// Sets every byte. Waits until that is done, so that every stream sees it.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn fill(&mut self, byte: u8) -> Result<()> {
        let Place { address, bytes } = self.place;
        self.device.run("cuMemsetD8", |functions| {
            // SAFETY: these are all bytes of this memory.
            unsafe { (functions.fill_now)(address, byte, bytes) }
        })?;
        self.settle()
    }

    /// Waits for the legacy default stream. A fill, and a copy of memory that is not pinned, may go on there after the
    /// driver's function has returned, and streams of ours do not wait for that stream.
    fn settle(&self) -> Result<()> {
        self.device.run("cuStreamSynchronize", |functions| {
            // SAFETY: null is the legacy default stream, which every context has.
            unsafe { (functions.stream_synchronize)(null_mut()) }
        })
    }

    fn check(&self, bytes: usize) -> Result<()> {
        if bytes <= self.place.bytes {
            return Ok(());
        }
        let problem = format!("{bytes} bytes do not fit into {}", self.place);
        Err(Error::Argument { problem })
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        if self.place.bytes > 0 {
            // SAFETY: it was allocated, and is freed once.
            self.device.give_back(|functions| unsafe { (functions.free)(self.place.address) });
        }
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").field("place", &self.place).finish()
    }
}

/// Pinned memory of the host that the driver has allocated, in zeros.
pub(crate) struct HostMemory {
    device: Arc<Opened>,
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns its memory, which any thread may use.
unsafe impl Send for HostMemory {}
// SAFETY: a shared reference reads only.
unsafe impl Sync for HostMemory {}

/// For all contexts of the process, and with an address of the device.
const PORTABLE_AND_MAPPED: u32 = 1 | 2;

impl HostMemory {
    pub(crate) fn new(device: Arc<Opened>, bytes: usize) -> Result<HostMemory> {
        let mut start = null_mut();
        if bytes > 0 {
            device.run("cuMemHostAlloc", |functions| {
                // SAFETY: the place is there to be written.
                unsafe { (functions.host_allocate)(&raw mut start, bytes, PORTABLE_AND_MAPPED) }
            })?;
        }
        let start = NonNull::new(start.cast::<u8>()).unwrap_or(NonNull::dangling());
        // SAFETY: the driver has allocated as many bytes, and nobody else has them yet.
        unsafe { start.write_bytes(0, bytes) };
        Ok(HostMemory { device, start, bytes })
    }

    /// The address of the device for the first byte.
    pub(crate) fn on_device(&self) -> Result<u64> {
        let mut address = 0;
        self.device.run("cuMemHostGetDevicePointer", |functions| {
            // SAFETY: the place is there to be written, and the memory is mapped for devices.
            unsafe {
                (functions.host_device_pointer)(&raw mut address, self.start.as_ptr().cast(), 0)
            }
        })?;
        Ok(address)
    }

    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl AsRef<[u8]> for HostMemory {
    fn as_ref(&self) -> &[u8] {
        // SAFETY: as many bytes are allocated and initialised, and belong to this value.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.bytes) }
    }
}

impl AsMut<[u8]> for HostMemory {
    fn as_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only reference.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.bytes) }
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        if self.bytes > 0 {
            // SAFETY: it was allocated, and is freed once.
            self.device.give_back(|functions| unsafe {
                (functions.host_free)(self.start.as_ptr().cast())
            });
        }
    }
}
