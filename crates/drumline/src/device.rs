//! GPUs: collectives on their memory.
//!
//! A [`DeviceGroup`] is a process group's end on one device. Its calls take memory of the device and a stream, and
//! return when they are queued. The driver is found at run time: to build a program, no toolkit is needed.
//!
//! ```
//! use std::sync::Arc;
//!
//! use drumline::{
//!     DType, ProcessGroup, ReduceOp,
//!     device::{Device, DeviceGroup, DeviceOptions, DeviceSlice, Driver, Stream},
//! };
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let group = ProcessGroup::alone();
//! let Ok(driver) = Driver::load(None) else { return Ok(()) }; // this machine has no GPU
//! if driver.devices()? == 0 {
//!     return Ok(());
//! }
//! let device = driver.device(0)?;
//! let mut gradient = device.allocate(4 * 1024)?;
//! gradient.fill(0)?;
//!
//! let on = DeviceGroup::new(&group, Arc::new(device.clone()), &DeviceOptions::default())?;
//! let stream = device.stream()?;
//! let data = DeviceSlice::new(gradient.place(), DType::F32);
//! let work = on.all_reduce_on(&stream, data, ReduceOp::Avg)?; // queued, behind what the stream does
//! work.join(&stream)?; // what is queued from now on sees the average
//! work.wait()?; // or the host waits
//! on.destroy()?;
//! # Ok(())
//! # }
//! ```

pub use drumline_accel::{
    Device, DeviceAsyncReduce, DeviceGroup, DeviceMessages, DeviceOp, DeviceOptions, DeviceSlice,
    DeviceWork, Error, Event, Gate, Identity, Place, Result, Stream, Wanted, Way,
};
pub use drumline_cuda::{CudaDevice, DeviceMemory, Driver, Family};
/// What a driver says.
pub use drumline_device::Error as DriverError;
pub use drumline_device::{
    DriverMemory, Flight, HostDevice, HostMemory, Part, Pinned, PinnedWindow, Refused,
};
