//! A group that goes on without ranks that have died.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use drumline_engine::membership::list;
use drumline_error::{Error, ErrorKind, Result, Section};
use drumline_group::{
    ProcessGroup,
    regroup::{Line, Loss},
};

use crate::steps;

/// A process group that goes on without ranks that have died.
///
/// A program hands in what its ranks do together, piece by piece: a step, an evaluation, a checkpoint. Each piece is a
/// closure, and all ranks [run](Self::run) the same pieces in the same order. If a rank dies, the others form a smaller group,
/// and run the piece that was under way again, on all of them. So no piece is lost, and none is done twice.
///
/// ```
/// use drumline::{ElasticGroup, ProcessGroup, ReduceOp};
///
/// let elastic = ElasticGroup::new(&ProcessGroup::init_or_alone()?);
/// for step in 0..3 {
///     let sum = elastic.run(|group| {
///         let mut mine = [group.rank() as f32 + step as f32]; // begins anew each time
///         group.all_reduce(&mut mine, ReduceOp::Sum)?;
///         Ok::<_, drumline::Error>(mine[0])
///     })?;
///     assert_eq!(sum, step as f32); // of the ranks that are there
/// }
/// elastic.close()?;
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// `DistributedDataParallel` with [`shards`](crate::ddp::DdpOptions::shards) has such a group, and each of its steps is a
/// piece. There the result does not depend on the number of ranks, to the last bit.
///
/// # What it needs
///
/// The store in which the ranks have met must outlive them: that of `drumline run`, a file or etcd, but not one that rank 0
/// hosts.
/// `drumline run` hears from each rank that the job goes on, and ends no rank while at least
/// [`Config::min_ranks`](drumline_group::Config::min_ranks) are left: unless set, half of them.
///
/// # What happens to
///
/// | what | it |
/// |---|---|
/// | a rank that is stopped or cut off for longer than the time limit | is left behind. `drumline run` kills it before the others go on. Under another launcher it gets an error when it wakes, and must end |
/// | the group of before, groups made from it, and memory that was registered with it | fail: take the present [`group`](Self::group) |
/// | a closure that fails while no rank has died | its error is returned, and nothing is run again |
#[derive(Clone)]
pub struct ElasticGroup(Arc<Shared>);

struct Shared {
    present: Mutex<Present>,
    /// Whether a piece is under way.
    runs: AtomicBool,
}

struct Present {
    group: ProcessGroup,
    /// `None` if it does not go on without a rank.
    line: Option<Line>,
    course: Course,
}

impl ElasticGroup {
    /// Begins with `group`, and tells a launcher that the job goes on when a rank has died.
    ///
    /// It does so if `group` has all ranks of the job, and more of them than [`Config::min_ranks`](drumline_group::Config::min_ranks).
    /// Otherwise it is [`fixed`](Self::fixed).
    pub fn new(group: &ProcessGroup) -> Self {
        let ranks = group.world_size();
        let min_ranks = group.config().min_ranks.unwrap_or_else(|| ranks.div_ceil(2)).max(1);
        let goes_on = min_ranks < ranks;
        let line = goes_on.then(|| Line::begin(group, min_ranks)).flatten();
        if line.is_some() {
            steps::regroups(min_ranks);
        }
        Self::with(group, line)
    }

    /// Never goes on without a rank: [`run`](Self::run) runs the closure, and that is all.
    pub fn fixed(group: &ProcessGroup) -> Self {
        Self::with(group, None)
    }

    fn with(group: &ProcessGroup, line: Option<Line>) -> Self {
        let group = group.clone();
        let present = Mutex::new(Present { group, line, course: Course::default() });
        Self(Arc::new(Shared { present, runs: AtomicBool::new(false) }))
    }

    /// The group of the ranks that are there.
    pub fn group(&self) -> ProcessGroup {
        self.lock().group.clone()
    }

