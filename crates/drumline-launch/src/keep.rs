//! The keepers: processes between the launcher and the ranks. The innermost starts the ranks, reports how they ended, and
//! ends all processes that they have started when the job is over or the launcher is gone. The others are its guards.
//!
//! ```text
//!  drumline run ── guard ── guard ── keeper ──┬── rank 0 ── wrapper ── program
//!                                             ├── rank 1
//!                                             └── what a rank has started and left
//! ```
//!
//! When the parent of a process ends, the kernel makes the nearest subreaper above it the new parent. That is
//! the keeper. So all processes that a rank has started, even by wrappers, double forks or `setsid`, stay
//! below the keeper, and no other processes do. A launcher that is killed by SIGKILL cannot end any process.
//!
//! No keeper relies on another, because each may be killed or stopped at any time, together with the launcher. Who acts
//! then is told in `docs/inside/two-worlds.md`.
//!
//! The launcher executes its own binary to start a keeper, because only unsafe code may run between fork
//! and exec.

use std::{
    collections::{BTreeMap, BTreeSet},
    env,
    ffi::{OsStr, OsString},
    fs, io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
        unix::{
            ffi::{OsStrExt, OsStringExt},
            net::UnixStream,
            process::CommandExt,
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus},
    time::{Duration, Instant},
};

use drumline::{LEASE_VARIABLE, cores, kill_with_parent, named};
use rustix::{
    process::{
        Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, getpid, getppid, pidfd_open,
        set_child_subreaper, waitid,
    },
    thread::{sched_getaffinity, sched_setaffinity},
};

use crate::{
    Ending, Error, Result,
    channel::Channel,
    environment::{LOCAL_PLACE, NOT_INHERITED, NUMA_BINDING},
    events::{Events, Source},
    job::OnSignal,
    lease::Lease,
    signals::Signals,
    sweep::{self, Swept},
};

/// The argument with which [`run`](crate::run()) executes its own binary as the keeper of a job's ranks. With
/// this argument the binary must call [`keep`], whatever arguments follow.
pub const KEEP_SUBCOMMAND: &str = "keep-ranks";

/// The first fields of messages from the launcher.
pub(crate) const START: &str = "start";
pub(crate) const ASK: &str = "ask";
pub(crate) const FINISH: &str = "finish";

/// The first fields of messages from the keeper. The first of them is `HERE`, with the number of its process.
pub(crate) const HERE: &str = "here";
pub(crate) const STARTED: &str = "started";
pub(crate) const REFUSED: &str = "refused";
pub(crate) const EXITED: &str = "exited";
pub(crate) const LEFT: &str = "left";
/// The first field of a guard's message: the keeper below it has ended too early.
pub(crate) const LOST: &str = "lost";

/// How long processes that ranks have left behind get to end by themselves. Some helpers wait for the end of
/// their parent.
const GRACE: Duration = Duration::from_millis(500);

/// How often the keeper collects processes that have ended without a parent, and kills ranks once their lease has run out.
/// One look at all processes may miss some that are just being started.
const EVERY: Duration = Duration::from_millis(100);

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
    let told = Told::of(env::args_os().collect());
    let is_channel =
        rustix::net::sockopt::socket_domain(&stdin) == Ok(rustix::net::AddressFamily::UNIX);
    let Some(told) = told.filter(|_| is_channel) else {
        let error = io::Error::other("only `drumline run` starts the keeper of its ranks");
        return Err(Error::system("keep ranks")(error));
    };
    set_child_subreaper(Some(getpid())).map_err(Error::call("prctl", "become a subreaper"))?;
    let lease =
        rustix::stdio::stdout().try_clone_to_owned().map_err(Error::system("open stdout"))?;
    let channel = Channel::over(UnixStream::from(stdin));
    let mut keeper = Keeper::new(told, channel, Lease::over(lease))?;
    let lives = keeper.watch();
    match &lives {
        Ok(Over::Asked) => keeper.finish(),
        Ok(Over::Guarded(status)) => keeper.stand_in(*status),
        // There is no launcher that could end anything.
        Ok(Over::Gone) | Err(_) => drop(sweep::end_all_below(Duration::ZERO)),
    }
    if let Some(private) = &keeper.private {
        let _ = fs::remove_dir_all(private); // The launcher may have done it.
    }
    lives.map(|_| ())
}

/// What a keeper is told by its arguments.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Told {
    /// The command that started it, up to [`KEEP_SUBCOMMAND`].
    itself: Vec<OsString>,
    /// How many keepers are to be below it.
    below: usize,
    /// The directory that nobody else removes if the launcher is killed.
    private: Option<PathBuf>,
}

