//! The choice of an algorithm, for many situations, and what narrow floats send.
#![allow(clippy::unwrap_used)]

mod choices;
mod narrow;
