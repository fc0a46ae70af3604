use super::cost::Cost;
use crate::collective::Collective;
use crate::lags::Lags;
use crate::schedule::{MemoryUse, Shelves};
use crate::step::{Rank, Step};
use crate::topology::Topology;

/// One way to carry out a collective: a row of the table.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Cost, MemoryUse, Topology};
/// use drumline_schedule::step::{Loc, Span, Step};
///
/// let halving: &Algorithm = Algorithm::find(Collective::AllReduce, "halving")?;
/// assert_eq!(halving.memory, MemoryUse::Private);
///
/// // A row of your own: the root sends its data to all ranks, one after another.
/// let data = Loc::data(Span::WHOLE);
/// let star = Algorithm::new(
///     Collective::Broadcast,
///     "star",
///     |topology, rank, root| match rank == root {
///         false => vec![Step::Recv { from: root, dst: Loc::data(Span::WHOLE) }],
///         true => (0..topology.world_size)
///             .filter(|&to| to != root)
///             .map(|to| Step::Send { to, src: Loc::data(Span::WHOLE) })
///             .collect(),
///     },
///     |topology, _, elements| {
///         let peers = topology.world_size - 1;
///         Cost { rounds: 1, messages: peers, elements: peers * elements, ..Cost::default() }
///     },
/// );
/// assert_eq!(star.schedule(&Topology::flat(3), 1, 0)?.steps, [Step::Recv { from: 0, dst: data }]);
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Algorithm {
    /// The collective that it carries out.
    pub collective: Collective,
    /// Its name, unique among the algorithms of one collective.
    pub name: &'static str,
    /// The memory that the ranks of a host must share.
    pub memory: MemoryUse,
    /// Writes the steps of one rank, without [`Step::Flush`]: `(topology, rank, root)`. The rank is
    /// always one of the topology. Collectives without a root ignore the root.
    pub generate: fn(&Topology, Rank, Rank) -> Vec<Step>,
    /// Returns the cost when every block has that many elements: `(topology, root, elements)`.
    pub cost: fn(&Topology, Rank, usize) -> Cost,
    /// Whether it serves these ranks. `generate` and `cost` may rely on that.
    pub applies: fn(&Topology) -> bool,
    /// What `applies` demands, as text that follows "needs".
    pub needs: &'static str,
    /// Whether incomplete sums travel. Narrow floats (f16, bf16) would lose accuracy if incomplete sums
    /// were rounded, so the executor sends them in the width of the sum. All other algorithms send
    /// contributions and complete sums only.
    pub partial_sums_travel: bool,
    /// Whether incomplete sums can lie [apart](crate::step::Buffer::Sum) from all else, which then keeps the width
    /// of the elements. Otherwise the executor widens the whole call.
    pub sums_apart: bool,
    /// Whether it serves blocks of different lengths ([`Counts`](crate::Counts)). Such an algorithm
    /// names whole blocks only.
    pub uneven: bool,
    /// By how much the steps of a rank lag where several windows of long data are under way at once
    /// ([`Pipeline`](crate::Pipeline)).
    pub lags: fn(&Topology, Rank, &[Step]) -> Lags,
    /// Where blocks lie in a slot that may hold a block for every rank.
    pub shelves: fn(&Topology, Rank) -> Shelves,
    /// Into how many parts a slot is cut. A window takes up one of them. If all data moves in one direction, windows are
    /// short: one side writes a window while the other side reads the window before. In other collectives both sides
    /// work all the time.
    pub slot_parts: usize,
    /// The messages between hosts in the longest chain in which each waits for the one before it. `None`: the
    /// [rounds](Cost::rounds) that are no posts.
    pub hops: Option<fn(&Topology) -> usize>,
    /// The lengths that it is meant for, among the algorithms in shared memory.
    pub meant_for: Lengths,
}

