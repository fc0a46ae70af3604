//! Collectives on the memory of accelerators.
//!
//! A [`DeviceGroup`] is a process group's end on one device of this rank. Its calls take memory of the device, and
//! streams; they return when they are queued. The data goes through memory of the host, where the process group sums
//! it:
//!
//! ```text
//!   device of a rank          memory of its host
//!   window 0 1 2 3 4 ...
//!          │ copy out         slot 0    each rank sums one slice of the window
//!          └────────────────► slot 1 ◄────────────────────────────────► neighbours
//!   window 0 1 2 3 4 ...      slot 2    the devices fetch each slice
//!          ▲                  slot 3    from where it was summed
//!          └─────────────────────┘ copy in
//! ```
//!
//! ```no_run
//! use std::sync::Arc;
//!
//! use drumline_accel::{DType, Device, DeviceGroup, DeviceOptions, DeviceSlice, Place, Stream};
//! use drumline_group::{ProcessGroup, ReduceOp};
//!
//! # fn example(group: ProcessGroup, device: Arc<dyn Device>, stream: Arc<dyn Stream>, gradient: Place) -> drumline_accel::Result<()> {
//! let on = DeviceGroup::new(&group, device, &DeviceOptions::default())?; // on all ranks
//! let gradient = DeviceSlice::new(gradient, DType::F32);
//! let work = on.all_reduce_on(&stream, gradient, ReduceOp::Avg)?; // after what the stream does now
//! work.join(&stream)?; // what is queued from now on sees the mean; the host goes on
//! on.destroy()?;
//! # Ok(())
//! # }
//! ```
//!
//! | file | what |
//! |---|---|
//! | `group.rs`, `collectives.rs`, `pieces.rs`, `coalesced.rs` | the handle: what is checked before any rank hears of a call |
//! | `direct.rs` | calls of the devices among themselves, by NCCL |
//! | `messages.rs` | messages between devices and hosts |
//! | `agreement.rs` | what ranks tell each other when they make the group, and the way of an all-reduce |
//! | `inbox.rs`, `watcher.rs` | what handles and the watching thread share, and what that thread does |
//! | `rounds.rs` | what ranks tell each other beside calls |
//! | `ring.rs`, `staged.rs` | the windows of an all-reduce, and every other call |
//! | `host_call.rs`, `pool.rs` | calls of the host on pinned memory, and that memory |
//! | `async_reduce.rs` | tensors by name, in any order |
//! | `work.rs` | the end of a call, for hosts and streams |

#![forbid(unsafe_code)]

mod agreement;
mod async_reduce;
mod coalesced;
mod collectives;
mod direct;
mod error;
mod group;
mod host_call;
mod inbox;
mod messages;
mod operator;
mod options;
mod pieces;
mod pool;
mod ring;
mod rounds;
mod slice;
mod staged;
mod watcher;
mod work;

pub use agreement::Way;
pub use async_reduce::DeviceAsyncReduce;
pub use drumline_device::{Device, Event, Gate, Identity, Place, Stream};
pub use drumline_error::{Error, Result};
pub use drumline_group::DType;
pub use group::DeviceGroup;
pub use messages::DeviceMessages;
pub use operator::DeviceOp;
#[doc(hidden)]
pub use options::Planted;
pub use options::{DeviceOptions, Wanted};
pub use slice::DeviceSlice;
pub use work::DeviceWork;
