//! The collectives and messages of process groups.

use drumline::{
    backend::Collective,
    driving::{Ask, recv_any_bytes, recv_bytes, send_bytes},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    call::{buffer_of_list, check_blocks, check_types, input_of_list, operator},
    config::duration,
    group::Group,
    memory::{Buffer, Input, Memory},
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
        let ask = Ask::new(Collective::AllReduce, data.dtype).by(operator(data.dtype, op, factor)?);
        self.carry_out(py, ask, Input::none(), Buffer::of(data), background)
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
        let ask = Ask::new(Collective::Reduce, data.dtype).by(operator(data.dtype, op, factor)?);
        self.carry_out(py, ask.at(root), Input::none(), Buffer::of(data), background)
    }

    #[pyo3(signature = (data, root, background=false))]
    fn broadcast(
        &self,
        py: Python<'_>,
        data: Memory,
        root: usize,
        background: bool,
    ) -> PyResult<Option<Work>> {
        let ask = Ask::new(Collective::Broadcast, data.dtype).at(root);
        self.carry_out(py, ask, Input::none(), Buffer::of(data), background)
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
        let counts = self.counts_of_list(&outputs, input.len())?;
        let ask = Ask::new(Collective::AllGather, input.dtype).in_blocks(&counts);
        let input = Input::new(input, &outputs.iter().collect::<Vec<_>>());
        self.carry_out(py, ask, input, buffer_of_list(outputs), background)
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
        let ask = Ask::new(Collective::Gather, input.dtype).in_blocks(&counts).at(root);
        let input = Input::new(input, &outputs.iter().collect::<Vec<_>>());
        self.carry_out(py, ask, input, buffer_of_list(outputs), background)
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
        let ask = Ask::new(Collective::Scatter, output.dtype).in_blocks(&counts).at(root);
        let input = input_of_list(inputs, &output);
        self.carry_out(py, ask, input, Buffer::of(output), background)
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
        let op = operator(output.dtype, op, factor)?;
        let counts = self.counts_of_list(&inputs, output.len())?;
        let ask = Ask::new(Collective::ReduceScatter, output.dtype).by(op).in_blocks(&counts);
        let input = input_of_list(inputs, &output);
        self.carry_out(py, ask, input, Buffer::of(output), background)
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
        let ask = Ask::new(Collective::AllToAll, first.dtype);
        let ask = ask.in_blocks((&send_counts, &recv_counts));
        let input = match <[Memory; 1]>::try_from(inputs) {
            Ok([input]) => Input::new(input, &outputs.iter().collect::<Vec<_>>()),
            Err(inputs) => Input::joined(&inputs),
        };
        self.carry_out(py, ask, input, buffer_of_list(outputs), background)
    }

    #[pyo3(signature = (background=false))]
    pub(crate) fn barrier(&self, py: Python<'_>, background: bool) -> PyResult<Option<Work>> {
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
        let (group, dtype, buffer) = (self.get()?, data.dtype, Buffer::of(data));
        Work::of(py.detach(|| send_bytes(&group, dtype, buffer, to, tag)))
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
        let (group, dtype, buffer) = (self.get()?, data.dtype, Buffer::of(data));
        match from_rank {
            Some(from) => Work::of(py.detach(|| recv_bytes(&group, dtype, buffer, from, tag))),
            None => Work::of(py.detach(|| recv_any_bytes(&group, dtype, buffer, tag))),
        }
    }
}

impl Group {
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
