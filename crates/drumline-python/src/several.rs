//! Collectives on several buffers of a rank, each of which counts as a member of its own.

use drumline::{DType, ReduceOp};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    call::{check_list, finish},
    group::Group,
    memory::{Buffer, Input, Memory, with_element},
    work::Work,
};

#[pymethods]
impl Group {
    #[pyo3(signature = (buffers, op, background=false))]
    fn all_reduce_multi(
        &self,
        py: Python<'_>,
        buffers: Vec<Memory>,
        op: &str,
        background: bool,
    ) -> PyResult<Option<Work>> {
        with_element!(type_of("all_reduce_multigpu", &buffers)?, T => {
            let (group, op, buffers) = (self.get()?, operator(op)?, plain::<T>(buffers));
            let work = py.detach(|| group.torch_spelling().all_reduce_multi_async(buffers, op));
            finish(py, background, work)
        })
    }

    #[pyo3(signature = (buffers, op, root, root_buffer, background=false))]
    fn reduce_multi(
        &self,
        py: Python<'_>,
        buffers: Vec<Memory>,
        op: &str,
        root: usize,
        root_buffer: usize,
        background: bool,
    ) -> PyResult<Option<Work>> {
        with_element!(type_of("reduce_multigpu", &buffers)?, T => {
            let (group, op, buffers) = (self.get()?, operator(op)?, plain::<T>(buffers));
            let work = py.detach(|| {
                group.torch_spelling().reduce_multi_async(buffers, op, root, root_buffer)
            });
            finish(py, background, work)
        })
    }

    #[pyo3(signature = (buffers, root, root_buffer, background=false))]
    fn broadcast_multi(
        &self,
        py: Python<'_>,
        buffers: Vec<Memory>,
        root: usize,
        root_buffer: usize,
        background: bool,
    ) -> PyResult<Option<Work>> {
        with_element!(type_of("broadcast_multigpu", &buffers)?, T => {
            let (group, buffers) = (self.get()?, plain::<T>(buffers));
            let work = py.detach(|| {
                group.torch_spelling().broadcast_multi_async(buffers, root, root_buffer)
            });
            finish(py, background, work)
        })
    }

    /// Each list of `outputs` gets block `k * n + j`, input `j` of rank `k`, in place `k * n + j`.
    #[pyo3(signature = (inputs, outputs, background=false))]
    fn all_gather_multi(
        &self,
        py: Python<'_>,
        inputs: Vec<Memory>,
        outputs: Vec<Vec<Memory>>,
        background: bool,
    ) -> PyResult<Option<Work>> {
        let dtype = type_of("all_gather_multigpu", &inputs)?;
        for list in &outputs {
            same_type("all_gather_multigpu", dtype, list)?;
        }
        with_element!(dtype, T => {
            let group = self.get()?;
            let outputs = outputs.into_iter().map(Buffer::<T>::gathered).collect();
            let inputs: Vec<Input<T>> = inputs.into_iter().map(Input::Lent).collect();
            let work = py.detach(|| {
                let inputs: Vec<&[T]> = inputs.iter().map(AsRef::as_ref).collect();
                group.torch_spelling().all_gather_multi_async(&inputs, outputs)
            });
            finish(py, background, work)
        })
    }

    /// Output `j` of rank `k` gets the reduction of entry `k * n + j` of all lists of all ranks.
    #[pyo3(signature = (inputs, outputs, op, background=false))]
    fn reduce_scatter_multi(
        &self,
        py: Python<'_>,
        inputs: Vec<Vec<Memory>>,
        outputs: Vec<Memory>,
        op: &str,
        background: bool,
    ) -> PyResult<Option<Work>> {
        let dtype = type_of("reduce_scatter_multigpu", &outputs)?;
        for list in &inputs {
            same_type("reduce_scatter_multigpu", dtype, list)?;
        }
        with_element!(dtype, T => {
            let (group, op, outputs) = (self.get()?, operator(op)?, plain::<T>(outputs));
            let inputs: Vec<Input<T>> = inputs.iter().map(|list| Input::joined(list)).collect();
            let work = py.detach(|| {
                let inputs: Vec<&[T]> = inputs.iter().map(AsRef::as_ref).collect();
                group.torch_spelling().reduce_scatter_multi_async(&inputs, outputs, op)
            });
            finish(py, background, work)
        })
    }
}

fn plain<T: drumline::Element>(buffers: Vec<Memory>) -> Vec<Buffer<T>> {
    buffers.into_iter().map(Buffer::of).collect()
}

fn type_of(operation: &str, buffers: &[Memory]) -> PyResult<DType> {
    check_list(buffers)?.ok_or_else(|| {
        PyValueError::new_err(format!("{operation}: the list has no array, and it needs one"))
    })
}

fn same_type(operation: &str, dtype: DType, buffers: &[Memory]) -> PyResult<()> {
    match type_of(operation, buffers)? == dtype {
        true => Ok(()),
        false => Err(PyValueError::new_err(format!(
            "{operation}: some arrays have elements of type {}, others of type {dtype}",
            buffers[0].dtype
        ))),
    }
}

fn operator(op: &str) -> PyResult<ReduceOp> {
    op.parse::<ReduceOp>().map_err(|error| PyValueError::new_err(error.to_string()))
}
