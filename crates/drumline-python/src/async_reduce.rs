//! Named tensors that are reduced while backward runs.

use std::{
    mem,
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use drumline::{
    DType, ReduceOp, Result,
    async_reduce::{AsyncReduce as Core, AsyncReduceOptions, TensorRegistry},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    config::duration,
    error::raise,
    group::Group,
    signals::{self, Exclusive},
};

/// Tensors in one buffer that the ranks of a host share.
///
/// The buffer stays in place as long as this object lives, also after `leave`. Tensors over the buffer
/// must keep this object.
#[pyclass(frozen, weakref, module = "drumline._core")]
pub(crate) struct AsyncReduce {
    /// `None` only after `forget`.
    core: Exclusive<Core>,
    is_left: AtomicBool,
    /// The address of the buffer, and its length in bytes.
    memory: (usize, usize),
    /// The process that made this object.
    process: rustix::process::Pid,
}

#[pymethods]
impl AsyncReduce {
    /// `tensors` are names, numbers of elements and codes of element types. All ranks of `group` call this.
    #[new]
    #[pyo3(signature = (group, tensors, op="avg", bucket_bytes=None))]
    fn new(
        py: Python<'_>,
        group: &Group,
        tensors: Vec<(String, usize, u8)>,
        op: &str,
        bucket_bytes: Option<usize>,
    ) -> PyResult<AsyncReduce> {
        let (registry, options) = registry_of(tensors, op, bucket_bytes)?;
        let group = group.get()?;
        let core = signals::run_beside(py, move || registry.freeze(&group, &options))?;
        let mut bytes = 0;
        for name in core.names() {
            bytes = bytes.max(core.place(name).map_err(raise)?.bytes.end);
        }
        Ok(AsyncReduce {
            memory: (core.as_mut_ptr().addr(), bytes),
            core: Exclusive::new(core),
            is_left: AtomicBool::new(false),
            process: rustix::process::getpid(),
        })
    }

    /// The address of the buffer, and its length in bytes.
    #[getter]
    fn memory(&self) -> (usize, usize) {
        self.memory
    }

    /// The offset of a tensor in the buffer, in bytes.
    fn offset(&self, py: Python<'_>, name: &str) -> PyResult<usize> {
        self.with(py, |core| core.place(name).map(|place| place.bytes.start))
    }

    /// Starts to reduce a tensor in its place. Returns at once. Until `synchronize` has returned, the program
    /// must not touch the tensor.
    fn async_reduce(&self, py: Python<'_>, name: &str) -> PyResult<()> {
        self.with(py, |core| core.async_reduce(name))
    }

    /// Waits until all tensors are reduced.
    fn synchronize(&self, py: Python<'_>) -> PyResult<()> {
        self.interruptibly(py, Core::synchronize)
    }

    /// Brings the tensors that were not brought in this step, and waits.
    fn sync_grad(&self, py: Python<'_>) -> PyResult<()> {
        self.interruptibly(py, Core::sync_grad)
    }

    /// Steps without an error, rounds in which ranks told each other which tensors are complete, and
    /// all-reduces.
    fn counts(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let counts = self.with(py, |core| Ok(core.counts()))?;
        Ok((counts.steps, counts.rounds, counts.all_reduces))
    }

    #[getter]
    fn is_destroyed(&self) -> bool {
        self.is_left.load(Ordering::SeqCst)
    }

    /// Aborts the steps of all ranks.
    fn abort(&self, py: Python<'_>) {
        if self.check().is_ok() {
            py.detach(|| self.core.with_or_abort(|core| core.as_ref().map(Core::abort)));
        }
    }

    /// Leaves the other ranks, after waiting for them at most `patience` seconds. The tensors stay in place.
    fn leave(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        self.leave_within(py, duration("patience", patience)?)
    }

    /// Leaves without waiting for other ranks.
    fn drop(&self, py: Python<'_>) -> PyResult<()> {
        self.leave_within(py, Duration::ZERO)
    }

    /// At the end of the process: closes nothing, so that the peers see this process die.
    fn forget(&self, py: Python<'_>) {
        self.is_left.store(true, Ordering::SeqCst);
        py.detach(|| mem::forget(self.core.with(Option::take)));
    }
}

impl AsyncReduce {
    fn interruptibly(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Core) -> Result<()> + Send,
    ) -> PyResult<()> {
        self.check()?;
        let call = |core: &mut Option<Core>| core.as_mut().map_or(Ok(()), call);
        signals::run(py, || self.core.with(call).unwrap_or_else(|| Err(in_use())))
    }

    fn with<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Core) -> Result<R> + Send,
    ) -> PyResult<R> {
        self.check()?;
        let result = py.detach(|| self.core.with(|core| core.as_mut().map(call)));
        result.ok_or_else(|| raise(in_use()))?.ok_or_else(left)?.map_err(raise)
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
        let leave = |core: &mut Option<Core>| core.as_mut().map_or(Ok(()), |it| it.leave(patience));
        py.detach(|| self.core.with_or_abort(leave)).unwrap_or(Ok(())).map_err(raise)
    }
}

/// The tensors, and how they are reduced, as the package passes them.
pub(crate) fn registry_of(
    tensors: Vec<(String, usize, u8)>,
    op: &str,
    bucket_bytes: Option<usize>,
) -> PyResult<(TensorRegistry, AsyncReduceOptions)> {
    let mut registry = TensorRegistry::new();
    for (name, len, code) in tensors {
        let dtype = DType::from_code(code)
            .ok_or_else(|| PyValueError::new_err(format!("no element type has the code {code}")))?;
        registry.register_as(dtype, name, len).map_err(raise)?;
    }
    let op = op.parse::<ReduceOp>().map_err(|error| PyValueError::new_err(error.to_string()))?;
    let mut options = AsyncReduceOptions::default().op(op);
    options.bucket_bytes = bucket_bytes.unwrap_or(options.bucket_bytes);
    Ok((registry, options))
}

/// The error of a call in a handler that interrupts `synchronize`.
pub(crate) fn in_use() -> drumline::Error {
    drumline::Error::argument("AsyncReduce", "this thread is in a call of it, and a handler of a signal interrupts that: wait until the handler \
                  has returned, or abort it"
            .to_owned())
}

fn left() -> PyErr {
    PyValueError::new_err("this AsyncReduce was stopped")
}

impl Drop for AsyncReduce {
    fn drop(&mut self) {
        // A fork shares the connections of its parent and must not say goodbye on them.
        if rustix::process::getpid() != self.process {
            mem::forget(self.core.with(Option::take));
        }
    }
}
