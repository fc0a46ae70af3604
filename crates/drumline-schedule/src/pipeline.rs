//! Long data in windows, of which several are under way at once.
//!
//! A schedule may be run on one window of the data after another. Then nothing travels while a
//! window is summed, and nothing is summed while one travels. In a pipeline each round of an algorithm
//! is one window behind the round before it:
//!
//! ```text
//!   turn             0          1          2          3
//!   send a block     window 0   window 1   window 2   ...      no lag
//!   receive, sum,
//!   send the result             window 0   window 1   window 2    a lag of 1
//!   receive results                        window 0   window 1    a lag of 2
//! ```
//!
//! So a rank always has sent what its peers wait for next, and what has come in is summed while it
//! is in the cache. The steps of a turn are those of the schedule, in their order; each acts on the
//! window that its lag leads to, if there is such a window. Every rank knows from the schedule and the
//! number of windows what its peers send in which order, so messages need no name.
//!
//! That order is the same at both ends if every message is received one round after it was sent,
//! counted at either end, as in exchanges of all with all. [`Pipeline::of`] knows which algorithms
//! are of that kind, and the checker proves it for what [`Pipeline::unrolled`] makes of them.

use std::collections::BTreeMap;

use crate::algorithm::{Algorithm, Collective, MemoryUse};
use crate::extent::Blocks;
use crate::schedule::Schedule;
use crate::step::{Buffer, Loc, Rank, Span, Step};

/// How many windows each step of a schedule lags behind, and what follows from it.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Pipeline, Topology};
///
/// let direct = Algorithm::find(Collective::AllReduce, "direct")?;
/// let schedule = direct.schedule(&Topology::flat(3), 0, 0)?;
/// let pipeline = Pipeline::of(&schedule);
/// assert_eq!(pipeline.turns(10), 12); // the last window ends two turns after it began
/// assert_eq!(pipeline.lag(0), 0); // the first step does not lag
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pipeline {
    /// By step. Empty: no step lags, so a window is done before the next one begins.
    lags: Vec<usize>,
    /// The largest.
    depth: usize,
    /// The largest difference of the lags of two steps that name the same scratch.
    scratch: usize,
}

impl Algorithm {
    /// Whether windows of long data may be under way at once.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Collective};
    ///
    /// let row = |name| Algorithm::find(Collective::AllReduce, name);
    /// assert!(row("direct")?.is_pipelined() && !row("halving")?.is_pipelined());
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
    pub fn is_pipelined(&self) -> bool {
        is_pipelined(self.collective, self.memory, self.name)
    }
}

pub(crate) fn is_pipelined(collective: Collective, memory: MemoryUse, name: &str) -> bool {
    let exchanges = matches!(collective, Collective::AllReduce | Collective::ReduceScatter);
    exchanges && memory == MemoryUse::Private && name == "direct"
}

impl Pipeline {
    /// The pipeline of a schedule; of most, one in which nothing lags.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Collective, Pipeline, Topology};
    ///
    /// let binomial = Algorithm::find(Collective::AllReduce, "binomial")?;
    /// let pipeline = Pipeline::of(&binomial.schedule(&Topology::flat(3), 0, 0)?);
    /// assert_eq!(pipeline, Pipeline::default()); // one window after another
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
    pub fn of(schedule: &Schedule) -> Pipeline {
        if !is_pipelined(schedule.collective, schedule.memory, schedule.algorithm) {
            return Pipeline::default();
        }
        let (mut rounds, mut has_sent) = (0, false);
        let lag = |step: &Step| {
            match step {
                Step::Send { .. } => has_sent = true,
                Step::Recv { .. } | Step::RecvReduce { .. } if std::mem::take(&mut has_sent) => {
                    rounds += 1;
                }
                _ => {}
            }
            rounds
        };
        let mut lags: Vec<usize> = schedule.steps.iter().map(lag).collect();
        // A flush is for the sake of the step behind it.
        for (index, step) in schedule.steps.iter().enumerate().rev() {
            if let (Step::Flush { .. }, Some(&next)) = (step, lags.get(index + 1)) {
                lags[index] = next;
            }
        }
        let mut uses: BTreeMap<usize, (usize, usize)> = BTreeMap::new();
        for (step, &lag) in schedule.steps.iter().zip(&lags) {
            for Loc { buffer, .. } in step.reads().chain(step.writes()) {
                if let Buffer::Scratch(slot) = buffer {
                    let (first, last) = uses.entry(slot).or_insert((lag, lag));
                    (*first, *last) = (lag.min(*first), lag.max(*last));
                }
            }
        }
        let scratch = uses.values().map(|(first, last)| last - first).max().unwrap_or(0);
        Pipeline { depth: rounds, lags, scratch }
    }

