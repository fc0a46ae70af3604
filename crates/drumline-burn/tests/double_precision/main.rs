//! Data-parallel training in double precision.
//!
//! A test program of its own, because burn fixes the default dtype of a device once per process.

#![allow(clippy::panic, clippy::unwrap_used)]

#[path = "../common/mod.rs"]
mod common;
mod equivalence;
mod random_models;
mod sharded;
mod sync_batch_norm;

use std::sync::OnceLock;

use burn::tensor::{Device, FloatDType};

/// The CPU, with f64 as the default dtype.
fn device() -> Device {
    static CONFIGURED: OnceLock<()> = OnceLock::new();
    CONFIGURED.get_or_init(|| Device::flex().configure(FloatDType::F64).unwrap());
    Device::flex().autodiff()
}
