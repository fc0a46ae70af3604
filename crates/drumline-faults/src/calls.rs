//! The system calls that are counted, and the faults that each may have.

use std::fs;

use libc::{
    EAGAIN, ECONNABORTED, ECONNREFUSED, ECONNRESET, EINTR, EIO, EMFILE, ENFILE, ENOBUFS, ENOMEM,
    ENOSPC, EPIPE, c_int, c_long,
};

/// A fault of one system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call is not carried out, and returns this error.
    Error(c_int),
    /// The call is carried out with half its length, which is its third argument, but at least 1.
    Less,
}

use Fault::{Error, Less};

/// What the file descriptor of a call stands for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// Standard input, output or error. The rank reports to the test through these, so no fault hits them.
    Standard,
    Socket {
        blocks: bool,
    },
    File,
    Other,
}

impl Kind {
    fn of(pid: i32, descriptor: u64) -> Kind {
        let link = fs::read_link(format!("/proc/{pid}/fd/{descriptor}")).unwrap_or_default();
        match link.to_string_lossy() {
            _ if descriptor <= 2 => Kind::Standard,
            link if link.starts_with("socket:") => Kind::Socket { blocks: blocks(pid, descriptor) },
            link if link.starts_with('/') => Kind::File,
            _ => Kind::Other,
        }
    }
}

fn blocks(pid: i32, descriptor: u64) -> bool {
    let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{descriptor}")).unwrap_or_default();
    let flags = info.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| u32::from_str_radix(flags.trim(), 8).ok());
    flags.is_none_or(|flags| flags & libc::O_NONBLOCK as u32 == 0)
}

/// The faults that the call `number` of the process `pid` may have. `first` is the first argument of the
/// call. Empty if the call is not counted.
pub fn faults_of(number: c_long, pid: i32, first: u64) -> &'static [Fault] {
    match number {
        libc::SYS_read | libc::SYS_readv | libc::SYS_recvmsg | libc::SYS_recvfrom => {
            match (Kind::of(pid, first), number) {
                (Kind::Standard, _) => &[],
                (Kind::File, _) => &[Less, Error(EINTR), Error(EIO)],
                (Kind::Socket { blocks: true }, libc::SYS_read | libc::SYS_recvfrom) => {
                    &[Less, Error(EINTR), Error(ECONNRESET)]
                }
                (Kind::Socket { .. }, libc::SYS_read | libc::SYS_recvfrom) => {
                    &[Less, Error(EINTR), Error(ECONNRESET), Error(EAGAIN)]
                }
                (Kind::Socket { .. }, _) => &[Error(EINTR), Error(ECONNRESET), Error(ENOMEM)],
                (Kind::Other, _) => &[Error(EINTR)],
            }
        }
        libc::SYS_write | libc::SYS_writev | libc::SYS_sendmsg | libc::SYS_sendto => {
            match (Kind::of(pid, first), number) {
                (Kind::Standard, _) => &[],
                (Kind::File, _) => &[Less, Error(EINTR), Error(ENOSPC), Error(EIO)],
                (Kind::Socket { blocks: true }, libc::SYS_write | libc::SYS_sendto) => {
                    &[Less, Error(EINTR), Error(EPIPE), Error(ENOBUFS)]
                }
                (Kind::Socket { .. }, libc::SYS_write | libc::SYS_sendto) => {
                    &[Less, Error(EAGAIN), Error(EINTR), Error(EPIPE)]
                }
                (Kind::Socket { .. }, _) => {
                    &[Error(EINTR), Error(EPIPE), Error(ENOBUFS), Error(ECONNRESET)]
                }
                (Kind::Other, _) => &[Error(EINTR)],
            }
        }
        libc::SYS_openat => &[Error(EMFILE), Error(EINTR), Error(ENFILE), Error(ENOMEM)],
        libc::SYS_memfd_create => &[Error(EMFILE), Error(ENOMEM), Error(ENFILE)],
        libc::SYS_mmap | libc::SYS_mremap => &[Error(ENOMEM)],
        libc::SYS_ftruncate | libc::SYS_fallocate => &[Error(ENOSPC), Error(EINTR), Error(EIO)],
        libc::SYS_fsync | libc::SYS_fdatasync => &[Error(EIO), Error(ENOSPC)],
        libc::SYS_renameat | libc::SYS_renameat2 | libc::SYS_mkdirat => {
            &[Error(ENOSPC), Error(EIO)]
        }
        libc::SYS_getdents64 | libc::SYS_statx => &[Error(EIO), Error(ENOMEM)],
        libc::SYS_socket | libc::SYS_socketpair => &[Error(EMFILE), Error(ENFILE), Error(ENOBUFS)],
        libc::SYS_bind | libc::SYS_listen => &[Error(libc::EADDRINUSE), Error(ENOMEM)],
        libc::SYS_connect => &[Error(ECONNREFUSED), Error(libc::ETIMEDOUT), Error(EINTR)],
        libc::SYS_accept4 => &[Error(EMFILE), Error(ECONNABORTED), Error(EINTR), Error(ENFILE)],
        libc::SYS_setsockopt | libc::SYS_getsockopt | libc::SYS_getsockname => &[Error(ENOBUFS)],
        libc::SYS_epoll_create1 | libc::SYS_eventfd2 | libc::SYS_timerfd_create => {
            &[Error(EMFILE), Error(ENOMEM)]
        }
        libc::SYS_epoll_ctl => &[Error(ENOMEM), Error(ENOSPC)],
        libc::SYS_epoll_pwait | libc::SYS_epoll_pwait2 | libc::SYS_ppoll => &[Error(EINTR)],
        libc::SYS_pidfd_open | libc::SYS_pidfd_getfd => &[Error(EMFILE), Error(ENOMEM)],
        libc::SYS_timerfd_settime => &[Error(libc::EINVAL)],
        libc::SYS_dup3 | libc::SYS_dup | libc::SYS_fcntl => &[Error(EMFILE)],
        libc::SYS_pipe2 => &[Error(EMFILE), Error(ENFILE)],
        libc::SYS_clone3 | libc::SYS_clone => &[Error(EAGAIN), Error(ENOMEM)],
        #[cfg(target_arch = "x86_64")]
        number => of_x86_64(number),
        #[cfg(not(target_arch = "x86_64"))]
        _ => &[],
    }
}

