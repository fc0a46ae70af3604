//! One rank's end of a group over MPI.

use drumline_mpi::Communicator;
use drumline_schedule::step::Rank;

use super::{buffers::Buffers, inbox::Inbox, wait::Waiting};

/// One rank of one group: a communicator of the group's members.
#[derive(Debug)]
pub(super) struct OverMpi {
    pub(super) rank: Rank,
    pub(super) world_size: usize,
    /// Whether MPI adds, where it can.
    pub(super) adds_by_itself: bool,
    pub(super) communicator: Communicator,
    pub(super) waiting: Waiting,
    pub(super) buffers: Buffers,
    /// How many bytes of its data a rank works on at a time.
    pub(super) piece_bytes: usize,
    pub(super) inbox: Inbox,
}
