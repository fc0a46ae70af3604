//! One call from Python on its way to the core.

use drumline::{Begun, DType, Element, Error, Operator, ProcessGroup, ReduceOp, Result};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    memory::{Buffer, Factor, Input, Memory},
    signals,
    work::Work,
};

/// A call with its group and its buffers, to run on this thread or in the background.
pub(crate) struct Prepared<T> {
    pub(crate) group: ProcessGroup,
    pub(crate) input: Input<T>,
    pub(crate) buffer: Buffer<T>,
    pub(crate) background: bool,
}

impl<T: Element> Prepared<T> {
    /// Runs `now` on this thread, or starts `later` in the background.
    pub(crate) fn run(
        mut self,
        py: Python<'_>,
        now: impl FnOnce(&ProcessGroup, &[T], &mut [T]) -> Result<()> + Send,
        later: impl FnOnce(&ProcessGroup, Input<T>, Buffer<T>) -> Begun<Buffer<T>> + Send,
    ) -> PyResult<Option<Work>> {
        let (group, input) = (self.group, self.input);
        if self.background {
            return Work::of(py.detach(|| later(&group, input, self.buffer))).map(Some);
        }
        signals::run(py, || {
            now(&group, input.as_ref(), self.buffer.as_mut())?;
            self.buffer.deal_out();
            Ok::<_, Error>(())
        })?;
        Ok(None)
    }
}

pub(crate) fn operator<T: Factor>(
    op: &str,
    factor: Option<Bound<'_, PyAny>>,
) -> PyResult<Operator<T>> {
    match (op, factor) {
        ("premul_sum", Some(factor)) => Ok(Operator::premul_sum(T::from_python(&factor)?)),
        ("premul_sum", None) => Err(PyValueError::new_err("premul_sum needs a factor")),
        (op, _) => {
            let op = op.parse::<ReduceOp>();
            Ok(op.map_err(|error| PyValueError::new_err(error.to_string()))?.into())
        }
    }
}

pub(crate) fn buffer_of_list<T: Element>(list: Vec<Memory>) -> Buffer<T> {
    match <[Memory; 1]>::try_from(list) {
        Ok([memory]) => Buffer::of(memory),
        Err(list) => Buffer::gathered(list),
    }
}

pub(crate) fn input_of_list<T: Element>(list: Vec<Memory>, output: &Memory) -> Input<T> {
    match <[Memory; 1]>::try_from(list) {
        Ok([memory]) => Input::new(memory, &[output]),
        Err(list) => Input::joined(&list),
    }
}

pub(crate) fn check_types(one: &Memory, others: &[Memory]) -> PyResult<()> {
    match others.iter().find(|other| other.dtype != one.dtype) {
        None => Ok(()),
        Some(other) => Err(PyValueError::new_err(format!(
            "the buffers of one call have different types, {} and {}",
            one.dtype, other.dtype
        ))),
    }
}

/// The element type of all buffers in the list; `None` for an empty list.
pub(crate) fn check_list(list: &[Memory]) -> PyResult<Option<DType>> {
    let Some(first) = list.first() else { return Ok(None) };
    check_types(first, list)?;
    Ok(Some(first.dtype))
}

/// Fails if a buffer of the list does not have `block` elements: without `counts`, all ranks bring and get
/// the same number.
pub(crate) fn check_blocks(operation: &str, block: usize, list: &[Memory]) -> PyResult<()> {
    if list.len() < 2 || list.iter().all(|memory| memory.len() == block) {
        return Ok(());
    }
    let lengths: Vec<usize> = list.iter().map(Memory::len).collect();
    Err(PyValueError::new_err(format!(
        "{operation}: the buffers of the list have {lengths:?} elements, but this rank's has {block}"
    )))
}

/// Waits for the call, unless it runs in the background.
pub(crate) fn finish<T: Element>(
    py: Python<'_>,
    background: bool,
    begun: Begun<Vec<Buffer<T>>>,
) -> PyResult<Option<Work>> {
    if background {
        return Work::of(begun).map(Some);
    }
    signals::run(py, || {
        begun?.wait()?.iter_mut().for_each(Buffer::deal_out);
        Ok::<_, Error>(())
    })?;
    Ok(None)
}
