//! Collectives on the memory of GPUs.
//!
//! The package passes memory of a device as it passes other memory: address, elements, type, and the object that keeps
//! it. A stream is the number that its library has for it.

use std::{
    path::PathBuf,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use drumline::{
    DType,
    device::{
        self, CudaDevice, DeviceGroup as Core, DeviceOptions, DeviceSlice, Driver, Place, Stream,
    },
};
use pyo3::{
    exceptions::{PyRuntimeError, PyValueError},
    prelude::*,
};

use crate::{
    call::operator,
    config::{duration, patience},
    error::raise,
    group::Group,
    signals,
};

/// Elements in the memory of a device: `(address, elements, dtype, owner)`.
pub(crate) struct OnDevice {
    pub(crate) slice: DeviceSlice,
    pub(crate) owner: Py<PyAny>,
}

impl<'py> FromPyObject<'_, 'py> for OnDevice {
    type Error = PyErr;

    fn extract(object: Borrowed<'_, 'py, PyAny>) -> PyResult<OnDevice> {
        let (address, count, code, owner): (u64, usize, u8, Py<PyAny>) = object.extract()?;
        let dtype = DType::from_code(code)
            .ok_or_else(|| PyValueError::new_err(format!("no element type has the code {code}")))?;
        let bytes = count.checked_mul(dtype.size()).ok_or_else(|| {
            PyValueError::new_err(format!("{count} elements of type {dtype} are too many"))
        })?;
        Ok(OnDevice { slice: DeviceSlice::new(Place { address, bytes }, dtype), owner })
    }
}

/// A group's end on a GPU. All ranks make it together. Calls return when they are queued.
#[pyclass(frozen, weakref, module = "drumline._core")]
pub(crate) struct DeviceGroup {
    core: Mutex<Option<Core>>,
    device: CudaDevice,
}

#[pymethods]
impl DeviceGroup {
    /// `ordinal` is the driver's number of the device; unless given, the one that is current on this thread. `library`
    /// is the driver's file; unless given, it is found.
    #[new]
    #[pyo3(signature = (group, ordinal=None, library=None, window_bytes=None, way="host"))]
    fn new(
        py: Python<'_>,
        group: &Group,
        ordinal: Option<usize>,
        library: Option<PathBuf>,
        window_bytes: Option<usize>,
        way: &str,
    ) -> PyResult<DeviceGroup> {
        let group = group.get()?;
        let way = way.parse().map_err(PyValueError::new_err::<String>)?;
        let mut options = DeviceOptions::default().way(way);
        options.window_bytes = window_bytes.unwrap_or(options.window_bytes);
        let device = open(ordinal, library)?;
        let of_core = device.clone();
        let made = move || Core::new(&group, Arc::new(of_core), &options);
        let core = signals::run_beside(py, made)?;
        Ok(DeviceGroup { core: Mutex::new(Some(core)), device })
    }

    /// What the device is.
    #[getter]
    fn device(&self) -> PyResult<String> {
        Ok(self.get()?.identity().to_string())
    }

    /// Which way an all-reduce of this type takes, and why.
    fn explain(&self, dtype: u8) -> PyResult<String> {
        let dtype = DType::from_code(dtype).ok_or_else(|| {
            PyValueError::new_err(format!("no element type has the code {dtype}"))
        })?;
        Ok(self.get()?.explain(dtype).to_string())
    }

    /// Why calls go by NCCL, or through the host.
    #[getter]
    fn why(&self) -> PyResult<String> {
        Ok(self.get()?.why())
    }

