//! The parts of the program that know nothing of a `Learner`: images for burn's loader, and a network.

pub mod data;
pub mod model;
