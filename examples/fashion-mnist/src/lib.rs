//! The parts of the program that do not need burn: the images, the history of a training, and its picture.
//!
//! The network and its training are in `main.rs`. Without burn, the tests of this library are built in
//! seconds.

pub mod data;
pub mod history;
pub mod plot;
