//! The end of a process that MPI is in, with groups that nobody has destroyed.
//!
//! `MPI_Finalize` waits for all ranks. Ranks that still call one of these groups must hear first that this rank comes no
//! more. And this rank must hear whether they end as well: ranks that have failed do not finalise MPI.

use std::{
    sync::{Arc, Mutex, MutexGuard, Once, PoisonError, Weak},
    thread,
    time::Instant,
};

use drumline_schedule::step::Rank;

use super::drive::Driven;
use crate::backend::mpi;

/// The lanes of this process.
#[derive(Default)]
struct Lanes {
    all: Vec<Weak<Driven>>,
    /// Those that were left, and not by all ranks at once.
    kept: Vec<(Arc<Driven>, Vec<Rank>)>,
}

static LANES: Mutex<Lanes> = Mutex::new(Lanes { all: Vec::new(), kept: Vec::new() });

/// Has this lane be left at exit, if it is there then, before MPI is finalised.
pub(super) fn remember(lane: &Arc<Driven>) {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| mpi::before_finalize(see_off));
    let mut lanes = lanes();
    lanes.all.retain(|lane| lane.strong_count() > 0);
    lanes.all.push(Arc::downgrade(lane));
}

/// Keeps a lane that this rank has left until all `peers` have left it, or until the process ends.
pub(super) fn keep(lane: &Arc<Driven>, peers: Vec<Rank>) {
    // A lane that is dropped in a panic ends without goodbye.
    if !mpi::is_loaded() || thread::panicking() || lane.is_over() {
        return;
    }
    let mut kept = std::mem::take(&mut lanes().kept);
    kept.retain(|(lane, peers)| !lane.have_left(peers));
    kept.push((lane.clone(), peers));
    lanes().kept.append(&mut kept);
}

/// Leaves all groups. Returns whether all their ranks have left them.
fn see_off() -> bool {
    // The values of this thread have been dropped already, and calls need some.
    let leaving = thread::Builder::new().name("drumline-exit".to_owned()).spawn(|| {
        let Lanes { all, kept } = std::mem::take(&mut *lanes());
        let open = all.iter().filter_map(Weak::upgrade).filter(|lane| !lane.is_over());
        let open: Vec<_> = open.inspect(|lane| lane.take_leave()).collect();
        drop(kept);
        let now = Instant::now();
        open.iter().all(|lane| lane.close(now, None).is_ok())
    });
    let are_over = leaving.is_ok_and(|leaving| leaving.join().unwrap_or(false));
    are_over && !Driven::one_has_failed() // its ranks may end without a last word
}

fn lanes() -> MutexGuard<'static, Lanes> {
    LANES.lock().unwrap_or_else(PoisonError::into_inner)
}