    #[pyo3(signature = (stream, data, op, factor=None))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        stream: u64,
        data: OnDevice,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
    ) -> PyResult<DeviceWork> {
        let op = operator(data.slice.dtype, op, factor)?;
        let slice = data.slice;
        self.queue(py, stream, vec![data], |on, stream| on.all_reduce_on(stream, slice, op))
    }

    fn reduce(
        &self,
        py: Python<'_>,
        stream: u64,
        data: OnDevice,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
        root: usize,
    ) -> PyResult<DeviceWork> {
        let op = operator(data.slice.dtype, op, factor)?;
        let slice = data.slice;
        self.queue(py, stream, vec![data], |on, stream| on.reduce_on(stream, slice, op, root))
    }

    fn broadcast(
        &self,
        py: Python<'_>,
        stream: u64,
        data: OnDevice,
        root: usize,
    ) -> PyResult<DeviceWork> {
        let slice = data.slice;
        self.queue(py, stream, vec![data], |on, stream| on.broadcast_on(stream, slice, root))
    }

    /// `outputs` is one memory with a block for every rank, or one for each rank.
    fn all_gather(
        &self,
        py: Python<'_>,
        stream: u64,
        input: OnDevice,
        outputs: Vec<OnDevice>,
    ) -> PyResult<DeviceWork> {
        if let [output] = &outputs[..] {
            let slices = (input.slice, output.slice);
            return self.queue(py, stream, both(vec![input], outputs), |on, stream| {
                on.all_gather_on(stream, slices.0, slices.1)
            });
        }
        let (counts, input) = (counts_of(&outputs), vec![input]);
        self.queue_pieces(py, stream, input, outputs, |on, stream, input, outputs| {
            on.all_gather_v_on(stream, input, outputs, &counts)
        })
    }

    /// `inputs` is one memory with a block for every rank, or one for each rank.
    #[pyo3(signature = (stream, inputs, output, op, factor=None))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        stream: u64,
        inputs: Vec<OnDevice>,
        output: OnDevice,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
    ) -> PyResult<DeviceWork> {
        let op = operator(output.slice.dtype, op, factor)?;
        if let [input] = &inputs[..] {
            let slices = (input.slice, output.slice);
            return self.queue(py, stream, both(inputs, vec![output]), |on, stream| {
                on.reduce_scatter_on(stream, slices.0, slices.1, op)
            });
        }
        let (counts, output) = (counts_of(&inputs), vec![output]);
        self.queue_pieces(py, stream, inputs, output, |on, stream, inputs, output| {
            on.reduce_scatter_v_on(stream, inputs, &counts, output, op)
        })
    }

    /// `outputs` is empty except at the root. `counts` are the elements that each rank brings.
    #[pyo3(signature = (stream, input, outputs, root, counts=None))]
    fn gather(
        &self,
        py: Python<'_>,
        stream: u64,
        input: OnDevice,
        outputs: Vec<OnDevice>,
        root: usize,
        counts: Option<Vec<usize>>,
    ) -> PyResult<DeviceWork> {
        let counts = counts.map_or_else(|| self.even(input.slice.len()), Ok)?;
        self.queue_pieces(py, stream, vec![input], outputs, |on, stream, input, outputs| {
            on.gather_v_on(stream, input, outputs, &counts, root)
        })
    }

    /// `inputs` is empty except at the root. `counts` are the elements that each rank gets.
    #[pyo3(signature = (stream, inputs, output, root, counts=None))]
    fn scatter(
        &self,
        py: Python<'_>,
        stream: u64,
        inputs: Vec<OnDevice>,
        output: OnDevice,
        root: usize,
        counts: Option<Vec<usize>>,
    ) -> PyResult<DeviceWork> {
        let counts = counts.map_or_else(|| self.even(output.slice.len()), Ok)?;
        self.queue_pieces(py, stream, inputs, vec![output], |on, stream, inputs, output| {
            on.scatter_v_on(stream, inputs, &counts, output, root)
        })
    }

    /// Sends `send_counts[i]` elements to rank `i` and gets `recv_counts[i]` from it. Inputs and outputs are one memory
    /// each, or one for each rank.
    fn all_to_all(
        &self,
        py: Python<'_>,
        stream: u64,
        inputs: Vec<OnDevice>,
        send_counts: Vec<usize>,
        outputs: Vec<OnDevice>,
        recv_counts: Vec<usize>,
    ) -> PyResult<DeviceWork> {
        self.queue_pieces(py, stream, inputs, outputs, |on, stream, inputs, outputs| {
            on.all_to_all_v_on(stream, inputs, &send_counts, outputs, &recv_counts)
        })
    }

    /// Every rank sends block `k` of its input to rank `k`.
    fn all_to_all_single(
        &self,
        py: Python<'_>,
        stream: u64,
        input: OnDevice,
        output: OnDevice,
    ) -> PyResult<DeviceWork> {
        let slices = (input.slice, output.slice);
        self.queue(py, stream, vec![input, output], |on, stream| {
            on.all_to_all_on(stream, slices.0, slices.1)
        })
    }

    /// Reduces several memories in one call.
    #[pyo3(signature = (stream, data, op, factor=None))]
    fn all_reduce_coalesced(
        &self,
        py: Python<'_>,
        stream: u64,
        data: Vec<OnDevice>,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
    ) -> PyResult<DeviceWork> {
        let Some(first) = data.first() else { return self.barrier(py, stream) };
        let op = operator(first.slice.dtype, op, factor)?;
        let slices = slices_of(&data);
        self.queue(py, stream, data, |on, stream| {
            on.all_reduce_coalesced_on(stream, &slices, &slices, op)
        })
    }

    /// `outputs[i]` gets the inputs `i` of all ranks, by rank.
    fn all_gather_coalesced(
        &self,
        py: Python<'_>,
        stream: u64,
        inputs: Vec<OnDevice>,
        outputs: Vec<OnDevice>,
    ) -> PyResult<DeviceWork> {
        let lens = counts_of(&inputs);
        let places = self.by_rank(&outputs, &lens)?;
        let counts = self.even(lens.iter().sum())?;
        let read = slices_of(&inputs);
        self.queue(py, stream, both(inputs, outputs), |on, stream| {
            on.all_gather_v_on(stream, &read, &places, &counts)
        })
    }

    /// `outputs[i]` gets this rank's block of the sum of the inputs `i`.
    #[pyo3(signature = (stream, inputs, outputs, op, factor=None))]
    fn reduce_scatter_coalesced(
        &self,
        py: Python<'_>,
        stream: u64,
        inputs: Vec<OnDevice>,
        outputs: Vec<OnDevice>,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
    ) -> PyResult<DeviceWork> {
        let Some(first) = inputs.first() else { return self.barrier(py, stream) };
        let op = operator(first.slice.dtype, op, factor)?;
        let lens = counts_of(&outputs);
        let places = self.by_rank(&inputs, &lens)?;
        let counts = self.even(lens.iter().sum())?;
        let filled = slices_of(&outputs);
        self.queue(py, stream, both(inputs, outputs), |on, stream| {
            on.reduce_scatter_v_on(stream, &places, &counts, &filled, op)
        })
    }

    fn barrier(&self, py: Python<'_>, stream: u64) -> PyResult<DeviceWork> {
        self.queue(py, stream, Vec::new(), |on, stream| on.barrier_on(stream))
    }

    fn send(
        &self,
        py: Python<'_>,
        stream: u64,
        data: OnDevice,
        to: usize,
        tag: u64,
    ) -> PyResult<DeviceWork> {
        let slice = data.slice;
        self.queue(py, stream, vec![data], |on, stream| on.send_on(stream, slice, to, tag))
    }

    fn recv(
        &self,
        py: Python<'_>,
        stream: u64,
        data: OnDevice,
        from: usize,
        tag: u64,
    ) -> PyResult<DeviceWork> {
        let slice = data.slice;
        self.queue(py, stream, vec![data], |on, stream| on.recv_on(stream, slice, from, tag))
    }

    /// Fails all calls of this group.
    fn abort(&self, py: Python<'_>) {
        if let Ok(core) = self.get() {
            py.detach(|| core.abort());
        }
    }

    /// Leaves the other ranks when all calls have ended, after waiting for them at most `patience` seconds.
    fn leave(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        let patience = duration("patience", patience)?;
        let Some(core) = self.core.lock().unwrap_or_else(PoisonError::into_inner).take() else {
            return Ok(());
        };
        py.detach(|| core.leave(patience)).map_err(raise)
    }
}