impl Told {
    fn of(arguments: Vec<OsString>) -> Option<Told> {
        let at = arguments.iter().position(|it| it == KEEP_SUBCOMMAND)?;
        let below = arguments.get(at + 1)?.to_str()?.parse().ok()?;
        let private = arguments.get(at + 2).map(PathBuf::from);
        Some(Told { itself: arguments[..=at].to_vec(), below, private })
    }

    /// The arguments that say this, behind [`KEEP_SUBCOMMAND`].
    pub(crate) fn arguments(
        below: usize,
        private: Option<&Path>,
    ) -> impl Iterator<Item = OsString> + use<> {
        let private = private.map(|it| it.as_os_str().to_owned());
        [below.to_string().into()].into_iter().chain(private)
    }
}

/// Why a keeper has nothing to watch any more.
enum Over {
    /// The launcher asks which processes are left.
    Asked,
    /// The launcher is gone, or the keeper above.
    Gone,
    /// The keeper below has ended.
    Guarded(ExitStatus),
}

struct Keeper {
    channel: Channel,
    lease: Lease,
    /// The lease as workers inherit it, if it may run out.
    inherited: Option<OwnedFd>,
    /// Readable once the parent has ended. The channel may still be open then, in a process that the
    /// launcher has forked.
    _parent: Option<OwnedFd>,
    events: Events,
    signals: Signals,
    /// The next keeper, if this one is a guard. Then it has no workers.
    guarded: Option<(Child, OwnedFd)>,
    /// The workers, by their ranks. The kernel keeps their exit statuses until this process
    /// ends. So no other process gets their numbers, and the launcher's signals never hit a stranger.
    workers: BTreeMap<usize, (Pid, OwnedFd)>,
    /// Workers that have ended while a debugger traces them: the kernel says how when it lets go of them.
    held: BTreeSet<usize>,
    /// When ranks are killed again, once their lease has run out.
    kill_at: Option<Instant>,
    /// A worker could not start, and so none starts after it.
    has_refused: bool,
    private: Option<PathBuf>,
}

impl Keeper {
    fn new(told: Told, channel: Channel, lease: Lease) -> Result<Keeper> {
        // The launcher decides what a signal to all its processes means. Signals are handled and not ignored,
        // because the ranks would inherit ignored signals.
        let meant = OnSignal::UNLESS_TOLD.map(|(signal, _)| signal);
        let signals = Signals::listen_to(meant)?;
        let events = Events::new()?;
        events.add(signals.ready(), Source::Signals)?;
        events.add(&lease, Source::Lease)?;
        // If there is no parent, the launcher is in another namespace or gone. The channel tells which.
        let parent = getppid().and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
        if let Some(parent) = &parent {
            events.add(parent, Source::Parent)?;
        }
        let guarded = match told.below.checked_sub(1) {
            Some(below) => Some(start_keeper(&told, below)?),
            None => None,
        };
        match &guarded {
            Some((_, pidfd)) => {
                events.add(pidfd, Source::Worker(0))?;
                events.add_end(&channel, Source::Channel)?;
            }
            None => events.add(&channel, Source::Channel)?,
        }
        let inherited = match &guarded {
            Some(_) => None,
            None => lease.to_inherit().map_err(Error::system("share a timer"))?,
        };
        let keeper = Keeper {
            channel,
            lease,
            inherited,
            _parent: parent,
            events,
            signals,
            guarded,
            workers: BTreeMap::new(),
            held: BTreeSet::new(),
            kill_at: None,
            has_refused: false,
            private: told.private,
        };
        if keeper.guarded.is_none() {
            keeper.tell(&[HERE.to_owned(), getpid().to_string()]);
        }
        Ok(keeper)
    }

