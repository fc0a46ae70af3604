//! The backend `mpi`: a group's calls over whatever MPI library the machine has.
//!
//! The library carries bytes. Sums are made here by [`Call::reduce`](super::Call::reduce), along the tree of every
//! backend, so they have the same bits as everywhere. Only under [`SumOrder::Backend`] does MPI add by itself.
//!
//! MPI says nothing when a rank dies, and cannot take back a call that has begun. So a
//! [guard](crate::backend::Guard) stands beside the group, and all memory that MPI sees is MPI's until its call is
//! over: a late message reaches no buffer of a user.

mod buffers;
mod collectives;
mod inbox;
mod members;
mod messages;
mod own_sums;
mod rank;
mod wait;

use std::{path::Path, sync::Arc, time::Instant};

use drumline_engine::{Cause, CollectiveError};
use drumline_mpi::Mpi;
use drumline_schedule::SumOrder;

use self::{buffers::Buffers, inbox::Inbox, rank::OverMpi, wait::Waiting};
use super::{Arrived, Backend, BackendOptions, Outgoing, Request, Wanted};
use crate::Result;

/// The name of this backend, and the scheme of its URL.
pub(crate) const MPI: &str = "mpi";

/// The library that would be loaded, in words. Loads it, and starts nothing.
///
/// # Errors
///
/// What was tried, and what to install.
pub(crate) fn describe(library: Option<&Path>) -> Result<String, String> {
    Mpi::load(library).map(|mpi| mpi.about().to_string()).map_err(|error| error.to_string())
}

/// Has `see_off` called before MPI is finalised. It says whether all ranks have come to their end.
pub(crate) fn before_finalize(see_off: fn() -> bool) {
    Mpi::before_finalize(see_off);
}

/// Whether MPI is in this process.
pub(crate) fn is_loaded() -> bool {
    Mpi::loaded().is_some()
}

/// MPI counts by 32 bits, in all blocks of a call together.
const PIECE_BYTES_MAX: usize = 1 << 28;

/// Connects this rank with the others of its group.
pub(super) fn connect(options: &BackendOptions) -> Result<Arc<dyn Backend>> {
    let failed = |error: drumline_mpi::Error| options.error(error.to_string());
    let mpi = Mpi::load(options.config.mpi_library.as_deref()).map_err(failed)?;
    if let Some(named) = &mpi.about().passed_over {
        tracing::warn!(
            named = %named.display(),
            used = %mpi.about().path.display(),
            "another MPI library was loaded already, and is used in place of the one in the settings"
        );
    }
    let world = mpi.init().map_err(failed)?;
    let ranks = members::agree(options, world)?;
    let guard = options.guard()?;
    let waiting = Waiting::new(mpi, guard);
    let making = world.communicator(&ranks, members::tag_of(&options.name)).map_err(failed)?;
    let communicator = waiting
        .until_made(making, options.deadline)
        .map_err(|cause| options.error(format!("MPI makes no communicator: {cause}")))?;
    tracing::info!(
        group = options.name,
        rank = options.rank,
        library = %mpi.about().path.display(),
        version = mpi.about().version,
        "MPI carries the group"
    );
    Ok(Arc::new(OverMpi {
        rank: options.rank,
        world_size: options.world_size,
        adds_by_itself: options.config.sum_order == SumOrder::Backend,
        communicator,
        waiting,
        buffers: Buffers::default(),
        piece_bytes: options.config.window_bytes.clamp(1, PIECE_BYTES_MAX),
        inbox: Inbox::default(),
    }))
}

impl Backend for OverMpi {
    fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause> {
        self.carry_out(request)
    }

    fn has_messages(&self) -> bool {
        true
    }

    fn send(&self, message: &Outgoing<'_>) -> Result<(), Cause> {
        self.send_message(message)
    }

    fn recv(&self, wanted: &Wanted) -> Result<Arrived, Cause> {
        self.receive_message(wanted)
    }

    fn abort(&self, _: &CollectiveError) {
        // The guard tells the peers. `MPI_Finalize` would wait for ranks that may have died.
        self.waiting.mpi().forgo_finalize();
    }

    fn shutdown(&self, _: Instant) -> Result<(), Cause> {
        Ok(()) // all ranks have come to this: the guard has seen to it
    }
}
