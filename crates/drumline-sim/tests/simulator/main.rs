//! Whole jobs on the simulator.

#![allow(clippy::panic, clippy::unwrap_used)]

mod large;
mod same_bits;
mod seeds;
mod suite;
