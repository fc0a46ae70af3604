//! Runs cases on a [`ProcessGroup`].

use bytemuck::Pod;
use drumline::{Element, ProcessGroup, RegisteredBuffer, Result, driving::Ask};
use drumline_kernels::with_element;
use drumline_schedule::Topology;

use crate::{
    Case, Kind, slices,
    value::{read_all, with_width},
    wait::Wait,
};

/// The form of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The call returns when this rank's part is done.
    Blocking,
    /// The call takes its buffers, and returns them at the end of the wait.
    Async,
    /// The data lies in registered memory.
    Registered,
}

impl Form {
    /// All forms.
    pub const ALL: [Form; 3] = [Form::Blocking, Form::Async, Form::Registered];

    /// Whether the collective `kind` has this form.
    pub fn is_of(self, kind: Kind) -> bool {
        match self {
            Form::Blocking | Form::Async => !matches!(kind, Kind::ReduceSlices(_)),
            Form::Registered => kind != Kind::Barrier,
        }
    }
}

/// Makes the call on this rank and compares the result with `answer`.
///
/// # Errors
///
/// The call failed, or its result is wrong.
pub fn check(case: &Case, form: Form, group: &ProcessGroup, answer: &[u8]) -> Result<(), String> {
    perform(case, form, group)
        .and_then(|found| agree(case, &found, answer))
        .map_err(|problem| format!("{case:?}, {form:?}: {problem}"))
}

/// Makes the call on this rank. Returns the buffer of the result.
pub(crate) fn perform(case: &Case, form: Form, group: &ProcessGroup) -> Result<Vec<u8>, String> {
    let buffers = case.buffers(group.rank(), group.world_size());
    match form {
        Form::Async => begin(case, false, group)?(Wait::Blocking),
        _ => with_element!(case.dtype, T => {
            at_once::<T>(case, form, group, &buffers.data, &buffers.input)
        })
        .map_err(|error| error.to_string()),
    }
}

/// Compares a result with the oracle's for this rank.
pub(crate) fn compare(
    case: &Case,
    rank: usize,
    world_size: usize,
    found: &[u8],
) -> Result<(), String> {
    agree(case, found, &case.expected(rank, &Topology::flat(world_size)))
}

fn agree(case: &Case, found: &[u8], answer: &[u8]) -> Result<(), String> {
    match case.agree(found, answer) {
        true => Ok(()),
        false => Err("wrong result".to_owned()),
    }
}

/// A call under way. Returns the buffer of the result.
pub(crate) type UnderWay<B> = Box<dyn FnOnce(Wait) -> Result<B, String>>;

/// Begins the call on this rank: on elements for one type of each width, and for the others on bytes, as Python does.
pub(crate) fn begin(
    case: &Case,
    registered: bool,
    group: &ProcessGroup,
) -> Result<UnderWay<Vec<u8>>, String> {
    let buffers = case.buffers(group.rank(), group.world_size());
    let (data, input) = (&buffers.data, &buffers.input);
    with_width!(case.dtype, T => match T::DTYPE == case.dtype {
        true => begin_with::<T>(case, registered, group, data, input),
        false => begin_on_bytes(case, registered, group, data, input),
    })
    .map_err(|error| error.to_string())
}

fn begin_on_bytes(
    case: &Case,
    registered: bool,
    group: &ProcessGroup,
    data: &[u8],
    input: &[u8],
) -> Result<UnderWay<Vec<u8>>> {
    let (kind, world_size) = (case.kind, group.world_size());
    let counts = case.counts(world_size);
    let (sent, received) = case.counts_by_pair(group.rank(), world_size);
    let mut ask = Ask::new(kind.collective(), case.dtype);
    if let Some(op) = kind.reduce_op() {
        ask = ask.by(op);
    }
    if let Some(root) = kind.root() {
        ask = ask.at(root);
    }
    ask = match kind {
        Kind::AllToAll if case.uneven => ask.in_blocks((&sent, &received)),
        _ if case.uneven && kind.has_blocks() => ask.in_blocks(&counts),
        _ => ask,
    };
    Ok(match registered {
        true => {
            let (data, input) = (in_registered(group, data)?, in_registered(group, input)?);
            let work = ask.begin(group, data, input)?;
            Box::new(|wait| Ok(wait.of(work)?.to_vec()))
        }
        false => {
            let work = ask.begin(group, Aligned::new(data), Aligned::new(input))?;
            Box::new(|wait| Ok(wait.of(work)?.as_ref().to_vec()))
        }
    })
}

/// Bytes where elements of any type may begin.
struct Aligned {
    words: Vec<u128>,
    len: usize,
}

impl Aligned {
    fn new(bytes: &[u8]) -> Aligned {
        let words = vec![0; bytes.len().div_ceil(size_of::<u128>())];
        let mut aligned = Aligned { words, len: bytes.len() };
        aligned.as_mut().copy_from_slice(bytes);
        aligned
    }
}

impl AsRef<[u8]> for Aligned {
    fn as_ref(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[..self.len]
    }
}

impl AsMut<[u8]> for Aligned {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.words)[..self.len]
    }
}

