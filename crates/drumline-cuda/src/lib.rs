//! Devices of CUDA and HIP, found at run time.
//!
//! To build a program, no toolkit is needed. To run it, no driver is needed until it asks for one.
//!
//! ```
//! use drumline_cuda::Driver;
//! use drumline_device::Device;
//!
//! match Driver::load(None) {
//!     Ok(driver) => {
//!         for ordinal in 0..driver.devices()? {
//!             println!("{}", driver.device(ordinal)?.identity());
//!         }
//!     }
//!     Err(error) => println!("{error}"), // lists what was tried, and says what to install
//! }
//! # Ok::<(), drumline_device::Error>(())
//! ```
//!
//! The crate implements the traits of `drumline-device`: [`Driver::device`] gives a
//! [`Device`](drumline_device::Device). Those traits say what is promised; here is how:
//!
//! - **Contexts.** A call works in the primary context of its device, as torch and burn do, and leaves the caller's
//!   current context as it was.
//! - **Bad addresses** never reach a copy: each place is looked up in the driver first. So the traits are safe to use
//!   with any number as an address.
//! - **HIP** has the functions of CUDA under other names, so one table of names serves both. No AMD hardware has run
//!   this yet.
//! - **Forks.** A driver does not survive a fork. A forked child gets an error.
//!
//! # NCCL
//!
//! [`nccl`] is NCCL or RCCL, found at run time too: collectives between GPUs, without the host. A
//! [`Communicator`](nccl::Communicator) takes places and streams of a [`CudaDevice`].
//!
//! ```
//! use drumline_cuda::nccl::{Communicator, Nccl};
//! use drumline_cuda::{CudaDevice, Driver};
//! use drumline_device::{Device, Result};
//! use drumline_kernels::{DType, ReduceOp};
//!
//! # fn main() -> Result<()> {
//! # let (Ok(driver), Ok(nccl)) = (Driver::load(None), Nccl::load(None)) else { return Ok(()) };
//! # let (rank, world_size) = (0, 1);
//! let device = driver.device(0)?;
//! let id = nccl.unique_id()?; // on one rank, which sends it to all others
//! let communicator = Communicator::new(&nccl, &device, &id, rank, world_size)?;
//! let (stream, gradients) = (device.stream()?, device.allocate(4096)?);
//! let place = gradients.place();
//! communicator.all_reduce(place, place, DType::F32, ReduceOp::Avg, &*stream)?;
//! stream.record()?.wait()?;
//! # Ok(())
//! # }
//! ```
//!
//! # Files
//!
//! `driver` finds the library, `loaded` is what it finds, `table` its functions. `device` is a device, `as_device` what it
//! does for those who know no driver, `opened` its context. `places` looks up addresses, `pin` pins memory, `memory`
//! allocates it, `ipc` opens that of other processes. `stream`, `event` and `gate` are what their names say. `nccl/` is NCCL.

mod as_device;
mod device;
mod driver;
mod event;
mod family;
mod gate;
mod ipc;
mod loaded;
mod memory;
pub mod nccl;
mod opened;
mod pin;
mod places;
mod stream;
mod table;

pub use device::CudaDevice;
pub use driver::Driver;
pub use family::Family;
pub use ipc::{MemoryHandle, OpenedMemory};
pub use memory::DeviceMemory;
