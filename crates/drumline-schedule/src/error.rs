use std::fmt;

use crate::collective::Collective;
use crate::step::Rank;

/// Why a schedule does not exist.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Error, Topology};
///
/// let doubling = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let error = doubling.schedule(&Topology::flat(2), 5, 0).unwrap_err();
/// assert_eq!(error, Error::RankOutOfRange { rank: 5, world_size: 2 });
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no such rank.
    #[error("rank {rank} is not in a world of {world_size}: pass one below {world_size}")]
    RankOutOfRange {
        /// The rank asked for.
        rank: Rank,
        /// Number of ranks.
        world_size: usize,
    },
    /// The root is no rank of the world.
    #[error("root {root} is not in a world of {world_size}: pass a rank below {world_size}")]
    RootOutOfRange {
        /// The root asked for.
        root: Rank,
        /// Number of ranks.
        world_size: usize,
    },
    /// The algorithm cannot serve these ranks.
    #[error(
        "the algorithm {algorithm} of {collective} does not serve these {world_size} ranks: it \
         needs {needs}; use one of {}", others.join(", ")
    )]
    DoesNotApply {
        /// The collective.
        collective: Collective,
        /// The algorithm.
        algorithm: &'static str,
        /// What the algorithm needs.
        needs: &'static str,
        /// Number of ranks.
        world_size: usize,
        /// The algorithms that serve these ranks.
        others: Vec<&'static str>,
    },
    /// No row of the table has this name.
    #[error("{collective} has no algorithm {name:?}: use one of {}", known.join(", "))]
    UnknownAlgorithm {
        /// The collective.
        collective: Collective,
        /// The name that was not found.
        name: String,
        /// The names in the table.
        known: Vec<&'static str>,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
