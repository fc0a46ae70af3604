//! Collective algorithms as data.

#![forbid(unsafe_code)]

pub mod step;
pub mod tree;
