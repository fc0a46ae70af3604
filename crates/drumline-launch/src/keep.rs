//! The keeper: a process between the launcher and the ranks. It starts the ranks, reports how they ended, and
//! ends all processes that they have started when the job is over or the launcher is gone.
//!
//! ```text
//!  drumline run ── keeper ──┬── rank 0 ── wrapper ── program
//!                           ├── rank 1
//!                           └── what a rank has started and left
//! ```
//!
//! When the parent of a process ends, the kernel makes the nearest subreaper above it the new parent. That is
//! the keeper. So all processes that a rank has started, even by wrappers, double forks or `setsid`, stay
//! below the keeper, and no other processes do. A launcher that is killed by SIGKILL cannot end any process.
//! The keeper notices that by the launcher's pidfd and by the channel to it.
//!
//! The launcher executes its own binary to start the keeper, because only unsafe code may run between fork
//! and exec.

use std::{
    ffi::{OsStr, OsString},
    fs, io,
    os::{
        fd::{AsFd, OwnedFd},
        unix::{
            ffi::{OsStrExt, OsStringExt},
            net::UnixStream,
            process::CommandExt,
        },
    },
    path::PathBuf,
    process::{Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use drumline::{NumaBinding, bind_to_cores, named};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, getppid, pidfd_open,
    set_child_subreaper, waitid,
};

use crate::{
    Error, Result,
    channel::Channel,
    environment::{LOCAL_PLACE, NOT_INHERITED, NUMA_BINDING},
    events::{Events, Source},
    job::OnSignal,
    lease::BootTime,
    signals::Signals,
    sweep::{self, Swept},
};

/// The argument with which [`run`](crate::run()) executes its own binary as the keeper of a job's ranks. With
/// this argument the binary must call [`keep`].
pub const KEEP_SUBCOMMAND: &str = "keep-ranks";

/// The first fields of messages from the launcher.
pub(crate) const START: &str = "start";
pub(crate) const REMOVE: &str = "remove";
pub(crate) const FINISH: &str = "finish";
pub(crate) const LEASE: &str = "lease";

/// The first fields of messages from the keeper.
pub(crate) const STARTED: &str = "started";
pub(crate) const REFUSED: &str = "refused";
pub(crate) const EXITED: &str = "exited";
pub(crate) const LEFT: &str = "left";

/// How long processes that ranks have left behind get to end by themselves. Some helpers wait for the end of
/// their parent.
const GRACE: Duration = Duration::from_millis(500);

/// How often the keeper collects processes that have ended without a parent.
const REAP_EVERY: Duration = Duration::from_millis(100);

/// Keeps the ranks of the launcher at the other end of stdin. Returns when no rank is left, and no process
/// that a rank has started.
///
/// For the `main` of a binary that calls [`run`](crate::run()): see [`KEEP_SUBCOMMAND`].
///
/// # Errors
///
/// This process was not started by [`run`](crate::run()), or a system call failed. No process of the ranks is
/// left in this case, either.
pub fn keep() -> Result<()> {
    let stdin = rustix::stdio::stdin().try_clone_to_owned().map_err(Error::system("open stdin"))?;
    if rustix::net::sockopt::socket_domain(&stdin) != Ok(rustix::net::AddressFamily::UNIX) {
        let error = io::Error::other("only `drumline run` starts the keeper of its ranks");
        return Err(Error::system("keep ranks")(error));
    }
    let channel = Channel::over(UnixStream::from(stdin));
    // If there is no parent, the launcher is in another namespace or gone. The channel tells which.
    let launcher = getppid().and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    set_child_subreaper(Some(getpid()))
        .map_err(named("prctl"))
        .map_err(Error::system("become a subreaper"))?;
    let kept = Keeper::new(channel, launcher).and_then(|mut keeper| {
        let lives = keeper.watch();
        match lives {
            Ok(true) => keeper.finish(),
            Ok(false) | Err(_) => keeper.clean_up(),
        }
        keeper.remove_private();
        lives
    });
    kept.map(|_| ())
}

struct Keeper {
    channel: Channel,
    /// Readable once the launcher has ended. The channel may still be open then, in a process that the
    /// launcher has forked.
    _launcher: Option<OwnedFd>,
    events: Events,
    signals: Signals,
    /// The workers, in the order of their ranks. The kernel keeps their exit statuses until this process
    /// ends. So no other process gets their numbers, and the launcher's signals never hit a stranger.
    workers: Vec<(Pid, OwnedFd)>,
    /// When all workers are killed unless the launcher gives them more time.
    lease: Option<BootTime>,
    /// Whether that time has come and no worker has started since.
    has_run_out: bool,
    /// The directory that nobody removes if the launcher is killed.
    private: Option<PathBuf>,
}

impl Keeper {
    fn new(channel: Channel, launcher: Option<OwnedFd>) -> Result<Keeper> {
        // The launcher decides what a signal to all its processes means. Signals are handled and not ignored,
        // because the ranks would inherit ignored signals.
        let meant = OnSignal::UNLESS_TOLD.map(|(signal, _)| signal);
        let signals = Signals::listen_to(meant)?;
        let events = Events::new()?;
        events.add(&channel, Source::Channel)?;
        events.add(signals.ready(), Source::Signals)?;
        if let Some(launcher) = &launcher {
            events.add(launcher, Source::Launcher)?;
        }
        Ok(Keeper {
            channel,
            _launcher: launcher,
            events,
            signals,
            workers: Vec::new(),
            lease: None,
            has_run_out: false,
            private: None,
        })
    }

    /// Carries out the launcher's requests. Returns `true` when the launcher asks which processes are left,
    /// `false` when the launcher is gone.
    fn watch(&mut self) -> Result<bool> {
        let mut reap_at: Option<Instant> = None;
        loop {
            let reap_in = reap_at.map(|at| at.saturating_duration_since(Instant::now()));
            let kill_in = self.lease.filter(|_| !self.has_run_out).map(BootTime::left);
            let timeout = reap_in.into_iter().chain(kill_in).min();
            for source in self.events.wait(timeout)? {
                let is_heard = match source {
                    Source::Worker(rank) => self.tell_exit(rank)?,
                    Source::Signals => {
                        if self.signals.arrived().any(|it| it.signal == Signal::CHILD) {
                            reap_at.get_or_insert_with(|| Instant::now() + REAP_EVERY);
                        }
                        true
                    }
                    Source::Channel => match self.channel.receive() {
                        Ok(Some((fields, _))) if fields[..] == [FINISH.as_bytes()] => {
                            return Ok(true);
                        }
                        Ok(Some((fields, _))) if fields[0] == LEASE.as_bytes() => {
                            self.lease =
                                fields.get(1).and_then(|it| BootTime::from_nanoseconds(it));
                            self.has_run_out = false;
                            true
                        }
                        Ok(Some((fields, _))) if fields[0] == REMOVE.as_bytes() => {
                            self.private =
                                fields.into_iter().nth(1).map(OsString::from_vec).map(Into::into);
                            true
                        }
                        Ok(Some((fields, streams))) => self.start(fields, streams)?,
                        Ok(None) | Err(_) => false,
                    },
                    Source::Launcher => false,
                    Source::Output | Source::Hosts | Source::Watch => true,
                };
                if !is_heard {
                    return Ok(false);
                }
            }
            if !self.has_run_out && self.lease.is_some_and(|until| until.left().is_zero()) {
                self.has_run_out = true;
                sweep::kill_all_below(|pid| self.is_worker(pid));
            }
            if reap_at.is_some_and(|at| at <= Instant::now()) {
                reap_at = None;
                self.reap();
            }
        }
    }

    fn start(&mut self, fields: Vec<Vec<u8>>, streams: Vec<OwnedFd>) -> Result<bool> {
        let answer = match spawn(fields, streams) {
            Ok(pid) => {
                let pidfd = pidfd_open(pid, PidfdFlags::empty())
                    .map_err(named("pidfd_open"))
                    .map_err(Error::system("open a pidfd (needs Linux 5.4)"))?;
                self.events.add(&pidfd, Source::Worker(self.workers.len()))?;
                self.workers.push((pid, pidfd));
                self.has_run_out = false;
                [STARTED.to_owned(), pid.to_string()]
            }
            Err(error) => {
                let number =
                    error.raw_os_error().unwrap_or(rustix::io::Errno::INVAL.raw_os_error());
                [REFUSED.to_owned(), number.to_string()]
            }
        };
        Ok(self.tell(&answer))
    }

    fn tell_exit(&self, rank: usize) -> Result<bool> {
        let Some((_, pidfd)) = self.workers.get(rank) else { return Ok(true) };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::PidFd(pidfd.as_fd()), options)
            .map_err(named("waitid"))
            .map_err(Error::system("wait for a worker"))?;
        let Some(status) = status else { return Ok(true) };
        self.events.remove(pidfd)?;
        let mut told = vec![EXITED.to_owned(), rank.to_string()];
        match status.exit_status() {
            Some(code) => told.push(code.to_string()),
            None => {
                told.push(status.terminating_signal().unwrap_or_default().to_string());
                told.push(u8::from(status.dumped()).to_string());
            }
        }
        Ok(self.tell(&told))
    }

    /// Collects processes that have ended after their parents.
    fn reap(&self) {
        sweep::collect_adopted(|pid| self.is_worker(pid));
    }

    fn is_worker(&self, pid: Pid) -> bool {
        self.workers.iter().any(|(worker, _)| *worker == pid)
    }

    /// Ends the processes that workers have left behind, and tells the launcher which ones. Then waits until the launcher
    /// needs nothing more, or is gone.
    fn finish(&mut self) {
        for (_, pidfd) in &self.workers {
            // Most have been removed at their exit.
            let _ = self.events.remove(pidfd);
        }
        let left = sweep::end_all_below(GRACE).into_iter().map(|Swept { process, is_gone }| {
            let still = if is_gone { "" } else { ", which does not end" };
            format!("{} (pid {}{still})", process.name, process.pid)
        });
        let mut is_needed =
            self.tell(&[LEFT.to_owned()].into_iter().chain(left).collect::<Vec<_>>());
        while is_needed && let Ok(sources) = self.events.wait(None) {
            for source in sources {
                match source {
                    Source::Launcher => is_needed = false,
                    Source::Channel => is_needed = matches!(self.channel.receive(), Ok(Some(_))),
                    Source::Signals => self.signals.arrived().for_each(drop),
                    _ => {}
                }
            }
        }
    }

    /// Ends all that workers have started: there is no launcher that could.
    fn clean_up(&self) {
        sweep::end_all_below(Duration::ZERO);
    }

    /// Removes what the launcher has not removed.
    fn remove_private(&self) {
        if let Some(private) = &self.private {
            let _ = fs::remove_dir_all(private);
        }
    }

    /// Sends a message to the launcher. Returns whether the launcher is there.
    fn tell(&self, fields: &[String]) -> bool {
        self.channel.send(fields, &[]).is_ok()
    }
}

