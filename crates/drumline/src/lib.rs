//! Synchronous data-parallel training.

#![forbid(unsafe_code)]

mod config;
pub mod ddp;
mod error;
mod executor;
mod group;
pub mod rendezvous;
pub mod store;
mod transport;

pub use config::Config;
pub use drumline_kernels::{DType, Element, ReduceOp};
pub use error::{Cause, CollectiveError, Error, Result};
pub use group::{ProcessGroup, init_process_group};
pub use rendezvous::is_launched;
