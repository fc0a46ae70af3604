//! The processes that [`spawn`](super::spawn()) has started, from the side of the one that did.

use std::{
    ffi::OsString,
    fs::File,
    hash::{BuildHasher, Hasher, RandomState},
    io::{Seek, Write},
    os::{
        fd::{AsFd, AsRawFd, OwnedFd},
        unix::{fs::FileExt, process::ExitStatusExt},
    },
    process::{Child, Command, ExitStatus, Stdio, id},
    time::{Duration, Instant, SystemTime},
};

use drumline_group::{
    Config,
    auth::Secret,
    rendezvous::Endpoint,
    store::tcp::{Door, TcpStoreServer},
};
use drumline_shm::named;
use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    fs::{MemfdFlags, Mode, fchmod, memfd_create},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::{
    child::{RETURNED, VARIABLE},
    error::{RankEnd, not_reached, system},
};
use crate::{
    Error, Result,
    blame::{Account, End, Words, culprit, is_never_a_reaction},
    error_file::{self, ErrorFile, Failure},
    outer_job,
    steps::STEPS_VARIABLE,
};

/// Variables that are not those of these ranks, also if no launcher has set them.
const NOT_INHERITED: [&str; 4] =
    ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", STEPS_VARIABLE];

/// For so long after the first failure the others are not told to end: they may have failed for the same reason, or
/// before, and end later.
const SETTLE: Duration = Duration::from_millis(100);

/// Processes of this program, each with a rank. Dropping this kills them.
#[must_use = "dropping this kills the processes; join waits for them"]
#[derive(Debug)]
pub struct Processes {
    members: Vec<Member>,
    started_at: SystemTime,
    /// Tells who has ended, the first one first.
    ends: Option<OwnedFd>,
    grace_period: Duration,
    /// Where the ranks meet, and the file with its secret.
    _store: Option<(TcpStoreServer, File)>,
}

#[derive(Debug)]
struct Member {
    child: Child,
    /// `None`: it has ended before it was opened, and nothing is left of it.
    pidfd: Option<OwnedFd>,
    /// What it writes of its failure: a file in memory, which it finds as one of this process.
    said: File,
    /// How it ended, and when. The system does not tell how if this process ignores SIGCHLD, or if other code of it
    /// collects all children.
    ended: Option<(Option<ExitStatus>, Duration)>,
    /// What it had said when it was told to end, if it was.
    told: Option<Words>,
}

impl Processes {
    /// In a process that another call has started.
    pub(super) fn none() -> Processes {
        Processes {
            members: Vec::new(),
            started_at: SystemTime::now(),
            ends: None,
            grace_period: Duration::ZERO,
            _store: None,
        }
    }

    /// Runs this program again with these arguments, for each rank, up to `call`.
    pub(super) fn start(
        ranks: usize,
        arguments: &[OsString],
        grace_period: Duration,
        call: &str,
    ) -> Result<Processes> {
        let config = Config::from_env()?;
        let of_outer_job = outer_job::variables();
        let inherited = match of_outer_job.iter().any(|name| name == "DRUMLINE_SECRET_FILE") {
            true => None,
            false => Secret::from_env()?,
        };
        let is_fresh = inherited.is_none();
        let secret = inherited.map_or_else(Secret::random, Ok)?;
        let file = memory("drumline-secret")?;
        (&file).write_all(secret.expose()).map_err(system("write the secret of the ranks"))?;
        let secret_file = is_fresh.then(|| in_memory(&file));
        let endpoint = Endpoint::Unix(format!("drumline-spawn-{}", new_name()));
        let door = Door::Secured { endpoint: endpoint.clone(), secret, level: config.security };
        let store = TcpStoreServer::open(&[door], config.store_bytes_max);
        let store = store?;
        let ends = epoll::create(epoll::CreateFlags::CLOEXEC);
        let mut processes = Processes {
            members: Vec::with_capacity(ranks),
            started_at: SystemTime::now(),
            ends: Some(
                ends.map_err(named("epoll_create1")).map_err(system("create an epoll set"))?,
            ),
            grace_period,
            _store: Some((store, file)),
        };
        for rank in 0..ranks {
            // The binary that runs, also if another one has its name by now.
            let mut command = Command::new("/proc/self/exe");
            command.args(arguments);
            for name in of_outer_job.iter().map(String::as_str).chain(NOT_INHERITED) {
                command.env_remove(name);
            }
            if let Some(path) = &secret_file {
                command.env("DRUMLINE_SECRET_FILE", path);
            }
            for name in ["RANK", "LOCAL_RANK"] {
                command.env(name, rank.to_string());
            }
            for name in ["WORLD_SIZE", "LOCAL_WORLD_SIZE"] {
                command.env(name, ranks.to_string());
            }
            command.env("DRUMLINE_STORE", endpoint.to_string());
            command.env(VARIABLE, format!("{rank} {} {call}", id()));
            processes.add(command)?;
        }
        Ok(processes)
    }

