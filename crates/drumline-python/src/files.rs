//! Files at places that others may write to, as `drumline::files` opens them.

use std::{borrow::Cow, path::PathBuf};

use drumline::files;
use pyo3::prelude::*;

/// Reads a regular file of at most `bytes_max` bytes.
#[pyfunction]
pub(crate) fn read_file(
    py: Python<'_>,
    path: PathBuf,
    bytes_max: usize,
) -> PyResult<Cow<'static, [u8]>> {
    Ok(Cow::Owned(py.detach(|| files::read(&path, bytes_max))?))
}

/// Writes a whole file anew.
#[pyfunction]
pub(crate) fn write_file(py: Python<'_>, path: PathBuf, content: &[u8]) -> PyResult<()> {
    Ok(py.detach(|| files::write(&path, content))?)
}
