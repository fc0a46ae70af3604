//! Training on groups whose ranks are threads or processes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod async_reduce;
mod checkpoint;
mod ddp;
mod elastic;
mod errors;
mod record;
mod sampler;
mod sharded;
mod shards;
mod spawn;

use drumline_testing as common;
