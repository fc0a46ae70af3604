//! Accelerators as the rest of Drumline sees them.
//!
//! A [`Device`] has memory that the CPU cannot touch, and engines that copy between that memory and the host's while
//! programs go on. This crate says what it needs of a device: [streams](Stream), in which copies run in order;
//! [events](Event), which tell how far a stream has come; and host memory that is [pinned](Pinned), so that a device
//! reaches it. `drumline-cuda` implements these for CUDA and HIP; [`HostDevice`] is for ranks that have no device.
//!
//! **No copy reaches memory that has another use.** A copy takes its host memory by value. The [`Flight`] that it
//! returns gives the memory back when the copy has ended, and not before. So nothing here is `unsafe` to use.
//!
//! The [`Pipeline`] is the order in which an all-reduce of device memory goes through the memory of the host. It is
//! data and counters of `drumline-schedule`, and its tests try every interleaving of several ranks.

#![forbid(unsafe_code)]

mod device;
mod error;
mod event;
pub mod fabric;
mod flight;
mod host;
mod pinned;
mod place;
mod stream;

pub use device::{Device, Identity, Memory};
pub use drumline_schedule::device::{Action, Pipeline, Rule};
pub use error::{Error, Refused, Result};
pub use event::{Event, Gate};
pub use flight::Flight;
pub use host::{HostDevice, HostMemory};
pub use pinned::{DriverMemory, Pinned, PinnedWindow};
pub use place::Place;
pub use stream::{Part, Stream};
