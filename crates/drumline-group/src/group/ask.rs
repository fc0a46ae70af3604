//! What a program asks of a group, on buffers of bytes: whether the buffers fit, and how the call begins.

use std::{marker::PhantomData, time::Duration};

use drumline_engine::{
    call::Call,
    executor::Held,
    operation::Operation,
    operator::{AnyOperator, Operator},
};
use drumline_schedule::{Borders, Collective, Counts, step::Rank};

use super::ProcessGroup;
use crate::{Begun, DType, Element, Error, Result, Work, WorkError, work::give_back};

/// A collective that a program asks for, without its buffers. All lengths count elements.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{DType, ReduceOp, driving::Ask, backend::Collective};
///
/// let group = drumline::ProcessGroup::alone();
/// let (mut sum, more) = ([1_u8, 2], [3_u8, 4]);
/// Ask::new(Collective::AllReduce, DType::U8).by(ReduceOp::Sum).run(&group, &mut sum, &[])?;
/// Ask::new(Collective::AllGather, DType::U8).run(&group, &mut sum, &more)?;
/// assert_eq!(sum, [3, 4]);
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Ask<'a> {
    /// The name in errors.
    operation: &'static str,
    collective: Collective,
    dtype: DType,
    operator: Option<AnyOperator>,
    root: Option<Rank>,
    lengths: Lengths<'a>,
    parts: Vec<usize>,
    timeout: Option<Duration>,
}

/// How long the blocks of a call are, in elements. A list of one length for each rank is one; so is a pair of lists for an
/// exchange: what this rank sends to each rank, and what it gets from each.
#[derive(Clone, Copy, Debug)]
pub struct Lengths<'a>(Of<'a>);

#[derive(Clone, Copy, Debug)]
enum Of<'a> {
    /// All have the same, which follows from the buffers.
    Even,
    ByRank(&'a [usize]),
    ByPair {
        sent: &'a [usize],
        received: &'a [usize],
    },
}

impl<'a, C: AsRef<[usize]> + ?Sized> From<&'a C> for Lengths<'a> {
    fn from(counts: &'a C) -> Lengths<'a> {
        Lengths(Of::ByRank(counts.as_ref()))
    }
}

impl<'a, S, R> From<(&'a S, &'a R)> for Lengths<'a>
where
    S: AsRef<[usize]> + ?Sized,
    R: AsRef<[usize]> + ?Sized,
{
    fn from((sent, received): (&'a S, &'a R)) -> Lengths<'a> {
        Lengths(Of::ByPair { sent: sent.as_ref(), received: received.as_ref() })
    }
}

impl<'a> Ask<'a> {
    /// A collective on elements of this type. A barrier has none, so all its ranks ask for the same, whatever type they say.
    #[inline(always)]
    pub fn new(collective: Collective, dtype: DType) -> Ask<'a> {
        Ask {
            operation: collective.name(),
            collective,
            dtype: if collective.is_barrier() { DType::U8 } else { dtype },
            operator: None,
            root: None,
            lengths: Lengths(Of::Even),
            parts: Vec::new(),
            timeout: None,
        }
    }

    #[inline(always)]
    pub(super) fn of<T: Element>(collective: Collective) -> Ask<'a> {
        Ask::new(collective, T::DTYPE)
    }

    /// The same with an operator, if it reduces.
    #[must_use]
    #[inline(always)]
    pub fn by(self, operator: impl Into<AnyOperator>) -> Ask<'a> {
        Ask { operator: Some(operator.into()), ..self }
    }

    /// The same by an operator of the type of the elements.
    #[inline(always)]
    pub(super) fn of_type_by<T: Element>(self, operator: impl Into<Operator<T>>) -> Ask<'a> {
        self.by(operator.into())
    }

    /// The same with a root.
    #[must_use]
    pub fn at(self, root: Rank) -> Ask<'a> {
        Ask { root: Some(root), ..self }
    }

    /// The same in blocks of these lengths.
    #[must_use]
    pub fn in_blocks(self, lengths: impl Into<Lengths<'a>>) -> Ask<'a> {
        Ask { lengths: lengths.into(), ..self }
    }

    /// The same on several buffers of these lengths, which travel as one.
    #[must_use]
    pub fn in_parts(self, parts: Vec<usize>) -> Ask<'a> {
        Ask { parts, ..self }
    }

    /// The same under another name in errors.
    #[must_use]
    pub fn named(self, operation: &'static str) -> Ask<'a> {
        Ask { operation, ..self }
    }

    /// Checks that the call has an operator if it reduces, and that its elements have it.
    fn check_operator(&self) -> Result<()> {
        let operator = self.operator.as_ref();
        let call = Call {
            operator: operator.map(AnyOperator::kind),
            ..Call::new(self.collective, self.dtype, Counts::Even(0))
        };
        let problem = operator.and_then(|it| it.problem_with(self.dtype));
        match problem.or_else(|| call.problem()) {
            None => Ok(()),
            Some(problem) => Err(Error::argument(self.operation, problem)),
        }
    }

    pub(super) fn within(self, timeout: Duration) -> Ask<'a> {
        Ask { timeout: Some(timeout), ..self }
    }
}

