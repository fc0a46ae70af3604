//! The launcher's end of the [keepers](mod@crate::keep): the processes that start the ranks, report how they
//! ended, and end the processes that they leave behind.
//!
//! No call here waits for a keeper, which may be stopped. The launcher's loop hears what it [tells](News), and
//! [looks](Keeper::look) whether it answers.

use std::{
    collections::VecDeque,
    ffi::{OsStr, OsString},
    fs::File,
    io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{ffi::OsStringExt, net::UnixStream, process::CommandExt},
    },
    path::Path,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use drumline::{ErrorOrigin, named};
use rustix::{
    process::{Pid, getpgrp},
    stdio::stdin,
    termios::isatty,
};

use crate::{
    Ending, Error, Result,
    channel::Channel,
    events::is_readable_within,
    job::Job,
    keep::{ASK, EXITED, FINISH, HERE, KEEP_SUBCOMMAND, LEFT, LOST, REFUSED, START, STARTED, Told},
    lease::{BootTime, Lease},
    processes::Process,
    program::arguments_of,
    stdin::Input,
    sweep,
    worker::Worker,
};

/// How many keepers stand above the one that starts the ranks. With two of them, any three of launcher and keepers may be
/// killed or stopped at once, and one is left that ends the ranks.
const GUARDS: usize = 2;

/// How often the keeper is asked whether it is there, if there is nothing else to ask.
const ASK_EVERY: Duration = Duration::from_secs(2);

/// How often the time is taken while an answer is due.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long the keeper may take to answer, ...
const ANSWER_MAX: Duration = Duration::from_secs(10);

/// ... while it ends what ranks have left, ...
const FINISH_MAX: Duration = sweep::PATIENCE_MAX.saturating_add(ANSWER_MAX);

/// ... while it starts a worker, because programs are read from slow disks, ...
const START_MAX: Duration = Duration::from_secs(60);

/// ... and if it is stopped.
const STOPPED_MAX: Duration = Duration::from_secs(2);

/// How many workers, and how many bytes, are asked for before the keeper has started the first of them.
const STARTS_MAX: usize = 8;
const START_BYTES_MAX: usize = 64 * 1024;

/// The keepers of a world. When this is dropped, no process of the world is left.
#[derive(Debug)]
pub(crate) struct Keeper {
    /// The outermost.
    child: Child,
    channel: Channel,
    /// All workers are killed when it has run out.
    pub(crate) lease: Lease,
    /// The innermost, once it has said so.
    innermost: Option<Pid>,
    /// The sizes of the requests for workers that it has not answered.
    starts: VecDeque<usize>,
    /// Whether it was asked if it is there, or for the end, and has not answered.
    has_asked: bool,
    /// How long it has owed an answer and said nothing. The time in which this process was stopped does not count: the
    /// keeper may have been stopped with it.
    waited: Duration,
    looked_at: Instant,
    /// It does not answer any more.
    is_lost: bool,
    /// It was asked for the end.
    is_finishing: bool,
    /// Nothing is below it any more.
    has_finished: bool,
}

/// What the keeper tells.
#[derive(Debug)]
pub(crate) enum News {
    /// The next worker that was asked for runs.
    Started(Worker),
    /// It cannot be started, and none of those that were asked for after it is.
    Refused(io::Error),
    /// A worker has ended.
    Exited(usize, Ending),
    /// All are gone. These processes were left behind and had to be ended: `name (pid N)`.
    Left(Vec<String>),
}

impl Keeper {
    /// Starts the keepers. If this process is killed, they remove the directory `private`. With a lease, they kill all
    /// workers when it has run out.
    pub(crate) fn start(
        job: &Job,
        private: Option<&Path>,
        lease: Option<BootTime>,
    ) -> Result<Keeper> {
        let (near, far) =
            UnixStream::pair().map_err(Error::call("socketpair", "make a socket pair"))?;
        let channel = Channel::over(near);
        channel.limit(ANSWER_MAX).map_err(Error::system("set up a socket pair"))?;
        let lease = Lease::new(lease)?;
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
            .args(Told::arguments(GUARDS, private))
            .stdin(Stdio::from(OwnedFd::from(far)))
            .stdout(lease.share().map_err(Error::system("share a timer"))?)
            .process_group(0)
            .spawn()
            .map_err(Error::call(
                "clone3",
                "start the keeper of the ranks (from /proc/self/exe)",
            ))?;
        Ok(Keeper {
            child,
            channel,
            lease,
            innermost: None,
            starts: VecDeque::new(),
            // It says that it is there as soon as it is.
            has_asked: true,
            waited: Duration::ZERO,
            looked_at: Instant::now(),
            is_lost: false,
            is_finishing: false,
            has_finished: false,
        })
    }

    /// Its process, which is a child of this one.
    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Whether another worker may be asked for now.
    pub(crate) fn is_free(&self) -> bool {
        self.starts.len() < STARTS_MAX && self.starts.iter().sum::<usize>() < START_BYTES_MAX
    }