impl DeviceGroup {
    fn get(&self) -> PyResult<Core> {
        let core = self.core.lock().unwrap_or_else(PoisonError::into_inner).clone();
        core.ok_or_else(|| PyValueError::new_err("the group of this device was left"))
    }

    /// The same number of elements for every rank.
    fn even(&self, count: usize) -> PyResult<Vec<usize>> {
        Ok(vec![count; self.get()?.world_size()])
    }

    /// The blocks of several memories, each of which has a block of `lens` elements for every rank: first all those for
    /// rank 0.
    fn by_rank(&self, memories: &[OnDevice], lens: &[usize]) -> PyResult<Vec<DeviceSlice>> {
        let ranks = self.get()?.world_size();
        if memories.len() != lens.len() {
            let problem = format!("{} memories for {} blocks", memories.len(), lens.len());
            return Err(PyValueError::new_err(problem));
        }
        let block = |rank: usize, of: &OnDevice, len: usize| {
            let DeviceSlice { place, dtype } = of.slice;
            let bytes = len * dtype.size();
            let fits = bytes.checked_mul(ranks) == Some(place.bytes);
            let place = place.part(rank * bytes..(rank + 1) * bytes).filter(|_| fits);
            let place = place.ok_or_else(|| {
                let held = of.slice.len();
                let problem =
                    format!("{held} elements are no block of {len} for each of {ranks} ranks");
                PyValueError::new_err(problem)
            })?;
            Ok(DeviceSlice::new(place, dtype))
        };
        let of_rank = |rank| memories.iter().zip(lens).map(move |(of, len)| block(rank, of, *len));
        (0..ranks).flat_map(of_rank).collect()
    }