impl ProcessGroup {
    #[inline]
    pub(super) fn run<T: Element>(&self, ask: Ask<'_>, data: &mut [T], input: &[T]) -> Result<()> {
        self.run_on(ask, bytemuck::cast_slice_mut(data), bytemuck::cast_slice(input))
    }

    #[inline]
    fn run_on(&self, mut ask: Ask<'_>, data: &mut [u8], input: &[u8]) -> Result<()> {
        let call = self.call(&mut ask, data.len(), input.len())?;
        self.inner.run(&mut Operation::lent(call, ask.operator, data, input))
    }

    /// Begins the call in the background, unless its arguments cannot be used.
    pub(super) fn submit<T, B, I>(&self, ask: Ask<'_>, buffer: B, input: I) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let (promise, work) = Work::of(&self.inner, true);
        let end = |result, buffer| promise.complete(give_back(result, buffer));
        match self.hold(ask, Owned { buffer, input, end, element: PhantomData::<T> }) {
            Ok(()) => Ok(work),
            Err((error, owned)) => Err(WorkError { error, buffer: Some(owned.buffer) }),
        }
    }

    /// Begins a call on one buffer in the background that ends in `end`.
    pub(super) fn begin_then<T, B>(
        &self,
        ask: Ask<'_>,
        buffer: B,
        end: impl FnOnce(Result<()>, B) + Send + 'static,
    ) where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        self.begin_both_then(ask, buffer, Vec::new(), end);
    }

    /// The same with an input.
    pub(super) fn begin_both_then<T, B>(
        &self,
        ask: Ask<'_>,
        buffer: B,
        input: Vec<T>,
        end: impl FnOnce(Result<()>, B) + Send + 'static,
    ) where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let element = PhantomData::<T>;
        if let Err((error, owned)) = self.hold(ask, Owned { buffer, input, end, element }) {
            let Owned { buffer, end, .. } = *owned;
            end(Err(error), buffer);
        }
    }

    /// Begins a call in the background that holds its buffers. They come back if its arguments cannot be used.
    fn hold<O: Held>(&self, mut ask: Ask<'_>, owned: O) -> Result<(), (Error, Box<O>)> {
        // What is checked must not move any more.
        let owned = Box::new(owned);
        let (data, input) = (owned.data(), owned.input());
        let call = self
            .check(&ask, data, input)
            .and_then(|()| self.call(&mut ask, data.len(), input.len()));
        match call {
            Ok(call) => {
                self.inner.submit(Box::new(Operation::held(call, ask.operator, owned)));
                Ok(())
            }
            Err(error) => Err((error, owned)),
        }
    }

    /// Checks what the types of the caller's buffers do not say.
    fn check(&self, ask: &Ask<'_>, data: &[u8], input: &[u8]) -> Result<()> {
        ask.check_operator()?;
        check_elements(ask, data)?;
        check_elements(ask, input)?;
        let lies_apart = || self.arena().is_none_or(|arena| arena.offset_of(data).is_none());
        if ask.collective == Collective::ReduceSlices && lies_apart() {
            let problem = "it takes registered buffers only".to_owned();
            return Err(Error::argument(ask.operation, problem));
        }
        Ok(())
    }
}