    /// Carries out the launcher's requests, until there is nothing to watch.
    fn watch(&mut self) -> Result<Over> {
        let mut reap_at: Option<Instant> = None;
        loop {
            let next = reap_at.into_iter().chain(self.kill_at).min();
            let timeout = next.map(|at| at.saturating_duration_since(Instant::now()));
            for source in self.events.wait(timeout)? {
                match source {
                    Source::Worker(rank) => match &mut self.guarded {
                        None => self.tell_exit(rank)?,
                        Some((keeper, _)) => {
                            let status = keeper.try_wait();
                            let status =
                                status.map_err(Error::call("waitid", "wait for a keeper"))?;
                            // A debugger may hide how it has ended.
                            return Ok(status.map_or(Over::Gone, Over::Guarded));
                        }
                    },
                    Source::Signals => {
                        let mut arrived = self.signals.arrived();
                        if arrived.any(|it| it.signal == Signal::CHILD) && self.guarded.is_none() {
                            reap_at.get_or_insert_with(|| Instant::now() + EVERY);
                        }
                    }
                    Source::Channel => {
                        if let Some(over) = self.hear()? {
                            return Ok(over);
                        }
                    }
                    Source::Parent => return Ok(Over::Gone),
                    Source::Lease => {
                        self.events.remove(&self.lease)?;
                        self.kill_at = Some(Instant::now());
                    }
                    Source::Output | Source::Hosts | Source::Watch => {}
                }
            }
            if self.kill_at.is_some_and(|at| at <= Instant::now()) {
                match self.guarded {
                    Some(_) => sweep::kill_ranks_below(),
                    None => sweep::kill_all_below(|pid| self.is_worker(pid)),
                }
                self.kill_at = Some(Instant::now() + EVERY);
            }
            if reap_at.is_some_and(|at| at <= Instant::now()) {
                reap_at = None;
                sweep::collect_adopted(|pid| self.is_worker(pid));
                for rank in self.held.clone() {
                    self.tell_exit(rank)?;
                }
            }
        }
    }

    /// Carries out a request of the launcher. A guard has none, and hears only that the launcher is gone.
    fn hear(&mut self) -> Result<Option<Over>> {
        if self.guarded.is_some() {
            return Ok(Some(Over::Gone));
        }
        let Ok(Some((fields, streams))) = self.channel.receive() else {
            return Ok(Some(Over::Gone));
        };
        match fields.first().map(Vec::as_slice) {
            Some(first) if first == FINISH.as_bytes() => return Ok(Some(Over::Asked)),
            Some(first) if first == ASK.as_bytes() => {
                self.tell(&[HERE.to_owned(), getpid().to_string()]);
            }
            _ => self.start(fields, streams)?,
        }
        Ok(None)
    }

    fn start(&mut self, fields: Vec<Vec<u8>>, streams: Vec<OwnedFd>) -> Result<()> {
        let rank = fields.get(1).and_then(|it| str::from_utf8(it).ok()?.parse().ok());
        let pid = match rank {
            _ if self.has_refused => Err(rustix::io::Errno::CANCELED.into()),
            _ if self.lease.has_run_out() => Err(rustix::io::Errno::TIME.into()),
            None => Err(io::Error::from(rustix::io::Errno::INVAL)),
            Some(rank) => spawn(fields, streams, self.inherited.as_ref()).map(|pid| (rank, pid)),
        };
        match pid {
            Ok((rank, pid)) => {
                let pidfd = pidfd_open(pid, PidfdFlags::empty())
                    .map_err(Error::call("pidfd_open", "open a pidfd (needs Linux 5.4)"))?;
                self.events.add(&pidfd, Source::Worker(rank))?;
                self.send(&[STARTED.to_owned(), pid.to_string()], &[pidfd.as_fd()]);
                self.workers.insert(rank, (pid, pidfd));
            }
            Err(error) => {
                self.has_refused = true;
                let number =
                    error.raw_os_error().unwrap_or(rustix::io::Errno::INVAL.raw_os_error());
                self.tell(&[REFUSED.to_owned(), number.to_string()]);
            }
        }
        Ok(())
    }

    fn tell_exit(&mut self, rank: usize) -> Result<()> {
        let Some((_, pidfd)) = self.workers.get(&rank) else { return Ok(()) };
        let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        let status = waitid(WaitId::PidFd(pidfd.as_fd()), options)
            .map_err(Error::call("waitid", "wait for a worker"))?;
        // It stays readable.
        if !self.held.remove(&rank) {
            self.events.remove(pidfd)?;
        }
        let Some(status) = status else {
            self.held.insert(rank);
            return Ok(());
        };
        let number = status.terminating_signal().unwrap_or_default();
        let killed = Ending::Signal { number, core_dumped: status.dumped() };
        self.tell_ending(EXITED, rank, status.exit_status().map_or(killed, Ending::Code));
        Ok(())
    }

    fn is_worker(&self, pid: Pid) -> bool {
        self.workers.values().any(|(worker, _)| *worker == pid)
    }