    /// Asks for the worker with this local rank: the program of `job`, found at `program`.
    /// [`News::Started`] or [`News::Refused`] follows.
    pub(crate) fn ask_for(
        &mut self,
        job: &Job,
        local_rank: usize,
        program: &Path,
        variables: impl IntoIterator<Item = (&'static str, OsString)>,
    ) -> Result<[OwnedFd; 2]> {
        let pipe = || io::pipe().map_err(Error::call("pipe2", "make a pipe for a worker's output"));
        let ((stdout, worker_stdout), (stderr, worker_stderr)) = (pipe()?, pipe()?);
        let input = input(job, local_rank);
        // 0 is a group of its own.
        let group = match input {
            Input::Terminal => getpgrp().to_string(),
            Input::Empty | Input::Launchers => "0".to_owned(),
        };
        let mut fields = vec![START.into(), local_rank.to_string().into()];
        fields.extend([program.as_os_str().to_owned(), job.program.clone(), group.into()]);
        fields.push(job.arguments.len().to_string().into());
        fields.extend(arguments_of(job, local_rank));
        fields.extend(variables.into_iter().map(|(name, value)| {
            let variable = [OsStr::new(name), OsStr::new("="), &value];
            variable.into_iter().collect::<OsString>()
        }));
        let fields: Vec<Vec<u8>> = fields.into_iter().map(OsString::into_vec).collect();
        let mut streams = vec![worker_stdout.as_fd(), worker_stderr.as_fd()];
        let empty = match input {
            Input::Empty => Some(File::open("/dev/null").map_err(Error::system(
                "open /dev/null as the stdin of a worker; /dev must have its files",
            ))?),
            Input::Launchers | Input::Terminal => None,
        };
        streams.push(match &empty {
            Some(empty) => empty.as_fd(),
            None => stdin(),
        });
        let sent = self.channel.send(&fields, &streams);
        sent.map_err(|error| self.failed("start a worker", error))?;
        self.starts.push_back(fields.iter().map(Vec::len).sum());
        Ok([stdout.into(), stderr.into()])
    }

    /// Gives the processes that workers have left behind a moment to end, and ends the others. [`News::Left`] follows. Call
    /// it when no worker is alive.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.has_asked = true;
        self.is_finishing = true;
        self.channel.send(&[FINISH], &[]).map_err(|error| self.failed("end what ranks left", error))
    }

    /// Reads at most one message: the next thing that the keeper has told, if it has told any. The worker that starts next
    /// has the local rank `next_rank`.
    pub(crate) fn news(&mut self, job: &Job, next_rank: usize) -> Result<Option<News>> {
        if !is_readable_within(&self.channel, Duration::ZERO) {
            return Ok(None);
        }
        let received = self.channel.receive();
        let received = received.map_err(|error| self.failed("hear the keeper", error))?;
        let Some((fields, descriptors)) = received else { return Err(self.gone()) };
        self.waited = Duration::ZERO;
        let text = |field: Vec<u8>| String::from_utf8_lossy(&field).into_owned();
        let told: Vec<String> = fields.into_iter().map(text).collect();
        let number = |n: usize| told.get(n)?.parse::<i32>().ok();
        let ended = || serde_json::from_str::<Ending>(told.get(2)?).ok();
        let news = match told.first().map(String::as_str) {
            Some(HERE) => {
                self.has_asked = false;
                self.innermost = number(1).and_then(Pid::from_raw);
                return Ok(None);
            }
            Some(STARTED) => {
                self.starts.pop_front();
                let pid = number(1).and_then(Pid::from_raw).zip(descriptors.into_iter().next());
                let is_at_terminal = input(job, next_rank) == Input::Terminal;
                pid.map(|(pid, pidfd)| News::Started(Worker::of(pid, pidfd, is_at_terminal)))
            }
            Some(REFUSED) => {
                self.starts.clear();
                number(1).map(|number| News::Refused(io::Error::from_raw_os_error(number)))
            }
            Some(EXITED) => number(1).zip(ended()).map(|(rank, ending)| {
                News::Exited(usize::try_from(rank).unwrap_or(usize::MAX), ending)
            }),
            Some(LEFT) => {
                self.has_asked = false;
                self.has_finished = true;
                Some(News::Left(told.into_iter().skip(1).collect()))
            }
            Some(LOST) => {
                let pid = number(1).unwrap_or(0);
                let how = ended().map_or("unknown".into(), |it| it.to_string());
                return Err(ended_too_early(pid, &how));
            }
            _ => None,
        };
        let problem = "the keeper's answer is not understood; has the program been replaced?";
        let error = || Error::system("hear the keeper of the ranks")(io::Error::other(problem));
        news.ok_or_else(error).map(Some)
    }

    /// The time until [`look`](Self::look) is due.
    pub(crate) fn timeout(&self) -> Duration {
        if self.has_asked || !self.starts.is_empty() {
            return LOOK_EVERY;
        }
        ASK_EVERY.saturating_sub(self.looked_at.elapsed())
    }

