//! Carries cases out with the collectives of a [`ProcessGroup`].

use bytemuck::Pod;
use drumline::{Element, ProcessGroup, Result};
use drumline_schedule::Topology;

use crate::{
    Case, Kind,
    value::{by_type, read_all},
    world::WRONG,
};

/// In which of its forms a collective is called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// It returns when this rank's part is done.
    Blocking,
    /// It takes its buffers, and gives them back when it is waited for.
    Async,
    /// Its data lies in memory that neighbours reach.
    Registered,
    /// Where the usual form works in place: from one buffer to another.
    OutOfPlace,
}

impl Form {
    /// All of them.
    pub const ALL: [Form; 4] = [Form::Blocking, Form::Async, Form::Registered, Form::OutOfPlace];

    /// Whether a collective has this form.
    pub fn is_of(self, kind: Kind) -> bool {
        match self {
            Form::Blocking | Form::Async => true,
            Form::Registered => kind != Kind::Barrier,
            Form::OutOfPlace => matches!(kind, Kind::AllReduce(_) | Kind::Reduce(..)),
        }
    }
}

/// Makes the call on this rank and compares what comes out.
///
/// # Errors
///
/// What the call said, or what is wrong with its result.
pub fn check(case: &Case, form: Form, group: &ProcessGroup) -> Result<(), String> {
    let (rank, world_size) = (group.rank(), group.world_size());
    let buffers = case.buffers(rank, world_size);
    let found = by_type!(case.dtype, perform(case, form, group, &buffers.data, &buffers.input))
        .map_err(|error| format!("{case:?}, {form:?}: {error}"))?;
    let expected = case.expected(rank, &Topology::flat(world_size));
    match case.agree(&found, &expected) {
        true => Ok(()),
        false => Err(format!("{case:?}, {form:?}: {WRONG} result")),
    }
}

/// Returns the buffer of the result.
fn perform<T: Element + Pod>(
    case: &Case,
    form: Form,
    group: &ProcessGroup,
    data: &[u8],
    input: &[u8],
) -> Result<Vec<u8>> {
    let (data, input) = (read_all::<T>(data), read_all::<T>(input));
    let result: Vec<T> = match form {
        Form::Blocking => {
            let mut data = data;
            blocking(case, group, &mut data, &input)?;
            data
        }
        Form::Registered => {
            let mut registered = group.alloc_registered::<T>(data.len())?;
            registered.copy_from_slice(&data);
            blocking(case, group, &mut registered, &input)?;
            registered.to_vec()
        }
        Form::Async => asynchronous(case, group, data, input)?,
        Form::OutOfPlace => out_of_place(case, group, data)?,
    };
    Ok(bytemuck::cast_slice(&result).to_vec())
}

fn blocking<T: Element>(
    case: &Case,
    group: &ProcessGroup,
    data: &mut [T],
    input: &[T],
) -> Result<()> {
    let world_size = group.world_size();
    let counts = || case.counts(world_size);
    match (case.kind, case.uneven) {
        (Kind::AllReduce(op), _) => group.all_reduce(data, op),
        (Kind::Reduce(op, root), _) => group.reduce(data, op, root),
        (Kind::Scan(op), _) => group.scan(data, op),
        (Kind::ExclusiveScan(op), _) => group.exclusive_scan(data, op),
        (Kind::Broadcast(root), _) => group.broadcast(data, root),
        (Kind::Barrier, _) => group.barrier(),
        (Kind::ReduceScatter(op), false) => group.reduce_scatter(input, data, op),
        (Kind::ReduceScatter(op), true) => group.reduce_scatter_v(input, &counts(), data, op),
        (Kind::AllGather, false) => group.all_gather(input, data),
        (Kind::AllGather, true) => group.all_gather_v(input, data, &counts()),
        (Kind::Gather(root), false) => group.gather(input, data, root),
        (Kind::Gather(root), true) => group.gather_v(input, data, &counts(), root),
        (Kind::Scatter(root), false) => group.scatter(input, data, root),
        (Kind::Scatter(root), true) => group.scatter_v(input, &counts(), data, root),
        (Kind::AllToAll, false) => group.all_to_all(input, data),
        (Kind::AllToAll, true) => {
            let (sent, received) = case.counts_by_pair(group.rank(), world_size);
            group.all_to_all_v(input, &sent, data, &received)
        }
    }
}

fn asynchronous<T: Element>(
    case: &Case,
    group: &ProcessGroup,
    data: Vec<T>,
    input: Vec<T>,
) -> Result<Vec<T>> {
    let counts = || case.counts(group.world_size());
    match (case.kind, case.uneven) {
        (Kind::AllReduce(op), _) => group.all_reduce_async(data, op).wait(),
        (Kind::Reduce(op, root), _) => group.reduce_async(data, op, root)?.wait(),
        (Kind::Scan(op), _) => group.scan_async(data, op).wait(),
        (Kind::ExclusiveScan(op), _) => group.exclusive_scan_async(data, op).wait(),
        (Kind::Broadcast(root), _) => group.broadcast_async(data, root)?.wait(),
        (Kind::Barrier, _) => group.barrier_async().wait().map(|_| data),
        (Kind::ReduceScatter(op), false) => group.reduce_scatter_async(input, data, op)?.wait(),
        (Kind::ReduceScatter(op), true) => {
            group.reduce_scatter_v_async(input, &counts(), data, op)?.wait()
        }
        (Kind::AllGather, false) => group.all_gather_async(input, data)?.wait(),
        (Kind::AllGather, true) => group.all_gather_v_async(input, data, &counts())?.wait(),
        (Kind::Gather(root), false) => group.gather_async(input, data, root)?.wait(),
        (Kind::Gather(root), true) => group.gather_v_async(input, data, &counts(), root)?.wait(),
        (Kind::Scatter(root), false) => group.scatter_async(input, data, root)?.wait(),
        (Kind::Scatter(root), true) => group.scatter_v_async(input, &counts(), data, root)?.wait(),
        (Kind::AllToAll, false) => group.all_to_all_async(input, data)?.wait(),
        (Kind::AllToAll, true) => {
            let (sent, received) = case.counts_by_pair(group.rank(), group.world_size());
            group.all_to_all_v_async(input, &sent, data, &received)?.wait()
        }
    }
}

fn out_of_place<T: Element + Pod>(
    case: &Case,
    group: &ProcessGroup,
    input: Vec<T>,
) -> Result<Vec<T>> {
    match case.kind {
        Kind::AllReduce(op) => {
            let mut output = vec![T::zeroed(); input.len()];
            group.all_reduce_into(&input, &mut output, op)?;
            Ok(output)
        }
        Kind::Reduce(op, root) => {
            let is_root = group.rank() == root;
            let mut output = vec![T::zeroed(); if is_root { input.len() } else { 0 }];
            group.reduce_into(&input, &mut output, op, root)?;
            Ok(if is_root { output } else { input })
        }
        _ => Ok(input),
    }
}