    /// Ends the processes that workers have left behind, and tells the launcher which ones. Then waits until the launcher
    /// needs nothing more, or is gone.
    fn finish(&mut self) {
        for (_, pidfd) in self.workers.values() {
            // Most have been removed at their exit.
            let _ = self.events.remove(pidfd);
        }
        let left = sweep::end_all_below(GRACE).into_iter().map(|Swept { process, is_gone }| {
            let still = if is_gone { "" } else { ", which does not end" };
            format!("{} (pid {}{still})", process.name, process.pid)
        });
        self.tell(&[LEFT.to_owned()].into_iter().chain(left).collect::<Vec<_>>());
        // No rank is left, and one that has run out would stay readable.
        let _ = self.events.remove(&self.lease);
        let mut is_needed = true;
        while is_needed && let Ok(sources) = self.events.wait(None) {
            for source in sources {
                match source {
                    Source::Parent => is_needed = false,
                    Source::Channel => is_needed = matches!(self.channel.receive(), Ok(Some(_))),
                    Source::Signals => self.signals.arrived().for_each(drop),
                    _ => {}
                }
            }
        }
    }

    /// The keeper below has ended. If that was too early, its orphans are below this one now.
    fn stand_in(&self, status: ExitStatus) {
        sweep::end_all_below(Duration::ZERO);
        if let Some((keeper, _)) = self.guarded.as_ref().filter(|_| !status.success()) {
            self.tell_ending(LOST, keeper.id(), Ending::of(status));
        }
    }

    /// Tells how the worker, or the keeper, with this number has ended.
    fn tell_ending(&self, first: &str, whose: impl ToString, ending: Ending) {
        let ending = serde_json::to_string(&ending).unwrap_or_default();
        self.tell(&[first.to_owned(), whose.to_string(), ending]);
    }

    fn tell(&self, fields: &[String]) {
        self.send(fields, &[]);
    }

    /// Sends a message to the launcher. If that is gone, the channel says so.
    fn send(&self, fields: &[String], descriptors: &[BorrowedFd<'_>]) {
        let _ = self.channel.send(fields, descriptors);
    }
}

/// Starts the next keeper, with so many below that. It is in the process group of this one, and no rank is.
fn start_keeper(told: &Told, below: usize) -> Result<(Child, OwnedFd)> {
    let start = || {
        let (name, arguments) = told.itself.split_first().ok_or(rustix::io::Errno::INVAL)?;
        let keeper = Command::new("/proc/self/exe")
            .arg0(name)
            .args(arguments)
            .args(Told::arguments(below, told.private.as_deref()))
            .spawn()
            .map_err(named("clone3"))?;
        let pidfd = pidfd_open(Pid::from_child(&keeper), PidfdFlags::empty())?;
        Ok((keeper, pidfd))
    };
    start().map_err(Error::system::<io::Error>("start a keeper (from /proc/self/exe)"))
}

/// Starts a worker, in the process group that is told (0: its own).
fn spawn(fields: Vec<Vec<u8>>, streams: Vec<OwnedFd>, lease: Option<&OwnedFd>) -> io::Result<Pid> {
    let invalid = || io::Error::from(rustix::io::Errno::INVAL);
    let mut fields = fields.into_iter().skip(2).map(OsString::from_vec);
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
    let stdin = streams.next().ok_or_else(invalid)?;

    let start = |command: &mut Command| -> io::Result<Pid> {
        for name in NOT_INHERITED {
            command.env_remove(name);
        }
        let child = kill_with_parent(command)
            .args(&arguments)
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .envs(lease.map(|lease| (LEASE_VARIABLE, lease.as_raw_fd().to_string())))
            .stdin(stdin.try_clone()?)
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
    let binding =
        value(NUMA_BINDING).and_then(|binding| binding.parse::<cores::NumaBinding>().ok());
    let Some(((rank, ranks), binding)) =
        number(LOCAL_PLACE).zip(number("LOCAL_WORLD_SIZE")).zip(binding)
    else {
        return start_as_a_shell_would();
    };
    // A worker starts on the cores of the thread that starts it. It ends with that thread, too: so this is always the
    // first one.
    let all = sched_getaffinity(None)?;
    let started = cores::bind_to_cores(binding, rank, ranks).and_then(|_| start_as_a_shell_would());
    sched_setaffinity(None, &all)?;
    started
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_keeper_understands_what_the_one_above_tells() {
        let itself: Vec<OsString> = ["python3", "-m", "x", KEEP_SUBCOMMAND].map(Into::into).into();
        for private in [None, Some(PathBuf::from("/tmp/keep-ranks"))] {
            let arguments = itself.iter().cloned().chain(Told::arguments(2, private.as_deref()));
            let told = Told { itself: itself.clone(), below: 2, private: private.clone() };
            assert_eq!(Told::of(arguments.collect()), Some(told));
        }
        assert_eq!(Told::of(itself), None);
    }
}
