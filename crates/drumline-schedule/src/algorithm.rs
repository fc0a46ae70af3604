//! Collectives and the table of algorithms that perform them.
//!
//! An algorithm is a row of [`ALGORITHMS`]: a name, a function that writes the steps of one rank,
//! and a function that prices them. A new algorithm is a new row; [`check`](crate::check) says
//! whether it is right. Rows of your own need not be in the table to be scheduled or checked.
//!
//! Every row keeps the order of sums of [`tree`](crate::tree), so the choice among them changes
//! the time that an operation takes and never a bit of its result.

mod binomial;
mod bruck;
mod direct;
mod dissemination;
mod doubling;
mod gather;
mod halving;
mod hierarchical;
mod leaders;
mod nodes;
mod registered;
mod rooted;
mod scan;
mod seats;
mod shared;
mod shared_blocks;
mod shared_rooted;
mod table;

use std::fmt;

use crate::error::Error;
use crate::flush;
use crate::schedule::Schedule;
use crate::step::{Buffer, Rank, Step};
use crate::topology::Topology;

pub use direct::DIRECT_MAX_RANKS;
pub use table::ALGORITHMS;

/// An operation that all ranks of a group take part in.
///
/// ```
/// use drumline_schedule::{ALGORITHMS, Collective};
///
/// let names = ALGORITHMS.iter().filter(|row| row.collective == Collective::Barrier);
/// assert!(names.map(|row| row.name).any(|name| name == "dissemination"));
/// assert_eq!(Collective::AllReduce.to_string(), "all_reduce");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Collective {
    /// Every rank gets the sum of all ranks.
    AllReduce,
    /// The root gets the sum of all ranks. The others' data stays as it is.
    Reduce,
    /// Every rank gets what the root has.
    Broadcast,
    /// Every rank gets the contributions of all ranks, in the order of ranks.
    AllGather,
    /// Every rank brings as many blocks as there are ranks and gets the sum of one: rank `i`
    /// that of all blocks `i`.
    ReduceScatter,
    /// The root gets the contributions of all ranks, in the order of ranks.
    Gather,
    /// The root brings as many blocks as there are ranks, and rank `i` gets block `i`.
    Scatter,
    /// Every rank brings as many blocks as there are ranks, and gets as many: from rank `i` that
    /// rank's block for it.
    AllToAll,
    /// Every rank gets the sum of the ranks up to itself: the tree over just these, whatever
    /// the [order](crate::SumOrder) of other sums.
    Scan,
    /// Every rank gets the sum of the ranks below it. The data of rank 0 stays as it is.
    ExclusiveScan,
    /// No rank leaves before every rank has entered.
    Barrier,
}

impl Collective {
    /// Whether what a rank contributes lies in a [`Buffer::Input`].
    /// Otherwise it lies in the data, where the result is going to be.
    ///
    /// ```
    /// use drumline_schedule::Collective;
    ///
    /// assert!(Collective::AllGather.has_input());
    /// assert!(!Collective::AllReduce.has_input()); // in place
    /// ```
    pub fn has_input(self) -> bool {
        match self {
            Collective::AllGather
            | Collective::ReduceScatter
            | Collective::Gather
            | Collective::Scatter
            | Collective::AllToAll => true,
            Collective::AllReduce
            | Collective::Reduce
            | Collective::Broadcast
            | Collective::Scan
            | Collective::ExclusiveScan
            | Collective::Barrier => false,
        }
    }

    /// The buffer of each rank that others reach where it is registered: the data, where results go to, but
    /// of a reduce_scatter and a gather what each rank brings.
    ///
    /// ```
    /// use drumline_schedule::{Collective, step::Buffer};
    ///
    /// assert_eq!(Collective::AllReduce.registered_buffer(), Buffer::Data);
    /// assert_eq!(Collective::ReduceScatter.registered_buffer(), Buffer::Input);
    /// ```
    pub fn registered_buffer(self) -> Buffer {
        match self {
            Collective::ReduceScatter | Collective::Gather => Buffer::Input,
            _ => Buffer::Data,
        }
    }

    /// Whether one rank has a part of its own.
    ///
    /// ```
    /// use drumline_schedule::Collective;
    ///
    /// assert!(Collective::Broadcast.has_root() && !Collective::AllGather.has_root());
    /// ```
    pub fn has_root(self) -> bool {
        matches!(
            self,
            Collective::Reduce | Collective::Broadcast | Collective::Gather | Collective::Scatter
        )
    }
}

impl fmt::Display for Collective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Collective::AllReduce => "all_reduce",
            Collective::Reduce => "reduce",
            Collective::Broadcast => "broadcast",
            Collective::AllGather => "all_gather",
            Collective::ReduceScatter => "reduce_scatter",
            Collective::Gather => "gather",
            Collective::Scatter => "scatter",
            Collective::AllToAll => "all_to_all",
            Collective::Scan => "scan",
            Collective::ExclusiveScan => "exclusive_scan",
            Collective::Barrier => "barrier",
        })
    }
}

