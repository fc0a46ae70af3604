//! Process groups.

use std::{
    mem,
    sync::{Mutex, MutexGuard, PoisonError},
};

use drumline::{
    Element, GroupOptions, Operator, ProcessGroup, ReduceOp, Result, connect_members,
    init_process_group, init_with_store,
};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyDict};

use crate::{
    config::{config, duration},
    error::raise,
    foreign_store::any_store,
    memory::{Buffer, Factor, Input, Memory, with_element},
    signals,
    work::Work,
};

/// A process group. Operations with `background=True` return a `Work` at once.
#[pyclass(frozen, weakref, module = "drumline._core")]
pub(crate) struct Group {
    group: Mutex<Option<ProcessGroup>>,
    /// Its name, for errors when it is gone.
    name: String,
    /// The process that has made it.
    process: rustix::process::Pid,
}

/// An operation on one buffer, in both forms.
struct Call<T> {
    group: ProcessGroup,
    input: Input<T>,
    buffer: Buffer<T>,
    background: bool,
}

impl<T: Element> Call<T> {
    /// Runs `now` on this thread, or starts `later`.
    fn run(
        mut self,
        py: Python<'_>,
        now: impl FnOnce(&ProcessGroup, &[T], &mut [T]) -> Result<()> + Send,
        later: impl FnOnce(&ProcessGroup, Vec<T>, Buffer<T>) -> Result<drumline::Work<Buffer<T>>> + Send,
    ) -> PyResult<Option<Work>> {
        let (group, input) = (self.group, self.input);
        if self.background {
            return py
                .detach(|| later(&group, input.into_vec(), self.buffer))
                .map(|work| Some(Work::of(work)))
                .map_err(raise);
        }
        signals::run(py, || {
            now(&group, input.as_ref(), self.buffer.as_mut())?;
            self.buffer.deal_out();
            Ok(())
        })?;
        Ok(None)
    }
}

#[pymethods]
impl Group {
    /// Meets the other ranks as `url` says, in the group `world`.
    #[staticmethod]
    #[pyo3(signature = (url, settings=None))]
    fn init(py: Python<'_>, url: String, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Group> {
        let config = config(settings)?;
        signals::run_beside(py, move || init_process_group(&url, &config)).map(Group::new)
    }

