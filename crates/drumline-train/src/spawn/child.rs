//! A process that [`spawn`](super::spawn()) has started, from its side.

use std::{
    collections::BTreeMap,
    env,
    fmt::{Debug, Display},
    io::{self, Write},
    panic::{AssertUnwindSafe, Location, catch_unwind},
    process,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
};

use drumline_shm::{files, named, take_signals};
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, getpid, getppid, kill_process, pidfd_open},
};

use super::error::{nested, not_understood};
use crate::Result;
use crate::{
    error_file,
    record::{record_error, record_panics},
};

/// What tells a process that it is a rank: `<rank> <process of the parent> <call>`.
pub(crate) const VARIABLE: &str = "DRUMLINE_SPAWN";

/// What a rank writes to its error file when it begins.
pub(super) const BEGUN: &[u8] = b" ";

/// What it writes there when the function has returned without an error.
pub(super) const RETURNED: &[u8] = b"  ";

/// Which process a call of `spawn` is in.
pub(super) enum Place {
    /// The one that starts others for this call.
    Parent { call: String },
    /// One that another call has started, which comes later.
    Before,
    /// One that this call has started.
    Rank(Rank),
}

/// This process, which is a rank.
pub(super) struct Rank {
    number: usize,
    parent: Pid,
}

/// Whether the call that started this process has begun.
static IS_RANK: AtomicBool = AtomicBool::new(false);

impl Place {
    pub(super) fn of(caller: &Location<'_>) -> Result<Place> {
        if IS_RANK.load(Ordering::SeqCst) {
            return Err(nested());
        }
        let call = nth(caller);
        let Some(told) = env::var_os(VARIABLE) else { return Ok(Place::Parent { call }) };
        let told = told.to_string_lossy().into_owned();
        let mut parts = told.splitn(3, ' ');
        let mut number = || parts.next().and_then(|it| it.parse::<i32>().ok());
        let (rank, parent) = (number(), number().and_then(Pid::from_raw));
        let rank = rank.and_then(|rank| usize::try_from(rank).ok());
        let Some((number, parent)) = rank.zip(parent) else {
            return Err(not_understood(&told));
        };
        // A rank has started another program, which inherits the variable.
        let is_another =
            getppid() != Some(parent) && pidfd_open(parent, PidfdFlags::empty()).is_ok();
        match parts.next() {
            _ if is_another => Ok(Place::Parent { call }),
            Some(its) if its == call => {
                IS_RANK.store(true, Ordering::SeqCst);
                Ok(Place::Rank(Rank { number, parent }))
            }
            _ => Ok(Place::Before),
        }
    }
}

/// The place of a call in the program, and how often it has been called before.
fn nth(caller: &Location<'_>) -> String {
    static COUNTS: Mutex<BTreeMap<String, usize>> = Mutex::new(BTreeMap::new());
    let place = caller.to_string();
    let mut counts = COUNTS.lock().unwrap_or_else(PoisonError::into_inner);
    let count = counts.entry(place.clone()).or_default();
    *count += 1;
    format!("{place} {count}")
}

/// Writes how far this process has come.
fn tell(what: &[u8]) -> io::Result<()> {
    env::var_os(error_file::VARIABLE).map_or(Ok(()), |path| files::write(path.as_ref(), what))
}

impl Rank {
    /// Runs the function, and ends the process.
    pub(super) fn run<E: Display + Debug>(
        self,
        function: impl FnOnce(usize) -> Result<(), E>,
    ) -> ! {
        if let Err(error) = self.begin() {
            let _ = writeln!(
                io::stderr(),
                "Error: rank {} of spawn cannot begin: {error}",
                self.number
            );
            process::exit(1);
        }
        record_panics();
        process::exit(match catch_unwind(AssertUnwindSafe(|| function(self.number))) {
            Ok(Ok(())) => {
                // If nobody reads it, the exit code says so as well.
                let _ = tell(RETURNED);
                0
            }
            Ok(Err(error)) => {
                record_error(&error);
                let _ = writeln!(io::stderr(), "Error: {error:?}");
                1
            }
            // As Rust ends a program that panics.
            Err(_) => 101,
        })
    }

    fn begin(&self) -> io::Result<()> {
        take_signals()?;
        self.end_with_parent()?;
        tell(BEGUN)
    }

    /// From now on this process ends when its parent does, however that ends.
    fn end_with_parent(&self) -> io::Result<()> {
        let parent = self.parent;
        let descriptor = match pidfd_open(parent, PidfdFlags::empty()) {
            Ok(descriptor) if getppid() == Some(parent) => descriptor,
            Ok(_) | Err(Errno::SRCH) => return Err(io::Error::other("its parent has ended")),
            Err(error) => return Err(named("pidfd_open")(error)),
        };
        let watch = move || {
            let mut ended = [PollFd::new(&descriptor, PollFlags::IN)];
            while poll(&mut ended, None) == Err(Errno::INTR) {}
            let _ = kill_process(getpid(), Signal::KILL);
        };
        thread::Builder::new()
            .name("parent".into())
            .stack_size(64 * 1024)
            .spawn(watch)
            .map_err(named("clone3"))?;
        Ok(())
    }
}
