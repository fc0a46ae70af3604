//! Data-parallel training on process groups, without a framework.
//!
//! | module | what it holds |
//! |---|---|
//! | [`ddp`] | buckets, the reducer, verification and broadcast of models |
//! | [`async_reduce`] | named tensors, reduced in any order |
//! | [`sampler`] | which samples each rank sees, in torch's exact order |
//! | [`checkpoint`] | named tensors in files that are written atomically |
//! | [`step()`] | tells the launcher which step a rank begins |

#![forbid(unsafe_code)]

pub mod async_reduce;
pub mod checkpoint;
pub mod ddp;
mod error;
#[doc(hidden)]
pub mod error_file;
pub mod sampler;
#[doc(hidden)]
pub mod steps;

pub use error::{Error, Result};
pub use steps::{Step, step};
