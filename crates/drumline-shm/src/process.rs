//! The process at the other end of a Unix socket: its user, and whether it is alive. And processes that end with this
//! one, or at a time that another one sets.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::{net::UnixStream, process::CommandExt};
use std::process::Command;
use std::{env, fs, io, mem, thread};

use bytemuck::Pod;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::process::{
    Pid, PidfdFlags, Signal, getpid, getppid, kill_process, pidfd_open,
    set_parent_process_death_signal,
};
use rustix::time::timerfd_gettime;

use crate::error::{Error, Result};
use crate::forbidden::named;
use crate::inherited::inherited;
use crate::per_process::PerProcess;

/// The process and the user at the other end of a Unix socket, as the kernel knows them. It is the process
/// that connected the socket or listened on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Credentials {
    /// The number of the process; `None` when it lives in another PID namespace.
    pub pid: Option<u32>,
    /// The effective user.
    pub uid: u32,
    /// The effective group.
    pub gid: u32,
}

impl Credentials {
    /// The credentials of the process at the other end, at the time when that process connected or
    /// began to listen.
    ///
    /// # Errors
    ///
    /// [`Error::Os`] when the kernel does not know them.
    pub fn of_peer(stream: &UnixStream) -> Result<Credentials> {
        let [pid, uid, gid] = socket_option(stream, libc::SO_PEERCRED)
            .map_err(Error::os("ask who is at the other end of a socket (getsockopt)"))?;
        Ok(Credentials { pid: (pid != 0).then_some(pid), uid, gid })
    }

    /// Checks that memory may be shared with that process: it must run as this process's user or as
    /// root.
    ///
    /// # Errors
    ///
    /// [`Error::Stranger`] names the process and both users.
    pub fn check(&self) -> Result<()> {
        self.check_for(rustix::process::geteuid().as_raw())
    }

    fn check_for(&self, ours: u32) -> Result<()> {
        if self.uid == ours || self.uid == 0 {
            return Ok(());
        }
        Err(Error::Stranger { pid: self.pid, theirs: self.uid, ours })
    }
}

/// A descriptor of a process. Unlike a PID, it never refers to another process later.
///
/// The descriptor becomes readable when the process exits. It can be polled together with sockets
/// and doorbells.
#[derive(Debug)]
pub struct PidFd(OwnedFd);

impl PidFd {
    /// The process that connected the socket or listened on it.
    ///
    /// Linux 6.5 and newer give the descriptor at once. Older kernels give only the number of the
    /// process, and this function looks the number up. If the process has closed the socket by then,
    /// the number may belong to another process, and this is an error.
    ///
    /// # Errors
    ///
    /// [`Error::Closed`] when the process may be gone, and [`Error::Os`] when the kernel is older
    /// than 5.3 or the process has no number in our PID namespace.
    pub fn of_peer(stream: &UnixStream) -> Result<PidFd> {
        const WHAT: &str = "get a descriptor of the process at the other end of a socket";
        match socket_option::<i32>(stream, libc::SO_PEERPIDFD) {
            // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
            Ok(fd) => Ok(PidFd(unsafe { OwnedFd::from_raw_fd(fd) })),
            Err(error) if error.raw_os_error() == Some(libc::ENOPROTOOPT) => {
                PidFd::by_number(stream)
            }
            Err(error) => Err(Error::os(WHAT)(error)),
        }
    }

    /// [`PidFd::of_peer`] on kernels before 6.5.
    fn by_number(stream: &UnixStream) -> Result<PidFd> {
        const WHAT: &str = "look up the process at the other end of a socket";
        let pid = Credentials::of_peer(stream)?.pid.and_then(|pid| Pid::from_raw(pid as i32));
        let Some(pid) = pid else {
            return Err(Error::os(WHAT)(io::Error::other("it lives in another PID namespace")));
        };
        let process = pidfd_open(pid, PidfdFlags::empty())
            .map_err(Error::os("look up the process at the other end of a socket (pidfd_open)"))?;
        // While the socket is open the process lives, and the number is still its own.
        if ready(stream.as_fd(), PollFlags::RDHUP).map_err(Error::os(WHAT))? {
            return Err(Error::Closed { missing: "its process was looked up" });
        }
        Ok(PidFd(process))
    }

    /// Whether the process has exited. It may or may not have been reaped.
    ///
    /// # Errors
    ///
    /// The kernel cannot tell.
    pub fn has_exited(&self) -> Result<bool> {
        ready(self.as_fd(), PollFlags::IN)
            .map_err(Error::os("look whether a process has exited (ppoll)"))
    }

    /// Whether the process has crashed, and the kernel still writes its memory to a file. `false` where `/proc` does not tell.
    pub fn dumps_core(&self) -> bool {
        let path = format!("/proc/self/fdinfo/{}", self.0.as_raw_fd());
        let number = line_of(&path, "Pid:").and_then(|number| number.parse().ok());
        // -1: it has ended.
        number.filter(|number| *number > 0).and_then(Pid::from_raw).is_some_and(dumps_core)
    }
}

