//! Data-parallel training in single precision.

#![allow(clippy::panic, clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod ddp;
mod overlap;
mod unusual_models;
