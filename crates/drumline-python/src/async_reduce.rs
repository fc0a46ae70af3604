//! Named tensors that are reduced while backward runs.

use std::{
    mem,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use drumline::{
    DType, ReduceOp,
    async_reduce::{AsyncReduce as Engine, AsyncReduceOptions, TensorRegistry},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{config::duration, error::raise, group::Group, memory::with_element, signals};

/// Tensors in one buffer that the ranks of a host share.
///
/// The buffer stays where it is for as long as this object lives, also when the engine has been
/// left: whoever makes tensors from it keeps the object.
#[pyclass(frozen, weakref, module = "drumline._core")]
pub(crate) struct AsyncReduce {
    /// There until this object is dropped.
    engine: Mutex<Option<Engine>>,
    is_left: AtomicBool,
    /// Where the buffer begins, and its bytes.
    memory: (usize, usize),
    /// The process that has made it.
    process: rustix::process::Pid,
}

#[pymethods]
impl AsyncReduce {
    /// `tensors` are names, numbers of elements and codes of types. All ranks of `group` call this.
    #[new]
    #[pyo3(signature = (group, tensors, op="avg", bucket_bytes=None))]
    fn new(
        py: Python<'_>,
        group: &Group,
        tensors: Vec<(String, usize, u8)>,
        op: &str,
        bucket_bytes: Option<usize>,
    ) -> PyResult<AsyncReduce> {
        let mut registry = TensorRegistry::new();
        for (name, len, code) in tensors {
            let dtype = DType::from_code(code).ok_or_else(|| {
                PyValueError::new_err(format!("no element type has the code {code}"))
            })?;
            with_element!(dtype, T => registry.register::<T>(name, len).map_err(raise))?;
        }
        let op =
            op.parse::<ReduceOp>().map_err(|error| PyValueError::new_err(error.to_string()))?;
        let mut options = AsyncReduceOptions::default().op(op);
        options.bucket_bytes = bucket_bytes.unwrap_or(options.bucket_bytes);
        let group = group.get()?;
        let engine = signals::run_beside(py, move || registry.freeze(&group, &options))?;
        let mut bytes = 0;
        for name in engine.names() {
            bytes = bytes.max(engine.place(name).map_err(raise)?.bytes.end);
        }
        Ok(AsyncReduce {
            memory: (engine.as_mut_ptr().addr(), bytes),
            engine: Mutex::new(Some(engine)),
            is_left: AtomicBool::new(false),
            process: rustix::process::getpid(),
        })
    }

    /// The address of the buffer, and its bytes.
    #[getter]
    fn memory(&self) -> (usize, usize) {
        self.memory
    }

    /// Where a tensor begins in the buffer, in bytes.
    fn offset(&self, py: Python<'_>, name: &str) -> PyResult<usize> {
        self.with(py, |engine| engine.place(name).map(|place| place.bytes.start))
    }

    /// Brings a tensor as it lies in its place. Returns at once; until `synchronize` has returned,
    /// nobody may touch it.
    fn async_reduce(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.with(py, |engine| engine.async_reduce(name))
    }

    /// Waits until all tensors are reduced.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        self.check()?;
        signals::run(py, || self.lock().as_mut().map_or(Ok(()), Engine::synchronize))
    }

    /// Brings what was not brought in this step, and waits.
    fn sync_grad(&self, py: Python<'_>) -> PyResult<()> {
        self.check()?;
        signals::run(py, || self.lock().as_mut().map_or(Ok(()), Engine::sync_grad))
    }

    /// Steps that have ended well, rounds in which ranks told each other what is complete, and
    /// all-reduces.
    fn counts(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let counts = self.with(py, |engine| Ok(engine.counts()))?;
        Ok((counts.steps, counts.rounds, counts.all_reduces))
    }

    #[getter]
    fn is_destroyed(&self) -> bool {
        self.is_left.load(Ordering::SeqCst)
    }

    /// Breaks the engine off, on all ranks.
    fn abort(&self, py: Python<'_>) {
        if self.check().is_ok() {
            py.detach(|| {
                if let Some(engine) = &*self.lock() {
                    engine.abort();
                }
            });
        }
    }

    /// Leaves the other ranks, without waiting longer than so many seconds for them. The tensors
    /// stay where they are.
    fn leave(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        self.leave_within(py, duration("patience", patience)?)
    }

    /// Leaves without waiting for anybody.
    fn drop(&self, py: Python<'_>) -> PyResult<()> {
        self.leave_within(py, Duration::ZERO)
    }

    /// Leaves the engine as it is when the process ends: the peers see it die.
    fn forget(&self, py: Python<'_>) {
        self.is_left.store(true, Ordering::SeqCst);
        py.detach(|| mem::forget(self.lock().take()));
    }
}

impl AsyncReduce {
    /// To be called without the interpreter's lock, for which whoever has this one may be waiting.
    fn lock(&self) -> MutexGuard<'_, Option<Engine>> {
        self.engine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Engine) -> drumline::Result<R> + Send,
    ) -> PyResult<R> {
        self.check()?;
        let result = py.detach(|| self.lock().as_mut().map(call));
        result.ok_or_else(left)?.map_err(raise)
    }

    fn check(&self) -> PyResult<()> {
        if rustix::process::getpid() != self.process {
            return Err(PyValueError::new_err(format!(
                "this AsyncReduce belongs to process {}, of which this process is a fork",
                self.process
            )));
        }
        match self.is_left.load(Ordering::SeqCst) {
            true => Err(left()),
            false => Ok(()),
        }
    }

    fn leave_within(&self, py: Python<'_>, patience: Duration) -> PyResult<()> {
        if self.is_left.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        let left = py.detach(|| self.lock().as_mut().map_or(Ok(()), |it| it.leave(patience)));
        left.map_err(raise)
    }
}

fn left() -> PyErr {
    PyValueError::new_err("this AsyncReduce was stopped")
}

impl Drop for AsyncReduce {
    fn drop(&mut self) {
        // A fork of the process shares the connections: no goodbye from there.
        if rustix::process::getpid() != self.process {
            mem::forget(self.lock().take());
        }
    }
}
