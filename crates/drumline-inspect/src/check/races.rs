//! Accesses to shared memory, and their order.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use drumline_schedule::step::{Buffer, Rank};
use drumline_schedule::{Counts, Schedule};

/// Two accesses to one element of shared memory, at least one of them a write, that nothing orders: no chain
/// of steps, messages and posts leads from one to the other.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Cost, MemoryUse, Topology};
/// use drumline_inspect::check::{CheckError, Race, check};
/// use drumline_schedule::step::{Loc, Span, Step};
///
/// // Rank 1 copies from the slot of rank 0, and does not wait for the post.
/// let steps = |_: &Topology, rank, _| {
///     let (data, slot) = (Loc::data(Span::WHOLE), Loc::slot(Span::WHOLE));
///     match rank {
///         0 => vec![Step::Copy { dst: slot, src: data }, Step::Post],
///         _ => vec![Step::Post, Step::Copy { dst: data, src: slot.of(0) }],
///     }
/// };
/// let hasty = Algorithm::new(Collective::Broadcast, "hasty", steps, |_, _, _| Cost::default())
///     .in_memory(MemoryUse::Staged);
/// let error = check(&hasty, &Topology::hosts(&[2]), 0, 10).unwrap_err();
/// let CheckError::Race(race) = error else { panic!("{error}") };
/// let Race { owner, late, early, .. } = *race;
/// assert_eq!(owner, 0);
/// assert!(late.writes != early.writes);
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "race for element {element} of {buffer:?} of rank {owner}:\n  {late}\n  {early}\nand nothing \
     says which comes first"
)]
pub struct Race {
    /// The owner of the memory.
    pub owner: Rank,
    /// Buffer that is accessed.
    pub buffer: Buffer,
    /// Index of the first such element in that buffer.
    pub element: usize,
    /// The access that was checked last.
    pub late: Access,
    /// The earlier access that it is not ordered with.
    pub early: Access,
}

impl fmt::Debug for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// An access to shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// The rank that accesses the memory.
    pub rank: Rank,
    /// Index of the call, of those that run back to back.
    pub call: usize,
    /// Index of the step; `None` for the user, who writes the buffer before a call and reads
    /// it after.
    pub step: Option<usize>,
    /// Whether the access is a write.
    pub writes: bool,
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Access { rank, call, step, writes } = self;
        let verb = if *writes { "writes" } else { "reads" };
        match (step, writes) {
            (Some(step), _) => {
                write!(f, "rank {rank} {verb} it at step {step} of call {call}")
            }
            (None, true) => {
                write!(f, "the user of rank {rank} {verb} it before call {call}")
            }
            (None, false) => {
                write!(f, "the user of rank {rank} {verb} it after call {call}")
            }
        }
    }
}

/// A vector clock: for each rank, the time up to which its actions are known to have happened. The time of a
/// rank advances when it tells others its clock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Clock(Vec<u32>);

impl Clock {
    /// The clock of `rank` before it has learnt of any other rank.
    pub(super) fn start(rank: Rank, world_size: usize) -> Clock {
        Clock((0..world_size).map(|other| u32::from(other == rank)).collect())
    }

    pub(super) fn now(&self, rank: Rank) -> u32 {
        self.0[rank]
    }

    /// The clock that `rank` tells others. They do not know of its later actions.
    pub(super) fn tell(&mut self, rank: Rank) -> Clock {
        let told = self.clone();
        self.0[rank] += 1;
        told
    }

    pub(super) fn learn(&mut self, told: &Clock) {
        for (own, theirs) in self.0.iter_mut().zip(&told.0) {
            *own = (*own).max(*theirs);
        }
    }
}

/// The accesses to a shared buffer that later accesses must be ordered with.
#[derive(Clone)]
pub(super) struct Touched {
    /// The borders of all spans that any rank names. All elements between two adjacent borders have the same
    /// accesses.
    borders: Vec<usize>,
    /// Between each border and the next.
    regions: Vec<Region>,
}

#[derive(Clone, Default)]
struct Region {
    written: Option<Touch>,
    /// The last read of each rank since then.
    read: BTreeMap<Rank, Touch>,
}

#[derive(Clone, Copy)]
struct Touch {
    by: Access,
    time: u32,
}

impl Touched {
    /// No accesses to a buffer of `len` elements, of which schedules name spans with these borders.
    pub(super) fn new(len: usize, mut borders: Vec<usize>) -> Touched {
        borders.extend([0, len]);
        borders.sort_unstable();
        borders.dedup();
        Touched { regions: vec![Region::default(); borders.len() - 1], borders }
    }

    /// Notes that a rank has accessed `range` at its time `clock`. If this access races with an earlier one,
    /// returns the first element in both, and the earlier access. The borders of the range must have been
    /// given to `new`.
    pub(super) fn access(
        &mut self,
        by: Access,
        range: Range<usize>,
        clock: &Clock,
    ) -> Option<(usize, Access)> {
        if range.is_empty() {
            return None;
        }
        let unknown = |touch: &Touch| touch.time > clock.now(touch.by.rank);
        let now = Touch { by, time: clock.now(by.rank) };
        let first = self.borders.partition_point(|&border| border < range.start);
        let end = self.borders.partition_point(|&border| border < range.end);
        for index in first..end {
            let region = &mut self.regions[index];
            let writes = region.written.iter();
            let reads = region.read.values().filter(|_| by.writes);
            if let Some(other) = writes.chain(reads).find(|touch| unknown(touch)) {
                return Some((self.borders[index], other.by));
            }
            if by.writes {
                *region = Region { written: Some(now), read: BTreeMap::new() };
            } else {
                region.read.insert(by.rank, now);
            }
        }
        None
    }
}

impl Touched {
    /// An access to `range` in a call up to `call` that a reader with `clock` does not know to have ended.
    pub(super) fn unknown_write(
        &self,
        range: Range<usize>,
        clock: &Clock,
        call: usize,
    ) -> Option<(usize, Access)> {
        let regions = self.borders.iter().zip(&self.regions);
        let mut inside = regions.filter(|(border, _)| range.contains(border));
        inside.find_map(|(border, region)| {
            let Touch { by, time } = region.written?;
            (by.call <= call && time > clock.now(by.rank)).then_some((*border, by))
        })
    }
}

/// The borders of all spans of `buffer`, of any rank.
pub(super) fn borders(schedules: &[Schedule], buffer: Buffer, counts: &[Counts]) -> Vec<usize> {
    let mut borders: Vec<usize> = vec![];
    for (schedule, counts) in schedules.iter().zip(counts) {
        let locs = schedule.steps.iter().flat_map(|step| step.reads().chain(step.writes()));
        for loc in locs.filter(|loc| loc.buffer == buffer) {
            let range = schedule.resolve(loc, counts);
            borders.extend([range.start, range.end]);
        }
        borders.sort_unstable();
        borders.dedup();
    }
    borders
}
