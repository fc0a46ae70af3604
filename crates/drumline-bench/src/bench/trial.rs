//! One case: an operation with its buffers, and how a rank calls it.

use std::{
    mem,
    time::{Duration, Instant},
};

use drumline::{DType, ProcessGroup, ReduceOp, RegisteredBuffer, Result};
use drumline_kernels::with_element;

use super::{
    answers::{Answers, Sample},
    choice::{Buffers, CallStyle},
    operation::{Operation, Place},
};

/// An operation with everything that decides its time, without buffers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Case {
    pub(super) operation: Operation,
    pub(super) place: Place,
    pub(super) dtype: DType,
    pub(super) op: ReduceOp,
    pub(super) root: usize,
    /// In elements.
    pub(super) block: usize,
    pub(super) buffers: Buffers,
    pub(super) style: CallStyle,
}

/// A case with its buffers, of any element type.
pub(super) trait Trial {
    /// Writes the inputs of this rank for `salt`.
    fn rewrite(&mut self, salt: usize);

    /// Fills all buffers with zeros, which no operation changes.
    fn clear(&mut self);

    /// Carries the operation out `count` times, and returns the time.
    fn run(&mut self, count: usize) -> Result<Duration>;

    /// The number of wrong elements in this rank's result.
    fn wrong(&self, salt: usize) -> u64;
}

impl Case {
    /// The case with its buffers on this rank of `group`.
    pub(super) fn trial<'a>(self, group: &'a ProcessGroup) -> Result<Box<dyn Trial + 'a>> {
        with_element!(self.dtype, T => Ok(Box::new(Typed::<T>::new(self, group)?)))
    }
}

/// Memory of one kind.
enum Buffer<T: Sample> {
    Private(Vec<T>),
    Registered(RegisteredBuffer<T>),
}

impl<T: Sample> Buffer<T> {
    fn new(kind: Buffers, group: &ProcessGroup, len: usize) -> Result<Buffer<T>> {
        Ok(match kind {
            Buffers::Staged => Buffer::Private(vec![T::zeroed(); len]),
            Buffers::Registered => Buffer::Registered(group.alloc_registered(len)?),
        })
    }

    fn take(&mut self) -> Buffer<T> {
        mem::replace(self, Buffer::Private(Vec::new()))
    }
}

impl<T: Sample> AsRef<[T]> for Buffer<T> {
    fn as_ref(&self) -> &[T] {
        match self {
            Buffer::Private(buffer) => buffer,
            Buffer::Registered(buffer) => buffer,
        }
    }
}

impl<T: Sample> AsMut<[T]> for Buffer<T> {
    fn as_mut(&mut self) -> &mut [T] {
        match self {
            Buffer::Private(buffer) => buffer,
            Buffer::Registered(buffer) => buffer,
        }
    }
}

struct Typed<'a, T: Sample> {
    case: Case,
    group: &'a ProcessGroup,
    answers: Answers<T>,
    /// Empty if the operation works in place.
    input: Buffer<T>,
    output: Buffer<T>,
}

impl<'a, T: Sample> Typed<'a, T> {
    fn new(case: Case, group: &'a ProcessGroup) -> Result<Typed<'a, T>> {
        let Case { operation, place, op, root, block, buffers, .. } = case;
        let (rank, ranks) = (group.rank(), group.world_size());
        let lengths = operation.lengths(place, block, ranks, rank == root);
        let parts = operation.result(block, ranks, root, rank);
        Ok(Typed {
            case,
            group,
            answers: Answers::new(op, ranks, rank, parts),
            input: Buffer::new(buffers, group, lengths.input)?,
            output: Buffer::new(buffers, group, lengths.output)?,
        })
    }

    /// The ranks after and before this one, in a ring.
    fn neighbours(&self) -> (usize, usize) {
        let (rank, ranks) = (self.group.rank(), self.group.world_size());
        ((rank + 1) % ranks, (rank + ranks - 1) % ranks)
    }

    fn blocking(&mut self) -> Result<()> {
        let Case { operation, place, op, root, .. } = self.case;
        let (next, before) = self.neighbours();
        let group = self.group;
        if operation == Operation::SendRecv {
            let sending = group.send_async(self.input.take(), next, 0)?;
            group.recv(self.output.as_mut(), before, 0)?;
            self.input = sending.wait()?;
            return Ok(());
        }
        let (input, output) = (self.input.as_ref(), self.output.as_mut());
        if (operation, place) == (Operation::AllReduce, Place::Out) {
            output.copy_from_slice(input);
        }
        match operation {
            Operation::AllReduce => group.all_reduce(output, op),
            Operation::Reduce => group.reduce(output, op, root),
            Operation::Broadcast => group.broadcast(output, root),
            Operation::AllGather => group.all_gather(input, output),
            Operation::Gather => group.gather(input, output, root),
            Operation::Scatter => group.scatter(input, output, root),
            Operation::ReduceScatter => group.reduce_scatter(input, output, op),
            Operation::AllToAll => group.all_to_all(input, output),
            Operation::SendRecv => Ok(()),
            Operation::Barrier => group.barrier(),
        }
    }

    /// Operations that take their input by value get a copy, which is made before the time is taken.
    fn background(&mut self) -> Result<Duration> {
        let Case { operation, place, op, root, .. } = self.case;
        let (next, before) = self.neighbours();
        let group = self.group;
        let input = self.input.as_ref().to_vec();
        let mut output = self.output.take();
        let start = Instant::now();
        if (operation, place) == (Operation::AllReduce, Place::Out) {
            output.as_mut().copy_from_slice(&input);
        }
        let work = match operation {
            Operation::AllReduce => group.all_reduce_async(output, op),
            Operation::Reduce => group.reduce_async(output, op, root),
            Operation::Broadcast => group.broadcast_async(output, root),
            Operation::AllGather => group.all_gather_async(input, output),
            Operation::Gather => group.gather_async(input, output, root),
            Operation::Scatter => group.scatter_async(input, output, root),
            Operation::ReduceScatter => group.reduce_scatter_async(input, output, op),
            Operation::AllToAll => group.all_to_all_async(input, output),
            Operation::SendRecv => {
                let sending = group.send_async(input, next, 0)?;
                let receiving = group.recv_async(output, before, 0)?;
                self.output = receiving.wait()?;
                sending.wait()?;
                return Ok(start.elapsed());
            }
            Operation::Barrier => {
                group.barrier_async()?.wait()?;
                self.output = output;
                return Ok(start.elapsed());
            }
        }?;
        self.output = work.wait()?;
        Ok(start.elapsed())
    }
}

impl<T: Sample> Trial for Typed<'_, T> {
    fn rewrite(&mut self, salt: usize) {
        let is_in = self.case.place == Place::In;
        let data = if is_in { self.output.as_mut() } else { self.input.as_mut() };
        self.answers.fill(salt, data);
    }

    fn clear(&mut self) {
        self.input.as_mut().fill(T::zeroed());
        self.output.as_mut().fill(T::zeroed());
    }

    fn run(&mut self, count: usize) -> Result<Duration> {
        if self.case.style == CallStyle::Async {
            return (0..count).map(|_| self.background()).sum();
        }
        let start = Instant::now();
        for _ in 0..count {
            self.blocking()?;
        }
        Ok(start.elapsed())
    }

    fn wrong(&self, salt: usize) -> u64 {
        self.answers.wrong(salt, self.output.as_ref())
    }
}