    fn queue_pieces(
        &self,
        py: Python<'_>,
        stream: u64,
        inputs: Vec<OnDevice>,
        outputs: Vec<OnDevice>,
        call: impl FnOnce(
            &Core,
            &Arc<dyn Stream>,
            &[DeviceSlice],
            &[DeviceSlice],
        ) -> device::Result<device::DeviceWork>
        + Send,
    ) -> PyResult<DeviceWork> {
        let (read, filled) = (slices_of(&inputs), slices_of(&outputs));
        self.queue(py, stream, both(inputs, outputs), |on, stream| call(on, stream, &read, &filled))
    }

    fn queue(
        &self,
        py: Python<'_>,
        stream: u64,
        owners: Vec<OnDevice>,
        call: impl FnOnce(&Core, &Arc<dyn Stream>) -> device::Result<device::DeviceWork> + Send,
    ) -> PyResult<DeviceWork> {
        let core = self.get()?;
        queue(py, &self.device, stream, owners, |stream| call(&core, stream))
    }
}

/// Messages of a group from and to the memory of a GPU of this rank. No other rank takes part when it is made.
#[pyclass(frozen, module = "drumline._core")]
pub(crate) struct DeviceMessages {
    core: device::DeviceMessages,
    device: CudaDevice,
}

#[pymethods]
impl DeviceMessages {
    #[new]
    #[pyo3(signature = (group, ordinal=None, library=None))]
    fn new(
        py: Python<'_>,
        group: &Group,
        ordinal: Option<usize>,
        library: Option<PathBuf>,
    ) -> PyResult<DeviceMessages> {
        let (group, device) = (group.get()?, open(ordinal, library)?);
        let of_core = Arc::new(device.clone());
        let core = py.detach(|| device::DeviceMessages::new(&group, of_core)).map_err(raise)?;
        Ok(DeviceMessages { core, device })
    }

    fn send(
        &self,
        py: Python<'_>,
        stream: u64,
        data: OnDevice,
        to: usize,
        tag: u64,
    ) -> PyResult<DeviceWork> {
        let (slice, messages) = (data.slice, &self.core);
        queue(py, &self.device, stream, vec![data], |stream| {
            messages.send_on(stream, slice, to, tag)
        })
    }

    /// Receives from any rank without `from_rank`.
    #[pyo3(signature = (stream, data, from_rank, tag))]
    fn recv(
        &self,
        py: Python<'_>,
        stream: u64,
        data: OnDevice,
        from_rank: Option<usize>,
        tag: u64,
    ) -> PyResult<DeviceWork> {
        let (slice, messages) = (data.slice, &self.core);
        queue(py, &self.device, stream, vec![data], |stream| match from_rank {
            Some(from) => messages.recv_on(stream, slice, from, tag),
            None => messages.recv_any_on(stream, slice, tag),
        })
    }
}

pub(crate) fn open(ordinal: Option<usize>, library: Option<PathBuf>) -> PyResult<CudaDevice> {
    let open = || -> Result<CudaDevice, device::DriverError> {
        let driver = Driver::load(library.as_deref())?;
        driver.device(ordinal.or_else(|| driver.current_device()).unwrap_or(0))
    };
    open().map_err(|error| PyRuntimeError::new_err(error.to_string()))
}

