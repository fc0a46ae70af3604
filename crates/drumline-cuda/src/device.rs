//! A device: its places, and what it makes.

use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::sync::Arc;

use drumline_device::{
    Device, Error, Gate, Identity, Pinned, PinnedWindow, Place, Refused, Result, Stream,
};
use drumline_shm::{PeerWindow, Registered};

use crate::driver::{Driver, INVALID_VALUE};
use crate::gate::CudaGate;
use crate::memory::{DeviceMemory, HostMemory};
use crate::opened::Opened;
use crate::pin::Pin;
use crate::stream::CudaStream;
use crate::table::Handle;

/// A device of a [`Driver`]. Clones share it.
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
    pub(crate) fn open(driver: Driver, ordinal: usize) -> Result<CudaDevice> {
        Ok(CudaDevice(Arc::new(Opened::new(driver, ordinal)?)))
    }

    pub(crate) fn of(opened: Arc<Opened>) -> CudaDevice {
        CudaDevice(opened)
    }

    /// The driver of the device.
    pub fn driver(&self) -> &Driver {
        &self.0.driver
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

    /// One attribute of an address. `None`: the driver does not know the address.
    fn attribute<T: Number>(&self, attribute: c_int, address: u64) -> Result<Option<T>> {
        let mut value = T::default();
        let code = self.0.inside(|functions| {
            let place = (&raw mut value).cast::<c_void>();
            // SAFETY: callers name a type of the width that the attribute has.
            unsafe { (functions.pointer_attribute)(place, attribute, address) }
        })?;
        match code {
            0 => Ok(Some(value)),
            INVALID_VALUE => Ok(None),
            code => self.0.done("cuPointerGetAttribute", code).map(|()| None),
        }
    }

    /// The bytes from `address` to the end of its allocation. `None`: nothing is allocated there.
    fn bytes_from(&self, address: u64) -> Result<Option<u64>> {
        let (mut base, mut bytes) = (0_u64, 0_usize);
        let code = self.0.inside(|functions| {
            // SAFETY: both places are there to be written.
            unsafe { (functions.address_range)(&raw mut base, &raw mut bytes, address) }
        })?;
        Ok((code == 0).then(|| base.saturating_add(bytes as u64).saturating_sub(address)))
    }
}

/// What an attribute may be: any bytes are a value.
trait Number: Default {}
impl Number for c_int {}
impl Number for c_uint {}
impl Number for usize {}

/// Of `CUpointer_attribute` and `CUmemorytype`; HIP has the same numbers.
const CONTEXT: c_int = 1;
const MEMORY_TYPE: c_int = 2;
const DEVICE_ORDINAL: c_int = 9;
const OF_DEVICE: c_uint = 2;

impl Device for CudaDevice {
    fn identity(&self) -> &Identity {
        &self.0.identity
    }

    fn check(&self, place: Place) -> Result<()> {
        if place.bytes == 0 {
            return Ok(());
        }
        let no = |problem: String| Err(Error::Place { place, problem });
        let unknown = "it is memory of the host, or was freed";
        match self.attribute::<c_uint>(MEMORY_TYPE, place.address)? {
            None => return no(unknown.to_owned()),
            Some(OF_DEVICE) => {}
            Some(_) => return no("it is memory of the host".to_owned()),
        }
        let ordinal = self.attribute::<c_int>(DEVICE_ORDINAL, place.address)?;
        if let Some(ordinal) = ordinal.filter(|it| *it != self.0.number) {
            return no(format!("it is memory of {}:{ordinal}", self.0.identity.kind));
        }
        // Memory of a pool has no context.
        let context = self.attribute::<usize>(CONTEXT, place.address)?.unwrap_or(0);
        if context != 0 && context != self.0.context.addr() {
            return no("it is memory of another context of this device".to_owned());
        }
        // What an allocator has mapped piece by piece consists of several ranges.
        let (mut address, mut left) = (place.address, place.bytes as u64);
        loop {
            match self.bytes_from(address)? {
                Some(bytes) if bytes >= left => return Ok(()),
                Some(bytes) if bytes > 0 => {
                    left -= bytes;
                    address += bytes;
                }
                _ if address == place.address => return no(unknown.to_owned()),
                _ => {
                    let bytes = address - place.address;
                    return no(format!("only {bytes} bytes are allocated there"));
                }
            }
        }
    }

    fn stream(&self) -> Result<Arc<dyn Stream>> {
        Ok(Arc::new(CudaStream::new(self.0.clone())?))
    }

    fn pin(&self, memory: Registered<u8>) -> Result<Pinned, Refused<Registered<u8>>> {
        let pin = match Pin::new(self.0.clone(), memory.as_ptr(), memory.len()) {
            Ok(pin) => Arc::new(pin),
            Err(error) => return Err(Box::new((error, memory))),
        };
        let of_detach = pin.clone();
        let hook = memory.before_detach(move || of_detach.release());
        // A tuple drops in order. The pin is released by whichever comes first.
        Ok(Pinned::in_place(memory, (pin, hook)))
    }

    fn pin_window(&self, window: PeerWindow) -> Result<PinnedWindow> {
        let pin = Pin::new(self.0.clone(), window.address(), window.len())?;
        Ok(PinnedWindow::new(window, pin))
    }

    fn pinned(&self, bytes: usize) -> Result<Pinned> {
        Ok(Pinned::of_driver(HostMemory::new(self.0.clone(), bytes)?))
    }

    fn gate(&self) -> Result<Arc<dyn Gate>> {
        if self.0.functions().wait_value.is_none() {
            let device = self.0.name.clone();
            return Err(Error::Unsupported { device, what: "let streams wait for the host" });
        }
        Ok(Arc::new(CudaGate::new(self.0.clone())?))
    }
}

impl fmt::Debug for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("CudaDevice").field(&self.0.name).finish()
    }
}
