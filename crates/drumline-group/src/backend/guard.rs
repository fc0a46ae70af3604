//! The watch over the ranks of a group, for backends that do not notice what happens to them.

use std::{fmt, sync::Arc};

use drumline_engine::Cause;
use drumline_schedule::step::Rank;

use crate::Result;

/// Knows which ranks of a group have died, left, failed or made another call, so that a backend need not.
///
/// A guard is a small built-in group of the same ranks, beside the backend's own connections. If a backend has
/// [asked](super::BackendOptions::guard) for one, the library exchanges a word about every collective there.
/// The exchange begins before [`Backend::collective`](super::Backend::collective). It is over before the call
/// returns, so ranks that make different calls all get a [`Cause::Mismatch`] with both calls. When this rank
/// fails, the guard tells the peers why.
///
/// Clones are one guard. A backend keeps one as long as it lives, and no longer.
#[derive(Clone)]
pub struct Guard(pub(crate) Arc<dyn Watch>);

/// What a guard does for a backend.
pub(crate) trait Watch: fmt::Debug + Send + Sync {
    fn check(&self) -> Result<(), Cause>;
    fn late(&self) -> Vec<Rank>;
    fn has_left(&self, peer: Rank) -> bool;
}

/// Connects the guard of a group when its backend asks for it.
pub(crate) trait Guards: fmt::Debug + Send + Sync {
    fn guard(&self) -> Result<Guard>;
}

impl Guard {
    /// Fails once the calls of this rank can no longer end well. A backend asks in every loop that waits, in
    /// collectives, messages and [`Backend::shutdown`](super::Backend::shutdown), and returns the cause.
    ///
    /// Any thread may ask, at any time, and none waits for another. If nothing has happened, the answer takes
    /// as long as a look at the clock, and ten thousand times a second as long as a system call.
    ///
    /// # Errors
    ///
    /// The cause, with the rank at fault:
    ///
    /// - a peer's process has ended, or its host does not answer. The backend has a moment to take in what
    ///   that peer sent before;
    /// - a peer has aborted or failed, and says why;
    /// - ranks have made different calls;
    /// - the deadline of the collective has passed, and some ranks have not called it;
    /// - a peer has left, and the collective needs it. (A message may still come from a peer that has left: see
    ///   [`Guard::has_left`].)
    /// - this rank has aborted the group.
    ///
    /// If all ranks have called the collective and its deadline passes, no error comes: the backend says so itself.
    pub fn check(&self) -> Result<(), Cause> {
        self.0.check()
    }

    /// The ranks that have not made the collective that this rank is in, as far as is known. Empty if all have.
    pub fn late(&self) -> Vec<Rank> {
        self.0.late()
    }

    /// Whether `peer` has closed the group in good order. It sends nothing more, but what it sent before may
    /// still be on its way.
    pub fn has_left(&self, peer: Rank) -> bool {
        self.0.has_left(peer)
    }
}

impl fmt::Debug for Guard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
