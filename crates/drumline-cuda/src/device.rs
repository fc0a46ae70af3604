//! A device: its places, and what it makes.

use std::fmt;
use std::sync::Arc;

use drumline_device::{Result, Stream};

use crate::loaded::Loaded;
use crate::memory::DeviceMemory;
use crate::opened::Opened;
use crate::stream::CudaStream;
use crate::table::Handle;

/// A device of a [`Driver`](crate::Driver). Clones share it.
///
/// ```
/// use drumline_cuda::{CudaDevice, Driver};
/// use drumline_device::Device;
///
/// # fn main() -> Result<(), drumline_device::Error> {
/// let Ok(driver) = Driver::load(None) else { return Ok(()) };
/// if driver.devices()? > 0 {
///     let device: CudaDevice = driver.device(0)?;
///     let mut memory = device.allocate(8)?;
///     memory.write(&[1, 2, 3, 4, 5, 6, 7, 8])?;
///     device.check(memory.place())?;
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct CudaDevice(Arc<Opened>);

impl CudaDevice {
    pub(crate) fn open(library: Arc<Loaded>, ordinal: usize) -> Result<CudaDevice> {
        Ok(CudaDevice(Arc::new(Opened::new(library, ordinal)?)))
    }

    pub(crate) fn opened(&self) -> &Arc<Opened> {
        &self.0
    }

    /// `bytes` bytes of the device's memory.
    ///
    /// # Errors
    ///
    /// What the driver says: mostly that there is not as much.
    pub fn allocate(&self, bytes: usize) -> Result<DeviceMemory> {
        DeviceMemory::new(self.0.clone(), bytes)
    }

    /// A stream that another library has made. It is not destroyed when this handle is dropped. 0 is the legacy default
    /// stream, 1 as well, and 2 that of each thread.
    ///
    /// # Safety
    ///
    /// `raw` is a stream of this device's primary context, and lives as long as the result.
    pub unsafe fn foreign_stream(&self, raw: u64) -> Arc<dyn Stream> {
        Arc::new(CudaStream::foreign(self.0.clone(), raw as usize as Handle))
    }

    /// Whether this device can read the memory of another one of the same driver without help of the host.
    ///
    /// # Errors
    ///
    /// What the driver says.
    pub fn reaches(&self, other: &CudaDevice) -> Result<bool> {
        let mut can = 0;
        self.0.run("cuDeviceCanAccessPeer", |functions| {
            // SAFETY: the place is there to be written.
            unsafe { (functions.can_access_peer)(&raw mut can, self.0.number, other.0.number) }
        })?;
        Ok(can != 0)
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaDevice").field(&self.0.name).finish()
    }
}
