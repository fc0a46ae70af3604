//! The command line in the process of its caller.

use std::ffi::OsString;

use pyo3::prelude::*;

/// Runs the command line `drumline ...` and returns its exit code. `arguments` begin with the name of
/// the program. `itself` is the command that calls this function again in a new process.
#[pyfunction]
pub(crate) fn main(py: Python<'_>, arguments: Vec<OsString>, itself: Vec<OsString>) -> u8 {
    py.detach(|| drumline_cli::main(arguments, itself))
}

/// Tells the launcher that this rank begins this step. Returns whether to stop before it.
#[pyfunction]
pub(crate) fn step(py: Python<'_>, number: u64) -> bool {
    py.detach(|| drumline::step(number)) == drumline::Step::Stop
}

/// Why `drumline run` refuses this command line before it starts anything. None: it does not.
#[pyfunction]
pub(crate) fn refusal(arguments: Vec<OsString>) -> Option<String> {
    drumline_cli::refusal(arguments)
}