    /// Runs `piece` on all ranks. The piece makes its collectives on the group that it gets. It may run several times, each
    /// time with another group, so it begins by undoing what an earlier run has changed outside.
    ///
    /// When this returns `Ok`, all ranks have done the piece.
    ///
    /// # Errors
    ///
    /// That of `piece`, if the group has lost no rank. Or too few ranks are left, or the others have gone on without this
    /// rank (`drumline explain regroup`). [`Argument`](ErrorKind::Argument) within another piece.
    pub fn run<T, E: From<Error>>(
        &self,
        mut piece: impl FnMut(&ProcessGroup) -> Result<T, E>,
    ) -> Result<T, E> {
        let (mut group, line, mut course) = {
            let present = self.lock();
            (present.group.clone(), present.line.clone(), present.course.clone())
        };
        let Some(mut line) = line else { return piece(&group) };
        let _running = self.begin()?;
        let (mut result, mut lost) = (None, None);
        let mut act = course.handle(Event::Begin);
        loop {
            let done: Result<Event, E> = match act {
                Act::Do => piece(&group).map(|value| {
                    result = Some(value);
                    Event::Did
                }),
                // Who leaves the barrier knows that all ranks have come to it, each with its result.
                Act::Meet => group.barrier().map(|()| Event::Met).map_err(E::from),
                Act::Regroup => {
                    let loss: Loss = lost.take().unwrap_or_else(|| unreachable!("that is why"));
                    tracing::debug!("looks for the ranks that are left: {}", loss.failure);
                    let may_live = loss.may_live();
                    let before = group.ranks();
                    group = line.regroup(&group, loss)?;
                    let left = group.ranks();
                    let gone = before.into_iter().filter(|it| !left.contains(it));
                    let gone: Vec<_> = gone.collect();
                    if may_live {
                        steps::left_behind(&gone);
                    }
                    let gone = list(&gone);
                    let (rank, left) = (left[group.rank()], left.len());
                    tracing::warn!("rank {rank}: goes on without {gone}, in a world of {left}");
                    Ok(Event::Regrouped(line.group_number()))
                }
                Act::Compare => {
                    compare(&group, course.standing).map(Event::Compared).map_err(E::from)
                }
                Act::Return => {
                    *self.lock() = Present { group, line: Some(line), course };
                    return result.map_or_else(|| unreachable!("the piece is done"), Ok);
                }
                Act::Refuse(all) => return Err(differ(&group, &all).into()),
            };
            let event = match done {
                Ok(event) => event,
                Err(error) => match Loss::of(&group) {
                    None => return Err(error),
                    loss => {
                        lost = loss;
                        Event::Lost
                    }
                },
            };
            act = course.handle(event);
            if matches!(act, Act::Compare) {
                *self.lock() = Present {
                    group: group.clone(),
                    line: Some(line.clone()),
                    course: course.clone(),
                };
            }
        }
    }

    /// Takes leave of the other ranks. That ranks have died before does not matter any more.
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::destroy`], but not if a rank has died.
    pub fn close(&self) -> Result<()> {
        let (group, goes_on) = {
            let present = self.lock();
            (present.group.clone(), present.line.is_some())
        };
        let watched = group.clone();
        match group.destroy() {
            Err(_) if goes_on && Loss::of(&watched).is_some() => Ok(()),
            closed => closed,
        }
    }

    /// Begins a piece, until the result is dropped.
    fn begin(&self) -> Result<Running<'_>> {
        if self.0.runs.swap(true, Ordering::Acquire) {
            let problem =
                "a piece of this group is under way: run one after the other, on one thread";
            return Err(Error::argument("ElasticGroup::run", problem));
        }
        Ok(Running(&self.0.runs))
    }

    fn lock(&self) -> MutexGuard<'_, Present> {
        self.0.present.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Tells the ranks of `group` how far this one is, and hears it of them.
fn compare(group: &ProcessGroup, own: Standing) -> Result<Vec<Standing>> {
    let mut all = vec![0_u64; 2 * group.world_size()];
    group.all_gather(&[own.done, own.did_next_in], &mut all)?;
    let standing = |it: &[u64]| Standing { done: it[0], did_next_in: it[1] };
    Ok(all.chunks_exact(2).map(standing).collect())
}

fn differ(group: &ProcessGroup, all: &[Standing]) -> Error {
    let done: Vec<u64> = all.iter().map(|it| it.done).collect();
    let text = format!(
        "group {:?}, rank {}: the ranks have run different numbers of pieces: {done:?}; all ranks must run the same ones, \
         and a rank whose piece has failed must end",
        group.name(),
        group.rank(),
    );
    Error::new(ErrorKind::Mismatch, Section::Regroup, text)
}

/// How a rank goes through the pieces: which of them all ranks have done, and what comes next. It knows no group.
///
/// ```text
///  Do ──► Meet ──► Return        a rank is lost: Regroup ──► Compare ──► Do or Return
/// ```
#[derive(Clone, Debug)]
struct Course {
    standing: Standing,
    /// The number of the group in its line.
    group: u64,
}

/// How far a rank is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Standing {
    /// So many pieces all ranks have done, as this rank knows.
    done: u64,
    /// The number of the group in which this rank has done the next one. 0: it has not.
    did_next_in: u64,
}

