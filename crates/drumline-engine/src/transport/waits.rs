//! Which ranks wait for which, and for which ranks all of them wait in the end.
//!
//! A rank that lacks a message knows only its sender. But the sender may be waiting, too: in a tree or in a
//! hierarchy of hosts, most ranks wait for a rank that is not at fault. So a rank that has waited for a
//! while, in a call or for a message, tells all others for which ranks it waits. A rank that must name a
//! culprit follows this chain to its root: a rank that has not said that it waits.

use std::collections::{BTreeMap, BTreeSet};

use drumline_schedule::step::Rank;

use crate::executor::Description;

/// What a rank last said about its waiting. It tells only waits that have lasted for long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Waits {
    /// The call in which it waits, if it waits in a call.
    pub call: Option<InCall>,
    /// The ranks that should send it messages, or receive messages from it.
    pub messages: Vec<Rank>,
}

/// A call, and the ranks without which it cannot go on: at least one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InCall {
    /// The call.
    pub call: Description,
    pub(crate) ranks: Vec<Rank>,
}

impl Waits {
    /// Whether the rank waits at all.
    pub fn is_any(&self) -> bool {
        self.call.is_some() || !self.messages.is_empty()
    }
}

/// What a waiting rank lacks from another rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Lack {
    /// The other rank's part in a call.
    Call,
    /// A message from the other rank, or that it receives one.
    Message,
}

/// A rank that looks for a culprit.
#[derive(Clone, Copy, Debug)]
pub struct Seeker<'a> {
    /// The rank that looks.
    pub rank: Rank,
    /// What all ranks have said, including this one, except for ranks that have stopped since.
    pub told: &'a BTreeMap<Rank, Waits>,
}