    /// Looks whether the keeper answers. Call it after each wait, once all [news](Self::news) are heard.
    ///
    /// # Errors
    ///
    /// The keeper does not answer. When this is dropped, it and all below it are killed.
    pub(crate) fn look(&mut self) -> Result<()> {
        let passed = self.looked_at.elapsed();
        if !self.has_asked && self.starts.is_empty() {
            if passed >= ASK_EVERY {
                self.looked_at = Instant::now();
                self.waited = Duration::ZERO;
                self.has_asked = true;
                let asked = self.channel.send(&[ASK], &[]);
                asked.map_err(|error| self.failed("ask the keeper of the ranks", error))?;
            }
            return Ok(());
        }
        if passed < LOOK_EVERY || is_readable_within(&self.channel, Duration::ZERO) {
            return Ok(());
        }
        self.looked_at = Instant::now();
        self.waited += passed.min(LOOK_EVERY * 2);
        let waited = self.waited;
        let is_stopped = || {
            let process = self.innermost.and_then(Process::read);
            waited >= STOPPED_MAX && process.is_some_and(|it| matches!(it.state, 'T' | 't'))
        };
        let limit = match (self.starts.is_empty(), self.is_finishing) {
            (true, true) => FINISH_MAX,
            (true, false) => ANSWER_MAX,
            (false, _) => START_MAX,
        };
        if is_stopped() {
            return Err(self.silent("is stopped"));
        }
        if waited < limit { Ok(()) } else { Err(self.silent("does not answer")) }
    }

    /// The error if the keeper does not take or send a message.
    fn failed(&mut self, what: &str, error: io::Error) -> Error {
        use io::ErrorKind::{BrokenPipe, TimedOut, WouldBlock};
        match error.kind() {
            BrokenPipe => self.gone(),
            WouldBlock | TimedOut => self.silent("does not answer"),
            _ => Error::system(what)(error),
        }
    }

    /// The error if the keeper does not answer.
    fn silent(&mut self, what: &str) -> Error {
        self.is_lost = true;
        let pid = self.innermost.unwrap_or_else(|| self.pid());
        Error::system("keep the ranks")(io::Error::other(format!(
            "their keeper (pid {pid}) {what}, so they are killed: nobody would notice how they end"
        )))
    }

    /// The error if the keepers have ended too early.
    fn gone(&mut self) -> Error {
        // All of them have closed the channel. That happens in their last moment.
        let how = self
            .child
            .wait()
            .map_or_else(|error| error.to_string(), |it| Ending::of(it).to_string());
        ended_too_early(self.pid().as_raw_pid(), &how)
    }

    /// Waits until all keepers have ended, at most so long. Returns whether they have.
    fn has_ended_within(&mut self, patience: Duration) -> bool {
        let until = Instant::now() + patience;
        let left = || until.saturating_duration_since(Instant::now());
        while is_readable_within(&self.channel, left()) {
            if !matches!(self.channel.receive(), Ok(Some(_))) {
                let _ = self.child.wait();
                return true;
            }
        }
        false
    }
}

impl AsFd for Keeper {
    fn as_fd(&self) -> std::os::fd::BorrowedFd<'_> {
        self.channel.as_fd()
    }
}

/// The keepers end all processes that are left when no launcher is at the other end. If one is stopped, the kernel ends it,
/// and with that all below it. A process that hangs in the kernel must not hold up the launcher for ever.
impl Drop for Keeper {
    fn drop(&mut self) {
        self.channel.hang_up();
        let patience = if self.has_finished { STOPPED_MAX } else { FINISH_MAX };
        if self.is_lost || !self.has_ended_within(patience) {
            let _ = self.child.kill();
            self.has_ended_within(ANSWER_MAX);
        }
    }
}

/// Where this worker reads from.
fn input(job: &Job, local_rank: usize) -> Input {
    let is_alone = job.nproc_per_node.get() == 1 && job.hosts.max.get() == 1;
    job.stdin.of(local_rank, isatty(stdin()), is_alone)
}

fn ended_too_early(pid: i32, how: &str) -> Error {
    Error::system("keep the ranks")(io::Error::other(format!(
        "their keeper (pid {pid}) has ended before them ({how}), so they were ended as well"
    )))
}

/// The error of a program that cannot be started. What may pass is no fault of the program.
pub(crate) fn refused(program: &Path, error: io::Error) -> Error {
    if ErrorOrigin::of_system(&error) != ErrorOrigin::User {
        return Error::system("start a worker")(named("clone3")(error));
    }
    let hint = match error.kind() {
        // The program itself existed when the launcher looked.
        io::ErrorKind::NotFound => {
            format!("{error}; is the interpreter installed that its first line names?")
        }
        _ => named("clone3 or execve")(error).to_string(),
    };
    Error::ProgramNotExecutable { program: program.into(), hint }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::*;

    #[test]
    fn only_a_program_that_cannot_be_executed_forbids_another_attempt() {
        let code = |errno: Errno| refused(Path::new("train"), errno.into()).exit_code();
        assert_eq!([Errno::ACCESS, Errno::NOENT, Errno::INVAL].map(code), [126; 3]);
        // The last one tells that the lease has run out.
        assert_eq!([Errno::AGAIN, Errno::MFILE, Errno::TXTBSY, Errno::TIME].map(code), [1; 4]);
    }
}
