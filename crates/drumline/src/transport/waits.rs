//! Who waits for whom, and for whom they all wait in the end.
//!
//! A rank that lacks another one's message knows only that one, who may be waiting, too: in a tree
//! or a hierarchy of hosts most ranks wait for somebody innocent. So whoever has waited for a
//! while tells everybody for whom, and whoever must name a culprit follows the chain to its root:
//! a rank that has not said that it waits.

use std::collections::{BTreeMap, BTreeSet};

use drumline_schedule::step::Rank;

use crate::executor::Description;

/// What a rank last said of its waiting.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waits {
    /// The call that it is in.
    pub(crate) call: Description,
    /// Without whom nothing goes on there. None: that call is over.
    pub(crate) ranks: Vec<Rank>,
}

impl Waits {
    /// Whether the rank that says so has done its part of the call of that number.
    fn is_past(&self, sequence: u64) -> bool {
        let own = self.call.sequence();
        own > sequence || (own == sequence && self.ranks.is_empty())
    }
}

/// A rank that looks for a culprit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seeker {
    pub(crate) rank: Rank,
    /// Number of its first call that is not over.
    pub(crate) sequence: u64,
}

impl Seeker {
    /// The ranks for whom those that this rank awaits wait in the end, by what all have `told`.
    ///
    /// Somebody who waits is passed over, unless whom it awaits is past that call: what it lacks
    /// is on its way, so it has stopped since. This rank is never a root. It may be on the way to
    /// one: whom a message waits for may wait for this rank in a collective, and that for others.
    /// Where all wait for each other there is no root, and the answer is `awaited` itself.
    pub(crate) fn roots(self, awaited: Vec<Rank>, told: &BTreeMap<Rank, Waits>) -> Vec<Rank> {
        let is_past = |rank: Rank, sequence| match rank == self.rank {
            true => self.sequence > sequence,
            false => told.get(&rank).is_some_and(|waits| waits.is_past(sequence)),
        };
        let awaited_by = |rank| {
            told.get(&rank).into_iter().flat_map(|waits| {
                let sequence = waits.call.sequence();
                waits.ranks.iter().copied().filter(move |rank| !is_past(*rank, sequence))
            })
        };
        let mut seen = BTreeSet::new();
        let mut roots = BTreeSet::new();
        let mut next = awaited.clone();
        while let Some(rank) = next.pop() {
            if !seen.insert(rank) {
                continue;
            }
            let before = next.len();
            next.extend(awaited_by(rank));
            if next.len() == before && rank != self.rank {
                roots.insert(rank);
            }
        }
        match roots.is_empty() {
            true => awaited,
            false => roots.into_iter().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{DType, executor::Operation};

    /// (rank, number of its call, whom it awaits)
    fn told(said: &[(Rank, u64, &[Rank])]) -> BTreeMap<Rank, Waits> {
        let waits = |&(rank, sequence, ranks): &(Rank, u64, &[Rank])| {
            let call = Description::new(1, sequence, Operation::Barrier, DType::U8, 0, "tree");
            (rank, Waits { call, ranks: ranks.to_vec() })
        };
        said.iter().map(waits).collect()
    }

    const SELF: Seeker = Seeker { rank: 0, sequence: 7 };

    #[test]
    fn whoever_has_said_nothing_is_the_root() {
        assert_eq!(SELF.roots(vec![1, 2], &told(&[])), [1, 2]);
    }

    #[test]
    fn chains_are_followed_to_their_end_through_calls_too() {
        let said = told(&[(1, 7, &[2]), (2, 6, &[3, 4]), (4, 6, &[3])]);
        assert_eq!(SELF.roots(vec![1], &said), [3]);
        assert_eq!(SELF.roots(vec![1, 5], &said), [3, 5]);
    }

    #[test]
    fn those_that_wait_for_the_seeker_add_nobody() {
        assert_eq!(SELF.roots(vec![1, 2], &told(&[(1, 7, &[0])])), [2]);
    }

    #[test]
    fn chains_through_the_seeker_go_on_with_those_that_it_awaits_itself() {
        let said = [(1, 7, &[0][..]), (0, 7, &[2])];
        assert_eq!(SELF.roots(vec![1], &told(&said)), [2]);
        // Not if it is past the call that the other one says it waits in.
        assert_eq!(SELF.roots(vec![1], &told(&[(1, 6, &[0]), (0, 7, &[2])])), [1]);
    }

    #[test]
    fn in_a_circle_the_awaited_are_named() {
        let said = told(&[(1, 7, &[2]), (2, 7, &[1])]);
        assert_eq!(SELF.roots(vec![1], &said), [1]);
        assert_eq!(SELF.roots(vec![2], &told(&[(2, 7, &[0])])), [2]);
    }

    #[test]
    fn whoever_waits_for_what_was_sent_has_stopped_since() {
        // Rank 2, and then this one, are beyond the call that rank 1 says it waits in.
        assert_eq!(SELF.roots(vec![1], &told(&[(1, 6, &[2]), (2, 7, &[1])])), [1]);
        assert_eq!(SELF.roots(vec![1], &told(&[(1, 6, &[2]), (2, 6, &[])])), [1]);
        assert_eq!(SELF.roots(vec![1], &told(&[(1, 6, &[0])])), [1]);
        // Rank 3 is not.
        assert_eq!(SELF.roots(vec![1], &told(&[(1, 6, &[2, 3]), (2, 7, &[1])])), [3]);
    }

    proptest! {
        /// Where ranks wait in one call in any way, without circles, the roots are exactly the
        /// ranks at the ends of chains that begin here.
        #[test]
        fn roots_are_the_ends_of_chains(
            edges in prop::collection::vec((0..12_usize, 0..12_usize), 1..40),
        ) {
            let mut said: BTreeMap<Rank, Vec<Rank>> = BTreeMap::new();
            for (from, to) in edges.into_iter().filter(|(from, to)| from < to) {
                said.entry(from).or_default().push(to);
            }
            let Some(awaited) = said.remove(&0) else { return Ok(()) };
            let said: Vec<_> = said.iter().map(|(rank, to)| (*rank, 7, &to[..])).collect();
            let ends = |rank: Rank| {
                fn reach(rank: Rank, said: &[(Rank, u64, &[Rank])], ends: &mut BTreeSet<Rank>) {
                    match said.iter().find(|(of, ..)| *of == rank) {
                        Some((_, _, to)) => to.iter().for_each(|to| reach(*to, said, ends)),
                        None => drop(ends.insert(rank)),
                    }
                }
                let mut ends = BTreeSet::new();
                reach(rank, &said, &mut ends);
                ends
            };
            let expected: BTreeSet<Rank> = awaited.iter().flat_map(|rank| ends(*rank)).collect();
            let roots = SELF.roots(awaited, &told(&said));
            prop_assert_eq!(roots, expected.into_iter().collect::<Vec<_>>());
        }
    }
}
