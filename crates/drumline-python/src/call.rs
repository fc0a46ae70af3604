//! One call from Python on its way to the core.

use drumline::{
    DType, Error,
    driving::{AnyOperator, Ask, Number},
};
use pyo3::{
    exceptions::{PyOverflowError, PyValueError},
    prelude::*,
};

use crate::{
    group::Group,
    memory::{Buffer, Input, Memory},
    signals,
    work::Work,
};

impl Group {
    /// Carries the call out on this thread, or begins it in the background.
    pub(crate) fn carry_out(
        &self,
        py: Python<'_>,
        ask: Ask<'_>,
        input: Input,
        mut buffer: Buffer,
        background: bool,
    ) -> PyResult<Option<Work>> {
        let group = self.get()?;
        if background {
            return Work::of(py.detach(|| ask.begin(&group, buffer, input))).map(Some);
        }
        signals::run(py, || {
            ask.run(&group, buffer.as_mut(), input.as_ref())?;
            buffer.deal_out();
            Ok::<_, Error>(())
        })?;
        Ok(None)
    }
}

/// The operator `op` for elements of this type, with the factor that a premul_sum has.
pub(crate) fn operator(
    dtype: DType,
    op: &str,
    factor: Option<Bound<'_, PyAny>>,
) -> PyResult<AnyOperator> {
    match (op, factor) {
        ("premul_sum", Some(factor)) => {
            let is_whole = !dtype.is_float() && !dtype.is_complex();
            let number = match is_whole {
                true => Number::Integer(factor.extract()?),
                false => Number::Float(factor.extract()?),
            };
            let element = (dtype.kernels().element)(number).ok_or_else(|| {
                PyOverflowError::new_err(format!("the factor {factor} is no element of {dtype}"))
            })?;
            Ok(AnyOperator::premul_sum(dtype, &element[..dtype.size()]))
        }
        ("premul_sum", None) => Err(PyValueError::new_err("premul_sum needs a factor")),
        (op, _) => Ok(builtin(op)?.into()),
    }
}

/// The operator of the library with this name.
pub(crate) fn builtin(op: &str) -> PyResult<drumline::ReduceOp> {
    let op = op.parse::<drumline::ReduceOp>();
    op.map_err(|error| PyValueError::new_err(error.to_string()))
}

pub(crate) fn buffer_of_list(list: Vec<Memory>) -> Buffer {
    match <[Memory; 1]>::try_from(list) {
        Ok([memory]) => Buffer::of(memory),
        Err(list) => Buffer::gathered(list),
    }
}

pub(crate) fn input_of_list(list: Vec<Memory>, output: &Memory) -> Input {
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