/// Starts a worker, in the process group that is told (0: its own), and with an empty stdin if none comes.
fn spawn(fields: Vec<Vec<u8>>, streams: Vec<OwnedFd>) -> io::Result<Pid> {
    let invalid = || io::Error::from(rustix::io::Errno::INVAL);
    let mut fields = fields.into_iter().skip(1).map(OsString::from_vec);
    let (program, name) = fields.next().zip(fields.next()).ok_or_else(invalid)?;
    let group = fields.next().and_then(|group| group.to_str()?.parse().ok()).ok_or_else(invalid)?;
    let count = fields.next().and_then(|count| count.to_str()?.parse().ok()).ok_or_else(invalid)?;
    let arguments: Vec<OsString> = fields.by_ref().take(count).collect();
    let variable = |field: OsString| {
        let (name, value) =
            field.as_bytes().split_at(field.as_bytes().iter().position(|&it| it == b'=')?);
        Some((str::from_utf8(name).ok()?.to_owned(), OsStr::from_bytes(&value[1..]).to_owned()))
    };
    let variables: Vec<(String, OsString)> =
        fields.map(variable).collect::<Option<_>>().ok_or_else(invalid)?;
    let mut streams = streams.into_iter();
    let (stdout, stderr) = streams.next().zip(streams.next()).ok_or_else(invalid)?;
    let stdin = streams.next();

    let start = |command: &mut Command| -> io::Result<Pid> {
        for name in NOT_INHERITED {
            command.env_remove(name);
        }
        let child = command
            .args(&arguments)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .stdin(match &stdin {
                Some(stdin) => Stdio::from(stdin.try_clone()?),
                None => Stdio::null(),
            })
            .stdout(stdout.try_clone()?)
            .stderr(stderr.try_clone()?)
            .process_group(group)
            .spawn()?;
        Ok(Pid::from_child(&child))
    };
    let start_as_a_shell_would = || match start(Command::new(&program).arg0(&name)) {
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NOEXEC.raw_os_error()) => {
            start(Command::new("/bin/sh").arg(&program))
        }
        other => other,
    };
    let value = |name: &str| variables.iter().find(|(known, _)| known == name)?.1.to_str();
    let number = |name: &str| value(name)?.parse::<usize>().ok();
    let binding = value(NUMA_BINDING).and_then(|binding| binding.parse::<NumaBinding>().ok());
    match number(LOCAL_PLACE).zip(number("LOCAL_WORLD_SIZE")).zip(binding) {
        None => start_as_a_shell_would(),
        // A worker starts on the cores of the thread that starts it.
        Some(((rank, ranks), binding)) => thread::scope(|scope| {
            let bound = scope.spawn(|| {
                bind_to_cores(binding, rank, ranks)?;
                start_as_a_shell_would()
            });
            bound.join().unwrap_or_else(|_| Err(invalid()))
        }),
    }
}