/// The lengths that an algorithm in shared memory is meant for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lengths {
    /// No length in particular.
    Any,
    /// Short data: it takes one round, in which every rank reads all data of all neighbours. Between hosts: it copies
    /// the data of many ranks together, so that it travels in one message.
    Short,
    /// Long data: it takes more rounds, to move fewer bytes between memory nodes, or to and from one host.
    Long,
}

impl Algorithm {
    /// An algorithm over links that serves every topology and even blocks. Other methods change that.
    pub const fn new(
        collective: Collective,
        name: &'static str,
        generate: fn(&Topology, Rank, Rank) -> Vec<Step>,
        cost: fn(&Topology, Rank, usize) -> Cost,
    ) -> Algorithm {
        Algorithm {
            collective,
            name,
            memory: MemoryUse::Private,
            generate,
            cost,
            applies: any,
            needs: "nothing",
            partial_sums_travel: false,
            sums_apart: false,
            uneven: false,
            lags: |_, _, _| Lags::NONE,
            shelves: |_, _| Shelves::AfterOwner,
            slot_parts: if collective.has_root() { 8 } else { 1 },
            hops: None,
            meant_for: Lengths::Any,
        }
    }

    /// The same algorithm, in this memory.
    pub const fn in_memory(self, memory: MemoryUse) -> Algorithm {
        Algorithm { memory, ..self }
    }

    /// The same algorithm, only where `applies` holds. `needs` says what that is.
    pub const fn only_where(
        self,
        applies: fn(&Topology) -> bool,
        needs: &'static str,
    ) -> Algorithm {
        Algorithm { applies, needs, ..self }
    }

    /// The same algorithm. It sends incomplete sums.
    pub const fn with_partial_sums(self) -> Algorithm {
        Algorithm { partial_sums_travel: true, ..self }
    }

    /// The same algorithm. It sends incomplete sums, which can lie apart.
    pub const fn with_sums_apart(self) -> Algorithm {
        Algorithm { partial_sums_travel: true, sums_apart: true, ..self }
    }

    /// The same algorithm. It serves blocks of different lengths.
    pub const fn with_uneven_blocks(self) -> Algorithm {
        Algorithm { uneven: true, ..self }
    }

    /// The same algorithm. Several windows may be under way at once, with the lags of the steps of a rank.
    pub const fn with_pipeline(self, lags: fn(&Topology, Rank, &[Step]) -> Lags) -> Algorithm {
        Algorithm { lags, ..self }
    }

    /// The same algorithm. A window takes up one of this number of parts of a slot.
    pub const fn with_slot_parts(self, slot_parts: usize) -> Algorithm {
        Algorithm { slot_parts, ..self }
    }

    /// The same algorithm. Blocks lie on these shelves of a slot.
    pub const fn with_shelves(self, shelves: fn(&Topology, Rank) -> Shelves) -> Algorithm {
        Algorithm { shelves, ..self }
    }

    /// The same algorithm. Its longest chain of messages between hosts has this length.
    pub const fn with_hops(self, hops: fn(&Topology) -> usize) -> Algorithm {
        Algorithm { hops: Some(hops), ..self }
    }

    /// The same algorithm, for these lengths.
    pub const fn for_lengths(self, meant_for: Lengths) -> Algorithm {
        Algorithm { meant_for, ..self }
    }

    /// Bytes of an element that travels, where elements have `bytes` and their sums `sum_bytes`: the mean, rounded
    /// up, where both travel.
    pub const fn travelling(&self, bytes: usize, sum_bytes: usize) -> usize {
        match self.collective {
            _ if !self.partial_sums_travel => bytes,
            // As many results travel as incomplete sums.
            Collective::AllReduce | Collective::ReduceSlices if self.sums_apart => {
                (bytes + sum_bytes).div_ceil(2)
            }
            _ => sum_bytes,
        }
    }
}

/// Serves every topology.
pub fn any(_topology: &Topology) -> bool {
    true
}
