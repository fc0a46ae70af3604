//! Who waits for whom, and for whom they all wait in the end.
//!
//! A rank that lacks another one's message knows only that one, who may be waiting, too: in a tree
//! or a hierarchy of hosts most ranks wait for somebody innocent. So whoever has waited for a
//! while, in a call or for a message, tells everybody for whom, and whoever must name a culprit
//! follows the chain to its root: a rank that has not said that it waits.

use std::collections::{BTreeMap, BTreeSet};

use drumline_schedule::step::Rank;

use crate::executor::Description;

/// What a rank last said of its waiting, of what has lasted for long.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Waits {
    /// Number of its first call that is not over.
    pub(crate) sequence: u64,
    /// Where it waits in a call.
    pub(crate) call: Option<InCall>,
    /// Who is to send it messages, or to take those that it sends.
    pub(crate) messages: Vec<Rank>,
}

/// A call, and without whom nothing goes on there: at least one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InCall {
    pub(crate) call: Description,
    pub(crate) ranks: Vec<Rank>,
}

impl Waits {
    /// Whether the rank waits at all.
    pub(crate) fn is_any(&self) -> bool {
        self.call.is_some() || !self.messages.is_empty()
    }

    /// Whether somebody who was told the one would learn something new from the other.
    pub(crate) fn differs(&self, other: &Waits) -> bool {
        (&self.call, &self.messages) != (&other.call, &other.messages)
    }

    /// Whether the rank that says so has done its part of the call of that number.
    fn is_past(&self, sequence: u64) -> bool {
        self.sequence > sequence
    }
}

/// What a rank is awaited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Lack {
    /// Its part in the call of that number.
    Call(u64),
    /// A message from it, or that it takes one.
    Message,
}

/// A rank that looks for a culprit.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seeker<'a> {
    pub(crate) rank: Rank,
    /// What all ranks have said, this one among them.
    pub(crate) told: &'a BTreeMap<Rank, Waits>,
}