    /// Meets the other ranks in `store`, in the group `world`.
    #[staticmethod]
    #[pyo3(signature = (store, rank, world_size, settings=None))]
    fn init_with_store(
        store: &Bound<'_, PyAny>,
        rank: usize,
        world_size: usize,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Group> {
        let (py, config, store) = (store.py(), config(settings)?, any_store(store)?);
        signals::run_beside(py, move || init_with_store(store, rank, world_size, &config))
            .map(Group::new)
    }

    /// A group of one.
    #[staticmethod]
    fn alone() -> Group {
        Group::new(ProcessGroup::alone())
    }

    /// Connects the members of a group of a job that was formed elsewhere. `ranks` are their numbers
    /// in the job.
    #[staticmethod]
    #[pyo3(signature = (name, store, rank, ranks, master=None, settings=None))]
    fn connect(
        name: String,
        store: &Bound<'_, PyAny>,
        rank: usize,
        ranks: Vec<usize>,
        master: Option<(String, u16)>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Group> {
        let (py, config, store) = (store.py(), config(settings)?, any_store(store)?);
        signals::run_beside(py, move || {
            let master = master.as_ref().and_then(resolve);
            connect_members(&name, store, rank, &ranks, master, &config)
        })
        .map(Group::new)
    }

    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn rank(&self) -> PyResult<usize> {
        Ok(self.get()?.rank())
    }

    #[getter]
    fn world_size(&self) -> PyResult<usize> {
        Ok(self.get()?.world_size())
    }

    /// The members, by their numbers in the whole job.
    #[getter]
    fn ranks(&self) -> PyResult<Vec<usize>> {
        Ok(self.get()?.ranks())
    }

    /// The time limit of operations, in seconds.
    #[getter]
    fn timeout(&self) -> PyResult<f64> {
        Ok(self.get()?.config().timeout.as_secs_f64())
    }

    /// The most bytes that an object may take.
    #[getter]
    fn object_bytes_max(&self) -> PyResult<usize> {
        Ok(self.get()?.config().object_bytes_max)
    }

    #[getter]
    fn is_destroyed(&self) -> bool {
        self.lock().is_none()
    }

    /// Sets the time limit of the operations that are called from now on, in seconds.
    fn set_timeout(&self, seconds: f64) -> PyResult<()> {
        let group = self.get()?.within(duration("timeout", seconds)?);
        *self.lock() = Some(group);
        Ok(())
    }

    /// The same group with another time limit for the operations called there, in seconds.
    fn within(&self, seconds: f64) -> PyResult<Group> {
        Ok(Group::new(self.get()?.within(duration("timeout", seconds)?)))
    }

    /// Seconds spent in operations.
    fn communication_time(&self) -> PyResult<f64> {
        Ok(self.get()?.communication_time().as_secs_f64())
    }

    /// Connects some of the members, which alone call this.
    #[pyo3(signature = (ranks, name=None, timeout=None, keep_order=false))]
    fn new_group(
        &self,
        py: Python<'_>,
        ranks: Vec<usize>,
        name: Option<String>,
        timeout: Option<f64>,
        keep_order: bool,
    ) -> PyResult<Group> {
        let (group, mut options) = (self.get()?, GroupOptions::default());
        options.name = name;
        options.timeout = timeout.map(|limit| duration("timeout", limit)).transpose()?;
        options.keep_order = keep_order;
        signals::run_beside(py, move || group.new_group(&ranks, &options)).map(Group::new)
    }

    /// Breaks the group off, on all ranks.
    fn abort(&self, py: Python<'_>) {
        if let Ok(group) = self.get() {
            py.detach(|| group.abort());
        }
    }

    /// Closes the group together with all other ranks.
    fn destroy(&self, py: Python<'_>) -> PyResult<()> {
        let Some(group) = self.take()? else { return Ok(()) };
        signals::run_beside(py, || group.destroy())
    }

    /// Closes the group, without waiting longer than so many seconds for the others.
    fn leave(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        let patience = duration("patience", patience)?;
        let Some(group) = self.take()? else { return Ok(()) };
        signals::run_beside(py, move || group.leave(patience))
    }

    /// Leaves the group without waiting for anybody.
    fn drop(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.take()?;
        py.detach(|| drop(group));
        Ok(())
    }

    /// Leaves the group as it is when the process ends: the peers see it die.
    fn forget(&self) {
        if let Some(group) = self.lock().take() {
            mem::forget(group);
        }
    }

    #[pyo3(signature = (data, op, factor=None, background=false))]
    fn all_reduce(
        &self,
        py: Python<'_>,
        data: Memory,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
        background: bool,
    ) -> PyResult<Option<Work>> {
        with_element!(data.dtype, T => {
            let op = operator::<T>(op, factor)?;
            self.call(Input::<T>::none(), Buffer::of(data), background)?.run(
                py,
                |group, _, data| group.all_reduce(data, &op),
                |group, _, data| Ok(group.all_reduce_async(data, &op)),
            )
        })
    }

    /// The sum of the ranks up to this one; `exclusive`: below it.
    #[pyo3(signature = (data, op, factor=None, exclusive=false, background=false))]
    fn scan(
        &self,
        py: Python<'_>,
        data: Memory,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
        exclusive: bool,
        background: bool,
    ) -> PyResult<Option<Work>> {
        with_element!(data.dtype, T => {
            let op = operator::<T>(op, factor)?;
            self.call(Input::<T>::none(), Buffer::of(data), background)?.run(
                py,
                |group, _, data| match exclusive {
                    true => group.exclusive_scan(data, &op),
                    false => group.scan(data, &op),
                },
                |group, _, data| Ok(match exclusive {
                    true => group.exclusive_scan_async(data, &op),
                    false => group.scan_async(data, &op),
                }),
            )
        })
    }

    #[pyo3(signature = (data, op, factor, root, background=false))]
    fn reduce(
        &self,
        py: Python<'_>,
        data: Memory,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
        root: usize,
        background: bool,
    ) -> PyResult<Option<Work>> {
        with_element!(data.dtype, T => {
            let op = operator::<T>(op, factor)?;
            self.call(Input::<T>::none(), Buffer::of(data), background)?.run(
                py,
                |group, _, data| group.reduce(data, &op, root),
                |group, _, data| group.reduce_async(data, &op, root),
            )
        })
    }

    #[pyo3(signature = (data, root, background=false))]
    fn broadcast(
        &self,
        py: Python<'_>,
        data: Memory,
        root: usize,
        background: bool,
    ) -> PyResult<Option<Work>> {
        with_element!(data.dtype, T => {
            self.call(Input::<T>::none(), Buffer::of(data), background)?.run(
                py,
                |group, _, data| group.broadcast(data, root),
                |group, _, data| group.broadcast_async(data, root),
            )
        })
    }

    /// The inputs of all ranks; `outputs` is one memory for all, or one for each rank.
    #[pyo3(signature = (input, outputs, background=false))]
    fn all_gather(
        &self,
        py: Python<'_>,
        input: Memory,
        outputs: Vec<Memory>,
        background: bool,
    ) -> PyResult<Option<Work>> {
        check_types(&input, &outputs)?;
        with_element!(input.dtype, T => {
            let input = Input::<T>::new(input, &outputs.iter().collect::<Vec<_>>());
            let counts = self.counts_of_list(&outputs)?;
            self.call(input, buffer_of_list(outputs), background)?.run(
                py,
                |group, input, output| match &counts {
                    None => group.all_gather(input, output),
                    Some(counts) => group.all_gather_v(input, output, counts),
                },
                |group, input, output| match &counts {
                    None => group.all_gather_async(input, output),
                    Some(counts) => group.all_gather_v_async(input, output, counts),
                },
            )
        })
    }

    /// `outputs` is empty but at the root. With `counts`, ranks bring so many elements each.
    #[pyo3(signature = (input, outputs, root, counts=None, background=false))]
    fn gather(
        &self,
        py: Python<'_>,
        input: Memory,
        outputs: Vec<Memory>,
        root: usize,
        counts: Option<Vec<usize>>,
        background: bool,
    ) -> PyResult<Option<Work>> {
        check_types(&input, &outputs)?;
        check_blocks("gather", input.len(), &outputs, counts.as_deref())?;
        with_element!(input.dtype, T => {
            let input = Input::<T>::new(input, &outputs.iter().collect::<Vec<_>>());
            self.call(input, buffer_of_list(outputs), background)?.run(
                py,
                |group, input, output| match &counts {
                    None => group.gather(input, output, root),
                    Some(counts) => group.gather_v(input, output, counts, root),
                },
                |group, input, output| match &counts {
                    None => group.gather_async(input, output, root),
                    Some(counts) => {
                        group.gather_v_async(input, output, counts, root)
                    }
                },
            )
        })
    }

    /// `inputs` is empty but at the root. With `counts`, ranks get so many elements each.
    #[pyo3(signature = (inputs, output, root, counts=None, background=false))]
    fn scatter(
        &self,
        py: Python<'_>,
        inputs: Vec<Memory>,
        output: Memory,
        root: usize,
        counts: Option<Vec<usize>>,
        background: bool,
    ) -> PyResult<Option<Work>> {
        check_types(&output, &inputs)?;
        check_blocks("scatter", output.len(), &inputs, counts.as_deref())?;
        with_element!(output.dtype, T => {
            let input = input_of_list::<T>(inputs, &output);
            self.call(input, Buffer::of(output), background)?.run(
                py,
                |group, input, output| match &counts {
                    None => group.scatter(input, output, root),
                    Some(counts) => group.scatter_v(input, counts, output, root),
                },
                |group, input, output| match &counts {
                    None => group.scatter_async(input, output, root),
                    Some(counts) => {
                        group.scatter_v_async(input, counts, output, root)
                    }
                },
            )
        })
    }

    /// `inputs` is one memory with a block for every rank, or one for each rank.
    #[pyo3(signature = (inputs, output, op, factor=None, background=false))]
    fn reduce_scatter(
        &self,
        py: Python<'_>,
        inputs: Vec<Memory>,
        output: Memory,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
        background: bool,
    ) -> PyResult<Option<Work>> {
        check_types(&output, &inputs)?;
        with_element!(output.dtype, T => {
            let op = operator::<T>(op, factor)?;
            let counts = self.counts_of_list(&inputs)?;
            let input = input_of_list::<T>(inputs, &output);
            self.call(input, Buffer::of(output), background)?.run(
                py,
                |group, input, output| match &counts {
                    None => group.reduce_scatter(input, output, &op),
                    Some(counts) => group.reduce_scatter_v(input, counts, output, &op),
                },
                |group, input, output| match &counts {
                    None => group.reduce_scatter_async(input, output, &op),
                    Some(counts) => {
                        group.reduce_scatter_v_async(input, counts, output, &op)
                    }
                },
            )
        })
    }

    /// Sends `send_counts[i]` elements to rank `i` and gets `recv_counts[i]` from it. Inputs and
    /// outputs are one memory each, or one for each rank.
    #[pyo3(signature = (inputs, send_counts, outputs, recv_counts, background=false))]
    fn all_to_all(
        &self,
        py: Python<'_>,
        inputs: Vec<Memory>,
        send_counts: Vec<usize>,
        outputs: Vec<Memory>,
        recv_counts: Vec<usize>,
        background: bool,
    ) -> PyResult<Option<Work>> {
        let Some(first) = inputs.first() else {
            return Err(PyValueError::new_err("all_to_all: there is no input"));
        };
        check_types(first, &inputs)?;
        check_types(first, &outputs)?;
        with_element!(first.dtype, T => {
            let input = match <[Memory; 1]>::try_from(inputs) {
                Ok([input]) => Input::<T>::new(input, &outputs.iter().collect::<Vec<_>>()),
                Err(inputs) => Input::joined(&inputs),
            };
            self.call(input, buffer_of_list(outputs), background)?.run(
                py,
                |group, input, output| {
                    group.all_to_all_v(input, &send_counts, output, &recv_counts)
                },
                |group, input, output| {
                    group.all_to_all_v_async(input, &send_counts, output, &recv_counts)
                },
            )
        })
    }

    /// Several buffers in one operation.
    #[pyo3(signature = (data, op, factor=None, background=false))]
    fn all_reduce_coalesced(
        &self,
        py: Python<'_>,
        data: Vec<Memory>,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
        background: bool,
    ) -> PyResult<Option<Work>> {
        let Some(dtype) = check_list(&data)? else { return self.barrier(py, background) };
        with_element!(dtype, T => {
            let (group, op) = (self.get()?, operator::<T>(op, factor)?);
            let buffers = data.into_iter().map(Buffer::<T>::of).collect();
            finish(py, background, py.detach(|| group.all_reduce_coalesced_async(buffers, &op)))
        })
    }

    #[pyo3(signature = (inputs, outputs, background=false))]
    fn all_gather_coalesced(
        &self,
        py: Python<'_>,
        inputs: Vec<Memory>,
        outputs: Vec<Memory>,
        background: bool,
    ) -> PyResult<Option<Work>> {
        let Some(dtype) = check_list(&inputs)? else { return self.barrier(py, background) };
        check_types(&inputs[0], &outputs)?;
        with_element!(dtype, T => {
            let group = self.get()?;
            let buffers = outputs.into_iter().map(Buffer::<T>::of).collect();
            let inputs: Vec<Input<T>> = inputs.into_iter().map(Input::Lent).collect();
            let work = py.detach(|| {
                let inputs: Vec<&[T]> = inputs.iter().map(AsRef::as_ref).collect();
                group.all_gather_coalesced_async(&inputs, buffers)
            });
            finish(py, background, work.map_err(raise)?)
        })
    }

    #[pyo3(signature = (inputs, outputs, op, factor=None, background=false))]
    fn reduce_scatter_coalesced(
        &self,
        py: Python<'_>,
        inputs: Vec<Memory>,
        outputs: Vec<Memory>,
        op: &str,
        factor: Option<Bound<'_, PyAny>>,
        background: bool,
    ) -> PyResult<Option<Work>> {
        let Some(dtype) = check_list(&inputs)? else { return self.barrier(py, background) };
        check_types(&inputs[0], &outputs)?;
        with_element!(dtype, T => {
            let (group, op) = (self.get()?, operator::<T>(op, factor)?);
            let buffers = outputs.into_iter().map(Buffer::<T>::of).collect();
            let inputs: Vec<Input<T>> = inputs.into_iter().map(Input::Lent).collect();
            let work = py.detach(|| {
                let inputs: Vec<&[T]> = inputs.iter().map(AsRef::as_ref).collect();
                group.reduce_scatter_coalesced_async(&inputs, buffers, &op)
            });
            finish(py, background, work.map_err(raise)?)
        })
    }

    #[pyo3(signature = (background=false))]
    fn barrier(&self, py: Python<'_>, background: bool) -> PyResult<Option<Work>> {
        let group = self.get()?;
        if background {
            return Ok(Some(Work::of(py.detach(|| group.barrier_async()))));
        }
        signals::run(py, || group.barrier()).map(|()| None)
    }

    /// A barrier that names all ranks that have not come after so many seconds.
    fn monitored_barrier(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let (group, timeout) = (self.get()?, duration("timeout", timeout)?);
        signals::run(py, || group.monitored_barrier(timeout))
    }

    /// Always in the background.
    fn send(&self, py: Python<'_>, data: Memory, to: usize, tag: u64) -> PyResult<Work> {
        with_element!(data.dtype, T => {
            let group = self.get()?;
            let buffer = Buffer::<T>::of(data);
            py.detach(|| group.send_async(buffer, to, tag)).map(Work::of).map_err(raise)
        })
    }

    /// Always in the background. Without `from`, from any rank.
    #[pyo3(signature = (data, from_rank, tag))]
    fn recv(
        &self,
        py: Python<'_>,
        data: Memory,
        from_rank: Option<usize>,
        tag: u64,
    ) -> PyResult<Work> {
        with_element!(data.dtype, T => {
            let group = self.get()?;
            let buffer = Buffer::<T>::of(data);
            let work = py.detach(|| match from_rank {
                Some(from) => group.recv_async(buffer, from, tag).map(Work::of),
                None => group.recv_any_async(buffer, tag).map(Work::of),
            });
            work.map_err(raise)
        })
    }

    fn __repr__(&self) -> String {
        match self.get() {
            Ok(group) => format!(
                "<drumline group {:?}, rank {} of {}>",
                self.name,
                group.rank(),
                group.world_size()
            ),
            Err(_) => format!("<drumline group {:?}, destroyed>", self.name),
        }
    }
}

impl Group {
    fn new(group: ProcessGroup) -> Group {
        let (name, process) = (group.name().to_owned(), rustix::process::getpid());
        Group { group: Mutex::new(Some(group)), name, process }
    }

    fn lock(&self) -> MutexGuard<'_, Option<ProcessGroup>> {
        self.group.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn get(&self) -> PyResult<ProcessGroup> {
        self.check_process()?;
        self.lock().clone().ok_or_else(|| {
            PyValueError::new_err(format!("group {:?} has been destroyed", self.name))
        })
    }

    fn take(&self) -> PyResult<Option<ProcessGroup>> {
        self.check_process()?;
        Ok(self.lock().take())
    }

    /// A forked process shares the connections of its parent, which must not hear from both.
    fn check_process(&self) -> PyResult<()> {
        let process = rustix::process::getpid();
        if process == self.process {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "group {:?} belongs to process {}, of which this process ({process}) is a fork: make a \
             group after the fork, or start processes by `spawn`",
            self.name, self.process
        )))
    }

