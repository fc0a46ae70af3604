//! The library of this process: what it is, and the lock under which it is called.

use std::fmt;
use std::ops::Deref;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::abi::{Abi, Level};
use crate::error::{Error, Result};
use crate::launcher::{Family, Launcher, launcher};
use crate::search;
use crate::table::{Calls, calls, card};
use drumline_loader::{Library, file_of};

/// What was found. MPI need not be initialised for it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct About {
    /// The file of the library.
    pub path: PathBuf,
    /// How it lays out constants and handles.
    pub abi: Abi,
    /// What it calls itself: the first line of `MPI_Get_library_version`.
    pub version: String,
    /// The version of the standard that it has.
    pub standard: (u32, u32),
    /// Who started this process.
    pub launcher: Option<Launcher>,
    /// The path that was named, if the process had loaded another MPI before.
    pub passed_over: Option<PathBuf>,
}

impl fmt::Display for About {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let About { path, abi, version, standard: (major, minor), .. } = self;
        write!(f, "{version} (MPI {major}.{minor}, {abi}): {}", path.display())
    }
}

/// The MPI of this process.
///
/// All threads may use it. It calls MPI under one lock, so MPI need not let several threads in at once. The lock is held
/// only during calls that do not wait, except for those that initialise and finalise.
///
/// A program that calls MPI in other threads of its own must have initialised it with `MPI_THREAD_MULTIPLE`.
#[derive(Debug)]
pub struct Mpi {
    about: About,
    calls: Box<dyn Calls>,
    lock: Mutex<()>,
    /// Calls that have begun and are not over. Those that were dropped count for ever.
    open: AtomicUsize,
    /// Set when this library has initialised MPI.
    pub(crate) is_ours: AtomicBool,
    pub(crate) is_forgone: AtomicBool,
}

static LOADED: Mutex<Option<&'static Mpi>> = Mutex::new(None);

/// What is called before MPI is finalised.
pub(crate) static HOOKS: Mutex<Vec<fn() -> bool>> = Mutex::new(Vec::new());

/// Set in a process that was forked from one that had initialised MPI.
pub(crate) static IS_FORKED: AtomicBool = AtomicBool::new(false);

impl Mpi {
    /// Finds and loads the library. Nothing is initialised. Later calls return the same library, whatever they name.
    ///
    /// `library` is a path. It is not used if the process has loaded an MPI already, as Python's `mpi4py` does:
    /// [`About::passed_over`] tells. With `None` the library is looked for.
    ///
    /// # Errors
    ///
    /// [`Error::NotFound`], [`Error::Symbol`] and [`Error::UnknownAbi`]. A later call tries again.
    pub fn load(library: Option<&Path>) -> Result<&'static Mpi> {
        let mut loaded = locked(&LOADED);
        if let Some(mpi) = *loaded {
            return Ok(mpi);
        }
        let mpi: &'static Mpi =
            Box::leak(Box::new(search::find(library, |it, name| look_at(it, name, library))?));
        *loaded = Some(mpi);
        Ok(mpi)
    }

    /// The library that [`Mpi::load`] has loaded. Looks for none.
    pub fn loaded() -> Option<&'static Mpi> {
        *locked(&LOADED)
    }

    /// What the library is.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Has `hook` called at exit, before MPI is finalised, in the order of these calls. There it ends what still uses
    /// MPI, and says whether all ranks come to their end, too. If not, or if it panics, MPI is not finalised: that
    /// would wait for them. No MPI need have been loaded, and a process that has not initialised it calls no hook.
    pub fn before_finalize(hook: fn() -> bool) {
        locked(&HOOKS).push(hook);
    }

    /// Has MPI not be finalised at exit. When a rank has died, that would wait for it.
    pub fn forgo_finalize(&self) {
        self.is_forgone.store(true, Ordering::SeqCst);
    }

    /// Lets this thread call MPI, and no other one, until the result is dropped.
    ///
    /// # Errors
    ///
    /// [`Error::Forked`] and [`Error::Finalized`].
    pub(crate) fn enter(&self) -> Result<Entered<'_>> {
        check_not_forked()?; // first: another thread may have held the lock at the fork
        let lock = locked(&self.lock);
        if self.calls.is_finalised()? {
            return Err(Error::Finalized);
        }
        Ok(Entered { calls: &*self.calls, _lock: lock })
    }

    /// MPI's functions without the lock, for a call that waits. MPI must let several threads in.
    pub(crate) fn beside(&self) -> &dyn Calls {
        &*self.calls
    }

    /// The family whose launchers start this library.
    pub(crate) fn family(&self) -> Option<Family> {
        Family::of(&self.about.version)
    }

    pub(crate) fn opened(&self) {
        self.open.fetch_add(1, Ordering::SeqCst);
    }

    pub(crate) fn closed(&self) {
        self.open.fetch_sub(1, Ordering::SeqCst);
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.open.load(Ordering::SeqCst) > 0
    }
}

