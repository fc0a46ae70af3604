//! Decides which buckets can be reduced now, although gradients come in different orders on different ranks.
//!
//! A round is an all-gather of one bitmap per rank, which says which buckets are complete on that rank.
//! Buckets that are complete on all ranks are reduced, in the order of their numbers. Then the next round may
//! begin. At any time there is either one round under way or the reductions of one round. So all calls go
//! over one group, in one order. Buckets that become complete meanwhile are told in the next round: where
//! reductions are slow, there are fewer and larger ones.
//!
//! A rank joins a round when it has news, or when it has *closed* the step, which means that it brings no
//! more tensors in it. No rank polls: a round waits until the last rank joins. No rank waits for ever,
//! because the caller of a rank that has not closed yet goes on, and will close. So
//!
//! - every round ends, because every rank will have news or close;
//! - each rank joins with news at most once per bucket, plus once to close. So after `buckets + 1` rounds all
//!   ranks have closed, and know that all others have;
//! - a round in which all ranks have closed and no bucket is newly complete on all of them is the last one.
//!   All ranks see that alike. If a bucket is left, a tensor is missing.

use std::ops::Range;

use super::bitmap::Bitmap;

/// The first bit of a rank's word. The bits of the buckets follow.
const CLOSED: usize = 0;

/// The rounds of one rank, as a state machine without threads and sockets.
#[derive(Debug)]
pub(super) struct Rounds {
    buckets: usize,
    /// What this rank would tell now.
    now: Bitmap,
    /// What this rank told last in this step.
    told: Bitmap,
    /// What all ranks told last in this step, one word after another. Empty before the first round.
    heard: Vec<u64>,
    /// The buckets that are complete on all ranks.
    agreed: Bitmap,
    phase: Phase,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// Nothing is under way.
    Idle,
    /// A round is under way.
    Telling,
    /// The reductions of a round are under way.
    Reducing,
    /// The step is over: all buckets are reduced, or some can never be.
    Over,
}

/// What must be done after a round.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Reduce these runs of buckets in this order, then call [`Rounds::on_reduced`].
    Reduce(Vec<Range<usize>>),
    /// Nothing. Join the next round when there is a reason.
    GoOn,
    /// All ranks have closed, and some bucket is incomplete on some rank.
    Missing,
}

impl Rounds {
    pub(super) fn new(buckets: usize) -> Rounds {
        let none = Bitmap::new(1 + buckets);
        Rounds {
            buckets,
            now: none.clone(),
            told: none.clone(),
            heard: Vec::new(),
            agreed: none,
            phase: Phase::Idle,
        }
    }

    /// A bucket is complete on this rank.
    pub(super) fn complete(&mut self, bucket: usize) {
        self.now.insert(1 + bucket);
    }

    /// This rank brings nothing more in this step.
    pub(super) fn close(&mut self) {
        self.now.insert(CLOSED);
    }

    /// Joins a round, if there is a reason. Returns what this rank tells in it.
    pub(super) fn join(&mut self) -> Option<Vec<u64>> {
        let has_reason = self.now != self.told || self.now.contains(CLOSED);
        if self.phase != Phase::Idle || !has_reason {
            return None;
        }
        self.phase = Phase::Telling;
        self.told = self.now.clone();
        Some(self.told.words().to_vec())
    }

    /// A round has ended. `heard` has the words of all ranks, one after another.
    pub(super) fn on_round(&mut self, heard: Vec<u64>) -> Verdict {
        let mut common = self.told.clone();
        for word in heard.chunks_exact(common.words().len()) {
            common.keep_common(word);
        }
        self.heard = heard;
        let is_new =
            |bucket: &usize| common.contains(1 + bucket) && !self.agreed.contains(1 + bucket);
        let new: Vec<usize> = (0..self.buckets).filter(is_new).collect();
        if new.is_empty() {
            let is_closed = common.contains(CLOSED);
            self.phase = if is_closed { Phase::Over } else { Phase::Idle };
            return if is_closed { Verdict::Missing } else { Verdict::GoOn };
        }
        self.phase = Phase::Reducing;
        self.agreed = common;
        let runs = new.chunk_by(|before, bucket| before + 1 == *bucket);
        Verdict::Reduce(runs.map(|run| run[0]..run[run.len() - 1] + 1).collect())
    }