    /// How many windows need scratch of their own at once.
    ///
    /// ```
    /// use drumline_schedule::Pipeline;
    ///
    /// assert_eq!(Pipeline::default().scratch_copies(), 1); // where nothing lags
    /// ```
    pub fn scratch_copies(&self) -> usize {
        self.scratch + 1
    }

    /// How many turns it takes to bring so many windows to their end.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Collective, Pipeline, Topology};
    ///
    /// let direct = Algorithm::find(Collective::AllReduce, "direct")?;
    /// let schedule = direct.schedule(&Topology::flat(3), 0, 0)?;
    /// let pipeline = Pipeline::of(&schedule);
    /// assert_eq!((pipeline.turns(10), Pipeline::default().turns(10)), (12, 10));
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
    pub fn turns(&self, windows: usize) -> usize {
        windows + self.depth
    }

    /// The window, of so many, that a step works on in a turn, if there is one.
    fn window(&self, step: usize, turn: usize, windows: usize) -> Option<usize> {
        turn.checked_sub(self.lag(step)).filter(|window| *window < windows)
    }

    /// How many windows a step is behind: in turn `t` it works on window `t - lag`, if there is one.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Collective, Pipeline, Topology};
    ///
    /// let direct = Algorithm::find(Collective::AllReduce, "direct")?;
    /// let schedule = direct.schedule(&Topology::flat(3), 0, 0)?;
    /// let last = schedule.steps.len() - 1;
    /// assert_eq!(Pipeline::of(&schedule).lag(last), 2);
    /// assert_eq!(Pipeline::default().lag(last), 0); // where nothing lags
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
    pub fn lag(&self, step: usize) -> usize {
        self.lags.get(step).copied().unwrap_or(0)
    }