    fn add(&mut self, mut command: Command) -> Result<()> {
        let said = memory("drumline-error")?;
        let started =
            command.env(error_file::VARIABLE, in_memory(&said)).stdin(Stdio::null()).spawn();
        let mut child = started
            .map_err(named("clone3"))
            .map_err(system("start this program again (/proc/self/exe)"))?;
        let watched = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).and_then(|pidfd| {
            let number = epoll::EventData::new_u64(self.members.len() as u64);
            if let Some(ends) = &self.ends {
                epoll::add(ends, &pidfd, number, epoll::EventFlags::IN)?;
            }
            Ok(pidfd)
        });
        let (pidfd, ended) = match watched {
            Ok(pidfd) => (Some(pidfd), None),
            Err(Errno::SRCH) => (None, Some((None, self.now()))),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(system("open a pidfd (needs Linux 5.4)")(named("pidfd_open")(error)));
            }
        };
        self.members.push(Member { child, pidfd, said, ended, told: None });
        Ok(())
    }

    /// The process ids, by rank.
    pub fn ids(&self) -> Vec<u32> {
        self.members.iter().map(|member| member.child.id()).collect()
    }

    /// Waits until all processes have ended.
    ///
    /// # Errors
    ///
    /// [`Rank`](crate::ErrorKind::Rank) if one failed: the first one. Then the others have ended, too. Its detail is a
    /// [`RankEnd`].
    pub fn join(mut self) -> Result<()> {
        self.wait_until(None).map(|_| ())
    }

    /// Waits at most this long. Returns whether all processes have ended.
    ///
    /// # Errors
    ///
    /// Those of [`join`](Processes::join).
    pub fn join_timeout(&mut self, timeout: Duration) -> Result<bool> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    fn wait_until(&mut self, until: Option<Instant>) -> Result<bool> {
        let mut is_late = false;
        loop {
            if self.members.iter().any(Member::has_failed) {
                return Err(self.fail());
            }
            if self.members.iter().all(|member| member.ended.is_some()) {
                return Ok(true);
            }
            if is_late {
                return Ok(false);
            }
            is_late = !self.collect(until)?;
        }
    }

    /// Collects processes that end until then. Returns whether there was one, or there may still be.
    fn collect(&mut self, until: Option<Instant>) -> Result<bool> {
        let ended = self.wait(until)?;
        for &rank in &ended {
            self.look_at(rank)?;
        }
        Ok(!ended.is_empty() || until.is_none_or(|until| until > Instant::now()))
    }

    /// Ends all processes after a failure, and finds out which one was the first.
    fn fail(&mut self) -> Error {
        let settled = Instant::now() + SETTLE;
        while self.members.iter().any(|member| member.ended.is_none()) {
            match self.collect(Some(settled)) {
                Ok(true) => {}
                Ok(false) | Err(_) => break,
            }
        }
        self.end_all();
        let now = self.now();
        let accounts = self.members.iter().map(|it| it.account(self.started_at, now));
        let first = culprit(&accounts.collect::<Vec<_>>()).unwrap_or(0);
        self.error_of(first)
    }

    fn now(&self) -> Duration {
        self.started_at.elapsed().unwrap_or_default()
    }

    /// The ranks that have ended in the meantime, in that order.
    fn wait(&self, until: Option<Instant>) -> Result<Vec<usize>> {
        let Some(ends) = &self.ends else { return Ok(Vec::new()) };
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut ready = Vec::with_capacity(16);
        match epoll::wait(ends, spare_capacity(&mut ready), left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(system("wait for the ranks")(error)),
        }
        Ok(ready.iter().map(|event| event.data.u64() as usize).collect())
    }

    /// Collects a process that has ended.
    fn look_at(&mut self, rank: usize) -> Result<()> {
        let now = self.now();
        let (Some(member), Some(ends)) = (self.members.get_mut(rank), &self.ends) else {
            return Ok(());
        };
        let status = match member.child.wait() {
            Ok(status) => Some(status),
            Err(error) if error.raw_os_error() == Some(Errno::CHILD.raw_os_error()) => None,
            Err(error) => return Err(system("wait for the ranks")(error)),
        };
        member.ended = Some((status, now));
        match &member.pidfd {
            Some(pidfd) => epoll::delete(ends, pidfd).map_err(system("wait for the ranks")),
            None => Ok(()),
        }
    }

    /// Why this rank has failed.
    fn error_of(&self, rank: usize) -> Error {
        let member = &self.members[rank];
        let (pid, failure) = (member.child.id(), member.failure());
        let status =
            member.ended.map_or_else(|| Some(ExitStatus::from_raw(0)), |(status, _)| status);
        let said = match failure {
            Err(NotBegun) if status.is_some_and(|it| it.success()) => {
                return not_reached(rank, pid);
            }
            other => other.unwrap_or(None),
        };
        let (message, backtrace) = match said {
            Some(failure) => (Some(failure.message), failure.callstack),
            None if member.told.is_some() => (self.who_has_lost_it(), None),
            None => (None, None),
        };
        RankEnd { pid, status, message, backtrace }.of(rank)
    }

    /// What is told of a rank that ended only when it was told to, and has said nothing.
    fn who_has_lost_it(&self) -> Option<String> {
        let failed = self.members.iter().enumerate().filter(|(_, member)| member.has_failed());
        let (rank, (_, failure)) = failed
            .filter_map(|(rank, it)| Some((rank, (it.ended?.1, it.failure().unwrap_or(None)?))))
            .min_by_key(|(_, (at, _))| *at)?;
        Some(format!("it ended when it was told to; rank {rank} had lost it: {}", failure.message))
    }

    /// Ends the processes that still run.
    fn end_all(&mut self) {
        let until = Instant::now().checked_add(self.grace_period);
        let (since, now) = (self.started_at, self.now());
        for member in self.members.iter_mut().filter(|member| member.ended.is_none()) {
            member.told = Some(member.words(since, now));
        }
        for signal in [Signal::TERM, Signal::KILL] {
            let living = self.members.iter().filter(|member| member.ended.is_none());
            // This fails only if the process has ended.
            for pidfd in living.filter_map(|member| member.pidfd.as_ref()) {
                let _ = pidfd_send_signal(pidfd, signal);
            }
            let until = until.filter(|_| signal == Signal::TERM);
            while self.members.iter().any(|member| member.ended.is_none()) {
                match self.collect(until) {
                    Ok(true) => {}
                    Ok(false) | Err(_) => break,
                }
            }
        }
    }
}