impl Seeker<'_> {
    /// The ranks for which `awaited` wait in the end. Empty where all ranks wait for each other.
    ///
    /// This rank is never a root, but the way to a root may lead through it: a rank that this rank awaits for
    /// a message may wait for this rank in a call, and this rank for others.
    ///
    /// A message may be posted long before any rank needs it. So where all ranks wait for each other, one of
    /// them may not really wait. Then the search is repeated with calls only, and its result counts.
    pub fn roots(self, lack: Lack, awaited: &[Rank]) -> Vec<Rank> {
        let all = self.ends(lack, awaited, |rank, lack| self.awaited_by(rank, lack));
        let roots = match all.is_empty() {
            true => self.ends(lack, awaited, |rank, _| self.awaited_in_call(rank)),
            false => all,
        };
        roots.into_iter().collect()
    }

    /// The ends of all chains that begin with `awaited`, without this rank.
    fn ends(
        self,
        lack: Lack,
        awaited: &[Rank],
        awaited_by: impl Fn(Rank, Lack) -> Vec<(Rank, Lack)>,
    ) -> BTreeSet<Rank> {
        let mut seen = BTreeSet::new();
        let mut ends = BTreeSet::new();
        let mut next: Vec<_> = awaited.iter().map(|rank| (*rank, lack)).collect();
        while let Some((rank, lack)) = next.pop() {
            if !seen.insert((rank, lack)) {
                continue;
            }
            let others = awaited_by(rank, lack);
            if others.is_empty() && rank != self.rank {
                ends.insert(rank);
            }
            next.extend(others);
        }
        ends
    }

    /// The ranks for which `rank` waits, if another rank lacks `lack` from it, and what it lacks from them. A
    /// rank that is in a call does its part there whether or not its messages arrive.
    fn awaited_by(self, rank: Rank, lack: Lack) -> Vec<(Rank, Lack)> {
        let Some(waits) = self.told.get(&rank) else { return Vec::new() };
        let mut awaited = self.awaited_in_call(rank);
        if waits.call.is_none() || lack == Lack::Message {
            awaited.extend(waits.messages.iter().map(|rank| (*rank, Lack::Message)));
        }
        awaited
    }

    fn awaited_in_call(self, rank: Rank) -> Vec<(Rank, Lack)> {
        let in_call = self.told.get(&rank).and_then(|waits| waits.call.as_ref());
        let ranks = in_call.into_iter().flat_map(|in_call| &in_call.ranks);
        ranks.map(|rank| (*rank, Lack::Call)).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::DType;
    use drumline_schedule::Collective;

    /// The report of a rank that waits for these ranks in a call.
    fn calls(ranks: &[Rank]) -> Waits {
        let call = Description::new(1, 7, Collective::Barrier, DType::U8, 0, "tree");
        let call = Some(InCall { call, ranks: ranks.to_vec() });
        Waits { call, messages: Vec::new() }
    }

    /// The report of a rank that waits for messages from these ranks.
    fn messages(ranks: &[Rank]) -> Waits {
        Waits { call: None, messages: ranks.to_vec() }
    }

    fn both(in_call: &[Rank], messages: &[Rank]) -> Waits {
        Waits { messages: messages.to_vec(), ..calls(in_call) }
    }

    /// The roots when rank 0 waits for these ranks in a call.
    fn in_call(awaited: &[Rank], told: &[(Rank, Waits)]) -> Vec<Rank> {
        roots(Lack::Call, awaited, told)
    }

    /// The roots when rank 0 waits for messages from these ranks.
    fn for_messages(awaited: &[Rank], told: &[(Rank, Waits)]) -> Vec<Rank> {
        roots(Lack::Message, awaited, told)
    }

    fn roots(lack: Lack, awaited: &[Rank], told: &[(Rank, Waits)]) -> Vec<Rank> {
        let mut all = BTreeMap::from([(0, Waits::default())]);
        all.extend(told.iter().cloned());
        Seeker { rank: 0, told: &all }.roots(lack, awaited)
    }

    const NOBODY: [Rank; 0] = [];

    #[test]
    fn whoever_has_said_nothing_is_the_root() {
        assert_eq!(in_call(&[1, 2], &[]), [1, 2]);
        assert_eq!(for_messages(&[1, 2], &[(1, Waits::default())]), [1, 2]);
    }

    #[test]
    fn chains_are_followed_to_their_end_through_calls_too() {
        let said = [(1, calls(&[2])), (2, calls(&[3, 4])), (4, calls(&[3]))];
        assert_eq!(in_call(&[1], &said), [3]);
        assert_eq!(in_call(&[1, 5], &said), [3, 5]);
        assert_eq!(for_messages(&[1], &said), [3]);
    }

    #[test]
    fn chains_are_followed_through_messages_too() {
        // 1 awaits a message of 2, which is in a call with 3, which awaits one of 4.
        let said = [(1, messages(&[2])), (2, calls(&[3])), (3, messages(&[4]))];
        assert_eq!(in_call(&[1], &said), [4]);
        assert_eq!(for_messages(&[1], &said), [4]);
    }

    #[test]
    fn a_part_in_a_call_waits_for_no_message_once_it_has_begun() {
        let said = [(1, both(&[2], &[3]))];
        assert_eq!(in_call(&[1], &said), [2]);
        // A message may wait for either of the two.
        assert_eq!(for_messages(&[1], &said), [2, 3]);
    }

    #[test]
    fn those_that_wait_for_the_seeker_add_nobody() {
        assert_eq!(in_call(&[1, 2], &[(1, calls(&[0]))]), [2]);
        assert_eq!(in_call(&[1, 2], &[(1, messages(&[0]))]), [2]);
    }

    #[test]
    fn chains_through_the_seeker_go_on_with_those_that_it_awaits_itself() {
        assert_eq!(in_call(&[1], &[(1, calls(&[0])), (0, calls(&[2]))]), [2]);
        assert_eq!(for_messages(&[1], &[(1, calls(&[0])), (0, messages(&[1, 2]))]), [2]);
    }

    #[test]
    fn in_a_circle_nobody_is_the_root() {
        let said = [(1, calls(&[2])), (2, calls(&[1]))];
        assert_eq!(in_call(&[1], &said), NOBODY);
        assert_eq!(in_call(&[2], &[(2, calls(&[0]))]), NOBODY);
    }

    #[test]
    fn in_a_circle_of_messages_whoever_is_awaited_in_a_call_is_the_root() {
        let said = [(1, messages(&[2])), (2, messages(&[1]))];
        assert_eq!(in_call(&[1], &said), [1]);
        assert_eq!(for_messages(&[2], &said), [2]);
        // Rank 3 has made another call than the others, and went on to messages.
        let said = [(1, calls(&[3])), (3, messages(&[1, 2])), (2, messages(&[1, 3]))];
        assert_eq!(for_messages(&[1, 3], &said), [3]);
        assert_eq!(in_call(&[3], &said), [3]);
    }

    #[test]
    fn a_receive_posted_early_does_not_excuse_whoever_is_late_in_a_call() {
        // Rank 2 gets its message from rank 1 after the call in which rank 1 waits for it.
        let said = [(1, calls(&[2])), (2, messages(&[1]))];
        assert_eq!(in_call(&[1], &said), [2]);
        assert_eq!(for_messages(&[1], &said), [2]);
    }

    proptest! {
        /// Ranks wait for each other, some in a call and some for messages, but never in a circle. Then the
        /// ranks to blame are exactly the last ranks of all chains of waits that begin at rank 0.
        #[test]
        fn roots_are_the_ends_of_chains(
            edges in prop::collection::vec((0..12_usize, 0..12_usize), 1..40),
            in_calls in prop::collection::vec(any::<bool>(), 12),
        ) {
            let mut said: BTreeMap<Rank, Vec<Rank>> = BTreeMap::new();
            for (from, to) in edges.into_iter().filter(|(from, to)| from < to) {
                said.entry(from).or_default().push(to);
            }
            let Some(awaited) = said.remove(&0) else { return Ok(()) };
            fn reach(rank: Rank, said: &BTreeMap<Rank, Vec<Rank>>, ends: &mut BTreeSet<Rank>) {
                match said.get(&rank) {
                    Some(to) => to.iter().for_each(|to| reach(*to, said, ends)),
                    None => drop(ends.insert(rank)),
                }
            }
            let mut expected = BTreeSet::new();
            awaited.iter().for_each(|rank| reach(*rank, &said, &mut expected));
            let waits = |(&rank, to): (&Rank, &Vec<Rank>)| {
                (rank, if in_calls[rank] { calls(to) } else { messages(to) })
            };
            let said: Vec<_> = said.iter().map(waits).collect();
            let expected: Vec<_> = expected.into_iter().collect();
            prop_assert_eq!(in_call(&awaited, &said), &expected[..]);
            prop_assert_eq!(for_messages(&awaited, &said), &expected[..]);
        }
    }
}
