//! The launcher's end of the [keeper](mod@crate::keep): the process that starts the ranks, reports how they
//! ended, and ends the processes that they leave behind.

use std::{
    ffi::{OsStr, OsString},
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            ffi::{OsStrExt, OsStringExt},
            net::UnixStream,
            process::CommandExt,
        },
    },
    path::Path,
    process::{Child, Command, ExitStatus, Stdio},
    time::{Duration, Instant},
};

use drumline::named;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::retry_on_intr,
    process::{Pid, getpgrp},
};

use crate::{
    Ending, Error, Result,
    channel::Channel,
    job::Job,
    keep::{EXITED, FINISH, KEEP_SUBCOMMAND, LEASE, LEFT, REFUSED, REMOVE, START, STARTED},
    lease::BootTime,
    program::arguments_of,
    stdin::Input,
    sweep,
    worker::{Streams, Worker},
};

/// How long the keeper may take to end those processes, before the launcher ends without it.
const PATIENCE: Duration = sweep::PATIENCE_MAX.saturating_add(Duration::from_secs(10));

/// The keeper of a job. When it is dropped, no process of the job is left.
#[derive(Debug)]
pub(crate) struct Keeper {
    child: Child,
    channel: Channel,
    /// Workers that ended while others were being started.
    early: Vec<(usize, Ending)>,
}

impl Keeper {
    /// Starts the keeper.
    pub(crate) fn start(job: &Job) -> Result<Keeper> {
        let (near, far) = UnixStream::pair()
            .map_err(named("socketpair"))
            .map_err(Error::system("make a socket pair"))?;
        let mut command = match job.relaunch.split_first() {
            Some((first, others)) => {
                let mut command = Command::new(first);
                command.args(others);
                command
            }
            None => {
                // Not current_exe(): the binary may be replaced while the job is being started.
                let mut command = Command::new("/proc/self/exe");
                // A user who kills launchers by name must not hit their keepers.
                command.arg0("keeper");
                command
            }
        };
        let child = command
            .arg(KEEP_SUBCOMMAND)
            .stdin(Stdio::from(OwnedFd::from(far)))
            .stdout(Stdio::null())
            .process_group(0)
            .spawn()
            .map_err(named("clone3"))
            .map_err(Error::system(
                "start the keeper of the ranks (from /proc/self/exe, with /dev/null)",
            ))?;
        Ok(Keeper { child, channel: Channel::over(near), early: Vec::new() })
    }

    /// Has the keeper remove this directory if the launcher is killed.
    pub(crate) fn remove_at_the_end(&self, directory: &Path) -> Result<()> {
        let told = self.channel.send(&[REMOVE.as_bytes(), directory.as_os_str().as_bytes()], &[]);
        told.map_err(Error::system("hear the keeper of the ranks"))
    }

