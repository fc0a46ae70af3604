//! The collectives and messages of process groups.

use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    call::{
        Prepared, buffer_of_list, check_blocks, check_list, check_types, finish, input_of_list,
        operator,
    },
    config::duration,
    group::Group,
    memory::{Buffer, Input, Memory, with_element},
    signals,
    work::Work,
};

#[pymethods]
impl Group {
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
            self.prepare(Input::<T>::none(), Buffer::of(data), background)?.run(
                py,
                |group, _, data| group.all_reduce(data, &op),
                |group, _, data| group.all_reduce_async(data, &op),
            )
        })
    }

    /// Reduces the data of the ranks up to this one; with `exclusive`, of the ranks below it.
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
            self.prepare(Input::<T>::none(), Buffer::of(data), background)?.run(
                py,
                |group, _, data| match exclusive {
                    true => group.exclusive_scan(data, &op),
                    false => group.scan(data, &op),
                },
                |group, _, data| match exclusive {
                    true => group.exclusive_scan_async(data, &op),
                    false => group.scan_async(data, &op),
                },
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
            self.prepare(Input::<T>::none(), Buffer::of(data), background)?.run(
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
            self.prepare(Input::<T>::none(), Buffer::of(data), background)?.run(
                py,
                |group, _, data| group.broadcast(data, root),
                |group, _, data| group.broadcast_async(data, root),
            )
        })
    }

    /// Gathers the inputs of all ranks. `outputs` is one memory for all, or one for each rank.
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
            let counts = self.counts_of_list(&outputs, input.len())?;
            let input = Input::<T>::new(input, &outputs.iter().collect::<Vec<_>>());
            self.prepare(input, buffer_of_list(outputs), background)?.run(
                py,
                |group, input, output| group.all_gather_v(input, output, &counts),
                |group, input, output| group.all_gather_v_async(input, output, &counts),
            )
        })
    }

    /// `outputs` is empty except at the root. `counts` are the elements that each rank brings.
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
        let counts = self.counts_or_even("gather", counts, &outputs, input.len())?;
        with_element!(input.dtype, T => {
            let input = Input::<T>::new(input, &outputs.iter().collect::<Vec<_>>());
            self.prepare(input, buffer_of_list(outputs), background)?.run(
                py,
                |group, input, output| group.gather_v(input, output, &counts, root),
                |group, input, output| group.gather_v_async(input, output, &counts, root),
            )
        })
    }

    /// `inputs` is empty except at the root. `counts` are the elements that each rank gets.
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
        let counts = self.counts_or_even("scatter", counts, &inputs, output.len())?;
        with_element!(output.dtype, T => {
            let input = input_of_list::<T>(inputs, &output);
            self.prepare(input, Buffer::of(output), background)?.run(
                py,
                |group, input, output| group.scatter_v(input, &counts, output, root),
                |group, input, output| group.scatter_v_async(input, &counts, output, root),
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
            let counts = self.counts_of_list(&inputs, output.len())?;
            let input = input_of_list::<T>(inputs, &output);
            self.prepare(input, Buffer::of(output), background)?.run(
                py,
                |group, input, output| group.reduce_scatter_v(input, &counts, output, &op),
                |group, input, output| group.reduce_scatter_v_async(input, &counts, output, &op),
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
            self.prepare(input, buffer_of_list(outputs), background)?.run(
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

    /// Reduces several buffers in one call.
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
            finish(py, background, py.detach(|| group.torch_spelling().all_reduce_coalesced_async(buffers, &op)))
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
                group.torch_spelling().all_gather_coalesced_async(&inputs, buffers)
            });
            finish(py, background, work)
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
                group.torch_spelling().reduce_scatter_coalesced_async(&inputs, buffers, &op)
            });
            finish(py, background, work)
        })
    }

    #[pyo3(signature = (background=false))]
    fn barrier(&self, py: Python<'_>, background: bool) -> PyResult<Option<Work>> {
        let group = self.get()?;
        if background {
            return Work::of(py.detach(|| group.barrier_async())).map(Some);
        }
        signals::run(py, || group.barrier()).map(|()| None)
    }

    /// A barrier whose error names all ranks that have not come within `timeout` seconds.
    fn monitored_barrier(&self, py: Python<'_>, timeout: f64) -> PyResult<()> {
        let (group, timeout) = (self.get()?, duration("timeout", timeout)?);
        signals::run(py, || group.monitored_barrier(timeout))
    }

    /// Sends in the background.
    fn send(&self, py: Python<'_>, data: Memory, to: usize, tag: u64) -> PyResult<Work> {
        with_element!(data.dtype, T => {
            let group = self.get()?;
            let buffer = Buffer::<T>::of(data);
            Work::of(py.detach(|| group.send_async(buffer, to, tag)))
        })
    }

    /// Receives in the background, from any rank without `from_rank`.
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
            match from_rank {
                Some(from) => Work::of(py.detach(|| group.recv_async(buffer, from, tag))),
                None => Work::of(py.detach(|| group.recv_any_async(buffer, tag))),
            }
        })
    }
}

impl Group {
    fn prepare<T>(
        &self,
        input: Input<T>,
        buffer: Buffer<T>,
        background: bool,
    ) -> PyResult<Prepared<T>> {
        Ok(Prepared { group: self.get()?, input, buffer, background })
    }

    /// The number of elements of each rank: the length of its entry in the list, or `own` for every rank
    /// if the list is one memory for all.
    fn counts_of_list(&self, list: &[Memory], own: usize) -> PyResult<Vec<usize>> {
        match (list, self.get()?.world_size()) {
            ([_], ranks) if ranks > 1 => Ok(vec![own; ranks]),
            _ => Ok(list.iter().map(Memory::len).collect()),
        }
    }

    /// The same where only the root has the list: without `counts`, `own` elements for every rank.
    fn counts_or_even(
        &self,
        operation: &str,
        counts: Option<Vec<usize>>,
        list: &[Memory],
        own: usize,
    ) -> PyResult<Vec<usize>> {
        if let Some(counts) = counts {
            return Ok(counts);
        }
        check_blocks(operation, own, list)?;
        Ok(vec![own; self.get()?.world_size()])
    }
}
