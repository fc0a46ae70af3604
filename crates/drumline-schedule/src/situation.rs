use std::fmt;

use crate::algorithm::{ALGORITHMS, Algorithm};
use crate::collective::Collective;
use crate::price::ElementKind;
use crate::schedule::MemoryUse;
use crate::topology::{Rounding, Topology};

/// What the choice of an algorithm depends on, other than prices.
///
/// ```
/// use drumline_schedule::price::ElementKind;
/// use drumline_schedule::{Algorithm, Collective, Situation, Topology, Why, eligible};
///
/// // Four ranks on each of two memory nodes sum bf16 in registered buffers.
/// let world = Topology::hosts(&[8]).with_nodes((0..8).map(|rank| Some(rank / 4)));
/// let bf16 = ElementKind { bytes: 2, sum_bytes: 4 };
/// let over_links = Situation::over_links(Collective::AllReduce, &world, 1_000, bf16);
/// let situation = Situation { long_bytes: Some(1 << 20), registered: true, ..over_links };
///
/// let push = Algorithm::find(Collective::AllReduce, "shm-nodes-push")?;
/// assert_eq!(eligible(push, &situation), Err(Why::WouldRound));
/// assert_eq!(eligible(push, &over_links), Err(Why::NoSharedMemory));
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Situation<'a> {
    /// The collective.
    pub collective: Collective,
    /// The ranks.
    pub topology: &'a Topology,
    /// Elements of the longest block.
    pub elements: usize,
    /// The width of elements and of their sums.
    pub kind: ElementKind,
    /// Whether blocks have different lengths.
    pub uneven: bool,
    /// Whether the [buffer that neighbours access](Collective::registered_buffer) is registered.
    pub registered: bool,
    /// The length in bytes from which data counts as long in the memory that the ranks of a host share.
    /// `None` if the ranks share no memory.
    pub long_bytes: Option<usize>,
}

impl<'a> Situation<'a> {
    /// Even blocks, and ranks that share no memory.
    pub fn over_links(
        collective: Collective,
        topology: &'a Topology,
        elements: usize,
        kind: ElementKind,
    ) -> Situation<'a> {
        let (uneven, registered, long_bytes) = (false, false, None);
        Situation { collective, topology, elements, kind, uneven, registered, long_bytes }
    }

    /// Whether `row` sends and stores all elements in the width of their sums, which is more than their own.
    pub fn widens(&self, row: &Algorithm) -> bool {
        self.is_narrow() && row.partial_sums_travel && !row.sums_apart
    }

    /// Whether each host rounds the sum of its ranks before it travels: where the group asks for it, and an algorithm
    /// can do so. Then all do, so that results do not depend on the algorithm.
    pub fn rounds_on_hosts(&self) -> bool {
        let Situation { topology, collective, .. } = *self;
        let can = |row: &Algorithm| {
            row.collective == collective && row.sums_apart && (row.applies)(topology)
        };
        topology.rounding == Rounding::Host
            && self.is_narrow()
            && self.long_bytes.is_some()
            && topology.has_hosts_of_several()
            && ALGORITHMS.iter().any(can)
    }

    /// Whether elements are narrower than their sums.
    pub fn is_narrow(&self) -> bool {
        self.kind.sum_bytes > self.kind.bytes
    }
}

/// Why an algorithm cannot be used in a [`Situation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// It carries out another collective.
    OtherCollective(Collective),
    /// It does not serve these ranks.
    Needs(&'static str),
    /// It uses memory that these ranks do not share.
    NoSharedMemory,
    /// It works in a registered buffer, and this one is not.
    NotRegistered,
    /// It works in place, where narrow floats have no room for their sums.
    WouldRound,
    /// It rounds sums of narrow floats once, in a group whose hosts round their own.
    RoundsOnce,
    /// It serves even blocks only.
    UnevenBlocks,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Why::OtherCollective(collective) => write!(f, "it is an algorithm of {collective}"),
            Why::Needs(needs) => write!(f, "it needs {needs}"),
            Why::NoSharedMemory => f.write_str("these ranks share no memory"),
            Why::NotRegistered => f.write_str("the buffer is not registered"),
            Why::WouldRound => {
                f.write_str("sums of floats of 16 or 8 bits would be rounded on their way")
            }
            Why::RoundsOnce => {
                f.write_str("each host rounds its sum, and it rounds only the result")
            }
            Why::UnevenBlocks => f.write_str("it serves no blocks of different lengths"),
        }
    }
}

/// Whether `row` can be used in this situation.
///
/// # Errors
///
/// The first reason why it cannot.
pub fn eligible(row: &Algorithm, situation: &Situation<'_>) -> Result<(), Why> {
    let in_place = row.memory == MemoryUse::Registered;
    let shares_memory = situation.long_bytes.is_some();
    let refused = if row.collective != situation.collective {
        Why::OtherCollective(row.collective)
    } else if !(row.applies)(situation.topology) {
        Why::Needs(row.needs)
    } else if row.memory != MemoryUse::Private && !shares_memory {
        Why::NoSharedMemory
    } else if in_place && !situation.registered {
        Why::NotRegistered
    } else if in_place && situation.widens(row) {
        Why::WouldRound
    } else if situation.rounds_on_hosts() && !row.sums_apart {
        Why::RoundsOnce
    } else if situation.uneven && !row.uneven {
        Why::UnevenBlocks
    } else {
        return Ok(());
    };
    Err(refused)
}
