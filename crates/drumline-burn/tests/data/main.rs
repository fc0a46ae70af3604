//! The data loader: its order, its place in the data, and what it does when samples cannot be read.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[path = "../common/mod.rs"]
mod common;
mod evaluation;
mod failures;
mod order;
mod place;
mod settings;
mod shards;
mod source;
