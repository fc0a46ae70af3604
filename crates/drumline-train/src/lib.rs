//! Data-parallel training on process groups, without a framework.
//!
//! | module | what it holds |
//! |---|---|
//! | [`ddp`] | buckets, the reducer, verification and broadcast of models |
//! | [`async_reduce`] | named tensors, reduced in any order |
//! | [`sampler`] | which samples each rank sees, in torch's exact order |
//! | [`checkpoint`] | named tensors in files that are written atomically |
//! | [`ElasticGroup`] | goes on without ranks that have died |
//! | [`step()`] | tells the launcher which step a rank begins |
//! | [`record()`] | tells the launcher why a rank fails |
//! | [`local()`] | runs ranks in threads of this program, for tests and examples |
//! | [`spawn()`] | runs ranks in processes of this program, without a launcher |

#![forbid(unsafe_code)]

pub mod async_reduce;
#[doc(hidden)]
pub mod blame;
pub mod checkpoint;
pub mod ddp;
mod elastic;
#[doc(hidden)]
pub mod error_file;
#[doc(hidden)]
pub mod failure;
mod local;
#[doc(hidden)]
pub mod outer_job;
mod record;
pub mod sampler;
mod spawn;
#[doc(hidden)]
pub mod steps;

pub use drumline_error::{Error, ErrorKind, Result};
pub use elastic::ElasticGroup;
pub use local::{local, local_with};
pub use record::{record, record_panics};
pub use spawn::{Processes, RankEnd, Spawn, spawn};
pub use steps::{Step, step};
