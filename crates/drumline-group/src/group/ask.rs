//! What a program asks of a group, on buffers of bytes, and whether the buffers fit.

use std::time::Duration;

use drumline_engine::{
    call::Call,
    operator::{AnyOperator, Operator},
};
use drumline_schedule::{Borders, Collective, Counts, step::Rank};

use super::ProcessGroup;
use crate::{DType, Element, Error, Result};

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
    pub(super) operation: &'static str,
    collective: Collective,
    dtype: DType,
    pub(super) operator: Option<AnyOperator>,
    root: Option<Rank>,
    lengths: Lengths<'a>,
    parts: Vec<usize>,
    timeout: Option<Duration>,
    /// Whether the buffers pass through slots even if they are registered.
    pub(super) is_staged: bool,
}

/// The lengths of blocks.
#[derive(Clone, Copy, Debug)]
enum Lengths<'a> {
    /// All have the same, which follows from the buffers.
    Even,
    ByRank(&'a [usize]),
    ByPair {
        sent: &'a [usize],
        received: &'a [usize],
    },
}

impl<'a> Ask<'a> {
    /// A collective on elements of this type.
    #[inline(always)]
    pub fn new(collective: Collective, dtype: DType) -> Ask<'a> {
        Ask {
            operation: collective.name(),
            collective,
            dtype,
            operator: None,
            root: None,
            lengths: Lengths::Even,
            parts: Vec::new(),
            timeout: None,
            is_staged: false,
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

    /// The same in blocks of these lengths, one for each rank.
    #[must_use]
    pub fn in_blocks(self, counts: &'a [usize]) -> Ask<'a> {
        let operation = match self.collective {
            Collective::AllGather => "all_gather_v",
            Collective::Gather => "gather_v",
            Collective::Scatter => "scatter_v",
            Collective::ReduceScatter => "reduce_scatter_v",
            _ => self.operation,
        };
        Ask { operation, lengths: Lengths::ByRank(counts), ..self }
    }

    /// The same as an exchange of blocks of these lengths: to each rank, and from each rank.
    #[must_use]
    pub fn exchanging(self, sent: &'a [usize], received: &'a [usize]) -> Ask<'a> {
        let lengths = Lengths::ByPair { sent, received };
        Ask { operation: "all_to_all_v", lengths, ..self }
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

    pub(super) fn collective(&self) -> Collective {
        self.collective
    }

    /// Checks that the call has an operator if it reduces, and that its elements have it.
    pub(super) fn check_operator(&self) -> Result<()> {
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

    /// The same through slots: the buffers of other ranks are not registered.
    pub(super) fn staged(self) -> Ask<'a> {
        Ask { is_staged: true, ..self }
    }
}

impl ProcessGroup {
    /// The call that a program asks for, if buffers of these lengths in bytes fit. The one place that checks lengths.
    #[inline]
    pub(super) fn call(&self, ask: &mut Ask<'_>, data: usize, input: usize) -> Result<Call> {
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
        let Lengths::ByRank(counts) = lengths else {
            if holds_all {
                self.check_even(operation, own, long, what)?;
            }
            return Ok(Counts::Even(own));
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
    pub(super) fn check_even(
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
        let Lengths::ByPair { sent: send_counts, received: recv_counts } = ask.lengths else {
            check_len(operation, "the output", output, input)?;
            let block = input / self.world_size();
            self.check_even(operation, block, input, "an input")?;
            return Ok(Counts::Even(block));
        };
        let sent = self.borders(operation, "send_counts", send_counts)?;
        let received = self.borders(operation, "recv_counts", recv_counts)?;
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
pub(super) fn check_len(
    operation: &'static str,
    what: &str,
    found: usize,
    expected: usize,
) -> Result<()> {
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
pub(super) fn check_elements(ask: &Ask<'_>, bytes: &[u8]) -> Result<()> {
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