#[derive(Clone, Debug)]
enum Event {
    /// The program hands in the next piece.
    Begin,
    /// The piece is done on this rank.
    Did,
    /// All ranks have come to the barrier.
    Met,
    /// The group has lost ranks.
    Lost,
    /// Those that are left are a group of this number.
    Regrouped(u64),
    /// How far the ranks of that group are.
    Compared(Vec<Standing>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Act {
    /// Does the piece.
    Do,
    /// Waits for all ranks.
    Meet,
    /// Forms a group with the ranks that are left.
    Regroup,
    /// Compares how far they are.
    Compare,
    /// The piece is done on all ranks: its result counts.
    Return,
    /// The ranks have not run the same pieces.
    Refuse(Vec<Standing>),
}

impl Default for Course {
    fn default() -> Self {
        Self { standing: Standing::default(), group: 1 }
    }
}

impl Course {
    fn handle(&mut self, event: Event) -> Act {
        match event {
            Event::Begin => Act::Do,
            Event::Did => {
                self.standing.did_next_in = self.group;
                Act::Meet
            }
            Event::Met => self.end(),
            Event::Lost => Act::Regroup,
            Event::Regrouped(group) => {
                self.group = group;
                Act::Compare
            }
            Event::Compared(all) => match self.standing.counts(&all) {
                Some(true) => self.end(),
                Some(false) => {
                    self.standing.did_next_in = 0;
                    Act::Do
                }
                None => Act::Refuse(all),
            },
        }
    }

    fn end(&mut self) -> Act {
        self.standing = Standing { done: self.standing.done + 1, did_next_in: 0 };
        Act::Return
    }
}

impl Standing {
    /// Whether the result of a rank that stands here counts, among `all` that are left. Otherwise it does the piece again.
    /// `None`: they have not run the same pieces.
    ///
    /// A rank that leaves the barrier at the end of a piece knows that all ranks have its result, made in the same group. So
    /// if one rank is a piece further, those that are not keep their results. If all are at the same piece, it counts only if
    /// all have done it, in the same group. A rank that was further is dead then, and nobody has seen what it did.
    fn counts(self, all: &[Standing]) -> Option<bool> {
        let furthest = all.iter().map(|it| it.done).max()?;
        let may_be =
            |it: &Standing| it.done == furthest || it.done + 1 == furthest && it.did_next_in > 0;
        let have_all_done_it = self.did_next_in > 0 && all.iter().all(|it| *it == self);
        all.iter().all(may_be).then_some(self.done < furthest || have_all_done_it)
    }
}

struct Running<'a>(&'a AtomicBool);

impl Drop for Running<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

impl fmt::Debug for ElasticGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let present = self.lock();
        f.debug_struct("ElasticGroup")
            .field("group", &present.group)
            .field("goes_on", &present.line.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use super::*;

    /// Ranks that run pieces and may die at any moment. What they do together is as loose as a network allows: of the ranks
    /// that wait for each other some may hear that all have come, and others that one has died.
    struct World {
        seed: u64,
        /// The ranks that live and have not run all pieces.
        ranks: BTreeMap<usize, Member>,
        /// The ranks of each group of the line.
        groups: Vec<BTreeSet<usize>>,
        /// Who has come to a barrier or comparison of a group, and what it has told there.
        came: BTreeMap<(usize, u64), BTreeMap<usize, Standing>>,
        /// The number of the group in which the result of each piece was made, by rank.
        results: BTreeMap<usize, Vec<u64>>,
        counts: Counts,
    }

    struct Member {
        course: Course,
        act: Act,
        group: usize,
    }

    /// What has happened in all worlds.
    #[derive(Clone, Copy, Debug, Default)]
    struct Counts {
        deaths: usize,
        /// Results that counted because another rank was further, or because all had them; and pieces that were run again.
        behind: usize,
        alike: usize,
        again: usize,
        joins_that_failed: usize,
    }

    const PIECES: usize = 3;

    /// A comparison comes once in a group, a barrier once for each piece.
    const COMPARISON: u64 = u64::MAX;

    impl World {
        fn new(size: usize, seed: u64) -> World {
            let member = |number| {
                let mut course = Course::default();
                let act = course.handle(Event::Begin);
                (number, Member { course, act, group: 0 })
            };
            World {
                seed,
                ranks: (0..size).map(member).collect(),
                groups: vec![(0..size).collect()],
                came: BTreeMap::new(),
                results: BTreeMap::new(),
                counts: Counts::default(),
            }
        }

        fn run(mut self) -> (BTreeMap<usize, Vec<u64>>, Counts) {
            let mut idle = 0;
            while !self.ranks.is_empty() {
                let nth = self.draw(self.ranks.len());
                let number = *self.ranks.keys().nth(nth).unwrap();
                if self.ranks.len() + self.results.len() > 1 && self.draw(12) == 0 {
                    self.ranks.remove(&number);
                    self.results.remove(&number);
                    self.counts.deaths += 1;
                } else if self.step(number) {
                    idle = 0;
                } else {
                    idle += 1;
                    assert!(idle < 1000, "nobody can go on");
                }
                let results = &self.results;
                self.ranks.retain(|it, _| results.get(it).is_none_or(|it| it.len() < PIECES));
            }
            (self.results, self.counts)
        }

        fn draw(&mut self, below: usize) -> usize {
            self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (self.seed >> 33) as usize % below
        }

        /// Lets a rank go on. Returns whether it could.
        fn step(&mut self, number: usize) -> bool {
            let coin = self.draw(2) == 0;
            let Member { course, act, group } = &self.ranks[&number];
            let (group, standing, act) = (*group, course.standing, act.clone());
            let has_died = |it: &usize| !self.ranks.contains_key(it);
            let is_broken = self.groups[group].iter().any(has_died);
            let event = match act {
                Act::Return => Event::Begin,
                Act::Do if is_broken && coin => Event::Lost,
                Act::Do => Event::Did,
                Act::Meet | Act::Compare => {
                    let call = if act == Act::Meet { standing.done } else { COMPARISON };
                    let came = self.came.entry((group, call)).or_default();
                    if came.insert(number, standing).is_none() {
                        return true;
                    }
                    let is_complete = came.len() == self.groups[group].len();
                    match act {
                        Act::Meet if is_complete && (coin || !is_broken) => Event::Met,
                        Act::Compare if is_complete && (coin || !is_broken) => {
                            Event::Compared(came.values().copied().collect())
                        }
                        _ if is_broken => Event::Lost,
                        _ => return false,
                    }
                }
                Act::Regroup => {
                    let next = group + 1;
                    if self.groups.len() == next {
                        let living = |it: &usize| self.ranks.contains_key(it);
                        let living = self.groups[group].iter().copied().filter(living).collect();
                        self.groups.push(living);
                    }
                    let has_died = |it: &usize| !self.ranks.contains_key(it);
                    let fails = coin && self.groups[next].iter().any(has_died);
                    self.ranks.get_mut(&number).unwrap().group = next;
                    if fails {
                        self.counts.joins_that_failed += 1;
                        return true;
                    }
                    Event::Regrouped(next as u64 + 1)
                }
                Act::Refuse(all) => panic!("rank {number} refuses {all:?}"),
            };
            let compared = matches!(event, Event::Compared(_));
            let is_behind = matches!(&event, Event::Compared(all) if all.iter().any(|it| it.done > standing.done));
            let member = self.ranks.get_mut(&number).unwrap();
            member.act = member.course.handle(event);
            match member.act {
                Act::Return if compared && is_behind => self.counts.behind += 1,
                Act::Return if compared => self.counts.alike += 1,
                Act::Do if compared && standing.did_next_in > 0 => self.counts.again += 1,
                _ => {}
            }
            if member.act == Act::Return {
                self.results.entry(number).or_default().push(standing.did_next_in);
            }
            true
        }
    }

    #[test]
    fn the_ranks_that_are_left_have_all_results_and_the_same_ones() {
        let mut sum = Counts::default();
        for (size, seed) in (2..=5).flat_map(|size| (0..50_000).map(move |seed| (size, seed))) {
            let (results, counts) = World::new(size, seed << 20 | 1).run();
            let first = results.values().next();
            assert!(results.values().all(|it| it.len() == PIECES), "{size} {seed}: {results:?}");
            assert!(results.values().all(|it| Some(it) == first), "{size} {seed}: {results:?}");
            sum.deaths += counts.deaths;
            sum.behind += counts.behind;
            sum.alike += counts.alike;
            sum.again += counts.again;
            sum.joins_that_failed += counts.joins_that_failed;
        }
        let Counts { deaths, behind, alike, again, joins_that_failed } = sum;
        assert!(
            [deaths, behind, alike, again, joins_that_failed].iter().all(|it| *it > 1000),
            "{sum:?}"
        );
    }

    #[test]
    fn ranks_that_have_run_other_pieces_are_refused() {
        let at = |done, did_next_in| Standing { done, did_next_in };
        assert_eq!(at(5, 0).counts(&[at(5, 0), at(3, 1)]), None);
        assert_eq!(at(4, 0).counts(&[at(5, 0), at(4, 0)]), None);
    }
}