fn begin_with<T: Element + Pod>(
    case: &Case,
    registered: bool,
    group: &ProcessGroup,
    data: &[u8],
    input: &[u8],
) -> Result<UnderWay<Vec<u8>>> {
    fn to_bytes<T: Pod, B: AsRef<[T]> + 'static>(call: UnderWay<B>) -> UnderWay<Vec<u8>> {
        Box::new(|wait| Ok(bytemuck::cast_slice(call(wait)?.as_ref()).to_vec()))
    }
    let (data, input) = (read_all::<T>(data), read_all::<T>(input));
    Ok(match registered {
        true => {
            let (data, input) = (in_registered(group, &data)?, in_registered(group, &input)?);
            to_bytes(asynchronous(case, group, data, input)?)
        }
        false => to_bytes(asynchronous(case, group, data, input)?),
    })
}

fn in_registered<T: Element>(group: &ProcessGroup, elements: &[T]) -> Result<RegisteredBuffer<T>> {
    let mut buffer = group.alloc_registered(elements.len())?;
    buffer.copy_from_slice(elements);
    Ok(buffer)
}

fn at_once<T: Element + Pod>(
    case: &Case,
    form: Form,
    group: &ProcessGroup,
    data: &[u8],
    input: &[u8],
) -> Result<Vec<u8>> {
    let (mut data, input) = (read_all::<T>(data), read_all::<T>(input));
    match (form, case.kind) {
        (_, Kind::ReduceSlices(op)) => {
            data = slices::gathered(group, in_registered(group, &data)?, op)?
        }
        (Form::Registered, _) => {
            let mut result = in_registered(group, &data)?;
            blocking(case, group, &mut result, &in_registered(group, &input)?)?;
            data = result.to_vec();
        }
        (Form::Blocking | Form::Async, _) => blocking(case, group, &mut data, &input)?,
    }
    Ok(bytemuck::cast_slice(&data).to_vec())
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
        (Kind::ReduceSlices(_), _) => unreachable!("slices need registered memory"),
        (Kind::Reduce(op, root), _) => group.reduce(data, op, root),
        (Kind::Broadcast(root), _) => group.broadcast(data, root),
        (Kind::Barrier, _) => group.barrier(),
        (Kind::ReduceScatter(op), false) => group.reduce_scatter(input, data, op),
        (Kind::ReduceScatter(op), true) => {
            group.in_blocks(&counts()).reduce_scatter(input, data, op)
        }
        (Kind::AllGather, false) => group.all_gather(input, data),
        (Kind::AllGather, true) => group.in_blocks(&counts()).all_gather(input, data),
        (Kind::Gather(root), false) => group.gather(input, data, root),
        (Kind::Gather(root), true) => group.in_blocks(&counts()).gather(input, data, root),
        (Kind::Scatter(root), false) => group.scatter(input, data, root),
        (Kind::Scatter(root), true) => group.in_blocks(&counts()).scatter(input, data, root),
        (Kind::AllToAll, false) => group.all_to_all(input, data),
        (Kind::AllToAll, true) => {
            let (sent, received) = case.counts_by_pair(group.rank(), world_size);
            group.in_blocks((&sent, &received)).all_to_all(input, data)
        }
    }
}

fn asynchronous<T, B, I>(
    case: &Case,
    group: &ProcessGroup,
    data: B,
    input: I,
) -> Result<UnderWay<B>>
where
    T: Element,
    I: AsRef<[T]> + Send + 'static,
    B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
{
    let counts = || case.counts(group.world_size());
    let work = match (case.kind, case.uneven) {
        (Kind::AllReduce(op), _) => group.all_reduce_async(data, op),
        (Kind::ReduceSlices(_), _) => unreachable!("no program draws slices"),
        (Kind::Reduce(op, root), _) => group.reduce_async(data, op, root),
        (Kind::Broadcast(root), _) => group.broadcast_async(data, root),
        (Kind::Barrier, _) => {
            let met = group.barrier_async()?;
            return Ok(Box::new(|wait| wait.of(met).map(|_| data)));
        }
        (Kind::ReduceScatter(op), false) => group.reduce_scatter_async(input, data, op),
        (Kind::ReduceScatter(op), true) => {
            group.in_blocks(&counts()).reduce_scatter_async(input, data, op)
        }
        (Kind::AllGather, false) => group.all_gather_async(input, data),
        (Kind::AllGather, true) => group.in_blocks(&counts()).all_gather_async(input, data),
        (Kind::Gather(root), false) => group.gather_async(input, data, root),
        (Kind::Gather(root), true) => group.in_blocks(&counts()).gather_async(input, data, root),
        (Kind::Scatter(root), false) => group.scatter_async(input, data, root),
        (Kind::Scatter(root), true) => group.in_blocks(&counts()).scatter_async(input, data, root),
        (Kind::AllToAll, false) => group.all_to_all_async(input, data),
        (Kind::AllToAll, true) => {
            let (sent, received) = case.counts_by_pair(group.rank(), group.world_size());
            group.in_blocks((&sent, &received)).all_to_all_async(input, data)
        }
    }?;
    Ok(Box::new(|wait| wait.of(work)))
}
