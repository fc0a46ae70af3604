//! System calls that a filter forbids.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit};

/// For `map_err`: names the system call that failed, if it may be forbidden: containers forbid some by a filter. Also if
/// `clone3` has met the limit of processes. Other errors stay as they are.
pub fn named<E: Into<io::Error>>(call: &'static str) -> impl FnOnce(E) -> io::Error {
    move |error| {
        let error = error.into();
        let is_limit =
            call == "clone3" && error.raw_os_error() == Some(Errno::AGAIN.raw_os_error());
        match if is_limit { TOO_MANY } else { advice(&error) } {
            "" => error,
            advice => io::Error::new(error.kind(), format!("{call}: {error}{advice}")),
        }
    }
}

const TOO_MANY: &str = "; the user or the container has as many processes and threads as it may: raise `ulimit -u` or \
                        the container's `pids.max`";

/// What to do about the error of a system call that is forbidden.
pub(crate) fn advice(error: &io::Error) -> &'static str {
    match error.raw_os_error().map(Errno::from_raw_os_error) {
        Some(Errno::PERM) => {
            "; a filter of system calls (seccomp) or another rule of the system forbids it: allow this call to the \
             container or program"
        }
        Some(Errno::NOSYS) => {
            "; this kernel lacks it, or a filter of system calls (seccomp) hides it: allow this call to the container \
             or program"
        }
        _ => "",
    }
}

/// A limit of this process. `None` if the system does not tell it: rustix panics then.
pub fn limit_of(resource: Resource) -> Option<Rlimit> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the call writes to `limit` and nowhere else.
    let told = unsafe { libc::getrlimit(resource as _, &raw mut limit) } == 0;
    let finite = |limit| (limit != libc::RLIM_INFINITY).then_some(limit);
    told.then(|| Rlimit { current: finite(limit.rlim_cur), maximum: finite(limit.rlim_max) })
}

/// The memory of this host, in bytes. `None` if the system does not tell it.
pub(crate) fn memory_of_host() -> Option<u64> {
    let mut info = std::mem::MaybeUninit::<libc::sysinfo>::zeroed();
    // SAFETY: the call writes to `info` and nowhere else, and any bytes are a value of it.
    let (told, info) = unsafe { (libc::sysinfo(info.as_mut_ptr()) == 0, info.assume_init()) };
    if told {
        return Some(info.totalram.saturating_mul(u64::from(info.mem_unit)));
    }
    let meminfo = std::fs::read_to_string("/proc/meminfo").ok()?;
    let total = meminfo.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    total.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}
