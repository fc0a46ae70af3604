//! Collectives on lists of buffers, as torch spells them. They travel as one, and are copied from and to their places.
//!
//! Those that end in `coalesced` are several calls of one kind. In those that end in `multi`, each buffer of a rank
//! counts as a member of its own.

use drumline::{
    DType, Error, ReduceOp,
    backend::Collective,
    driving::{Ask, Bytes, round_sum, sum_of_members},
};
use pyo3::{exceptions::PyValueError, prelude::*};

use crate::{
    call::{builtin, check_list, check_types, operator},
    error::raise,
    group::Group,
    memory::{Buffer, Input, Memory, joined},
    signals,
    work::{Returned, Work},
};

#[pymethods]
impl Group {
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
        let ask = Ask::new(Collective::AllReduce, dtype).by(operator(dtype, op, factor)?);
        let ask = ask.in_parts(lengths(&data));
        let all = joined(data.iter().map(Memory::bytes));
        self.carry_out_as_one(
            py,
            ask,
            Bytes::default(),
            Joined::new(all, plain(data), deal_out),
            background,
        )
    }

    /// Gathers each of the inputs in the output at its place.
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
        let parts = lengths(&inputs);
        self.check_pairs("all_gather_coalesced", &parts, &lengths(&outputs), "an output")?;
        let own = joined(inputs.iter().map(Memory::bytes));
        let all = Bytes::zeroed(own.len() * self.get()?.world_size());
        let ask = Ask::new(Collective::AllGather, dtype).in_parts(parts.clone());
        let bytes: Vec<usize> = parts.iter().map(|len| len * dtype.size()).collect();
        let deal_out = move |all: &mut [u8], outputs: &mut [Buffer]| {
            let mut rest = &all[..];
            let mut place = 0;
            while !rest.is_empty() {
                for (&len, output) in bytes.iter().zip(&mut *outputs) {
                    let (block, others) = rest.split_at(len);
                    output.as_mut()[place * len..][..len].copy_from_slice(block);
                    rest = others;
                }
                place += 1;
            }
        };
        self.carry_out_as_one(py, ask, own, Joined::new(all, plain(outputs), deal_out), background)
    }

    /// Reduces each of the inputs, and scatters it to the output at its place.
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
        let op = operator(dtype, op, factor)?;
        let parts = lengths(&outputs);
        self.check_pairs("reduce_scatter_coalesced", &parts, &lengths(&inputs), "an input")?;
        // For each rank, its blocks of all inputs.
        let (inputs, size) = (&inputs, dtype.size());
        let blocks_for = |rank: usize| {
            inputs.iter().zip(&parts).map(move |(input, len)| {
                let len = len * size;
                &input.bytes()[rank * len..][..len]
            })
        };
        let all = joined((0..self.get()?.world_size()).flat_map(blocks_for));
        let own = Bytes::zeroed(parts.iter().sum::<usize>() * size);
        let ask = Ask::new(Collective::ReduceScatter, dtype).by(op).in_parts(parts.clone());
        self.carry_out_as_one(py, ask, all, Joined::new(own, plain(outputs), deal_out), background)
    }

    #[pyo3(signature = (buffers, op, background=false))]
    fn all_reduce_multi(
        &self,
        py: Python<'_>,
        buffers: Vec<Memory>,
        op: &str,
        background: bool,
    ) -> PyResult<Option<Work>> {
        let members = self.members("all_reduce_multigpu", &buffers)?;
        let (ask, sum, round) =
            members.summed(Collective::AllReduce, builtin(op)?, &bytes(&buffers))?;
        let then = move |sum: &mut [u8], buffers: &mut [Buffer]| {
            let rounded = round(sum);
            buffers.iter_mut().for_each(|buffer| buffer.as_mut().copy_from_slice(&rounded));
        };
        self.carry_out_as_one(
            py,
            ask,
            Bytes::default(),
            Joined::new(sum, plain(buffers), then),
            background,
        )
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
        let members = self.members("reduce_multigpu", &buffers)?;
        members.check_root(root_buffer)?;
        let (ask, sum, round) =
            members.summed(Collective::Reduce, builtin(op)?, &bytes(&buffers))?;
        let at_root = self.get()?.rank() == root;
        let then = move |sum: &mut [u8], buffers: &mut [Buffer]| {
            if at_root {
                buffers[root_buffer].as_mut().copy_from_slice(&round(sum));
            }
        };
        self.carry_out_as_one(
            py,
            ask.at(root),
            Bytes::default(),
            Joined::new(sum, plain(buffers), then),
            background,
        )
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
        let members = self.members("broadcast_multigpu", &buffers)?;
        members.check_root(root_buffer)?;
        let data = Bytes::from(buffers[root_buffer].bytes());
        let ask = Ask::new(Collective::Broadcast, members.dtype).at(root);
        let ask = ask.in_parts(vec![members.len, members.number]);
        self.carry_out_as_one(
            py,
            ask,
            Bytes::default(),
            Joined::new(data, plain(buffers), copy_to_each),
            background,
        )
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
        let operation = "all_gather_multigpu";
        let members = self.members(operation, &inputs)?;
        let block = members.len * members.number;
        members.check_lists(&outputs, block * members.ranks, "an output")?;
        let own = joined(inputs.iter().map(Memory::bytes));
        let all = Bytes::zeroed(own.len() * members.ranks);
        let ask = Ask::new(Collective::AllGather, members.dtype);
        let ask = ask.in_parts(vec![members.len, members.number]);
        let outputs = outputs.into_iter().map(Buffer::gathered).collect();
        self.carry_out_as_one(py, ask, own, Joined::new(all, outputs, copy_to_each), background)
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
        let operation = "reduce_scatter_multigpu";
        let members = self.members(operation, &outputs)?;
        let block = members.len * members.number;
        members.check_lists(&inputs, block * members.ranks, "an input")?;
        let inputs: Vec<Input> = inputs.iter().map(|list| Input::joined(list)).collect();
        let inputs: Vec<&[u8]> = inputs.iter().map(AsRef::as_ref).collect();
        let members = Members { len: block, ..members };
        let (ask, sum, round) = members.summed(Collective::ReduceScatter, builtin(op)?, &inputs)?;
        let own = Bytes::zeroed(block * members.dtype.accumulator().size());
        let then = move |own: &mut [u8], outputs: &mut [Buffer]| {
            deal_out(&mut round(own), outputs);
        };
        self.carry_out_as_one(py, ask, sum, Joined::new(own, plain(outputs), then), background)
    }
}