/// Calls on buffers whose types do not say what lies in them: the bytes of elements.
impl Ask<'_> {
    /// Carries the call out on the caller's thread.
    ///
    /// # Errors
    ///
    /// As for the call on elements; also for bytes that are no whole elements, or not aligned for them.
    pub fn run(self, group: &ProcessGroup, data: &mut [u8], input: &[u8]) -> Result<()> {
        group.check(&self, data, input)?;
        group.run_on(self, data, input)
    }

    /// Begins the call in the background. Gives `buffer` back.
    ///
    /// # Errors
    ///
    /// As for [`Ask::run`].
    pub fn begin<B, I>(self, group: &ProcessGroup, buffer: B, input: I) -> Begun<B>
    where
        I: AsRef<[u8]> + Send + 'static,
        B: AsMut<[u8]> + AsRef<[u8]> + Send + 'static,
    {
        group.submit(self, buffer, input)
    }

    /// [`Ask::begin`] that ends in `end`, which gets the buffer after a failure, too. It runs on the thread that drives
    /// the group, while the group is locked. So it must not wait for a call.
    pub fn begin_then<B>(
        self,
        group: &ProcessGroup,
        buffer: B,
        end: impl FnOnce(Result<()>, B) + Send + 'static,
    ) where
        B: AsMut<[u8]> + AsRef<[u8]> + Send + 'static,
    {
        group.begin_then::<u8, _>(self, buffer, end);
    }
}

/// The buffers of a call in the background, and what is done at its end.
struct Owned<T, B, I, F> {
    buffer: B,
    input: I,
    end: F,
    element: PhantomData<T>,
}

impl<T, B, I, F> Held for Owned<T, B, I, F>
where
    T: Element,
    I: AsRef<[T]> + Send + 'static,
    B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    F: FnOnce(Result<()>, B) + Send + 'static,
{
    fn data(&self) -> &[u8] {
        bytemuck::cast_slice(self.buffer.as_ref())
    }

    fn input(&self) -> &[u8] {
        bytemuck::cast_slice(self.input.as_ref())
    }

    fn both(&mut self) -> (&mut [u8], &[u8]) {
        let Owned { buffer, input, .. } = self;
        (bytemuck::cast_slice_mut(buffer.as_mut()), bytemuck::cast_slice::<T, u8>(I::as_ref(input)))
    }

    fn end(self: Box<Self>, result: drumline_engine::Result<()>) {
        let Owned { buffer, end, .. } = *self;
        end(result, buffer);
    }
}

impl ProcessGroup {
    /// The call that a program asks for, if buffers of these lengths in bytes fit. The one place that checks lengths.
    #[inline]
    fn call(&self, ask: &mut Ask<'_>, data: usize, input: usize) -> Result<Call> {
        let size = ask.dtype.size();
        let counts = self.counts(ask, data / size, input / size)?;
        Ok(Call {
            collective: ask.collective,
            operator: None,
            root: ask.root,
            dtype: ask.dtype,
            counts,
            parts: std::mem::take(&mut ask.parts),
            timeout: ask.timeout.or(self.timeout),
        })
    }

    #[inline]
    fn counts(&self, ask: &Ask<'_>, data: usize, input: usize) -> Result<Counts> {
        if let Some(root) = ask.root {
            self.check_rank(ask.operation, root)?;
        }
        match ask.collective {
            Collective::AllReduce
            | Collective::ReduceSlices
            | Collective::Reduce
            | Collective::Broadcast
            | Collective::Barrier
            | Collective::MonitoredBarrier => {
                check_len(ask.operation, "the input", input, 0)?;
                Ok(Counts::Even(data))
            }
            Collective::AllGather | Collective::Gather => {
                self.check_blocks(ask, input, data, "an output")
            }
            Collective::ReduceScatter | Collective::Scatter => {
                self.check_blocks(ask, data, input, "an input")
            }
            Collective::AllToAll => self.check_exchange(ask, data, input),
        }
    }

    pub(super) fn check_rank(&self, operation: &'static str, rank: Rank) -> Result<()> {
        if rank < self.world_size() {
            return Ok(());
        }
        Err(Error::argument(
            operation,
            format!(
                "there is no rank {rank}: the ranks of group {:?} are 0 to {}",
                self.name(),
                self.world_size() - 1
            ),
        ))
    }

