//! The collectives, blocking and asynchronous.

use drumline_schedule::{Counts, step::Rank};

use super::ProcessGroup;
use crate::{
    Element, Error, ReduceOp, Result, Work,
    call::Call,
    engine,
    executor::Operation as Kind,
    lane::{Job, Operation},
    operation::CallOn,
    work::Promise,
};

impl ProcessGroup {
    /// Reduces `data` over all ranks, in place: afterwards it is the same on every rank.
    ///
    /// All ranks pass the same number of elements. The result has the same bits whatever the
    /// algorithm, because every algorithm adds in one order (payloads of NaN apart). Sums of
    /// 16-bit floats are kept in `f32` and rounded once.
    ///
    /// # Errors
    ///
    /// [`Error::Collective`] says which rank did what; [`Error::Poisoned`] after a failure.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let call = call::<T>(Kind::AllReduce, data.len()).reducing(op);
        self.run(call, data, &[])
    }

    /// [`ProcessGroup::all_reduce`] in the background.
    ///
    /// The buffer may be anything that is a slice: a `Vec<T>`, a `Box<[T]>`, a
    /// [`RegisteredBuffer<T>`](crate::RegisteredBuffer).
    pub fn all_reduce_async<T, B>(&self, buffer: B, op: ReduceOp) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let call = call::<T>(Kind::AllReduce, buffer.as_ref().len()).reducing(op);
        self.submit(call, buffer, Vec::new())
    }

    /// Reduces the `input` of all ranks and gives every rank its part: block `rank` of the sum.
    ///
    /// `input` holds `world_size` blocks of the length of `output`.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when the lengths do not fit; otherwise as
    /// [`ProcessGroup::all_reduce`].
    pub fn reduce_scatter<T: Element>(
        &self,
        input: &[T],
        output: &mut [T],
        op: ReduceOp,
    ) -> Result<()> {
        self.check_blocks("reduce_scatter", output.len(), input.len(), "an input")?;
        let call = call::<T>(Kind::ReduceScatter, output.len()).reducing(op);
        self.run(call, output, input)
    }

    /// [`ProcessGroup::reduce_scatter`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when the lengths do not fit.
    pub fn reduce_scatter_async<T, B>(
        &self,
        input: Vec<T>,
        output: B,
        op: ReduceOp,
    ) -> Result<Work<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let len = output.as_ref().len();
        self.check_blocks("reduce_scatter", len, input.len(), "an input")?;
        Ok(self.submit(call::<T>(Kind::ReduceScatter, len).reducing(op), output, input))
    }

    /// Gives every rank the `data` of rank `root`.
    ///
    /// All ranks pass the same number of elements. On the root, success means that the data has
    /// been sent, not that it has arrived.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a root that is no rank; otherwise as
    /// [`ProcessGroup::all_reduce`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<()> {
        self.check_rank("broadcast", root)?;
        self.run(call::<T>(Kind::Broadcast, data.len()).rooted(root), data, &[])
    }

    /// [`ProcessGroup::broadcast`] in the background.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a root that is no rank.
    pub fn broadcast_async<T, B>(&self, buffer: B, root: Rank) -> Result<Work<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.check_rank("broadcast", root)?;
        let call = call::<T>(Kind::Broadcast, buffer.as_ref().len()).rooted(root);
        Ok(self.submit(call, buffer, Vec::new()))
    }

    /// Collects the `input` of every rank in `output`, in order of rank.
    ///
    /// All ranks pass the same number of elements; `output` holds `world_size` times as many.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when the lengths do not fit; otherwise as
    /// [`ProcessGroup::all_reduce`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        self.check_blocks("all_gather", input.len(), output.len(), "an output")?;
        self.run(call::<T>(Kind::AllGather, input.len()), output, input)
    }

    /// [`ProcessGroup::all_gather`] in the background. Gives `output` back.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when the lengths do not fit.
    pub fn all_gather_async<T, B>(&self, input: Vec<T>, output: B) -> Result<Work<B>>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let len = input.len();
        self.check_blocks("all_gather", len, output.as_ref().len(), "an output")?;
        Ok(self.submit(call::<T>(Kind::AllGather, len), output, input))
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        self.run::<u8>(call::<u8>(Kind::Barrier, 0), &mut [], &[])
    }

    /// [`ProcessGroup::barrier`] in the background.
    pub fn barrier_async(&self) -> Work<Vec<u8>> {
        self.submit(call::<u8>(Kind::Barrier, 0), Vec::new(), Vec::new())
    }

    pub(super) fn check_rank(&self, operation: &'static str, rank: Rank) -> Result<()> {
        if rank < self.world_size() {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            operation,
            problem: format!(
                "there is no rank {rank}: the ranks of group {:?} are 0 to {}",
                self.name(),
                self.world_size() - 1
            ),
        })
    }

    /// Whether the long buffer holds a block of `block` elements for every rank.
    fn check_blocks(
        &self,
        operation: &'static str,
        block: usize,
        long: usize,
        what: &str,
    ) -> Result<()> {
        if block.checked_mul(self.world_size()) == Some(long) {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            operation,
            problem: format!(
                "{what} of {long} elements does not hold a block of {block} elements for each of \
                 {} ranks",
                self.world_size()
            ),
        })
    }

    fn run<T: Element>(&self, call: Call, data: &mut [T], input: &[T]) -> Result<()> {
        self.inner.run(&mut CallOn::<T, _, _>::new(call, data, input))
    }

    fn submit<T, B>(&self, call: Call, buffer: B, input: Vec<T>) -> Work<B>
    where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (promise, work) = Work::of(&self.inner);
        let on: CallOn<T, B, Vec<T>> = CallOn::new(call, buffer, input);
        match engine::get() {
            Ok(engine) => self.inner.submit(engine, Box::new(Owned { on, promise })),
            Err(error) => promise.complete(Err(error)),
        }
        work
    }
}

fn call<T: Element>(operation: Kind, elements: usize) -> Call {
    let counts = Counts::Even(elements);
    Call { operation, reduce_op: None, root: None, dtype: T::DTYPE, counts }
}

/// An operation that owns its buffers.
struct Owned<T: Element, B> {
    on: CallOn<T, B, Vec<T>>,
    promise: Promise<B>,
}

impl<T, B> Job for Owned<T, B>
where
    T: Element,
    B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
{
    fn operation(&mut self) -> &mut dyn Operation {
        &mut self.on
    }

    fn complete(self: Box<Self>, result: Result<()>) {
        let Owned { on, promise } = *self;
        promise.complete(result.map(|()| match on.into_data() {
            Some(buffer) => buffer,
            None => unreachable!("an operation that has ended gives its buffer back"),
        }));
    }
}