impl Group {
    /// Waits for the call, unless it runs in the background.
    fn carry_out_as_one(
        &self,
        py: Python<'_>,
        ask: Ask<'_>,
        input: Bytes,
        data: Joined,
        background: bool,
    ) -> PyResult<Option<Work>> {
        let group = self.get()?;
        let begun = py.detach(|| ask.begin(&group, data, input));
        if background {
            return Work::of(begun).map(Some);
        }
        signals::run(py, || {
            begun?.wait()?.settle();
            Ok::<_, Error>(())
        })?;
        Ok(None)
    }

    /// Checks that each long buffer holds a block for every rank, as long as the short buffer of the pair.
    fn check_pairs(
        &self,
        operation: &'static str,
        blocks: &[usize],
        long: &[usize],
        what: &str,
    ) -> PyResult<()> {
        let ranks = self.get()?.world_size();
        if blocks.len() != long.len() {
            let problem = format!(
                "the list has {} buffers where there should be {}",
                long.len(),
                blocks.len()
            );
            return Err(invalid(operation, problem));
        }
        match blocks.iter().zip(long).find(|(block, long)| *block * ranks != **long) {
            None => Ok(()),
            Some((block, long)) => Err(invalid(
                operation,
                format!(
                    "{what} of {long} elements does not hold a block of {block} elements for each of {ranks} ranks"
                ),
            )),
        }
    }

    /// The members of this rank, which have one length.
    fn members(&self, operation: &'static str, buffers: &[Memory]) -> PyResult<Members> {
        let dtype = type_of(operation, buffers)?;
        let len = one_length(operation, &lengths(buffers))?;
        let ranks = self.get()?.world_size();
        Ok(Members { operation, dtype, len, number: buffers.len(), ranks })
    }
}

/// The buffers of a rank, each of which counts as a member.
#[derive(Clone, Copy)]
struct Members {
    operation: &'static str,
    dtype: DType,
    /// The elements of each.
    len: usize,
    number: usize,
    ranks: usize,
}