    /// The counts of a call in which this rank has one block, of `own` elements, in one buffer. The other buffer, of
    /// `long` elements, holds the blocks of all ranks; if there is a root, it is empty on other ranks.
    fn check_blocks(&self, ask: &Ask<'_>, own: usize, long: usize, what: &str) -> Result<Counts> {
        let Ask { operation, root, lengths, .. } = *ask;
        let holds_all = root.is_none_or(|root| root == self.rank());
        if !holds_all && long != 0 {
            let what = format!("{what} of a rank that is not the root");
            return Err(other_length(operation, &what, long, 0));
        }
        let counts = match lengths.0 {
            Of::ByRank(counts) => counts,
            Of::Even => {
                if holds_all {
                    self.check_even(operation, own, long, what)?;
                }
                return Ok(Counts::Even(own));
            }
            Of::ByPair { .. } => {
                let problem = "it takes one list of lengths, the same on all ranks".to_owned();
                return Err(Error::argument(operation, problem));
            }
        };
        let borders = self.borders(operation, "counts", counts)?;
        check_len(operation, "this rank's block", own, counts[self.rank()])?;
        if holds_all {
            check_len(operation, "the buffer of all blocks", long, borders.total())?;
        }
        // All ranks pass the same counts, so all decide this alike.
        Ok(match counts.iter().all(|count| *count == own) {
            true => Counts::Even(own),
            false => Counts::ByRank(borders),
        })
    }

    /// Checks that the long buffer holds a block of `block` elements for every rank.
    fn check_even(
        &self,
        operation: &'static str,
        block: usize,
        long: usize,
        what: &str,
    ) -> Result<()> {
        if block.checked_mul(self.world_size()) == Some(long) {
            return Ok(());
        }
        Err(Error::argument(
            operation,
            format!(
                "{what} of {long} elements does not hold a block of {block} elements for each of \
                 {} ranks",
                self.world_size()
            ),
        ))
    }

    fn check_exchange(&self, ask: &Ask<'_>, output: usize, input: usize) -> Result<Counts> {
        let operation = ask.operation;
        let (send_counts, recv_counts) = match ask.lengths.0 {
            Of::ByPair { sent, received } => (sent, received),
            Of::ByRank(counts) => (counts, counts),
            Of::Even => {
                check_len(operation, "the output", output, input)?;
                let block = input / self.world_size();
                self.check_even(operation, block, input, "an input")?;
                return Ok(Counts::Even(block));
            }
        };
        let sent = self.borders(operation, "what it sends", send_counts)?;
        let received = self.borders(operation, "what it gets", recv_counts)?;
        check_len(operation, "the input", input, sent.total())?;
        check_len(operation, "the output", output, received.total())?;
        let (to_self, from_self) = (send_counts[self.rank()], recv_counts[self.rank()]);
        if to_self != from_self {
            let problem =
                format!("this rank sends {to_self} elements to itself but expects {from_self}");
            return Err(Error::argument(operation, problem));
        }
        Ok(Counts::Own { sent, received })
    }

    /// The borders of blocks that have `counts` elements, one count for each rank.
    fn borders(&self, operation: &'static str, what: &str, counts: &[usize]) -> Result<Borders> {
        let invalid = |problem| Error::argument(operation, problem);
        if counts.len() != self.world_size() {
            return Err(invalid(format!(
                "{what} has {} entries, but the group has {} ranks",
                counts.len(),
                self.world_size()
            )));
        }
        Borders::new(counts)
            .ok_or_else(|| invalid(format!("no memory holds as many elements as {what} says")))
    }
}

#[inline]
fn check_len(operation: &'static str, what: &str, found: usize, expected: usize) -> Result<()> {
    match found == expected {
        true => Ok(()),
        false => Err(other_length(operation, what, found, expected)),
    }
}

#[cold]
fn other_length(operation: &'static str, what: &str, found: usize, expected: usize) -> Error {
    let problem = format!("{what} has {found} elements where there should be {expected}");
    Error::argument(operation, problem)
}

/// Checks that the bytes are whole elements, and aligned for them.
fn check_elements(ask: &Ask<'_>, bytes: &[u8]) -> Result<()> {
    let (dtype, align) = (ask.dtype, ask.dtype.kernels().align);
    if bytes.is_empty()
        || bytes.len().is_multiple_of(dtype.size()) && bytes.as_ptr().addr().is_multiple_of(align)
    {
        return Ok(());
    }
    let problem = format!(
        "{} bytes at {:p} are no whole number of {dtype}, which take {} bytes and begin at multiples of {align}",
        bytes.len(),
        bytes,
        dtype.size()
    );
    Err(Error::argument(ask.operation, problem))
}