/// One way to perform a collective.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, MemoryUse, Topology, check};
///
/// let halving: &Algorithm = Algorithm::find(Collective::AllReduce, "halving")?;
/// assert_eq!(halving.memory, MemoryUse::Private);
/// // What the table says of its price is what its steps do.
/// let world = Topology::flat(6);
/// assert_eq!(check::check(halving, &world, 0, 60).unwrap(), (halving.cost)(&world, 0, 60));
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Algorithm {
    /// What it performs.
    pub collective: Collective,
    /// Its name, unique among the algorithms of one collective.
    pub name: &'static str,
    /// Which memory the ranks of a host must share for it.
    pub memory: MemoryUse,
    /// The steps of one rank, without [`Step::Flush`]: `(topology, rank, root)`. It is called
    /// with ranks of the topology only. Collectives without a root ignore the root.
    pub generate: fn(&Topology, Rank, Rank) -> Vec<Step>,
    /// The price when every block has that many elements: `(topology, root, elements)`.
    pub cost: fn(&Topology, Rank, usize) -> Cost,
    /// Whether it can serve these ranks. It is asked before `generate` and `cost` are called.
    pub applies: fn(&Topology) -> bool,
    /// What `applies` asks for, to be read after "needs".
    pub needs: &'static str,
    /// Whether sums that are not complete may travel. Narrow floats (f16, bf16) would lose accuracy
    /// if those were rounded to be sent, so such an algorithm moves them in the width that they
    /// are summed in. Of all others only what ranks bring, and what is finished, ever travels.
    pub partial_sums_travel: bool,
    /// Whether it serves blocks of different lengths ([`Counts`](crate::Counts)). Such an algorithm
    /// names whole blocks only.
    pub uneven: bool,
}

/// Which memory the ranks of a host share.
///
/// ```
/// use drumline_schedule::{ALGORITHMS, Collective, MemoryUse, Topology};
///
/// // What two ranks of one host can take that share no memory.
/// let world = Topology::hosts(&[2]);
/// let rows = ALGORITHMS.iter().filter(|row| row.collective == Collective::AllReduce);
/// let rows = rows.filter(|row| row.memory == MemoryUse::Private && (row.applies)(&world));
/// assert!(rows.map(|row| row.name).any(|name| name == "doubling"));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MemoryUse {
    /// None: ranks send each other messages.
    Private,
    /// [`Buffer::Slot`]. The users' buffers may lie anywhere.
    Staged,
    /// [`Buffer::Slot`], and of every user the [buffer](Collective::registered_buffer) that is
    /// registered with the group for that.
    Registered,
}

/// What an operation costs.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Cost, Topology};
///
/// let doubling = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let Cost { rounds, elements, .. } = (doubling.cost)(&Topology::flat(8), 0, 1_000);
/// assert_eq!((rounds, elements), (3, 3_000)); // everything, three times
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Cost {
    /// Messages and posts in the longest chain of which each can only be sent after the one
    /// before it has arrived.
    pub rounds: usize,
    /// Messages sent by the rank that sends the most messages.
    pub messages: usize,
    /// Elements sent by the rank that sends the most elements.
    pub elements: usize,
    /// Elements combined into others by the rank that combines the most.
    pub combined: usize,
    /// Elements read from and written to the memory of peers by the rank that does the most of
    /// it.
    pub shared_elements: usize,
}

impl fmt::Display for Cost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Cost { rounds, messages, elements, combined, shared_elements } = self;
        write!(f, "rounds: {rounds}, messages per rank: {messages}, ")?;
        write!(f, "elements per rank: {elements} sent, {combined} combined, ")?;
        write!(f, "{shared_elements} in the memory of peers")
    }
}

/// What one rank does in an all-reduce over links.
#[derive(Clone, Copy, Debug, Default)]
struct Load {
    messages: usize,
    /// Elements.
    sent: usize,
    /// Elements.
    combined: usize,
}

impl Load {
    /// The most of each that any rank does.
    fn most(loads: impl IntoIterator<Item = Load>) -> Cost {
        loads.into_iter().fold(Cost::default(), |cost, Load { messages, sent, combined }| Cost {
            messages: cost.messages.max(messages),
            elements: cost.elements.max(sent),
            combined: cost.combined.max(combined),
            ..cost
        })
    }
}

/// Serves every topology.
///
/// ```
/// use drumline_schedule::{Topology, algorithm};
///
/// assert!(algorithm::any(&Topology::flat(1)) && algorithm::any(&Topology::hosts(&[3, 5])));
/// ```
pub fn any(_topology: &Topology) -> bool {
    true
}

