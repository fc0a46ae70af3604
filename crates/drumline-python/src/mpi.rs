//! MPI: whether there is one, and how ranks that it has started meet.

use std::path::PathBuf;

use drumline::rendezvous::rendezvous;
use pyo3::{prelude::*, types::PyDict};

use crate::{config::config, log, signals, store::Store};

/// Whether an MPI library is found.
#[pyfunction]
pub(crate) fn is_mpi_available(py: Python<'_>) -> bool {
    py.detach(drumline::backend::is_mpi_available)
}

/// Has libraries of MPI looked for in Python's own prefix, too: `pip install mpich` puts them there.
pub(crate) fn look_beside_python(py: Python<'_>) -> PyResult<()> {
    let prefix: PathBuf = py.import("sys")?.getattr("prefix")?.extract()?;
    drumline_mpi::look_in(prefix);
    Ok(())
}

/// Meets the other ranks of the job at `url`: the store that they share, this rank, and how many ranks there are.
#[pyfunction]
#[pyo3(signature = (url, settings=None))]
pub(crate) fn meet(
    py: Python<'_>,
    url: String,
    settings: Option<&Bound<'_, PyDict>>,
) -> PyResult<(Store, usize, usize)> {
    log::open(py)?;
    let config = config(settings)?;
    let place = signals::run_beside(py, move || rendezvous(&url, &config))?;
    Ok((Store::around(place.store), place.rank, place.world_size))
}
