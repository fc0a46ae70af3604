//! MPI from its initialisation to its end: `MPI_Init_thread`, the world of all ranks, `MPI_Finalize` at exit.

use std::ffi::c_int;
use std::io::Write as _;
use std::panic::catch_unwind;
use std::sync::Once;
use std::sync::atomic::Ordering;

use crate::error::{Error, Result};
use crate::launcher::started;
use crate::making::Making;
use crate::mpi::{HOOKS, IS_FORKED, Mpi, check_level, check_not_forked, locked};

/// All processes of the job, as MPI knows them.
#[derive(Clone, Copy, Debug)]
pub struct World {
    mpi: &'static Mpi,
    rank: usize,
    size: usize,
}

impl Mpi {
    /// Initialises MPI, unless that has been done. This waits for the other ranks of the job.
    ///
    /// MPI is finalised when the process exits, after the hooks of [`Mpi::before_finalize`]. It is not if others have
    /// initialised it, or after [`Mpi::forgo_finalize`], or if a call of MPI is not over then.
    ///
    /// # Errors
    ///
    /// [`Error::Misfit`] before MPI is called, [`Error::Threads`], [`Error::Finalized`], [`Error::Forked`], and what MPI
    /// says.
    pub fn init(&'static self) -> Result<World> {
        let calls = self.enter()?;
        let is_ours = !calls.is_initialised()?;
        let level = if is_ours {
            self.check_launcher()?;
            let level = calls.initialise()?;
            self.is_ours.store(true, Ordering::SeqCst);
            calls.return_errors(calls.world())?;
            level
        } else {
            calls.level()?
        };
        watch_exit_and_forks();
        check_level(level)?;
        let number = |function, value: c_int| {
            let wanted = "a rank or a number of ranks";
            usize::try_from(value).map_err(|_| Error::Absurd {
                function,
                value: value.into(),
                wanted,
            })
        };
        let world = calls.world();
        let rank = number("MPI_Comm_rank", calls.rank(world)?)?;
        let size = number("MPI_Comm_size", calls.size(world)?)?;
        if size == 1 && started().and_then(|start| start.size).is_some_and(|size| size > 1) {
            self.check_launcher()?; // others have initialised it
        }
        Ok(World { mpi: self, rank, size })
    }

    fn check_launcher(&self) -> Result<()> {
        let Some(start) = started() else { return Ok(()) };
        match (start.launcher.family(), self.family()) {
            (Some(starts), Some(is)) if starts != is => Err(Error::Misfit {
                launcher: start.launcher,
                path: self.about().path.clone(),
                version: self.about().version.clone(),
            }),
            _ => Ok(()),
        }
    }
}

impl World {
    /// The number of this process.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of processes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// The library.
    pub fn mpi(&self) -> &'static Mpi {
        self.mpi
    }

    /// Makes a communicator of some ranks of the world. The n-th of `ranks` has number n in it.
    ///
    /// Each of these ranks, and no other, calls this with the same arguments. Communicators that are made at the same
    /// time must differ in their `tag`, which is below 32,768. A communicator is kept until the process ends.
    ///
    /// # Errors
    ///
    /// [`Error::Ranks`] if `ranks` lacks this rank, names one twice, or one that is not there.
    pub fn communicator(&self, ranks: &[usize], tag: u16) -> Result<Making> {
        check_not_forked()?;
        if tag > 0x7fff {
            return Err(Error::Tag { tag: tag.into() });
        }
        check_ranks(ranks, self.rank, self.size)?;
        Making::begin(self.mpi, ranks, tag)
    }
}

fn check_ranks(ranks: &[usize], own: usize, size: usize) -> Result<()> {
    let mut sorted = ranks.to_vec();
    sorted.sort_unstable();
    let twice = sorted.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0]);
    let what = match (twice, sorted.last()) {
        (Some(rank), _) => format!("rank {rank} is named twice in a communicator"),
        (_, Some(&last)) if last >= size => {
            format!("there is no rank {last}: MPI's world has {size} ranks")
        }
        _ if !ranks.contains(&own) => {
            format!("rank {own} makes a communicator without itself, of {ranks:?}")
        }
        _ => return Ok(()),
    };
    Err(Error::Ranks { what })
}

/// Once per process.
fn watch_exit_and_forks() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        // SAFETY: `at_exit` takes nothing and returns nothing, and lives as long as the program.
        let at_exit_refused = unsafe { libc::atexit(at_exit) } != 0;
        // SAFETY: as above. `in_child` only stores to an atomic, which is allowed in a forked process.
        let fork_refused = unsafe { libc::pthread_atfork(None, None, Some(in_child)) } != 0;
        debug_assert!(!at_exit_refused && !fork_refused, "there is no memory for two pointers");
    });
}

extern "C" fn in_child() {
    IS_FORKED.store(true, Ordering::SeqCst);
}

/// Finalises MPI. Open MPI's launcher calls a job failed if a rank ends without that.
extern "C" fn at_exit() {
    if IS_FORKED.load(Ordering::SeqCst) {
        return;
    }
    let Some(mpi) = Mpi::loaded() else { return };
    let hooks = std::mem::take(&mut *locked(&HOOKS));
    for hook in hooks {
        if !catch_unwind(hook).unwrap_or(false) {
            mpi.forgo_finalize();
        }
    }
    let is_ours = mpi.is_ours.load(Ordering::SeqCst);
    if !is_ours || mpi.is_forgone.load(Ordering::SeqCst) || mpi.is_busy() {
        return;
    }
    if let Ok(calls) = mpi.enter()
        && let Err(error) = calls.finalise()
    {
        // Nobody is left to return it to. eprintln! would panic if stderr is closed.
        let _ = writeln!(std::io::stderr(), "drumline: {error}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_of_a_communicator_are_checked() {
        assert!(check_ranks(&[2, 0], 0, 3).is_ok());
        let problem = |ranks: &[usize], own| check_ranks(ranks, own, 3).unwrap_err().to_string();
        assert_eq!(problem(&[1, 2, 1], 1), "rank 1 is named twice in a communicator");
        assert_eq!(problem(&[0, 3], 0), "there is no rank 3: MPI's world has 3 ranks");
        assert_eq!(problem(&[0, 2], 1), "rank 1 makes a communicator without itself, of [0, 2]");
        assert_eq!(problem(&[], 1), "rank 1 makes a communicator without itself, of []");
    }
}
