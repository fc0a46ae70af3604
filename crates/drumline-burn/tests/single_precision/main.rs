//! Data-parallel training in single precision.

#![allow(clippy::panic, clippy::unwrap_used)]

mod clip;
#[path = "../common/mod.rs"]
mod common;
mod ddp;
mod diverged;
mod ignored;
mod no_copy;
mod overlap;
mod paths;
mod scaler;
mod sharded;
mod shards;
mod short_types;
mod together;
mod uneven;
mod unusual_models;

/// A device without taps: its gradients are averaged after backward.
#[cfg(feature = "ndarray")]
#[allow(deprecated, reason = "burn will remove ndarray")]
fn other_device() -> burn::tensor::Device {
    burn::tensor::Device::ndarray().autodiff()
}
