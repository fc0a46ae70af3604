//! Training that is interrupted and resumed ends with the same bits as training that is not.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
mod killed;
mod mistakes;
mod optimizers;
mod program;
mod ranks;
mod sharded;
mod shards;
