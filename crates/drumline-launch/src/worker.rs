//! One worker process, from its start until its exit status is collected.
//!
//! The launcher executes its own binary once more for each worker. This process calls
//! [`exec_as_worker`]: it asks the kernel for SIGKILL at the launcher's death, and then becomes the
//! program. Between fork and exec the same would take unsafe code; after exec it does not.

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
    time::Duration,
};

use drumline::bind_to_memory_node;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    process::{
        Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpgid, getppid, kill_process_group,
        pidfd_open, pidfd_send_signal, set_parent_process_death_signal, waitid,
    },
};

use crate::{
    Ending, Error, Result,
    environment::{NOT_INHERITED, NUMA_BINDING},
    job::Job,
};

/// The first argument with which [`run`](crate::run()) executes its own binary for each worker. The
/// binary must then call [`exec_as_worker`]. The other arguments are the process number of the
/// launcher, `--`, the program's path, its name, and its arguments.
pub const EXEC_SUBCOMMAND: &str = "exec-worker";

/// A worker in a process group of its own. A Ctrl-C at the terminal therefore reaches only the
/// launcher, which passes it on.
///
/// The kernel keeps the exit status of the process until the `Worker` is dropped. Until then it gives
/// the process number to no other process, so a signal to the group never hits a stranger.
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
    /// Starts the program of `job`, found at `program`, with an empty stdin.
    ///
    /// The kernel kills the worker when the calling thread ends. Therefore the thread that waits for
    /// the worker must start it.
    pub(crate) fn spawn(
        job: &Job,
        program: &Path,
        environment: impl IntoIterator<Item = (&'static str, String)>,
    ) -> Result<(Worker, Streams)> {
        let mut command = match job.relaunch.split_first() {
            Some((first, others)) => {
                let mut command = Command::new(first);
                command.args(others);
                command
            }
            None => {
                // Not current_exe(): the binary may be replaced while the job is being started.
                let mut command = Command::new("/proc/self/exe");
                command.arg0("drumline");
                command
            }
        };
        for name in NOT_INHERITED {
            command.env_remove(name);
        }
        let mut child = command
            .args([EXEC_SUBCOMMAND, &std::process::id().to_string(), "--"])
            .arg(program)
            .arg(&job.program)
            .args(&job.arguments)
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

    /// Sends `signal` to the process and, as a terminal does, to the processes it started. SIGUSR1 and
    /// SIGUSR2 go to the process only: they would kill a child that has no handler for them.
    pub(crate) fn signal(&self, signal: Signal) {
        let to_group = !matches!(signal, Signal::USR1 | Signal::USR2);
        // These fail only if no process is left.
        if to_group {
            let _ = kill_process_group(self.pid, signal);
        }
        // A process may have moved to another group.
        if !to_group || getpgid(Some(self.pid)).is_ok_and(|group| group != self.pid) {
            let _ = pidfd_send_signal(&self.pidfd, signal);
        }
    }
}

/// Kills the process and everything that is left in its process group.
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
/// For the `main` of a binary that calls [`run`](crate::run()): see [`EXEC_SUBCOMMAND`].
pub fn exec_as_worker(launcher: i32, program: &OsStr, command: &[OsString]) -> Error {
    let (name, arguments) = match command.split_first() {
        Some((name, arguments)) => (name.as_os_str(), arguments),
        None => (program, command),
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return Error::system("ask for a signal at the launcher's death")(error);
    }
    // The launcher may have died before the kernel was asked.
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