/// No process of a `spawn` outlives it.
impl Drop for Processes {
    fn drop(&mut self) {
        self.grace_period = Duration::ZERO;
        self.end_all();
    }
}

/// A process that has not come to its call.
struct NotBegun;

impl Member {
    /// What it has said of its failure so far.
    fn failure(&self) -> Result<Option<Failure>, NotBegun> {
        let length = self.said.metadata().map_or(0, |it| it.len());
        let mut said = self.said.try_clone();
        let rewound = said.as_mut().is_ok_and(|file| file.rewind().is_ok());
        match said.map(ErrorFile::read_from) {
            _ if length == 0 => Err(NotBegun),
            Ok(ErrorFile::Failure(failure)) if rewound => Ok(Some(failure)),
            _ => Ok(None),
        }
    }

    /// Whether it has said that the function has returned.
    fn has_returned(&self) -> bool {
        let mut said = [0; RETURNED.len() + 1];
        self.said.read_at(&mut said, 0).is_ok_and(|length| &said[..length] == RETURNED)
    }

    /// Whether it has ended by itself, and not well.
    fn has_failed(&self) -> bool {
        let is_bad = |status: Option<ExitStatus>| match status {
            Some(status) => !status.success() || self.failure().is_err(),
            None => !self.has_returned(),
        };
        self.told.is_none() && self.ended.is_some_and(|(status, _)| is_bad(status))
    }

    fn words(&self, since: SystemTime, now: Duration) -> Words {
        let failure = self.failure().unwrap_or(None);
        failure.map_or(Words::None, |it| Words::of_failure(&it, since, now))
    }

    fn account(&self, since: SystemTime, now: Duration) -> Account {
        let end = match self.ended {
            Some((status, at)) if self.has_failed() => End::Failure {
                at,
                is_never_a_reaction: status
                    .and_then(|it| it.signal())
                    .is_some_and(is_never_a_reaction),
            },
            Some(_) if self.told.is_none() => End::Success,
            _ => End::Open,
        };
        Account { end, words: self.told.unwrap_or_else(|| self.words(since, now)) }
    }
}

/// A file in memory that only this user can open.
fn memory(name: &str) -> Result<File> {
    let made = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL)
        // Kernels before 6.3 do not know that flag.
        .or_else(|error| match error {
            Errno::INVAL => memfd_create(name, MemfdFlags::CLOEXEC),
            other => Err(other),
        })
        .and_then(|file| fchmod(file.as_fd(), Mode::RUSR | Mode::WUSR).map(|()| file));
    made.map(File::from).map_err(named("memfd_create")).map_err(system("make a file in memory"))
}

/// 64 random bits. They come from the operating system, through the hasher's keys.
fn new_name() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}

/// Where another process of this user finds the file.
fn in_memory(file: &File) -> String {
    format!("/proc/{}/fd/{}", id(), file.as_raw_fd())
}
