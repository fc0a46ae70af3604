//! The kernels, against definitions that are written without a thought of speed.

mod convert;
mod format;
mod reduce;
mod reference;
