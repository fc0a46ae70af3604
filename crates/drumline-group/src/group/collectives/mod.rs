//! The collectives, blocking and asynchronous, sorted by what they do.
//!
//! Functions that end in `_v` take blocks of different lengths.

mod barrier;
mod exchange;
mod gather;
mod reduce;
mod scan;
mod scatter;
pub(super) mod torch_spelling;

use drumline_engine::{
    any_call::{AnyCall, Job},
    call::Call,
    operator::Operator,
    typed_call::TypedCall,
};
use drumline_schedule::{Borders, Collective, Counts, step::Rank};

use super::ProcessGroup;
use crate::{Begun, Element, Error, Result, Work, WorkError, work::give_back};

impl ProcessGroup {
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

    /// Checks that the long buffer holds a block of `block` elements for every rank.
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

    /// Checks the same at the root. On other ranks the long buffer must be empty.
    fn check_at_root(
        &self,
        operation: &'static str,
        root: Rank,
        block: usize,
        long: usize,
        what: &str,
    ) -> Result<()> {
        self.check_rank(operation, root)?;
        match self.rank() == root {
            true => self.check_blocks(operation, block, long, what),
            false => {
                let what = format!("{what} of a rank that is not the root");
                self.check_len(operation, &what, long, 0)
            }
        }
    }

    fn check_len(
        &self,
        operation: &'static str,
        what: &str,
        found: usize,
        expected: usize,
    ) -> Result<()> {
        if found == expected {
            return Ok(());
        }
        Err(Error::InvalidArgument {
            operation,
            problem: format!("{what} has {found} elements where there should be {expected}"),
        })
    }

    /// The borders of blocks that have `counts` elements, one count for each rank.
    fn borders(&self, operation: &'static str, what: &str, counts: &[usize]) -> Result<Borders> {
        let invalid = |problem| Error::InvalidArgument { operation, problem };
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

    /// The counts of a call with blocks of these lengths, one for each rank. Checks that this rank's block has `own`
    /// elements. If this rank holds all blocks, `long` is their length in all, which is checked, too.
    fn blocks_by_rank(
        &self,
        operation: &'static str,
        counts: &[usize],
        own: usize,
        long: Option<usize>,
    ) -> Result<Counts> {
        let borders = self.borders(operation, "counts", counts)?;
        self.check_len(operation, "this rank's block", own, counts[self.rank()])?;
        if let Some(long) = long {
            self.check_len(operation, "the buffer of all blocks", long, borders.total())?;
        }
        // All ranks pass the same counts, so all decide this alike.
        Ok(match counts.iter().all(|count| *count == own) {
            true => Counts::Even(own),
            false => Counts::ByRank(borders),
        })
    }

    /// Like `blocks_by_rank`, for a call in which only the root holds all blocks.
    fn blocks_at_root(
        &self,
        operation: &'static str,
        root: Rank,
        counts: &[usize],
        own: usize,
        long: usize,
    ) -> Result<Counts> {
        self.check_rank(operation, root)?;
        if self.rank() == root {
            return self.blocks_by_rank(operation, counts, own, Some(long));
        }
        let what = "the buffer of all blocks, on a rank that is not the root,";
        self.check_len(operation, what, long, 0)?;
        self.blocks_by_rank(operation, counts, own, None)
    }

    // Inlined, so that the call is built where it stays: moving it costs as much as a short call itself.
    #[inline]
    fn run<T: Element>(
        &self,
        call: Call,
        operator: Option<Operator<T>>,
        data: &mut [T],
        input: &[T],
    ) -> Result<()> {
        self.inner.run(&mut TypedCall::new(self.limited(call), operator, data, input))
    }

    /// The call with the time limit of this handle, unless it has its own.
    #[inline]
    fn limited(&self, mut call: Call) -> Call {
        call.timeout = call.timeout.or(self.timeout);
        call
    }

    /// Begins the call in the background, unless its arguments cannot be used.
    fn submit<T, B, I>(
        &self,
        call: Result<Call>,
        operator: Option<Operator<T>>,
        buffer: B,
        input: I,
    ) -> Begun<B>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let call = match call.and_then(|call| usable(call, &operator)) {
            Ok(call) => call,
            Err(error) => return Err(WorkError { error, buffer: Some(buffer) }),
        };
        let (promise, work) = Work::of(&self.inner, true);
        self.submit_and(call, operator, buffer, input, move |result, buffer| {
            promise.complete(give_back(result, buffer));
        });
        Ok(work)
    }

    /// The same on a copy: `prepared` is the call, its buffer and its input. When it has succeeded, `then` copies the
    /// buffer to those of the caller.
    fn submit_copy<T, I, B, F>(
        &self,
        prepared: Result<(Call, Vec<T>, I)>,
        operator: Option<Operator<T>>,
        mut outputs: Vec<B>,
        then: F,
    ) -> Begun<Vec<B>>
    where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: Send + 'static,
        F: FnOnce(&mut [T], &mut [B]) + Send + 'static,
    {
        let (call, buffer, input) =
            match prepared.and_then(|it| Ok((usable(it.0, &operator)?, it.1, it.2))) {
                Ok(prepared) => prepared,
                Err(error) => return Err(WorkError { error, buffer: Some(outputs) }),
            };
        let (promise, work) = Work::of(&self.inner, true);
        self.submit_and(call, operator, buffer, input, move |result, mut buffer: Vec<T>| {
            if result.is_ok() {
                then(&mut buffer, &mut outputs);
            }
            promise.complete(give_back(result, outputs));
        });
        Ok(work)
    }

    /// Begins the call in the background. When it has ended, `end` gets its result and its buffer.
    pub(super) fn submit_and<T, B, I, F>(
        &self,
        call: Call,
        operator: Option<Operator<T>>,
        buffer: B,
        input: I,
        end: F,
    ) where
        T: Element,
        I: AsRef<[T]> + Send + 'static,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
        F: FnOnce(Result<()>, B) + Send + 'static,
    {
        let on = TypedCall::new(self.limited(call), operator, buffer, input);
        self.inner.submit(Box::new(Owned { on, end }));
    }
}

/// A call on blocks of `elements` elements.
pub(super) fn call<T: Element>(operation: Collective, elements: usize) -> Call {
    call_of::<T>(operation, Counts::Even(elements))
}

fn call_of<T: Element>(operation: Collective, counts: Counts) -> Call {
    Call::new(operation, T::DTYPE, counts)
}

/// The call, if its type has the operator.
fn usable<T: Element>(call: Call, operator: &Option<Operator<T>>) -> Result<Call> {
    match operator.as_ref().and_then(|operator| operator.kind().problem_with(T::DTYPE)) {
        None => Ok(call),
        Some(problem) => Err(Error::InvalidArgument { operation: call.collective.name(), problem }),
    }
}

/// A call that owns its buffers.
struct Owned<T: Element, B, I, F> {
    on: TypedCall<T, B, I>,
    end: F,
}

impl<T, B, I, F> Job for Owned<T, B, I, F>
where
    T: Element,
    I: AsRef<[T]> + Send,
    B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    F: FnOnce(Result<()>, B) + Send,
{
    fn operation(&mut self) -> &mut dyn AnyCall {
        &mut self.on
    }

    fn complete(self: Box<Self>, result: drumline_engine::Result<()>) {
        let Owned { on, end } = *self;
        end(result.map_err(Error::from), on.into_data());
    }
}