    /// How many messages a rank has posted to `to`, of all windows together, once it has
    /// posted the first `upto` of those of `window`.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Collective, Pipeline, Topology};
    ///
    /// let direct = Algorithm::find(Collective::AllReduce, "direct")?;
    /// let schedule = direct.schedule(&Topology::flat(3), 0, 0)?;
    /// let pipeline = Pipeline::of(&schedule);
    /// // Of one window as many as the schedule says; of ten, later ones were posted meanwhile.
    /// assert_eq!(pipeline.posted(&schedule, 1, 1, 0, 1), 1);
    /// assert!(pipeline.posted(&schedule, 1, 2, 5, 10) > 2);
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
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
        // Of each message of the schedule: those of the turns before, and of this one, if it comes
        // earlier in it.
        let posted = lags.iter().enumerate().map(|(number, lag)| {
            let turns = turn + usize::from(number < upto);
            turns.saturating_sub(*lag).min(windows)
        });
        posted.sum()
    }

    /// The same in one piece: a schedule without windows that does what this one does with so
    /// many, where the data can be cut into so many alike. For the checker.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Collective, Pipeline, Topology, check};
    ///
    /// let world = Topology::flat(3);
    /// let direct = Algorithm::find(Collective::AllReduce, "direct")?;
    /// let schedules = direct.schedules(&world, 0)?;
    /// let unroll = |schedule| Pipeline::of(schedule).unrolled(schedule, 4);
    /// let unrolled: Vec<_> = schedules.iter().map(unroll).collect();
    /// // Windows do not get in each other's way.
    /// check::check_schedules(&world, &unrolled, 24).unwrap();
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
    pub fn unrolled(&self, schedule: &Schedule, windows: usize) -> Schedule {
        let steps = (0..self.turns(windows)).flat_map(|turn| {
            schedule.steps.iter().enumerate().filter_map(move |(index, step)| {
                let window = self.window(index, turn, windows)?;
                let place = |loc: Loc| self.within(schedule, loc, window, windows);
                Some(match step {
                    Step::Send { to, src } => Step::Send { to: *to, src: place(*src) },
                    Step::Recv { from, dst } => Step::Recv { from: *from, dst: place(*dst) },
                    Step::RecvReduce { from, dst, side, finish } => Step::RecvReduce {
                        from: *from,
                        dst: place(*dst),
                        side: *side,
                        finish: *finish,
                    },
                    Step::Reduce { dst, src, side, finish } => Step::Reduce {
                        dst: place(*dst),
                        src: place(*src),
                        side: *side,
                        finish: *finish,
                    },
                    Step::ReduceTree { dsts, srcs, finish } => Step::ReduceTree {
                        dsts: dsts.iter().map(|loc| place(*loc)).collect(),
                        srcs: srcs.iter().map(|(node, loc)| (*node, place(*loc))).collect(),
                        finish: *finish,
                    },
                    Step::Copy { dst, src } => Step::Copy { dst: place(*dst), src: place(*src) },
                    Step::Flush { to, upto } => {
                        let upto = self.posted(schedule, *to, *upto, window, windows);
                        Step::Flush { to: *to, upto }
                    }
                    Step::Post => Step::Post,
                    Step::Wait { peer, upto } => Step::Wait { peer: *peer, upto: *upto },
                })
            })
        });
        // Parts of blocks are named.
        Schedule { steps: steps.collect(), uneven: false, ..schedule.clone() }
    }

    /// A place in one window, as a place in the whole.
    fn within(&self, schedule: &Schedule, loc: Loc, window: usize, windows: usize) -> Loc {
        let Span { first, count, of } = loc.span;
        let first = match (loc.buffer, schedule.blocks(loc)) {
            // Used again and again.
            (Buffer::Scratch(_), _) => first,
            // Of every block, a window.
            (_, Blocks::All) => first * windows + window,
            (_, Blocks::One | Blocks::None) => window * of + first,
        };
        let buffer = match loc.buffer {
            Buffer::Scratch(slot) => {
                let copies = self.scratch_copies();
                Buffer::Scratch(slot * copies + window % copies)
            }
            other => other,
        };
        Loc { buffer, span: Span { first, count, of: of * windows }, ..loc }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::ALGORITHMS;
    use crate::check::check_schedules;
    use crate::topology::Topology;

    fn pipelined() -> impl Iterator<Item = &'static Algorithm> {
        ALGORITHMS.iter().filter(|row| row.is_pipelined())
    }

    #[test]
    fn pipelines_are_right() {
        assert!(pipelined().count() > 1);
        for row in pipelined() {
            for world_size in 1..=9 {
                let schedules = row.schedules(&Topology::flat(world_size), 0).unwrap();
                for windows in 1..=7 {
                    let unrolled: Vec<Schedule> = schedules
                        .iter()
                        .map(|schedule| Pipeline::of(schedule).unrolled(schedule, windows))
                        .collect();
                    for elements in [0, 1, 3].map(|part| part * windows * world_size) {
                        check_schedules(&Topology::flat(world_size), &unrolled, elements)
                            .unwrap_or_else(|error| {
                                panic!("{row:?}, {world_size} ranks, {windows} windows: {error}")
                            });
                    }
                }
            }
        }
    }

    /// The checker would tell if scratch were used by two windows at once.
    #[test]
    fn windows_under_way_need_scratch_of_their_own() {
        let direct = Algorithm::find(Collective::AllReduce, "direct").unwrap();
        let topology = Topology::flat(3);
        let schedules = direct.schedules(&topology, 0).unwrap();
        let hasty = schedules.iter().map(|schedule| {
            let mut pipeline = Pipeline::of(schedule);
            // What has come in is summed one turn later.
            let sum = |step: &Step| matches!(step, Step::ReduceTree { .. });
            let at = schedule.steps.iter().position(sum).unwrap();
            pipeline.lags[at..].iter_mut().for_each(|lag| *lag += 1);
            pipeline.depth += 1;
            (pipeline.clone().unrolled(schedule, 5), {
                pipeline.scratch = 1;
                pipeline.unrolled(schedule, 5)
            })
        });
        let (hasty, careful): (Vec<_>, Vec<_>) = hasty.unzip();
        check_schedules(&topology, &hasty, 30).unwrap_err();
        check_schedules(&topology, &careful, 30).unwrap();
    }

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