/// MPI's functions, under the lock.
pub(crate) struct Entered<'a> {
    calls: &'a dyn Calls,
    _lock: MutexGuard<'a, ()>,
}

impl<'a> Deref for Entered<'a> {
    type Target = dyn Calls + 'a;

    fn deref(&self) -> &Self::Target {
        self.calls
    }
}

pub(crate) fn check_not_forked() -> Result<()> {
    match IS_FORKED.load(Ordering::Relaxed) {
        true => Err(Error::Forked),
        false => Ok(()),
    }
}

/// The level at which several threads may call MPI, one at a time.
pub(crate) fn check_level(provided: Level) -> Result<()> {
    if provided < Level::Serialized { Err(Error::Threads { provided }) } else { Ok(()) }
}

/// A thread that panicked under one of these locks has left nothing half done.
pub(crate) fn locked<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks whether a library is an MPI, and which.
fn look_at(library: Library, name: &Path, named: Option<&Path>) -> Result<Mpi> {
    let function = library.symbol(c"MPI_Init_thread");
    let path = function.and_then(file_of).unwrap_or_else(|| name.to_owned());
    let card = card(library, &path)?;
    let first_line = card.text.lines().next().unwrap_or_default();
    let version = first_line.split_whitespace().collect::<Vec<_>>().join(" ");
    let abi = match () {
        () if card.is_standard => Abi::Standard,
        () if library.symbol(c"ompi_mpi_comm_world").is_some() => Abi::OpenMpi,
        () if Family::of(&version) == Some(Family::Mpich) => Abi::Mpich,
        () => return Err(Error::UnknownAbi { path, version }),
    };
    let is_other = |named: &&Path| named.canonicalize().ok().is_none_or(|named| named != path);
    let passed_over = named.filter(|_| named != Some(name)).filter(is_other).map(Path::to_owned);
    let calls = calls(library, &path, abi)?;
    Ok(Mpi {
        about: About {
            path,
            abi,
            version,
            standard: card.standard,
            launcher: launcher(),
            passed_over,
        },
        calls,
        lock: Mutex::new(()),
        open: AtomicUsize::new(0),
        is_ours: AtomicBool::new(false),
        is_forgone: AtomicBool::new(false),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_functions_of_mpi_is_none() {
        let error = Mpi::load(Some(Path::new("libm.so.6"))).unwrap_err();
        let Error::Symbol { path, name } = &error else { panic!("{error}") };
        assert_eq!(name, "MPI_Init_thread");
        assert_eq!(path, Path::new("libm.so.6"));
        assert!(error.to_string().contains("libm.so.6 is not a library of MPI"), "{error}");
    }

    #[test]
    fn levels_below_serialized_are_refused() {
        assert!(check_level(Level::Serialized).is_ok() && check_level(Level::Multiple).is_ok());
        let error = check_level(Level::Funneled).unwrap_err();
        assert!(error.to_string().contains("MPI_THREAD_FUNNELED"), "{error}");
    }
}
