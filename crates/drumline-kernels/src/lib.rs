//! Element types, reduce operators, and the loops that apply them.

mod dtype;

pub use dtype::{DType, Element};
