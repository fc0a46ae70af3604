//! Pipelines: several windows of long data under way at once.
//!
//! An executor may run a schedule on one window of the data after another. Then no window travels while
//! another is summed. In a pipeline each round of an algorithm is one window behind the round before it:
//!
//! ```text
//!   turn             0          1          2          3
//!   send a block     window 0   window 1   window 2   ...      no lag
//!   receive, sum,
//!   send the result             window 0   window 1   window 2    a lag of 1
//!   receive results                        window 0   window 1    a lag of 2
//! ```
//!
//! So a rank has always sent what its peers need next, and it sums messages while they are in the cache. A
//! turn takes all steps of the schedule in order. In turn `t` a step with lag `l` works on window `t - l`, if
//! there is such a window. From the schedule and the number of windows every rank knows the order of its
//! peers' messages, so messages need no name.
//!
//! Both ends have the same order if every message is received one round after it was sent. A row of the table
//! gives the lags for which that holds ([`Algorithm::lags`](crate::Algorithm::lags)), and the checker proves
//! it.
//!
//! # On a host
//!
//! Posts and waits have no lag: ranks post equally often in every turn, even where a turn has no window for the
//! steps around the post. So a turn is to the neighbours what a call is ([`step`](crate::step)): slots are used in
//! turn, and no rank is two turns ahead. A rank writes to a slot in the turn in which its neighbours read it.
//!
//! ```text
//!   turn                    0          1          2          3
//!   sums on the host,
//!   sent to other hosts     window 0   window 1   window 2   window 3
//!   sums over hosts, sent              window 0   window 1   window 2
//!   results, shared out                           window 0   window 1
//! ```
//!
//! The slots of a turn hold the windows that steps with different lags work on. [`Lags::slot_windows`] says how
//! many they have room for.

use std::collections::{BTreeMap, VecDeque};

use crate::lags::Lags;
use crate::schedule::Schedule;
use crate::step::{Buffer, Loc, Rank, Step};

/// The order in which the steps of a schedule work on windows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pipeline {
    /// The lag of each step. Empty: no step lags, so a window ends before the next one begins.
    lags: Vec<usize>,
    /// The largest lag.
    depth: usize,
    /// The largest difference between the lags of two steps that use the same scratch.
    scratch: usize,
}

impl Pipeline {
    /// The pipeline of a schedule. In most schedules no step lags.
    pub fn of(schedule: &Schedule) -> Pipeline {
        let Lags { of_steps: lags, .. } = schedule.lags.clone();
        let mut uses: BTreeMap<Buffer, (usize, usize)> = BTreeMap::new();
        let mut used = |loc: Loc, lag: usize| {
            if let Buffer::Scratch(_) | Buffer::Sum(_) = loc.buffer {
                let (first, last) = uses.entry(loc.buffer).or_insert((lag, lag));
                (*first, *last) = (lag.min(*first), lag.max(*last));
            }
        };
        // The sources of messages that no flush has covered.
        let mut sent: BTreeMap<Rank, VecDeque<(usize, Loc)>> = BTreeMap::new();
        let mut numbers: BTreeMap<Rank, usize> = BTreeMap::new();
        for (step, &lag) in schedule.steps.iter().zip(&lags) {
            step.reads().chain(step.writes()).for_each(|loc| used(loc, lag));
            match step {
                Step::Send { to, src } => {
                    let number = numbers.entry(*to).or_default();
                    *number += 1;
                    sent.entry(*to).or_default().push_back((*number, *src));
                }
                Step::Flush { to, upto } => {
                    let messages = sent.entry(*to).or_default();
                    while let Some((_, src)) = messages.pop_front_if(|(number, _)| *number <= *upto)
                    {
                        used(src, lag);
                    }
                }
                _ => {}
            }
        }
        let scratch = uses.values().map(|(first, last)| last - first).max().unwrap_or(0);
        Pipeline { depth: lags.iter().copied().max().unwrap_or(0), lags, scratch }
    }

    /// The number of windows that need separate scratch at the same time.
    pub fn scratch_copies(&self) -> usize {
        self.scratch + 1
    }

    /// The number of turns that `windows` windows take.
    pub fn turns(&self, windows: usize) -> usize {
        windows + self.depth
    }

    /// The lag of a step: in turn `t` it works on window `t - lag`, if there is one.
    pub fn lag(&self, step: usize) -> usize {
        self.lags.get(step).copied().unwrap_or(0)
    }

    /// The number of messages that a rank has sent to `to`, over all windows, when it has sent the first
    /// `upto` messages of `window`.
    pub fn posted(
        &self,
        schedule: &Schedule,
        to: Rank,
        upto: usize,
        window: usize,
        windows: usize,
    ) -> usize {
        if windows == 1 || upto == 0 {
            return upto;
        }
        let sends = schedule.steps.iter().enumerate().filter_map(|(index, step)| match step {
            Step::Send { to: receiver, .. } if *receiver == to => Some(self.lag(index)),
            _ => None,
        });
        let lags: Vec<usize> = sends.collect();
        let Some(&lag) = lags.get(upto - 1) else { return upto };
        let turn = window + lag;
        // For each message of the schedule: the windows of earlier turns, and the one of this turn if the
        // message comes before.
        let posted = lags.iter().enumerate().map(|(number, lag)| {
            let turns = turn + usize::from(number < upto);
            turns.saturating_sub(*lag).min(windows)
        });
        posted.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Algorithm, Collective, Topology};

    #[test]
    fn messages_are_counted_over_all_windows() {
        let direct = Algorithm::find(Collective::AllReduce, "direct").unwrap();
        let schedule = direct.schedule(&Topology::flat(2), 0, 0).unwrap();
        let pipeline = Pipeline::of(&schedule);
        assert_eq!((pipeline.scratch_copies(), pipeline.turns(4)), (1, 6));
        // Blocks and results of windows: b0 | b1 r0 | b2 r1 | b3 r2 | r3
        let posted = |upto, window| pipeline.posted(&schedule, 1, upto, window, 4);
        assert_eq!([0, 1, 2, 3].map(|window| posted(1, window)), [1, 2, 4, 6]);
        assert_eq!([0, 1, 2, 3].map(|window| posted(2, window)), [3, 5, 7, 8]);
        let halving = Algorithm::find(Collective::AllReduce, "halving").unwrap();
        let schedule = halving.schedule(&Topology::flat(2), 0, 0).unwrap();
        let sequential = Pipeline::of(&schedule);
        assert_eq!(sequential.posted(&schedule, 1, 1, 3, 4), 7);
    }
}
