//! Synchronous data-parallel training.

#![forbid(unsafe_code)]

mod error;
pub mod rendezvous;
pub mod store;

pub use error::{Error, Result};
