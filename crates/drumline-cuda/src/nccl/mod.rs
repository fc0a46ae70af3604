//! NCCL and RCCL, found at run time: collectives between GPUs.
//!
//! A [`Communicator`] is one rank's end of a group of GPUs. A [`Call`] is an operation of it, as data: one or several
//! are queued on a stream, and the call returns.
//!
//! - **Nothing waits within NCCL.** Communicators are non-blocking. A thread that waits here asks for the state, and
//!   [`Communicator::abort`] of any other thread ends its wait.
//! - **A rank that dies is told to nobody.** NCCL's operations then never end. Who learns of it otherwise must abort
//!   the communicator on all ranks.
//! - **Bad arguments** are refused before NCCL gets them: places that are no memory of this device, lengths that do not
//!   fit, operands that overlap, types and operators that NCCL lacks ([`Nccl::supports`]).
//! - **Two ranks on one GPU** are refused by NCCL. [`same_gpu_hint`] says what lets it be.
//!
//! # Files
//!
//! `library` finds the library, `functions` is its functions, `version` its number. `supports` knows what it lacks.
//! `unique_id` is how ranks meet. `steps` is what a call consists of, `shape` which operands fit.
//! `communicator` is what they are queued on, `queue` how. `fabric` is all of it for one device. `handle` keeps a communicator alive while it is used,
//! `patience` is how a thread waits for it.

mod communicator;
pub(crate) mod fabric;
mod functions;
mod handle;
mod library;
mod patience;
mod queue;
mod shape;
mod steps;
mod supports;
mod unique_id;
mod version;

pub use communicator::{Communicator, State};
pub use drumline_device::fabric::{Call, Operator, Work};
pub use library::{Nccl, look_in};
pub use unique_id::UniqueId;
pub use version::same_gpu_hint;