    fn call<T>(&self, input: Input<T>, buffer: Buffer<T>, background: bool) -> PyResult<Call<T>> {
        Ok(Call { group: self.get()?, input, buffer, background })
    }

    /// How a list with a memory for each rank divides its elements; `None` for one memory of even
    /// blocks.
    fn counts_of_list(&self, list: &[Memory]) -> PyResult<Option<Vec<usize>>> {
        let is_list = list.len() > 1 || self.get()?.world_size() == 1;
        Ok(is_list.then(|| list.iter().map(Memory::len).collect()))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let group = self.lock().take();
        match rustix::process::getpid() == self.process {
            true => drop(group),
            // The parent goes on with it: no goodbye from here.
            false => mem::forget(group),
        }
    }
}

fn resolve((host, port): &(String, u16)) -> Option<std::net::SocketAddr> {
    std::net::ToSocketAddrs::to_socket_addrs(&(host.as_str(), *port)).ok()?.next()
}

fn operator<T: Factor>(op: &str, factor: Option<Bound<'_, PyAny>>) -> PyResult<Operator<T>> {
    match (op, factor) {
        ("premul_sum", Some(factor)) => Ok(Operator::premul_sum(T::from_python(&factor)?)),
        ("premul_sum", None) => Err(PyValueError::new_err("premul_sum needs a factor")),
        (op, _) => {
            let op = op.parse::<ReduceOp>();
            Ok(op.map_err(|error| PyValueError::new_err(error.to_string()))?.into())
        }
    }
}