    /// The reductions of the last round have ended.
    pub(super) fn on_reduced(&mut self) {
        let is_over = self.agreed.missing(1..1 + self.buckets).is_empty();
        self.phase = if is_over { Phase::Over } else { Phase::Idle };
    }

    /// Whether the step is over: all buckets are reduced, or some can never be.
    pub(super) fn is_over(&self) -> bool {
        self.phase == Phase::Over
    }

    /// The next step begins.
    pub(super) fn next_step(&mut self) {
        *self = Rounds::new(self.buckets);
    }

    /// The buckets that `rank` had not completed when it last joined a round of this step.
    pub(super) fn lacking(&self, rank: usize) -> Vec<usize> {
        let words = self.now.words().len();
        let said = self.heard.get(rank * words..(rank + 1) * words);
        let said = said.map_or_else(|| Bitmap::new(1 + self.buckets), Bitmap::from_words);
        said.missing(1..1 + self.buckets).into_iter().map(|bit| bit - 1).collect()
    }
}

#[cfg(test)]
mod tests {
    use proptest::{prelude::*, sample::Index};

    use super::*;

    /// A rank of a job. A collective of the job ends when all ranks are in it.
    struct Rank {
        rounds: Rounds,
        /// The buckets that it completes, in this order. Then it closes.
        script: Vec<usize>,
        done: usize,
        has_closed: bool,
        /// What it has told, by round.
        said: Vec<Vec<u64>>,
        /// The number of rounds whose end it has heard.
        heard: usize,
        is_reducing: bool,
        verdicts: Vec<Verdict>,
    }

    #[derive(Clone, Copy, Debug)]
    enum Move {
        Complete(usize),
        Close(usize),
        Join(usize),
        Hear(usize),
        Reduced(usize),
    }

    fn moves(ranks: &[Rank]) -> Vec<Move> {
        let mut moves = Vec::new();
        let heard_by_all = ranks.iter().map(|rank| rank.heard).min().unwrap();
        for (number, rank) in ranks.iter().enumerate() {
            match rank.done < rank.script.len() {
                true => moves.push(Move::Complete(number)),
                false if !rank.has_closed => moves.push(Move::Close(number)),
                false => {}
            }
            let has_reason =
                rank.rounds.now != rank.rounds.told || rank.rounds.now.contains(CLOSED);
            if rank.rounds.phase == Phase::Idle && has_reason {
                moves.push(Move::Join(number));
            }
            if rank.heard < rank.said.len() && ranks.iter().all(|it| it.said.len() > rank.heard) {
                moves.push(Move::Hear(number));
            }
            if rank.is_reducing && heard_by_all == rank.heard {
                moves.push(Move::Reduced(number));
            }
        }
        moves
    }

    fn apply(ranks: &mut [Rank], next: Move) {
        match next {
            Move::Complete(rank) => {
                let Rank { rounds, script, done, .. } = &mut ranks[rank];
                rounds.complete(script[*done]);
                *done += 1;
            }
            Move::Close(rank) => {
                ranks[rank].rounds.close();
                ranks[rank].has_closed = true;
            }
            Move::Join(rank) => {
                let word = ranks[rank].rounds.join().expect("it has a reason");
                assert_eq!(ranks[rank].rounds.join(), None, "one at a time");
                ranks[rank].said.push(word);
            }
            Move::Hear(rank) => {
                let round = ranks[rank].heard;
                let all = ranks.iter().flat_map(|it| it.said[round].clone()).collect();
                let verdict = ranks[rank].rounds.on_round(all);
                if let Verdict::Reduce(runs) = &verdict {
                    for bucket in runs.iter().cloned().flatten() {
                        assert!(
                            ranks.iter().all(|it| it.script[..it.done].contains(&bucket)),
                            "bucket {bucket} is not complete everywhere"
                        );
                    }
                    assert!(runs.windows(2).all(|two| two[0].end < two[1].start), "{runs:?}");
                }
                ranks[rank].is_reducing = matches!(verdict, Verdict::Reduce(_));
                ranks[rank].heard += 1;
                ranks[rank].verdicts.push(verdict);
            }
            Move::Reduced(rank) => {
                ranks[rank].rounds.on_reduced();
                ranks[rank].is_reducing = false;
            }
        }
    }

