//! The ranks of a group.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use drumline_schedule::step::Rank;
use xxhash_rust::xxh3::xxh3_64;

/// This rank's place in its group.
#[derive(Clone, Debug)]
pub struct Membership {
    /// The name of the group, for errors.
    pub name: String,
    /// This rank.
    pub rank: Rank,
    /// The number of ranks.
    pub world_size: usize,
    /// A number that only the ranks of this group know. It tells them from left-over processes of an earlier
    /// group.
    pub digest: u64,
    /// The numbers of the ranks in the whole job.
    pub global: GlobalRanks,
    /// The failures that this rank has seen in any group of its world. These groups share them.
    pub seen: Arc<Seen>,
}

/// The failures that a rank has seen in the groups of its world.
#[derive(Debug, Default)]
pub struct Seen {
    /// The number of the newest of [`Failures::open`], or 0. Every call reads it, and hardly any locks the others.
    newest: AtomicUsize,
    failures: Mutex<Failures>,
}

#[derive(Debug, Default)]
struct Failures {
    /// How many there were.
    count: usize,
    /// Those after which this rank has not gone on, oldest first. They are numbered from 1 on.
    open: Vec<(usize, SeenFailure)>,
    /// The numbers in the job of the ranks that have ended, as far as this rank knows.
    ended: BTreeSet<Rank>,
}

impl Seen {
    /// The number of the newest failure after which this rank has not gone on. 0: there is none.
    #[inline]
    pub fn newest(&self) -> usize {
        self.newest.load(Ordering::Relaxed)
    }

    /// A group has failed, or could not be made, perhaps because the rank `ended` has.
    pub fn note(&self, failure: SeenFailure, ended: Option<Rank>) {
        let mut failures = self.lock();
        failures.ended.extend(ended);
        failures.count += 1;
        let count = failures.count;
        failures.open.push((count, failure));
        self.newest.store(count, Ordering::Relaxed);
    }

    /// This rank has begun a call, or to make a group, when failure `newest` was the newest, and has succeeded. So the
    /// program has coped with it and with those before it: if the rank leaves a group later, they are not why. Failures
    /// of other groups may have come meanwhile.
    #[cold]
    pub fn go_on(&self, newest: usize) {
        let mut failures = self.lock();
        failures.open.retain(|&(number, _)| number > newest);
        if failures.open.is_empty() {
            self.newest.store(0, Ordering::Relaxed);
        }
    }

