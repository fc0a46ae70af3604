//! What the program shows and learns from: the images, and the history of a training as a picture.
//!
//! The network and its training are in `main.rs`. This half knows nothing of burn: its tests are
//! built in seconds.

pub mod data;
pub mod history;
pub mod plot;