/// A call, its buffer, and what rounds the sum of all members that it leaves there.
type Summed<T> = PyResult<(Ask<'static>, Bytes, T)>;

impl Members {
    /// A call that reduces sums of members, in the type in which such sums are kept, and the sum of this rank's
    /// members.
    fn summed(
        self,
        collective: Collective,
        op: ReduceOp,
        members: &[&[u8]],
    ) -> Summed<impl FnOnce(&mut [u8]) -> Bytes + Send + use<>> {
        let Members { operation, dtype, len, number, ranks } = self;
        if !op.supports(dtype) {
            return Err(invalid(operation, format!("{dtype} has no operator {op}")));
        }
        // An average is divided at the end, by the number of all members.
        let across = if op == ReduceOp::Avg { ReduceOp::Sum } else { op };
        // The parts also hold the type of the members, which the call shows nowhere else.
        let parts = vec![len, number, dtype as usize];
        let ask = Ask::new(collective, dtype.accumulator()).by(across).in_parts(parts);
        let round = move |sum: &mut [u8]| round_sum(dtype, op, sum, ranks * number);
        Ok((ask, sum_of_members(dtype, op, members), round))
    }

    fn check_root(self, root_buffer: usize) -> PyResult<()> {
        if root_buffer < self.number {
            return Ok(());
        }
        let problem =
            format!("there is no buffer {root_buffer}: the list has {} of them", self.number);
        Err(invalid(self.operation, problem))
    }

    /// Checks that there is a list for each member, which has `elements` elements in all.
    fn check_lists(self, lists: &[Vec<Memory>], elements: usize, what: &str) -> PyResult<()> {
        for list in lists {
            if type_of(self.operation, list)? != self.dtype {
                return Err(PyValueError::new_err(format!(
                    "{}: some arrays have elements of type {}, others of type {}",
                    self.operation, list[0].dtype, self.dtype
                )));
            }
        }
        if lists.len() != self.number {
            let problem = format!(
                "{} buffers are given on one side and {} on the other",
                self.number,
                lists.len()
            );
            return Err(invalid(self.operation, problem));
        }
        let all: Vec<usize> = lists.iter().map(|list| lengths(list).iter().sum()).collect();
        let all = one_length(self.operation, &all)?;
        match all == elements {
            true => Ok(()),
            false => Err(invalid(
                self.operation,
                format!(
                    "{what} of {all} elements does not hold a block for each member of {} ranks, which take {elements}",
                    self.ranks
                ),
            )),
        }
    }
}

/// Several buffers that travel as one.
struct Joined {
    all: Bytes,
    places: Vec<Buffer>,
    /// Copies the result to its places.
    then: Box<Then>,
}

type Then = dyn FnOnce(&mut [u8], &mut [Buffer]) + Send;

impl Joined {
    fn new(
        all: Bytes,
        places: Vec<Buffer>,
        then: impl FnOnce(&mut [u8], &mut [Buffer]) + Send + 'static,
    ) -> Joined {
        Joined { all, places, then: Box::new(then) }
    }
}

impl AsRef<[u8]> for Joined {
    fn as_ref(&self) -> &[u8] {
        &self.all
    }
}

impl AsMut<[u8]> for Joined {
    fn as_mut(&mut self) -> &mut [u8] {
        &mut self.all
    }
}

impl Returned for Joined {
    fn settle(self) -> Option<usize> {
        let Joined { mut all, mut places, then } = self;
        then(&mut all, &mut places);
        places.iter_mut().for_each(Buffer::deal_out);
        None
    }
}

/// Copies the bytes to the buffers, one after another.
fn deal_out(all: &mut [u8], buffers: &mut [Buffer]) {
    let mut rest = &all[..];
    for buffer in buffers {
        let buffer = buffer.as_mut();
        let (own, others) = rest.split_at(buffer.len());
        buffer.copy_from_slice(own);
        rest = others;
    }
}

fn copy_to_each(bytes: &mut [u8], buffers: &mut [Buffer]) {
    buffers.iter_mut().for_each(|buffer| buffer.as_mut().copy_from_slice(bytes));
}

fn plain(memories: Vec<Memory>) -> Vec<Buffer> {
    memories.into_iter().map(Buffer::of).collect()
}

fn bytes(memories: &[Memory]) -> Vec<&[u8]> {
    memories.iter().map(Memory::bytes).collect()
}

fn lengths(memories: &[Memory]) -> Vec<usize> {
    memories.iter().map(Memory::len).collect()
}

/// The length that all buffers have.
fn one_length(operation: &'static str, lengths: &[usize]) -> PyResult<usize> {
    let first = lengths.first().copied().unwrap_or(0);
    match lengths.iter().find(|len| **len != first) {
        None => Ok(first),
        Some(other) => Err(invalid(
            operation,
            format!("a buffer has {other} elements and the first one {first}: all must be as long"),
        )),
    }
}

fn type_of(operation: &str, buffers: &[Memory]) -> PyResult<DType> {
    check_list(buffers)?.ok_or_else(|| {
        PyValueError::new_err(format!("{operation}: the list has no array, and it needs one"))
    })
}

fn invalid(operation: &'static str, problem: String) -> PyErr {
    raise(Error::argument(operation, problem))
}
