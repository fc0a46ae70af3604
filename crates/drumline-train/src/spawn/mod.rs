//! Ranks as processes of this program, without a launcher.
//!
//! A new process runs this program from its beginning, with the same arguments. In it, the call of [`spawn`] that
//! started it runs the given function and ends the process. So the function may use everything that the program has
//! computed before; the process computes it again.
//!
//! ```text
//!  main ── parse arguments ── spawn ───────────────────── join ── ...
//!                               │ starts                   ▲ the first failure
//!  main ── parse arguments ── spawn ── function(0) ── exit ┤
//!  main ── parse arguments ── spawn ── function(1) ── exit ┘
//! ```

mod child;
mod error;
mod processes;

use std::{
    ffi::OsString,
    fmt::{Debug, Display},
    panic::Location,
    time::Duration,
};

pub(crate) use child::VARIABLE as SPAWN_VARIABLE;
pub use error::RankEnd;
pub use processes::Processes;

use child::Place;

use crate::Result;

/// Runs `function` with the ranks 0 to `ranks` − 1, each in a process of its own. [`Processes::join`] waits for them.
///
/// If this program ignores SIGCHLD, or other code of it collects all children, the system does not tell how a process has
/// ended. Then one whose function has returned without an error has ended well, and any other one has failed.
///
/// The processes meet by `ProcessGroup::from_env`: they have the environment of `drumline run
/// --no-torch-store`, a secret of their own, and a store that this process hosts on a Unix socket. A process ends when
/// `function` returns, and with the process that started it.
///
/// Each process runs this program from its beginning, with the same arguments, up to this call. What stands before the
/// call therefore must not depend on what changes in between. Calls of `spawn` that stand before it, at other places of
/// the program, start nothing there and return at once.
///
/// ```no_run
/// use drumline::ProcessGroup;
///
/// fn main() -> drumline::Result<()> {
///     let steps = 1000; // every process has this
///     let ranks = drumline::spawn(4, |rank| {
///         let group = ProcessGroup::from_env()?;
///         println!("rank {rank} of {} makes {steps} steps", group.world_size());
///         group.destroy()
///     })?;
///     ranks.join()
/// }
/// ```
///
/// # Errors
///
/// The processes cannot be started, or this is one of them.
#[track_caller]
pub fn spawn<E: Display + Debug>(
    ranks: usize,
    function: impl FnOnce(usize) -> Result<(), E>,
) -> Result<Processes> {
    Spawn::new(ranks).start(function)
}

/// How [`spawn`] starts processes.
///
/// ```no_run
/// use drumline::Spawn;
///
/// let options = Spawn { arguments: Some(vec!["--worker".into()]), ..Spawn::new(2) };
/// let ranks = options.start(|rank| {
///     println!("rank {rank}");
///     Ok::<_, std::io::Error>(())
/// })?;
/// ranks.join()?;
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Spawn {
    /// How many processes.
    pub ranks: usize,
    /// The arguments of the processes. `None`: those of this process.
    pub arguments: Option<Vec<OsString>>,
    /// After a failure, how long the other processes may take to end: from SIGTERM until SIGKILL.
    pub grace_period: Duration,
}

impl Spawn {
    /// So many processes. Everything else has its default.
    pub fn new(ranks: usize) -> Spawn {
        Spawn { ranks, arguments: None, grace_period: Duration::from_secs(5) }
    }

    /// As [`spawn`].
    ///
    /// # Errors
    ///
    /// As [`spawn`].
    #[track_caller]
    pub fn start<E: Display + Debug>(
        &self,
        function: impl FnOnce(usize) -> Result<(), E>,
    ) -> Result<Processes> {
        match Place::of(Location::caller())? {
            Place::Parent { call } => {
                let own = || std::env::args_os().skip(1).collect();
                let arguments = self.arguments.clone().unwrap_or_else(own);
                Processes::start(self.ranks, &arguments, self.grace_period, &call)
            }
            Place::Before => Ok(Processes::none()),
            Place::Rank(rank) => rank.run(function),
        }
    }
}
