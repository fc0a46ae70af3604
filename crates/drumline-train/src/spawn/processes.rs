//! The processes that [`spawn`](super::spawn()) has started, from the side of the one that did.

use std::{
    ffi::OsString,
    fs::File,
    hash::{BuildHasher, Hasher, RandomState},
    io::Write,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    process::{Child, Command, ExitStatus, Stdio, id},
    time::{Duration, Instant},
};

use drumline_group::{
    Config, Endpoint,
    auth::Secret,
    store::tcp::{Door, TcpStoreServer},
};
use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    fs::{MemfdFlags, Mode, fchmod, memfd_create},
    io::Errno,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};

use super::{child::VARIABLE, error::SpawnError};
use crate::{
    error_file::{self, ErrorFile, Failure},
    steps::STEPS_VARIABLE,
};

/// Variables of an outer job, which are not those of these ranks.
const NOT_INHERITED: [&str; 4] =
    ["MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE", STEPS_VARIABLE];

/// Processes of this program, each with a rank. Dropping this kills them.
#[must_use = "dropping this kills the processes; join waits for them"]
#[derive(Debug)]
pub struct Processes {
    members: Vec<Member>,
    /// Tells who has ended, the first one first.
    ends: Option<OwnedFd>,
    grace_period: Duration,
    /// Where the ranks meet, and the file with its secret.
    _store: Option<(TcpStoreServer, File)>,
}

#[derive(Debug)]
struct Member {
    child: Child,
    pidfd: OwnedFd,
    /// What it writes of its failure: a file in memory, which it finds as one of this process.
    said: File,
    ended: Option<ExitStatus>,
}

impl Processes {
    /// In a process that another call has started.
    pub(super) fn none() -> Processes {
        Processes { members: Vec::new(), ends: None, grace_period: Duration::ZERO, _store: None }
    }