    /// The numbers in the job of the ranks that have ended, as far as this rank knows.
    pub fn ended(&self) -> BTreeSet<Rank> {
        self.lock().ended.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Failures> {
        self.failures.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A failure as a rank tells it when it leaves another group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SeenFailure {
    /// The rank at fault: its number in the job, or in the group in which this is told. `None`: no one rank of them is.
    pub culprit: Option<Rank>,
    /// The error of the rank that tells it.
    pub text: String,
}

impl Membership {
    /// Rank `rank` of `world_size`, before the group has a digest.
    pub fn new(name: &str, (rank, world_size): (Rank, usize), global: GlobalRanks) -> Membership {
        let seen = Arc::default();
        Membership { name: name.to_owned(), rank, world_size, digest: 0, global, seen }
    }

    /// What the ranks of this group are told when this rank leaves, if it has seen a failure and has not gone on since.
    pub fn seen(&self) -> Option<SeenFailure> {
        let (_, mut seen) = self.seen.lock().open.first()?.clone();
        let position = |rank| self.global.position(rank, self.world_size);
        seen.culprit = seen.culprit.and_then(position);
        Some(seen)
    }
}

/// The numbers in the whole job of a group's ranks. The group of the whole job stores none, because the
/// numbers are the same there.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GlobalRanks(Option<Arc<[Rank]>>);

impl GlobalRanks {
    /// A group in which rank `i` is the job's rank `ranks[i]`.
    pub fn new(ranks: Vec<Rank>) -> GlobalRanks {
        GlobalRanks(Some(ranks.into()))
    }

    /// The number in the job of the group's rank `rank`.
    pub fn of(&self, rank: Rank) -> Rank {
        self.0.as_ref().and_then(|ranks| ranks.get(rank).copied()).unwrap_or(rank)
    }

    /// The number in the group of the job's rank `global`. The group has `world_size` ranks.
    pub fn position(&self, global: Rank, world_size: usize) -> Option<Rank> {
        match &self.0 {
            Some(ranks) => ranks.iter().position(|&rank| rank == global),
            None => Some(global).filter(|&rank| rank < world_size),
        }
    }

    /// `rank 1 (global rank 3)`, or `rank 1` where both numbers are the same.
    pub fn who(&self, rank: Rank) -> String {
        match self.of(rank) {
            global if global == rank => format!("rank {rank}"),
            global => format!("rank {rank} (global rank {global})"),
        }
    }
}

/// A list of ranks for the name of a group: `0-3,8`. A long list ends in a digest.
pub fn list(ranks: &[Rank]) -> String {
    let mut text = String::new();
    let mut rest = ranks;
    while let [first, ..] = *rest {
        let run = rest.iter().zip(first..).take_while(|(rank, expected)| *rank == expected).count();
        let comma = if text.is_empty() { "" } else { "," };
        // A dash makes a run of two no shorter.
        let taken = if run > 2 { run } else { 1 };
        // Writing to a string cannot fail.
        let _ = match taken {
            1 => write!(text, "{comma}{first}"),
            _ => write!(text, "{comma}{first}-{}", first + taken - 1),
        };
        rest = &rest[taken..];
        if text.len() > LIST_BYTES_MAX {
            let all: Vec<u8> = ranks.iter().flat_map(|rank| rank.to_le_bytes()).collect();
            let _ = write!(text, ",...#{:016x}", xxh3_64(&all));
            break;
        }
    }
    text
}

const LIST_BYTES_MAX: usize = 64;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_short_and_differ() {
        for (ranks, expected) in [
            (&[][..], ""),
            (&[4], "4"),
            (&[0, 1], "0,1"),
            (&[0, 1, 2, 3, 8], "0-3,8"),
            (&[3, 2, 1], "3,2,1"),
            (&[7, 8, 9, 1, 2], "7-9,1,2"),
        ] {
            assert_eq!(list(ranks), expected);
        }
        let even: Vec<Rank> = (0..1000).map(|rank| rank * 2).collect();
        let mut other = even.clone();
        other[999] += 1;
        assert!(list(&even).len() < 100, "{}", list(&even));
        assert!(list(&even).starts_with("0,2,4,") && list(&even) != list(&other));
    }

    #[test]
    fn a_call_copes_with_the_failures_before_it() {
        let member = Membership::new("world", (0, 3), GlobalRanks::default());
        let failure = |text: &str| SeenFailure { culprit: None, text: text.to_owned() };
        let told = || member.seen().map(|it| it.text);
        let seen = &member.seen;
        assert_eq!((seen.newest(), told()), (0, None));
        seen.note(failure("a"), Some(2));
        seen.note(failure("b"), None);
        assert_eq!((seen.newest(), told()), (2, Some("a".to_owned())));
        // A call begins, and meanwhile another thread's group fails.
        let begun = seen.newest();
        seen.note(failure("c"), None);
        seen.go_on(begun);
        assert_eq!((seen.newest(), told()), (3, Some("c".to_owned())));
        seen.go_on(seen.newest());
        assert_eq!((seen.newest(), told()), (0, None));
        assert_eq!(seen.ended(), BTreeSet::from([2]), "a rank that has ended never comes back");
    }

    #[test]
    fn ranks_are_translated_both_ways() {
        let some = GlobalRanks::new(vec![5, 2, 7]);
        assert_eq!((some.of(0), some.position(7, 3), some.position(3, 3)), (5, Some(2), None));
        assert_eq!(
            (some.who(0), some.who(2)),
            ("rank 0 (global rank 5)".into(), "rank 2 (global rank 7)".into())
        );
        let whole = GlobalRanks::default();
        assert_eq!((whole.of(4), whole.position(4, 5), whole.position(5, 5)), (4, Some(4), None));
        assert_eq!(whole.who(4), "rank 4");
    }
}
