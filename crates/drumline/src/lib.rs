//! Synchronous data-parallel training.

#![forbid(unsafe_code)]

pub mod ddp;
mod error;
pub mod store;

pub use error::{Error, Result};