/// [`PidFd::dumps_core`], by the number of the process.
pub fn dumps_core(process: Pid) -> bool {
    line_of(&format!("/proc/{process}/status"), "CoreDumping:").is_some_and(|it| it == "1")
}

/// What stands behind this word in a file in which the kernel tells of a process.
fn line_of(path: &str, word: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    Some(text.lines().find_map(|line| line.strip_prefix(word))?.trim().to_owned())
}

impl AsFd for PidFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// Has the kernel kill the process that `command` starts, by SIGKILL, when the thread that starts it ends, for whatever
/// reason. What that process starts itself is not killed. A program that gets other rights by being executed (set-user-ID)
/// is not killed, either.
pub fn kill_with_parent(command: &mut Command) -> &mut Command {
    let parent = getpid();
    let ask = move || {
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // It may have ended before.
        if getppid() == Some(parent) { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
    };
    // SAFETY: between fork and exec the closure makes two system calls. It takes no lock, allocates and frees nothing
    // (both errors are plain numbers), and touches no memory but its own copy of `parent`.
    unsafe { command.pre_exec(ask) }
}

/// The variable with the number of an inherited descriptor: the lease of this process, a timer (`timerfd`) that others set
/// again and again.
pub const LEASE_VARIABLE: &str = "DRUMLINE_LEASE";

/// Has a thread end this process, by SIGKILL, once its lease has run out, even if all those who should end it are stopped.
/// Does nothing without a lease, or if a program in between has closed the descriptor.
///
/// # Errors
///
/// The thread cannot be started.
pub fn end_with_lease() -> io::Result<()> {
    static WATCHED: PerProcess<Option<i32>> = PerProcess::new();
    let watch = || {
        let number = env::var(LEASE_VARIABLE).ok().and_then(|number| number.parse().ok());
        let lease = number.and_then(|number| inherited(number).ok());
        // The number may belong to another file by now.
        let lease = lease.filter(|lease| timerfd_gettime(lease).is_ok())?;
        let end = move || {
            if retry_on_intr(|| poll(&mut [PollFd::new(&lease, PollFlags::IN)], None)).is_ok() {
                let _ = kill_process(getpid(), Signal::KILL);
            }
        };
        let started = thread::Builder::new().name("drumline-lease".to_owned()).spawn(end);
        started.err().map(|error| error.raw_os_error().unwrap_or(libc::EAGAIN))
    };
    WATCHED
        .get(watch)
        .map_or(Ok(()), |number| Err(named("clone3")(io::Error::from_raw_os_error(number))))
}

/// Whether a descriptor has one of `events`, an error or a hang-up now.
fn ready(fd: BorrowedFd<'_>, events: PollFlags) -> io::Result<bool> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut list = [PollFd::from_borrowed_fd(fd, events)];
    Ok(retry_on_intr(|| poll(&mut list, Some(&now)))? > 0)
}

/// Reads an option of a socket at the level `SOL_SOCKET`. `rustix` does not know `SO_PEERPIDFD`, and
/// its `SO_PEERCRED` cannot express a process without a number.
fn socket_option<T: Pod>(stream: &UnixStream, option: libc::c_int) -> io::Result<T> {
    let mut value = T::zeroed();
    let mut length = size_of::<T>() as libc::socklen_t;
    // SAFETY: `value` and `length` are alive and writable, and `length` is the size of `value`, so
    // the kernel writes no byte beyond it. `T` is plain old data: any bytes are a value of it.
    let answer = unsafe {
        libc::getsockopt(
            stream.as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            (&raw mut value).cast(),
            &raw mut length,
        )
    };
    if answer != 0 {
        return Err(io::Error::last_os_error());
    }
    if length as usize != mem::size_of::<T>() {
        return Err(io::Error::other("the kernel's answer has an unexpected size"));
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_user_and_root_are_let_in() {
        let peer = |uid| Credentials { pid: Some(7), uid, gid: uid };
        assert!(peer(1000).check_for(1000).is_ok());
        assert!(peer(0).check_for(1000).is_ok());
        assert!(peer(0).check_for(0).is_ok());
        assert!(peer(1000).check_for(0).is_err());
        let error = peer(1001).check_for(1000).unwrap_err().to_string();
        assert!(error.contains("process 7") && error.contains("user 1001"), "{error}");
        assert!(error.contains("user 1000"), "{error}");
        let unnumbered = Credentials { pid: None, ..peer(5) };
        assert!(unnumbered.check_for(6).unwrap_err().to_string().contains("another PID namespace"));
    }

    #[test]
    fn a_process_is_found_by_number_too_unless_it_hung_up() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        assert!(!PidFd::by_number(&ours).unwrap().has_exited().unwrap());
        drop(theirs);
        assert!(matches!(PidFd::by_number(&ours), Err(Error::Closed { .. })));
    }
}