/// Queues a call on memory that `owners` keep.
fn queue(
    py: Python<'_>,
    device: &CudaDevice,
    stream: u64,
    owners: Vec<OnDevice>,
    call: impl FnOnce(&Arc<dyn Stream>) -> device::Result<device::DeviceWork> + Send,
) -> PyResult<DeviceWork> {
    let stream = stream_of(device, stream);
    let work = py.detach(|| call(&stream)).map_err(raise)?;
    forget_ended(py);
    let owners = owners.into_iter().map(|it| it.owner).collect();
    Ok(DeviceWork { work, device: device.clone(), owners: Mutex::new(owners) })
}

fn slices_of(memories: &[OnDevice]) -> Vec<DeviceSlice> {
    memories.iter().map(|it| it.slice).collect()
}

fn counts_of(memories: &[OnDevice]) -> Vec<usize> {
    memories.iter().map(|it| it.slice.len()).collect()
}

fn both(mut inputs: Vec<OnDevice>, outputs: Vec<OnDevice>) -> Vec<OnDevice> {
    inputs.extend(outputs);
    inputs
}

/// A stream of the package's caller.
pub(crate) fn stream_of(device: &CudaDevice, raw: u64) -> Arc<dyn Stream> {
    // SAFETY: the package promises that this is a stream of the device's primary context. The program keeps it while
    // it calls, as torch keeps its streams for ever.
    unsafe { device.foreign_stream(raw) }
}

/// A call on the memory of a device. It keeps that memory until its end, also if nobody keeps this object.
#[pyclass(frozen, module = "drumline._core")]
pub(crate) struct DeviceWork {
    work: device::DeviceWork,
    device: CudaDevice,
    owners: Mutex<Vec<Py<PyAny>>>,
}

#[pymethods]
impl DeviceWork {
    /// Has what is queued in the stream from now on wait for the end.
    fn join(&self, py: Python<'_>, stream: u64) -> PyResult<()> {
        let stream = stream_of(&self.device, stream);
        py.detach(|| self.work.join(&stream)).map_err(raise)
    }

    /// Waits on the host for the end, at most `timeout` seconds. Returns whether the end has come; raises the error of
    /// a failure.
    #[pyo3(signature = (timeout=None))]
    fn wait(&self, py: Python<'_>, timeout: Option<f64>) -> PyResult<bool> {
        let limit = timeout.map(|seconds| patience("timeout", seconds)).transpose()?;
        let begun = std::time::Instant::now();
        loop {
            let left = limit.map(|limit| limit.saturating_sub(begun.elapsed()));
            let look = left.unwrap_or(signals::LOOK_EVERY).min(signals::LOOK_EVERY);
            let look = look.max(Duration::from_micros(1));
            if py.detach(|| self.work.wait_timeout(look)).map_err(raise)? {
                return Ok(true);
            }
            signals::check(py)?;
            if left.is_some_and(|left| left.is_zero()) {
                return Ok(false);
            }
        }
    }

    /// Whether the end has come, with or without an error.
    fn is_completed(&self) -> bool {
        self.work.is_done()
    }

    /// The rank that has sent what any could send, once that has ended.
    fn source(&self) -> Option<usize> {
        self.work.source()
    }

    /// The error, if the call has ended with one.
    fn error(&self) -> Option<PyErr> {
        match self.work.is_done() {
            true => self.work.wait().err().map(raise),
            false => None,
        }
    }
}

impl Drop for DeviceWork {
    fn drop(&mut self) {
        if !self.work.is_done() {
            let owners =
                std::mem::take(self.owners.get_mut().unwrap_or_else(PoisonError::into_inner));
            let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
            kept.push((self.work.clone(), owners));
        }
    }
}

/// What calls use whose objects are gone.
static KEPT: Mutex<Vec<(device::DeviceWork, Vec<Py<PyAny>>)>> = Mutex::new(Vec::new());

/// Lets go of what ended calls have used.
fn forget_ended(_py: Python<'_>) {
    let mut kept = KEPT.lock().unwrap_or_else(PoisonError::into_inner);
    let ended: Vec<_> = kept.extract_if(.., |(work, _)| work.is_done()).collect();
    // The objects' own code runs without the lock.
    drop(kept);
    drop(ended);
}