/// Old system calls that newer architectures lack: they have only the newer forms.
#[cfg(target_arch = "x86_64")]
fn of_x86_64(number: c_long) -> &'static [Fault] {
    match number {
        libc::SYS_open => &[Error(EMFILE), Error(EINTR), Error(ENOMEM)],
        libc::SYS_rename | libc::SYS_mkdir => &[Error(ENOSPC), Error(EIO)],
        libc::SYS_poll | libc::SYS_epoll_wait => &[Error(EINTR)],
        libc::SYS_pipe => &[Error(EMFILE)],
        _ => &[],
    }
}

/// The name of a counted call.
pub fn name_of(number: c_long) -> String {
    let names = [
        (libc::SYS_read, "read"),
        (libc::SYS_readv, "readv"),
        (libc::SYS_recvmsg, "recvmsg"),
        (libc::SYS_recvfrom, "recvfrom"),
        (libc::SYS_write, "write"),
        (libc::SYS_writev, "writev"),
        (libc::SYS_sendmsg, "sendmsg"),
        (libc::SYS_sendto, "sendto"),
        (libc::SYS_openat, "openat"),
        (libc::SYS_memfd_create, "memfd_create"),
        (libc::SYS_mmap, "mmap"),
        (libc::SYS_mremap, "mremap"),
        (libc::SYS_ftruncate, "ftruncate"),
        (libc::SYS_fallocate, "fallocate"),
        (libc::SYS_fsync, "fsync"),
        (libc::SYS_fdatasync, "fdatasync"),
        (libc::SYS_renameat, "renameat"),
        (libc::SYS_renameat2, "renameat2"),
        (libc::SYS_getdents64, "getdents64"),
        (libc::SYS_statx, "statx"),
        (libc::SYS_socket, "socket"),
        (libc::SYS_socketpair, "socketpair"),
        (libc::SYS_bind, "bind"),
        (libc::SYS_listen, "listen"),
        (libc::SYS_connect, "connect"),
        (libc::SYS_accept4, "accept4"),
        (libc::SYS_setsockopt, "setsockopt"),
        (libc::SYS_getsockopt, "getsockopt"),
        (libc::SYS_getsockname, "getsockname"),
        (libc::SYS_epoll_create1, "epoll_create1"),
        (libc::SYS_eventfd2, "eventfd2"),
        (libc::SYS_epoll_ctl, "epoll_ctl"),
        (libc::SYS_epoll_pwait, "epoll_pwait"),
        (libc::SYS_epoll_pwait2, "epoll_pwait2"),
        (libc::SYS_ppoll, "ppoll"),
        (libc::SYS_pidfd_open, "pidfd_open"),
        (libc::SYS_pidfd_getfd, "pidfd_getfd"),
        (libc::SYS_timerfd_create, "timerfd_create"),
        (libc::SYS_timerfd_settime, "timerfd_settime"),
        (libc::SYS_fcntl, "fcntl"),
        (libc::SYS_clone3, "clone3"),
        (libc::SYS_clone, "clone"),
    ];
    let named = names.iter().find(|(known, _)| *known == number);
    named.map_or_else(|| format!("call {number}"), |(_, name)| (*name).to_owned())
}