impl Algorithm {
    /// The row of [`ALGORITHMS`] with this name.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Collective};
    ///
    /// assert_eq!(Algorithm::find(Collective::AllGather, "bruck")?.name, "bruck");
    /// let error = Algorithm::find(Collective::AllGather, "brook").unwrap_err().to_string();
    /// assert!(error.contains("all_gather has no algorithm \"brook\"") && error.contains("bruck"));
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::UnknownAlgorithm`] lists the names that there are.
    pub fn find(collective: Collective, name: &str) -> Result<&'static Algorithm, Error> {
        let mut rows = ALGORITHMS.iter().filter(|row| row.collective == collective);
        rows.clone().find(|row| row.name == name).ok_or_else(|| Error::UnknownAlgorithm {
            collective,
            name: name.to_owned(),
            known: rows.by_ref().map(|row| row.name).collect(),
        })
    }

    /// What `rank` does, ready to run. Collectives without a root take any rank as `root`.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Collective, Topology, step::Step};
    ///
    /// let binomial = Algorithm::find(Collective::Broadcast, "binomial")?;
    /// let schedule = binomial.schedule(&Topology::flat(2), 1, 0)?;
    /// assert!(matches!(schedule.steps[0], Step::Recv { from: 0, .. }));
    /// assert!(binomial.schedule(&Topology::flat(2), 2, 0).is_err()); // there is no rank 2
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When `rank` or `root` is not in the topology, or the algorithm does not serve it.
    pub fn schedule(&self, topology: &Topology, rank: Rank, root: Rank) -> Result<Schedule, Error> {
        let world_size = topology.world_size;
        if rank >= world_size {
            return Err(Error::RankOutOfRange { rank, world_size });
        }
        if root >= world_size {
            return Err(Error::RootOutOfRange { root, world_size });
        }
        if !(self.applies)(topology) {
            return Err(self.does_not_apply(topology));
        }
        Ok(Schedule {
            collective: self.collective,
            algorithm: self.name,
            world_size,
            rank,
            root,
            memory: self.memory,
            uneven: self.uneven,
            steps: flush::insert((self.generate)(topology, rank, root)),
        })
    }

    /// The schedules of all ranks.
    ///
    /// ```
    /// use drumline_schedule::{Algorithm, Collective, Topology};
    ///
    /// let binomial = Algorithm::find(Collective::Broadcast, "binomial")?;
    /// let schedules = binomial.schedules(&Topology::flat(5), 3)?;
    /// assert!(schedules.iter().map(|schedule| schedule.rank).eq(0..5));
    /// assert!(schedules.iter().all(|schedule| schedule.root == 3));
    /// # Ok::<_, drumline_schedule::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As [`Algorithm::schedule`].
    pub fn schedules(&self, topology: &Topology, root: Rank) -> Result<Vec<Schedule>, Error> {
        (0..topology.world_size).map(|rank| self.schedule(topology, rank, root)).collect()
    }

    fn does_not_apply(&self, topology: &Topology) -> Error {
        let rows = ALGORITHMS.iter().filter(|row| row.collective == self.collective);
        Error::DoesNotApply {
            collective: self.collective,
            algorithm: self.name,
            needs: self.needs,
            world_size: topology.world_size,
            others: rows.filter(|row| (row.applies)(topology)).map(|row| row.name).collect(),
        }
    }
}

/// `ceil(log2(world_size))`: how often the informed ranks must double until they are all.
fn doublings(world_size: usize) -> usize {
    world_size.next_power_of_two().ilog2() as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_found() {
        for row in ALGORITHMS {
            let found = Algorithm::find(row.collective, row.name).unwrap();
            assert!(std::ptr::eq(row, found), "{} {}", row.collective, row.name);
        }
    }

    #[test]
    fn an_unknown_name_is_told_the_known_ones() {
        let error = Algorithm::find(Collective::Broadcast, "ring").unwrap_err();
        assert_eq!(
            error.to_string(),
            r#"broadcast has no algorithm "ring": use one of binomial, shm, shm-push"#
        );
    }

    #[test]
    fn ranks_outside_the_world_are_refused() {
        let row = Algorithm::find(Collective::Broadcast, "binomial").unwrap();
        let world = Topology::flat(4);
        assert_eq!(
            row.schedule(&world, 4, 0),
            Err(Error::RankOutOfRange { rank: 4, world_size: 4 })
        );
        assert_eq!(
            row.schedule(&world, 0, 4),
            Err(Error::RootOutOfRange { root: 4, world_size: 4 })
        );
        assert!(row.schedule(&Topology::flat(0), 0, 0).is_err());
    }

    #[test]
    fn worlds_that_an_algorithm_does_not_serve_are_refused() {
        let direct = Algorithm::find(Collective::AllReduce, "direct").unwrap();
        assert!(direct.schedule(&Topology::flat(DIRECT_MAX_RANKS), 0, 0).is_ok());
        assert!(direct.needs.contains(&DIRECT_MAX_RANKS.to_string()));
        let error = direct.schedule(&Topology::flat(DIRECT_MAX_RANKS + 1), 0, 0).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the algorithm direct of all_reduce does not serve these 257 ranks: it needs at most 256 \
             ranks, summed in their order; use one of halving, doubling, gather, binomial, \
             hierarchical-halving, hierarchical-halving-push"
        );
    }

    #[test]
    fn doublings_round_up() {
        assert_eq!([1, 2, 3, 4, 5, 8, 9].map(doublings), [0, 1, 2, 2, 3, 3, 4]);
    }
}
