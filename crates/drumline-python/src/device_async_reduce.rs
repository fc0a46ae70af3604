//! Named tensors of a GPU that are reduced while backward runs.

use std::{
    mem::take,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use drumline::{
    Result,
    device::{CudaDevice, DeviceAsyncReduce as Core, DeviceOptions},
};
use pyo3::prelude::*;

use crate::{
    async_reduce::{in_use, registry_of},
    device::{OnDevice, open, stream_of},
    error::raise,
    group::Group,
    signals::{self, Exclusive},
};

/// Tensors by name, reduced to one buffer of a GPU.
#[pyclass(frozen, weakref, module = "drumline._core")]
pub(crate) struct DeviceAsyncReduce {
    /// `None` after `stop`.
    core: Exclusive<Core>,
    device: CudaDevice,
    /// Keeps the buffer.
    _fused: Py<PyAny>,
    gradients: Mutex<Gradients>,
}

/// What keeps gradients until their copies have ended.
#[derive(Default)]
struct Gradients {
    of_this_step: Vec<Py<PyAny>>,
    of_the_last: Vec<Py<PyAny>>,
}

#[pymethods]
impl DeviceAsyncReduce {
    /// `tensors` are names, numbers of elements and codes of element types; `fused` is memory for all of them. All ranks
    /// of `group` call this.
    #[new]
    #[pyo3(signature = (group, tensors, fused, op="avg", bucket_bytes=None, ordinal=None, library=None, window_bytes=None))]
    #[expect(clippy::too_many_arguments, reason = "they are named in Python")]
    fn new(
        py: Python<'_>,
        group: &Group,
        tensors: Vec<(String, usize, u8)>,
        fused: OnDevice,
        op: &str,
        bucket_bytes: Option<usize>,
        ordinal: Option<usize>,
        library: Option<PathBuf>,
        window_bytes: Option<usize>,
    ) -> PyResult<DeviceAsyncReduce> {
        let (registry, options) = registry_of(tensors, op, bucket_bytes)?;
        let mut on = DeviceOptions::default();
        on.window_bytes = window_bytes.unwrap_or(on.window_bytes);
        let (group, device, place) = (group.get()?, open(ordinal, library)?, fused.slice.place);
        let of_core = Arc::new(device.clone());
        let core = signals::run_beside(py, move || {
            Core::new(registry, &group, of_core, &on, &options, |_| Ok(place))
        })?;
        Ok(DeviceAsyncReduce {
            core: Exclusive::new(core),
            device,
            _fused: fused.owner,
            gradients: Mutex::default(),
        })
    }

    /// Where a tensor begins and ends in the buffer, in elements of its type.
    fn place(&self, py: Python<'_>, name: &str) -> PyResult<(usize, usize)> {
        self.with(py, |core| {
            let slice = core.gradient(name)?;
            let start = (slice.place.address - core.fused().address) as usize / slice.dtype.size();
            Ok((start, start + slice.len()))
        })
    }

    /// Brings a tensor behind what the stream does: from its place in the buffer, or from `data`.
    #[pyo3(signature = (stream, name, data=None))]
    fn async_reduce(
        &self,
        py: Python<'_>,
        stream: u64,
        name: &str,
        data: Option<OnDevice>,
    ) -> PyResult<()> {
        let stream = stream_of(&self.device, stream);
        let slice = data.as_ref().map(|data| data.slice);
        self.with(py, |core| match slice {
            Some(slice) => core.async_reduce_from(name, slice, &stream),
            None => core.async_reduce(name, &stream),
        })?;
        self.gradients().of_this_step.extend(data.map(|data| data.owner));
        Ok(())
    }

    /// Has what the stream does from now on see the results. Waits until all ranks have brought all tensors.
    fn synchronize(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let stream = stream_of(&self.device, stream);
        let done = signals::run(py, || self.on_core(|core| core.synchronize(&stream)));
        // The copies of the step before the last one ended before those of the last one began to.
        let mut gradients = self.gradients();
        let Gradients { of_this_step, of_the_last } = &mut *gradients;
        let ended = std::mem::replace(of_the_last, take(of_this_step));
        drop(gradients);
        drop(ended);
        done
    }

    /// Waits on the host for the results of the last step.
    fn wait(&self, py: Python<'_>) -> PyResult<()> {
        signals::run(py, || self.on_core(Core::wait))
    }

    /// Steps without an error, rounds in which ranks told each other which tensors are complete, and all-reduces.
    fn counts(&self, py: Python<'_>) -> PyResult<(u64, u64, u64)> {
        let counts = self.with(py, |core| Ok(core.counts()))?;
        Ok((counts.steps, counts.rounds, counts.all_reduces))
    }

    /// Aborts the steps of all ranks.
    fn abort(&self, py: Python<'_>) {
        py.detach(|| self.core.with_or_abort(|core| core.as_ref().map(Core::abort)));
    }

    /// Ends the engine when all ranks do.
    fn stop(&self, py: Python<'_>) -> PyResult<()> {
        let core = py.detach(|| self.core.with_or_abort(Option::take));
        let stopped = signals::run(py, || core.flatten().map_or(Ok(()), Core::stop));
        drop(take(&mut *self.gradients()));
        stopped
    }
}

impl DeviceAsyncReduce {
    fn gradients(&self) -> MutexGuard<'_, Gradients> {
        self.gradients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<R: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&mut Core) -> Result<R> + Send,
    ) -> PyResult<R> {
        py.detach(|| self.on_core(call)).map_err(raise)
    }

    fn on_core<R>(&self, call: impl FnOnce(&mut Core) -> Result<R>) -> Result<R> {
        let used = self.core.with(|core| match core {
            Some(core) => call(core),
            None => Err(drumline::Error::argument("AsyncReduce", "it was stopped".to_owned())),
        });
        used.unwrap_or_else(|| Err(in_use()))
    }
}
