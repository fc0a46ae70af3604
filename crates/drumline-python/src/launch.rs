//! The launcher in the process of its caller.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command line `drumline ...`; `arguments` begin with the name of the program. Returns
/// the exit code.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, arguments: Vec<OsString>, itself: Vec<OsString>) -> u8 {
    py.detach(|| drumline_launch::main(arguments, itself))
}
