//! Makes the models of all ranks start equal: the same tensors, with rank 0's values.

use drumline::{
    DType,
    ddp::{Broadcast, DdpOptions, ParameterSpec, StateDigest, UnusedParameters},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{group::Group, memory::Memory, signals};

/// Name, shape and code of the type.
type Spec = (String, Vec<usize>, u8);

/// Compares the models of all ranks. If they differ, every rank raises an error that names the rank and
/// the tensor or option.
#[pyfunction]
pub(crate) fn verify_model(
    py: Python<'_>,
    group: &Group,
    parameters: Vec<Spec>,
    buffers: Vec<Spec>,
    bucket_bytes: usize,
    ignores_unused: bool,
) -> PyResult<()> {
    let (group, parameters, buffers) = (group.get()?, specs(parameters)?, specs(buffers)?);
    let unused = match ignores_unused {
        true => UnusedParameters::Ignore,
        false => UnusedParameters::Error,
    };
    let options = DdpOptions::default()
        .first_bucket_bytes(bucket_bytes)
        .bucket_bytes(bucket_bytes)
        .unused_parameters(unused);
    signals::run(py, || drumline::ddp::verify_model(&group, &parameters, &buffers, &options))
}

/// Gives the bytes of `tensors` on rank 0 to all ranks. All ranks pass the same lengths.
#[pyfunction]
pub(crate) fn broadcast(py: Python<'_>, group: &Group, mut tensors: Vec<Memory>) -> PyResult<()> {
    check_bytes("broadcast", &tensors)?;
    let group = group.get()?;
    signals::run(py, || {
        let total_bytes = tensors.iter().map(Memory::len).sum();
        let mut broadcast = Broadcast::new(&group, total_bytes);
        tensors.iter_mut().try_for_each(|tensor| broadcast.tensor(tensor.bytes_mut()))?;
        broadcast.finish()
    })
}

/// A digest of the bytes of each tensor, equal on all ranks if these are.
#[pyfunction]
pub(crate) fn digests(py: Python<'_>, tensors: Vec<Memory>) -> PyResult<Vec<i64>> {
    check_bytes("digests", &tensors)?;
    let digest = |tensor: &Memory| {
        let mut digest = StateDigest::default();
        digest.tensor(&ParameterSpec::new("", [tensor.len()], DType::U8), tensor.bytes());
        digest.finish() as i64
    };
    Ok(py.detach(|| tensors.iter().map(digest).collect()))
}

fn check_bytes(operation: &str, tensors: &[Memory]) -> PyResult<()> {
    match tensors.iter().find(|tensor| tensor.dtype != DType::U8) {
        None => Ok(()),
        Some(other) => {
            let problem = format!("{operation} takes bytes, not elements of type {}", other.dtype);
            Err(PyValueError::new_err(problem))
        }
    }
}

fn specs(tensors: Vec<Spec>) -> PyResult<Vec<ParameterSpec>> {
    let spec = |(name, shape, code)| match DType::from_code(code) {
        Some(dtype) => Ok(ParameterSpec::new(name, shape, dtype)),
        None => Err(PyValueError::new_err(format!("no element type has the code {code}"))),
    };
    tensors.into_iter().map(spec).collect()
}
