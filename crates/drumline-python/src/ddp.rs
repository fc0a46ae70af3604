//! Makes the models of all ranks start equal: the same tensors, with rank 0's values.

use drumline::{
    DType,
    ddp::{
        Broadcast, DdpOptions, Dealing, ParameterSpec, StateDigest, UnusedParameters, adds_in_order,
    },
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
    shards: Option<(usize, u64)>,
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
    let options = match shards {
        Some((count, seed)) => options.shards(count).seed(seed),
        None => options,
    };
    signals::run(py, || drumline::ddp::verify_model(&group, &parameters, &buffers, &options))
}

/// How a rank adds the gradients of its shards, and the ranks theirs.
#[pyclass(get_all, frozen)]
pub(crate) struct Dealt {
    /// The number of shards of each rank.
    lengths: Vec<usize>,
    /// The number of sums that each rank brings.
    nodes: Vec<usize>,
    /// After each shard of this rank, how often the two topmost sums are added.
    merges_of_run: Vec<usize>,
    /// The same after each sum that the ranks bring.
    merges_of_nodes: Vec<usize>,
    /// The same after each shard, if one adds them all.
    merges_of_all: Vec<usize>,
    /// Whether an all-reduce gives the sum.
    is_all_reduce: bool,
}

/// Deals shards to the ranks of a group.
#[pyfunction]
pub(crate) fn deal(group: &Group, shards: usize) -> PyResult<Dealt> {
    let group = group.get()?;
    let (rank, world_size) = (group.rank(), group.world_size());
    let (Some(dealing), Some(to_one)) = (Dealing::new(shards, world_size), Dealing::new(shards, 1))
    else {
        let problem = format!("{shards} shards are too few for {world_size} ranks");
        return Err(PyValueError::new_err(problem));
    };
    let of_ranks = || 0..world_size;
    Ok(Dealt {
        lengths: of_ranks().map(|it| dealing.run(it).len()).collect(),
        nodes: of_ranks().map(|it| dealing.nodes(it).len()).collect(),
        merges_of_run: dealing.merges_of_run(rank),
        merges_of_nodes: dealing.merges_of_nodes(),
        merges_of_all: to_one.merges_of_run(0),
        is_all_reduce: adds_in_order(&dealing, &group),
    })
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