    /// Runs this program again with these arguments, for each rank, up to `call`.
    pub(super) fn start(
        ranks: usize,
        arguments: &[OsString],
        grace_period: Duration,
        call: &str,
    ) -> Result<Processes, SpawnError> {
        let config = Config::from_env()?;
        let inherited = Secret::from_env().map_err(drumline_group::Error::from)?;
        let is_fresh = inherited.is_none();
        let secret =
            inherited.map_or_else(Secret::random, Ok).map_err(drumline_group::Error::from)?;
        let file = memory("drumline-secret")?;
        (&file)
            .write_all(secret.expose())
            .map_err(SpawnError::system("write the secret of the ranks"))?;
        let secret_file = is_fresh.then(|| in_memory(&file));
        let endpoint = Endpoint::Unix(format!("drumline-spawn-{}", new_name()));
        let door = Door::Secured { endpoint: endpoint.clone(), secret, level: config.security };
        let store = TcpStoreServer::open(&[door], config.store_bytes_max);
        let store = store.map_err(drumline_group::Error::from)?;
        let ends = epoll::create(epoll::CreateFlags::CLOEXEC);
        let mut processes = Processes {
            members: Vec::with_capacity(ranks),
            ends: Some(ends.map_err(SpawnError::system("create an epoll set"))?),
            grace_period,
            _store: Some((store, file)),
        };
        for rank in 0..ranks {
            // The binary that runs, also if another one has its name by now.
            let mut command = Command::new("/proc/self/exe");
            command.args(arguments);
            for name in NOT_INHERITED {
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

    fn add(&mut self, mut command: Command) -> Result<(), SpawnError> {
        let said = memory("drumline-error")?;
        let started =
            command.env(error_file::VARIABLE, in_memory(&said)).stdin(Stdio::null()).spawn();
        let mut child =
            started.map_err(SpawnError::system("start this program again (/proc/self/exe)"))?;
        let watched = pidfd_open(Pid::from_child(&child), PidfdFlags::empty()).and_then(|pidfd| {
            let number = epoll::EventData::new_u64(self.members.len() as u64);
            if let Some(ends) = &self.ends {
                epoll::add(ends, &pidfd, number, epoll::EventFlags::IN)?;
            }
            Ok(pidfd)
        });
        match watched {
            Ok(pidfd) => self.members.push(Member { child, pidfd, said, ended: None }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                return Err(SpawnError::system("open a pidfd (needs Linux 5.4)")(error));
            }
        }
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
    /// [`SpawnError::Failed`] if one failed: the first one. Then the others have ended, too.
    pub fn join(mut self) -> Result<(), SpawnError> {
        self.wait_until(None).map(|_| ())
    }

    /// Waits at most this long. Returns whether all processes have ended.
    ///
    /// # Errors
    ///
    /// Those of [`join`](Processes::join).
    pub fn join_timeout(&mut self, timeout: Duration) -> Result<bool, SpawnError> {
        self.wait_until(Instant::now().checked_add(timeout))
    }

    fn wait_until(&mut self, until: Option<Instant>) -> Result<bool, SpawnError> {
        while self.members.iter().any(|member| member.ended.is_none()) {
            let ended = self.wait(until)?;
            for &rank in &ended {
                self.look_at(rank).inspect_err(|_| self.end_all())?;
            }
            let is_late = until.is_some_and(|until| until <= Instant::now());
            if ended.is_empty() && is_late {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// The ranks that have ended in the meantime, in that order.
    fn wait(&self, until: Option<Instant>) -> Result<Vec<usize>, SpawnError> {
        let Some(ends) = &self.ends else { return Ok(Vec::new()) };
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let left = left.and_then(|left| Timespec::try_from(left).ok());
        let mut ready = Vec::with_capacity(16);
        match epoll::wait(ends, spare_capacity(&mut ready), left.as_ref()) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(SpawnError::system("wait for the ranks")(error)),
        }
        Ok(ready.iter().map(|event| event.data.u64() as usize).collect())
    }

    /// Collects a process that has ended.
    fn look_at(&mut self, rank: usize) -> Result<(), SpawnError> {
        let (Some(member), Some(ends)) = (self.members.get_mut(rank), &self.ends) else {
            return Ok(());
        };
        let status = member.child.wait().map_err(SpawnError::system("wait for the ranks"))?;
        member.ended = Some(status);
        epoll::delete(ends, &member.pidfd).map_err(SpawnError::system("wait for the ranks"))?;
        let pid = member.child.id();
        let failure = member.failure();
        match (status.success(), failure) {
            (true, Ok(_)) => Ok(()),
            (true, Err(NotBegun)) => Err(SpawnError::NotReached { rank, pid }),
            (false, said) => {
                let said = said.unwrap_or(None);
                let (message, backtrace) =
                    said.map_or((None, None), |it| (Some(it.message), it.callstack));
                Err(SpawnError::Failed { rank, pid, status, message, backtrace })
            }
        }
    }

    /// Ends the processes that still run.
    fn end_all(&mut self) {
        let until = Instant::now().checked_add(self.grace_period);
        for signal in [Signal::TERM, Signal::KILL] {
            let living = self.members.iter().filter(|member| member.ended.is_none());
            // This fails only if the process has ended.
            for member in living {
                let _ = pidfd_send_signal(&member.pidfd, signal);
            }
            let until = until.filter(|_| signal == Signal::TERM);
            while self.members.iter().any(|member| member.ended.is_none()) {
                let Ok(ended) = self.wait(until) else { break };
                let is_late = until.is_some_and(|until| until <= Instant::now());
                if ended.is_empty() && is_late {
                    break;
                }
                for rank in ended {
                    let _ = self.look_at(rank);
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
    fn failure(&self) -> Result<Option<Failure>, NotBegun> {
        let length = self.said.metadata().map_or(0, |it| it.len());
        match self.said.try_clone().map(ErrorFile::read_from) {
            _ if length == 0 => Err(NotBegun),
            Ok(ErrorFile::Failure(failure)) => Ok(Some(failure)),
            _ => Ok(None),
        }
    }
}

/// A file in memory that only this user can open.
fn memory(name: &str) -> Result<File, SpawnError> {
    let made = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::NOEXEC_SEAL)
        // Kernels before 6.3 do not know that flag.
        .or_else(|error| match error {
            Errno::INVAL => memfd_create(name, MemfdFlags::CLOEXEC),
            other => Err(other),
        })
        .and_then(|file| fchmod(file.as_fd(), Mode::RUSR | Mode::WUSR).map(|()| file));
    made.map(File::from).map_err(SpawnError::system("make a file in memory"))
}

/// 64 random bits. They come from the operating system, through the hasher's keys.
fn new_name() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}

/// Where another process of this user finds the file.
fn in_memory(file: &File) -> String {
    format!("/proc/{}/fd/{}", id(), file.as_raw_fd())
}
