//! The choice of an algorithm, for many situations.
#![allow(clippy::unwrap_used)]

mod choices;
