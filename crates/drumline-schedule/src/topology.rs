//! What is known about the ranks before an algorithm is chosen.

/// The ranks that run a collective together.
///
/// Today it knows how many there are. Which of them share a host will be told here too.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub struct Topology {
    /// Number of ranks.
    pub world_size: usize,
}

impl Topology {
    /// `world_size` ranks, all equally far from one another.
    pub const fn flat(world_size: usize) -> Topology {
        Topology { world_size }
    }
}
