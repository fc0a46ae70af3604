//! A call of a collective.

use std::time::Duration;

use drumline_kernels::DType;
use drumline_schedule::{Collective, Counts, Situation, Topology, price::ElementKind, step::Rank};

use crate::{executor::Description, operator::OperatorKind};

/// One call of a collective on a rank: its arguments without the buffers.
#[derive(Clone, Debug)]
pub struct Call {
    /// The kind of the collective.
    pub collective: Collective,
    /// The kind of its operator, if it reduces.
    pub operator: Option<OperatorKind>,
    /// The root, if it has one.
    pub root: Option<Rank>,
    /// The type of the elements.
    pub dtype: DType,
    /// The number of elements in each block.
    pub counts: Counts,
    /// The lengths of the caller's buffers, if several of them travel as one.
    pub parts: Vec<usize>,
    /// The time limit. `None`: that of the group.
    pub timeout: Option<Duration>,
}

impl Call {
    /// A call without an operator, a root, parts and a time limit of its own.
    pub fn new(collective: Collective, dtype: DType, counts: Counts) -> Call {
        let (operator, root, parts, timeout) = (None, None, Vec::new(), None);
        Call { collective, operator, root, dtype, counts, parts, timeout }
    }

    /// The same call with a root.
    pub fn rooted(self, root: Rank) -> Call {
        Call { root: Some(root), ..self }
    }

    /// The same call on several buffers of these lengths, which travel as one.
    pub fn in_parts(self, parts: Vec<usize>) -> Call {
        Call { parts, ..self }
    }

    /// The same call with a time limit of its own.
    pub fn within(self, timeout: Duration) -> Call {
        Call { timeout: Some(timeout), ..self }
    }

    /// Why no group can make this call. `None`: it can.
    ///
    /// A call that reduces has an operator that its elements have, and no other call has an operator.
    pub fn problem(&self) -> Option<String> {
        match (self.collective.reduces(), self.operator) {
            (true, Some(operator)) => operator.problem_with(self.dtype),
            (true, None) => Some("it reduces, and has no operator".to_owned()),
            (false, Some(operator)) => {
                Some(format!("it reduces nothing, so it takes no operator {}", operator.name()))
            }
            (false, None) => None,
        }
    }

    /// Whether the calls share a plan: they differ at most in their time limits.
    pub(crate) fn is_like(&self, other: &Call) -> bool {
        let Call { collective, operator, root, dtype, counts, parts, timeout: _ } = self;
        // Most calls have no parts. A comparison of two empty lists reads dangling addresses, which takes 50 ns
        // on a processor with masked loads: as long as all other comparisons together.
        let same_parts =
            parts.len() == other.parts.len() && (parts.is_empty() || *parts == other.parts);
        let lengths = same_parts && *counts == other.counts;
        let rest = (*collective, *operator, *root, *dtype);
        lengths && rest == (other.collective, other.operator, other.root, other.dtype)
    }

    /// The description of the call that peers compare with their own.
    pub fn describe(&self, group: u64, sequence: u64, algorithm: &str) -> Description {
        let Call { collective, dtype, .. } = *self;
        let description = Description::new(group, sequence, collective, dtype, 0, algorithm)
            .with_counts(&self.counts);
        let description = match self.parts[..] {
            [] => description,
            _ => description.with_blocks(self.parts.iter().copied()),
        };
        let description = match self.operator {
            Some(operator) => description.with_operator(operator),
            None => description,
        };
        match self.root {
            Some(root) => description.with_root(root),
            None => description,
        }
    }

    /// Everything that the choice of the algorithm depends on. `long_bytes` is
    /// [`Host::long_bytes`](crate::host::Host::long_bytes); `None` where ranks share no memory.
    pub(crate) fn situation<'a>(
        &self,
        topology: &'a Topology,
        long_bytes: Option<usize>,
        registered: bool,
    ) -> Situation<'a> {
        Situation {
            collective: self.collective,
            topology,
            elements: self.counts.longest(),
            kind: ElementKind { bytes: self.dtype.size(), sum_bytes: self.accumulator().size() },
            uneven: !matches!(self.counts, Counts::Even(_)),
            registered,
            long_bytes,
        }
    }

    /// The type of partial sums. A custom operator works on the caller's type.
    fn accumulator(&self) -> DType {
        match self.operator {
            Some(operator) if operator.is_custom() => self.dtype,
            _ => self.dtype.accumulator(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ReduceOp;

    #[test]
    fn a_call_has_an_operator_if_it_reduces() {
        for collective in Collective::ALL {
            let call =
                |operator| Call { operator, ..Call::new(collective, DType::F32, Counts::Even(1)) };
            let sum = Some(OperatorKind::Builtin(ReduceOp::Sum));
            assert_eq!(call(None).problem().is_none(), !collective.reduces(), "{collective}");
            assert_eq!(call(sum).problem().is_none(), collective.reduces(), "{collective}");
        }
    }

    #[test]
    fn a_time_limit_changes_nothing_of_how_a_call_is_carried_out() {
        let call = |elements| Call {
            operator: Some(OperatorKind::Builtin(ReduceOp::Sum)),
            ..Call::new(Collective::AllReduce, DType::F32, Counts::Even(elements))
        };
        let short = call(1);
        assert!(short.is_like(&short.clone().within(Duration::from_secs(1))));
        assert!(!short.is_like(&call(2)));
        assert!(!short.is_like(&Call { operator: None, ..short.clone() }));
        assert!(!short.is_like(&short.clone().rooted(0)));
        assert!(!short.is_like(&short.clone().in_parts(vec![1])));
    }
}