fn buffer_of_list<T: Element>(list: Vec<Memory>) -> Buffer<T> {
    match <[Memory; 1]>::try_from(list) {
        Ok([memory]) => Buffer::of(memory),
        Err(list) => Buffer::gathered(list),
    }
}

fn input_of_list<T: Element>(list: Vec<Memory>, output: &Memory) -> Input<T> {
    match <[Memory; 1]>::try_from(list) {
        Ok([memory]) => Input::new(memory, &[output]),
        Err(list) => Input::joined(&list),
    }
}

fn check_types(one: &Memory, others: &[Memory]) -> PyResult<()> {
    match others.iter().find(|other| other.dtype != one.dtype) {
        None => Ok(()),
        Some(other) => Err(PyValueError::new_err(format!(
            "the buffers of one call have different types, {} and {}",
            one.dtype, other.dtype
        ))),
    }
}

/// The type of several buffers, none of which are in the same place.
fn check_list(list: &[Memory]) -> PyResult<Option<drumline::DType>> {
    let Some(first) = list.first() else { return Ok(None) };
    check_types(first, list)?;
    Ok(Some(first.dtype))
}

/// Where all ranks bring or get equally many elements, so do those in the list.
fn check_blocks(
    operation: &str,
    block: usize,
    list: &[Memory],
    counts: Option<&[usize]>,
) -> PyResult<()> {
    if counts.is_some() || list.len() < 2 || list.iter().all(|memory| memory.len() == block) {
        return Ok(());
    }
    let lengths: Vec<usize> = list.iter().map(Memory::len).collect();
    Err(PyValueError::new_err(format!(
        "{operation}: the buffers of the list have {lengths:?} elements, but this rank's has {block}"
    )))
}

/// Waits for the operation, unless it may go on in the background.
fn finish<T: Element>(
    py: Python<'_>,
    background: bool,
    work: drumline::Work<Vec<Buffer<T>>>,
) -> PyResult<Option<Work>> {
    if background {
        return Ok(Some(Work::of(work)));
    }
    signals::run(py, || work.wait().map(drop))?;
    Ok(None)
}