impl Seeker<'_> {
    /// The ranks for whom those that this rank awaits wait in the end.
    ///
    /// Somebody who waits is passed over, unless whom it awaits in a call is past that call: what
    /// it lacks is on its way, so it has stopped since. (Who waits for a message and has stopped
    /// since is not in `told`, because it does not answer.) This rank is never a root. It may be on
    /// the way to one: whom a message waits for may wait for this rank in a call, and that for
    /// others.
    ///
    /// A message may have been posted long before anybody needs it, so where all wait for each
    /// other there may be one who does not really: it is the root if messages are left out of
    /// account. If that is nobody, either, the answer is `awaited` itself.
    pub(crate) fn roots(self, lack: Lack, awaited: &[Rank]) -> Vec<Rank> {
        let all = self.ends(lack, awaited, |rank, lack| self.awaited_by(rank, lack));
        let roots = match all.is_empty() {
            true => self.ends(lack, awaited, |rank, _| self.awaited_in_call(rank)),
            false => all,
        };
        match roots.is_empty() {
            true => awaited.to_vec(),
            false => roots.into_iter().collect(),
        }
    }

    /// The ends of all chains that begin with `awaited`, but for this rank.
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

    /// For whom a rank waits that is awaited for that, and what for. Its part in a call does not
    /// wait for messages once it is in the call.
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
        let Some(InCall { call, ranks }) = in_call else { return Vec::new() };
        let sequence = call.sequence();
        let is_past = |rank| self.told.get(rank).is_some_and(|waits| waits.is_past(sequence));
        let ranks = ranks.iter().filter(|rank| !is_past(rank));
        ranks.map(|rank| (*rank, Lack::Call(sequence))).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{DType, executor::Operation};

    /// What a rank says that is in the call of that number, or before it, and awaits these there.
    fn calls(sequence: u64, ranks: &[Rank]) -> Waits {
        let call = Description::new(1, sequence, Operation::Barrier, DType::U8, 0, "tree");
        let in_call = (!ranks.is_empty()).then(|| InCall { call, ranks: ranks.to_vec() });
        Waits { sequence, call: in_call, messages: Vec::new() }
    }

    /// And of one that waits for messages with these.
    fn messages(sequence: u64, ranks: &[Rank]) -> Waits {
        Waits { sequence, call: None, messages: ranks.to_vec() }
    }

    fn both(in_call: Waits, ranks: &[Rank]) -> Waits {
        Waits { messages: ranks.to_vec(), ..in_call }
    }

    /// For whom rank 0 waits in the end that awaits these in call 7.
    fn in_call(awaited: &[Rank], told: &[(Rank, Waits)]) -> Vec<Rank> {
        roots(Lack::Call(7), awaited, told)
    }

    /// The same, of messages.
    fn for_messages(awaited: &[Rank], told: &[(Rank, Waits)]) -> Vec<Rank> {
        roots(Lack::Message, awaited, told)
    }

    fn roots(lack: Lack, awaited: &[Rank], told: &[(Rank, Waits)]) -> Vec<Rank> {
        let mut all = BTreeMap::from([(0, calls(7, &[]))]);
        all.extend(told.iter().cloned());
        Seeker { rank: 0, told: &all }.roots(lack, awaited)
    }

    #[test]
    fn whoever_has_said_nothing_is_the_root() {
        assert_eq!(in_call(&[1, 2], &[]), [1, 2]);
        assert_eq!(for_messages(&[1, 2], &[(1, calls(7, &[]))]), [1, 2]);
    }

    #[test]
    fn chains_are_followed_to_their_end_through_calls_too() {
        let said = [(1, calls(7, &[2])), (2, calls(6, &[3, 4])), (4, calls(6, &[3]))];
        assert_eq!(in_call(&[1], &said), [3]);
        assert_eq!(in_call(&[1, 5], &said), [3, 5]);
        assert_eq!(for_messages(&[1], &said), [3]);
    }

    #[test]
    fn chains_are_followed_through_messages_too() {
        // 1 awaits a message of 2, which is in a call with 3, which awaits one of 4.
        let said = [(1, messages(7, &[2])), (2, calls(6, &[3])), (3, messages(6, &[4]))];
        assert_eq!(in_call(&[1], &said), [4]);
        assert_eq!(for_messages(&[1], &said), [4]);
    }

    #[test]
    fn a_part_in_a_call_waits_for_no_message_once_it_has_begun() {
        let said = [(1, both(calls(7, &[2]), &[3]))];
        assert_eq!(in_call(&[1], &said), [2]);
        // A message may wait for both.
        assert_eq!(for_messages(&[1], &said), [2, 3]);
    }

    #[test]
    fn those_that_wait_for_the_seeker_add_nobody() {
        assert_eq!(in_call(&[1, 2], &[(1, calls(7, &[0]))]), [2]);
        assert_eq!(in_call(&[1, 2], &[(1, messages(7, &[0]))]), [2]);
    }

    #[test]
    fn chains_through_the_seeker_go_on_with_those_that_it_awaits_itself() {
        assert_eq!(in_call(&[1], &[(1, calls(7, &[0])), (0, calls(7, &[2]))]), [2]);
        assert_eq!(for_messages(&[1], &[(1, calls(7, &[0])), (0, messages(7, &[1, 2]))]), [2]);
        // Not if it is past the call that the other one says it waits in.
        assert_eq!(in_call(&[1], &[(1, calls(6, &[0])), (0, calls(7, &[2]))]), [1]);
    }

    #[test]
    fn in_a_circle_the_awaited_are_named() {
        let said = [(1, calls(7, &[2])), (2, calls(7, &[1]))];
        assert_eq!(in_call(&[1], &said), [1]);
        assert_eq!(in_call(&[2], &[(2, calls(7, &[0]))]), [2]);
        let said = [(1, messages(7, &[2])), (2, messages(7, &[1]))];
        assert_eq!(in_call(&[1], &said), [1]);
        assert_eq!(for_messages(&[2], &said), [2]);
    }

    #[test]
    fn a_receive_posted_early_does_not_excuse_whoever_is_late_in_a_call() {
        // 2 will get a message from 1 after the call, in which 1 waits for it.
        let said = [(1, calls(7, &[2])), (2, messages(7, &[1]))];
        assert_eq!(in_call(&[1], &said), [2]);
        assert_eq!(for_messages(&[1], &said), [2]);
    }

    #[test]
    fn whoever_waits_for_what_was_sent_has_stopped_since() {
        // Rank 2, and then this one, are beyond the call that rank 1 says it waits in.
        assert_eq!(in_call(&[1], &[(1, calls(6, &[2])), (2, calls(7, &[1]))]), [1]);
        assert_eq!(in_call(&[1], &[(1, calls(6, &[2])), (2, calls(7, &[]))]), [1]);
        assert_eq!(in_call(&[1], &[(1, calls(6, &[2])), (2, messages(7, &[3]))]), [1]);
        assert_eq!(in_call(&[1], &[(1, calls(6, &[0]))]), [1]);
        // Rank 3 is not.
        assert_eq!(in_call(&[1], &[(1, calls(6, &[2, 3])), (2, calls(7, &[1]))]), [3]);
    }

    proptest! {
        /// Where ranks wait in one call, or for messages, in any way but without circles, the roots
        /// are exactly the ranks at the ends of chains that begin here.
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
                (rank, if in_calls[rank] { calls(7, to) } else { messages(7, to) })
            };
            let said: Vec<_> = said.iter().map(waits).collect();
            let expected: Vec<_> = expected.into_iter().collect();
            prop_assert_eq!(in_call(&awaited, &said), &expected[..]);
            prop_assert_eq!(for_messages(&awaited, &said), &expected[..]);
        }
    }
}