    /// The orders in which ranks complete buckets. Some buckets may never be complete.
    fn scripts() -> impl Strategy<Value = (usize, Vec<Vec<usize>>)> {
        (1_usize..=8, 1_usize..80).prop_flat_map(|(ranks, buckets)| {
            let order = Just((0..buckets).collect::<Vec<_>>()).prop_shuffle();
            let left_out = prop_oneof![4 => Just(0), 1 => 0..=buckets];
            let script = (order, left_out).prop_map(|(mut order, left_out)| {
                order.truncate(order.len() - left_out);
                order
            });
            (Just(buckets), prop::collection::vec(script, ranks))
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// For all orders and interleavings: each bucket that is complete on all ranks is reduced once, in
        /// the same order on all ranks; no rank is left waiting; and all ranks end alike.
        #[test]
        fn ranks_agree_and_come_to_an_end(
            (buckets, scripts) in scripts(),
            choices in prop::collection::vec(any::<Index>(), 1..200),
        ) {
            let mut ranks: Vec<Rank> = scripts
                .iter()
                .map(|script| Rank {
                    rounds: Rounds::new(buckets),
                    script: script.clone(),
                    done: 0,
                    has_closed: false,
                    said: Vec::new(),
                    heard: 0,
                    is_reducing: false,
                    verdicts: Vec::new(),
                })
                .collect();
            for _step in 0..2 {
                let mut turn = 0;
                loop {
                    let moves = moves(&ranks);
                    if moves.is_empty() {
                        break;
                    }
                    let choice = choices[turn % choices.len()].index(moves.len());
                    apply(&mut ranks, moves[choice]);
                    turn += 1;
                }
                let common: Vec<usize> =
                    (0..buckets).filter(|it| scripts.iter().all(|all| all.contains(it))).collect();
                let has_missing = common.len() < buckets;
                let first = std::mem::take(&mut ranks[0].verdicts);
                let mut reduced: Vec<usize> = first
                    .iter()
                    .filter_map(|verdict| match verdict {
                        Verdict::Reduce(runs) => Some(runs.iter().cloned().flatten()),
                        _ => None,
                    })
                    .flatten()
                    .collect();
                reduced.sort_unstable();
                prop_assert_eq!(reduced, common);
                prop_assert_eq!(first.last() == Some(&Verdict::Missing), has_missing);
                prop_assert!(first.len() <= buckets + 2, "{} rounds", first.len());
                for (number, rank) in ranks.iter_mut().enumerate() {
                    prop_assert!(rank.rounds.is_over(), "rank {} waits", number);
                    if number > 0 {
                        prop_assert_eq!(&std::mem::take(&mut rank.verdicts), &first);
                    }
                    let lacking = (0..buckets).filter(|it| !scripts[number].contains(it));
                    prop_assert_eq!(rank.rounds.lacking(number), lacking.collect::<Vec<_>>());
                    rank.rounds.next_step();
                    (rank.done, rank.heard, rank.has_closed) = (0, 0, false);
                    rank.said.clear();
                }
            }
        }
    }

    #[test]
    fn what_a_rank_said_last_is_known_of_it() {
        let mut rounds = Rounds::new(3);
        assert_eq!(rounds.lacking(1), [0, 1, 2], "nothing was said");
        rounds.complete(1);
        assert_eq!(rounds.join(), Some(vec![0b100]));
        let said = vec![0b100, 0b1010, 0b1111];
        assert_eq!(rounds.on_round(said), Verdict::GoOn);
        assert_eq!((rounds.lacking(0), rounds.lacking(1)), (vec![0, 2], vec![1]));
        assert_eq!(rounds.lacking(2), Vec::<usize>::new());
        assert_eq!(rounds.join(), None, "no news");
    }
}
