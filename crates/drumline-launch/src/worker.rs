//! One worker process, from its start to its burial.
//!
//! The launcher does not execute the program itself but a copy of its own binary
//! ([`exec_as_worker`]), which asks the kernel to kill it when the launcher dies and then becomes
//! the program. Between fork and exec this would take unsafe code; after exec it does not.

use std::{
    env,
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::process::CommandExt,
    },
    path::Path,
    process::{Child, Command, Stdio},
    sync::OnceLock,
    time::Duration,
};

use drumline::bind_to_memory_node;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{
        Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getppid, kill_process_group, pidfd_open,
        pidfd_send_signal, set_parent_process_death_signal, waitid,
    },
};

use crate::{
    Ending, Error, Result,
    environment::{NOT_INHERITED, NUMA_BINDING},
};

/// The first argument with which [`run`](crate::run) executes its own binary for each worker,
/// which then has to call [`exec_as_worker`]. The others are the process number of the launcher,
/// `--`, the program's path, its name, and its arguments.
pub(crate) const EXEC_SUBCOMMAND: &str = "exec-worker";

/// What the launcher starts to have [`EXEC_SUBCOMMAND`] carried out: a program with arguments.
static ITSELF: OnceLock<Vec<OsString>> = OnceLock::new();

/// Sets it, unless it is empty. The first call counts.
pub(crate) fn start_by(itself: Vec<OsString>) {
    if !itself.is_empty() {
        let _ = ITSELF.set(itself);
    }
}

fn itself() -> &'static [OsString] {
    // Not current_exe(): the binary may be replaced while the job is being started.
    ITSELF.get_or_init(|| vec!["/proc/self/exe".into()])
}

/// A worker in a process group of its own. A Ctrl-C at the terminal therefore reaches only the
/// launcher, which passes it on.
///
/// Its exit status stays with the kernel until it is dropped: so its number cannot be given to
/// another process, and a signal to its group never hits a stranger.
#[derive(Debug)]
pub(crate) struct Worker {
    child: Child,
    pid: Pid,
    pidfd: OwnedFd,
}

/// The ends of the pipes that a worker writes to.
#[derive(Debug)]
pub(crate) struct Streams {
    pub(crate) stdout: OwnedFd,
    pub(crate) stderr: OwnedFd,
}

impl Worker {
    /// Starts `program` under the name `name`, with an empty stdin.
    ///
    /// The kernel binds a worker's life to the calling thread, which must therefore be the one
    /// that waits for it.
    pub(crate) fn spawn(
        program: &Path,
        name: &OsStr,
        arguments: &[OsString],
        environment: impl IntoIterator<Item = (&'static str, String)>,
    ) -> Result<(Worker, Streams)> {
        let [first, others @ ..] = itself() else { unreachable!("it has a name") };
        let mut command = Command::new(first);
        for name in NOT_INHERITED {
            command.env_remove(name);
        }
        if others.is_empty() {
            command.arg0("drumline");
        }
        let mut child = command
            .args(others)
            .args([EXEC_SUBCOMMAND, &std::process::id().to_string(), "--"])
            .arg(program)
            .arg(name)
            .args(arguments)
            .envs(environment)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .process_group(0)
            .spawn()
            .map_err(Error::system("start a worker (from /proc/self/exe)"))?;

        let pid = Pid::from_child(&child);
        let pidfd = match pidfd_open(pid, PidfdFlags::empty()) {
            Ok(pidfd) => pidfd,
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(Error::system("open a pidfd (needs Linux 5.4)")(error));
            }
        };
        let pipes = child.stdout.take().zip(child.stderr.take());
        let worker = Worker { child, pid, pidfd };
        let (stdout, stderr) = pipes.ok_or_else(|| {
            Error::system("start a worker")(io::Error::other("its output is not piped"))
        })?;
        Ok((worker, Streams { stdout: stdout.into(), stderr: stderr.into() }))
    }

    /// The process.
    pub(crate) fn pid(&self) -> Pid {
        self.pid
    }

    /// A descriptor that is readable once the process has exited.
    pub(crate) fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// How the process ended, if it has.
    pub(crate) fn ending(&self) -> Result<Option<Ending>> {
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::PidFd(self.pidfd()), options)
            .map_err(Error::system(format!("wait for process {}", self.pid)))?;
        Ok(status.and_then(|status| match status.exit_status() {
            Some(code) => Some(Ending::Code(code)),
            None => status
                .terminating_signal()
                .map(|number| Ending::Signal { number, core_dumped: status.dumped() }),
        }))
    }

    /// Sends `signal` to the process and, as a terminal does, to those it started; signals whose
    /// meaning is the program's own to the process only, because they kill who does not know them.
    pub(crate) fn signal(&self, signal: Signal) {
        // The only way to fail is that nobody is left.
        let _ = match signal {
            Signal::USR1 | Signal::USR2 => pidfd_send_signal(&self.pidfd, signal),
            _ => kill_process_group(self.pid, signal),
        };
    }
}

/// Nothing outlives its `Worker`: the process is killed, and with it what it left behind in its
/// group.
impl Drop for Worker {
    fn drop(&mut self) {
        self.signal(Signal::KILL);
        // A process that is stuck in the kernel must not hold up the launcher for ever.
        let patience = Timespec::try_from(Duration::from_secs(1)).ok();
        let mut exited = [PollFd::new(&self.pidfd, PollFlags::IN)];
        if poll(&mut exited, patience.as_ref()).is_ok_and(|ready| ready > 0) {
            let _ = self.child.wait();
        }
    }
}

/// Becomes `program`, called `command[0]`, with the arguments `command[1..]`; the kernel will kill
/// it when the process `launcher` dies. Returns only if something fails.
///
/// For the `main` of a binary that calls [`run`](crate::run): see [`EXEC_SUBCOMMAND`].
pub(crate) fn exec_as_worker(launcher: i32, program: &OsStr, command: &[OsString]) -> Error {
    let (name, arguments) = match command.split_first() {
        Some((name, arguments)) => (name.as_os_str(), arguments),
        None => (program, command),
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return Error::system("ask for a signal at the launcher's death")(error);
    }
    // It may have died before it was asked for.
    if getppid().map(Pid::as_raw_pid) != Some(launcher) {
        return Error::system("start a worker")(io::Error::other("the launcher is gone"));
    }
    if env::var_os(NUMA_BINDING).is_some() {
        let number = |name| env::var(name).ok()?.parse().ok();
        let place = number("LOCAL_RANK").zip(number("LOCAL_WORLD_SIZE"));
        let bound = place.map_or(Ok(None), |(rank, ranks)| bind_to_memory_node(rank, ranks));
        if let Err(error) = bound {
            return Error::system("bind a worker to a memory node")(error);
        }
    }
    let error = Command::new(program).arg0(name).args(arguments).exec();
    let hint = match error.kind() {
        // The program itself was there when the launcher looked.
        io::ErrorKind::NotFound => {
            format!("{error}; is the interpreter installed that its first line names?")
        }
        _ => error.to_string(),
    };
    Error::ProgramNotExecutable { program: program.into(), hint }
}