    /// Its process.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Starts the worker with this local rank: the program of `job`, found at `program`.
    pub(crate) fn spawn(
        &mut self,
        job: &Job,
        local_rank: usize,
        program: &Path,
        variables: impl IntoIterator<Item = (&'static str, OsString)>,
    ) -> Result<(Worker, Streams)> {
        let pipe = || {
            io::pipe()
                .map_err(named("pipe2"))
                .map_err(Error::system("make a pipe for a worker's output"))
        };
        let ((stdout, worker_stdout), (stderr, worker_stderr)) = (pipe()?, pipe()?);
        let is_alone = job.nproc_per_node.get() == 1 && job.hosts.max.get() == 1;
        let input = job.stdin.for_worker(local_rank, is_alone);
        // 0 is a group of its own.
        let group = match input {
            Input::Terminal => getpgrp().to_string(),
            Input::Empty | Input::Launchers => "0".to_owned(),
        };
        let mut fields = vec![START.into(), program.as_os_str().to_owned(), job.program.clone()];
        fields.push(group.into());
        fields.push(job.arguments.len().to_string().into());
        fields.extend(arguments_of(job, local_rank));
        fields.extend(variables.into_iter().map(|(name, value)| {
            let variable = [OsStr::new(name), OsStr::new("="), &value];
            variable.into_iter().collect::<OsString>()
        }));
        let fields: Vec<Vec<u8>> = fields.into_iter().map(OsString::into_vec).collect();
        let mut streams = vec![worker_stdout.as_fd(), worker_stderr.as_fd()];
        streams.extend((input != Input::Empty).then_some(rustix::stdio::stdin()));
        let sent = self.channel.send(&fields, &streams);
        if let Err(error) = sent {
            return Err(match error.kind() {
                io::ErrorKind::BrokenPipe => self.gone(),
                _ => Error::system("start a worker")(error),
            });
        }
        let answer = loop {
            let answer = self.hear()?;
            match exit(&answer) {
                Some(exit) => self.early.push(exit),
                None => break answer,
            }
        };
        let number = answer.get(1).and_then(|field| field.parse::<i32>().ok());
        match answer.first().map(String::as_str) {
            Some(STARTED) => {
                let pid = number.and_then(Pid::from_raw);
                let pid = pid.ok_or_else(|| Error::system("start a worker")(not_understood()))?;
                let streams = Streams { stdout: stdout.into(), stderr: stderr.into() };
                Ok((Worker::of(pid, input == Input::Terminal)?, streams))
            }
            Some(REFUSED) => {
                let error = number.map_or_else(not_understood, io::Error::from_raw_os_error);
                Err(refused(program, error))
            }
            _ => Err(Error::system("start a worker")(not_understood())),
        }
    }

    /// All workers are killed at this time unless this is called again before, and those that start later, too.
    pub(crate) fn lease_until(&mut self, time: BootTime) {
        // If the keeper is gone, the next message to it says so.
        let _ = self.channel.send(&[LEASE.to_owned(), time.to_nanoseconds()], &[]);
    }

    /// The workers that ended before all were started.
    pub(crate) fn early_exits(&mut self) -> Vec<(usize, Ending)> {
        std::mem::take(&mut self.early)
    }

    /// The next worker that has ended: its rank, and how it ended. Call this when the keeper is readable.
    pub(crate) fn next_exit(&mut self) -> Result<(usize, Ending)> {
        let told = self.hear()?;
        exit(&told).ok_or_else(|| Error::system("wait for the ranks")(not_understood()))
    }

    /// Gives the processes that workers have left behind a moment to end, ends the others, and returns these:
    /// `name (pid N)`. Call it when no worker is alive. Until this is dropped, the keeper removes the directory if the
    /// launcher is killed.
    pub(crate) fn finish(&mut self) -> Result<Vec<String>> {
        if self.channel.send(&[FINISH], &[]).is_err() {
            return Err(self.gone());
        }
        loop {
            if !self.is_readable_within(PATIENCE) {
                return Ok(Vec::new());
            }
            let answer = self.hear()?;
            if answer.first().is_some_and(|first| first == LEFT) {
                return Ok(answer.into_iter().skip(1).collect());
            }
        }
    }

    /// Waits for the next message of the keeper.
    fn hear(&mut self) -> Result<Vec<String>> {
        match self.channel.receive().map_err(Error::system("hear the keeper of the ranks"))? {
            Some((fields, _)) => {
                let text = |field: Vec<u8>| String::from_utf8_lossy(&field).into_owned();
                Ok(fields.into_iter().map(text).collect())
            }
            None => Err(self.gone()),
        }
    }

    /// Signals do not end the wait.
    fn is_readable_within(&self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let ready = retry_on_intr(|| {
            let left = until.saturating_duration_since(Instant::now());
            let left = Timespec::try_from(left).ok();
            poll(&mut [PollFd::new(&self.channel, PollFlags::IN)], left.as_ref())
        });
        ready.is_ok_and(|ready| ready > 0)
    }

    /// The error if the keeper has ended too early.
    fn gone(&mut self) -> Error {
        let how =
            self.child.wait().map_or_else(|error| error.to_string(), |it| ending(it).to_string());
        let pid = self.child.id();
        Error::system("keep the ranks")(io::Error::other(format!(
            "their keeper (pid {pid}) has ended before them ({how}), so they were ended as well"
        )))
    }
}

impl AsFd for Keeper {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// The keeper ends all processes that are left when no launcher is at the other end.
impl Drop for Keeper {
    fn drop(&mut self) {
        self.channel.hang_up();
        // A process that hangs in the kernel must not hold up the launcher for ever.
        while self.is_readable_within(PATIENCE) {
            if !matches!(self.channel.receive(), Ok(Some(_))) {
                let _ = self.child.wait();
                break;
            }
        }
    }
}

/// The worker that has ended and how, if that is what the keeper has told.
fn exit(told: &[String]) -> Option<(usize, Ending)> {
    let number = |n: usize| told.get(n)?.parse::<i32>().ok();
    let rank = told.get(1)?.parse().ok().filter(|_| told[0] == EXITED)?;
    let ending = match number(3) {
        None => Ending::Code(number(2)?),
        Some(dumped) => Ending::Signal { number: number(2)?, core_dumped: dumped != 0 },
    };
    Some((rank, ending))
}

fn not_understood() -> io::Error {
    io::Error::other("the keeper's answer is not understood; has the program been replaced?")
}

/// The error of a program that cannot be started.
fn refused(program: &Path, error: io::Error) -> Error {
    use io::ErrorKind::{OutOfMemory, WouldBlock};
    let hint = match error.kind() {
        WouldBlock | OutOfMemory => return Error::system("start a worker")(error),
        // The program itself existed when the launcher looked.
        io::ErrorKind::NotFound => {
            format!("{error}; is the interpreter installed that its first line names?")
        }
        _ => named("clone3 or execve")(error).to_string(),
    };
    Error::ProgramNotExecutable { program: program.into(), hint }
}

fn ending(status: ExitStatus) -> Ending {
    use std::os::unix::process::ExitStatusExt;
    let signal = status.signal();
    signal.map_or(Ending::Code(status.code().unwrap_or(1)), |number| Ending::Signal {
        number,
        core_dumped: status.core_dumped(),
    })
}
