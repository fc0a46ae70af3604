//! Whole jobs on the simulator.

mod large;
mod same_bits;
mod seeds;
mod suite;
