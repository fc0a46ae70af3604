//! A group that goes on without ranks that have died.

use std::sync::Mutex;

use drumline::{Error, ProcessGroup};
use pyo3::{exceptions::PyValueError, prelude::*};
use rustix::process::{Pid, getpid};

use crate::{
    error::raise,
    group::Group,
    signals::{self, lock},
};

/// Runs pieces of a program on the ranks that are there. The package's `ElasticGroup` is around it.
#[pyclass(frozen, weakref, module = "drumline._core")]
pub(crate) struct ElasticGroup {
    /// `None` once it is closed.
    elastic: Mutex<Option<drumline::ElasticGroup>>,
    present: Mutex<Py<Group>>,
    /// The process that made this object.
    process: Pid,
}

/// Why a piece has failed, or the group.
struct Failed(PyErr);

impl From<Error> for Failed {
    fn from(error: Error) -> Failed {
        Failed(raise(error))
    }
}

#[pymethods]
impl ElasticGroup {
    #[new]
    fn new(py: Python<'_>, group: Py<Group>) -> PyResult<ElasticGroup> {
        let begins = group.get().get()?;
        let elastic = py.detach(|| drumline::ElasticGroup::new(&begins));
        Ok(ElasticGroup {
            elastic: Mutex::new(Some(elastic)),
            present: Mutex::new(group),
            process: getpid(),
        })
    }

    /// The group of the ranks that are there.
    #[getter]
    fn group(&self, py: Python<'_>) -> PyResult<Py<Group>> {
        self.object(py, &self.get()?.group())
    }

    /// Calls `piece` with the group, and again with a smaller one if a rank has died. Returns what it has returned.
    fn run(&self, py: Python<'_>, piece: Py<PyAny>) -> PyResult<Py<PyAny>> {
        let elastic = self.get()?;
        let call = |group: &ProcessGroup| {
            Python::attach(|py| piece.call1(py, (self.object(py, group)?,))).map_err(Failed)
        };
        signals::run_raising(py, || elastic.run(call), |Failed(error)| error)
    }

    /// Closes the group together with the ranks that are left.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let elastic = self.get()?;
        let present = elastic.group();
        signals::run_beside(py, move || elastic.close())?;
        self.object(py, &present)?.get().drop(py)?;
        self.drop(py);
        Ok(())
    }

    #[getter]
    fn is_destroyed(&self) -> bool {
        lock(&self.elastic).is_none()
    }

    /// Leaves the group without waiting for other ranks.
    fn drop(&self, py: Python<'_>) {
        let elastic = lock(&self.elastic).take();
        py.detach(|| drop(elastic));
    }

    /// At the end of the process: closes nothing, so that the peers see this process die.
    fn forget(&self) {
        std::mem::forget(lock(&self.elastic).take());
    }
}

impl ElasticGroup {
    fn get(&self) -> PyResult<drumline::ElasticGroup> {
        if getpid() != self.process {
            return Err(PyValueError::new_err(
                "an ElasticGroup belongs to the process that has made it, and this is a fork: make a group after the fork",
            ));
        }
        let elastic = lock(&self.elastic).clone();
        elastic.ok_or_else(|| PyValueError::new_err("the ElasticGroup has been closed"))
    }

    /// The object for what is the present group.
    fn object(&self, py: Python<'_>, group: &ProcessGroup) -> PyResult<Py<Group>> {
        let present = lock(&self.present).clone_ref(py);
        if present.get().is_named(group.name()) {
            return Ok(present);
        }
        let next = Py::new(py, Group::new(group.clone()))?;
        let before = std::mem::replace(&mut *lock(&self.present), next.clone_ref(py));
        drop(before); // without the lock
        Ok(next)
    }
}

impl Drop for ElasticGroup {
    fn drop(&mut self) {
        // The parent still uses the connections: a fork must not say goodbye on them.
        if getpid() != self.process {
            self.forget();
        }
    }
}
