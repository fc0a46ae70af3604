//! Where the threads of a rank wait. It is looked up before the rank is killed, because afterwards it is
//! unknown.

use std::{
    fs,
    path::Path,
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use rustix::process::Pid;

use crate::processes::{self, Process};

/// The most ranks that are looked up. Ranks that hang mostly hang in the same place.
const RANKS_MAX: usize = 8;

/// The most threads of each rank that are looked up.
const THREADS_MAX: usize = 256;

/// The most lines for each rank.
const LINES_MAX: usize = 12;

/// The time limit while a job ends. The kernel may let a reader of `/proc` wait for a process that hangs.
pub(crate) const PATIENCE: Duration = Duration::from_millis(200);

/// For each rank, the threads of its process and of the processes below it. All threads that wait in the same
/// place share one line.
pub(crate) fn within(patience: Duration, ranks: Vec<(usize, Pid)>) -> Vec<(usize, Vec<String>)> {
    if ranks.is_empty() {
        return Vec::new();
    }
    let (sender, lines) = mpsc::channel();
    let look = move || {
        let table = processes::all();
        for &(rank, pid) in ranks.iter().take(RANKS_MAX) {
            if sender.send((rank, lines_of(pid, &table))).is_err() {
                break;
            }
        }
    };
    // If the thread cannot be started, there is nothing to tell, and the job ends as it should.
    let _ = thread::Builder::new().name("waits".into()).spawn(look);
    let until = Instant::now() + patience;
    let next = || lines.recv_timeout(until.saturating_duration_since(Instant::now())).ok();
    std::iter::from_fn(next).collect()
}

fn lines_of(pid: Pid, table: &[Process]) -> Vec<String> {
    let below = processes::below(pid, table);
    let pids = [pid].into_iter().chain(below.iter().map(|process| process.pid));
    let threads = pids.flat_map(|pid| {
        let tasks = Path::new("/proc").join(pid.to_string()).join("task");
        let mut threads = processes::numbers_in(&tasks);
        threads.sort_unstable_by_key(|id| id.as_raw_pid());
        threads.into_iter().map(move |id| (tasks.join(id.to_string()), id))
    });
    let mut alike: Vec<(String, String, Vec<Pid>)> = Vec::new();
    for (directory, id) in threads.take(THREADS_MAX) {
        let Some((name, place)) = thread(&directory, id) else { continue };
        match alike.iter_mut().find(|(n, p, _)| *n == name && *p == place) {
            Some((_, _, ids)) => ids.push(id),
            None => alike.push((name, place, vec![id])),
        }
    }
    let more = alike.len().saturating_sub(LINES_MAX);
    let lines = alike.iter().take(LINES_MAX).map(|(name, place, ids)| {
        let and_more = match ids.len() {
            1 => String::new(),
            count => format!(" and {} more", count - 1),
        };
        format!("{name} ({}{and_more}): {place}", ids[0])
    });
    lines.chain((more > 0).then(|| format!("and {more} lines more"))).collect()
}

/// The name of a thread, and where it waits. `None` if it has ended.
fn thread(directory: &Path, id: Pid) -> Option<(String, String)> {
    let Process { name, state, .. } = Process::read_from(directory, id)?;
    let read = |file| fs::read_to_string(directory.join(file)).unwrap_or_default();
    let mut place = match state {
        'R' => return Some((name, "runs".to_owned())),
        'Z' | 'X' => return None,
        'D' => "waits in the kernel and cannot be interrupted".to_owned(),
        'T' => "is stopped".to_owned(),
        't' => "is stopped by a debugger".to_owned(),
        _ => "waits".to_owned(),
    };
    let target = |descriptor: i32| {
        let path = fs::read_link(directory.join(format!("fd/{descriptor}"))).ok()?;
        Some(path.to_string_lossy().escape_debug().to_string())
    };
    if let Some(call) = call(&read("syscall"), target) {
        place = format!("{place} in {call}");
    }
    let function = read("wchan");
    if !matches!(function.as_str(), "" | "0") {
        place = format!("{place}, kernel function {function}");
    }
    Some((name, place))
}

/// The system call in `text`, the content of `/proc/PID/syscall`, with the meaning of its first argument: a
/// process, or a descriptor, which `target` looks up. `None` if the thread is in no call, or if this user may
/// not look.
fn call(text: &str, target: impl Fn(i32) -> Option<String>) -> Option<String> {
    let mut words = text.split_ascii_whitespace();
    let number: libc::c_long = words.next()?.parse().ok().filter(|&number| number >= 0)?;
    let first =
        words.next().and_then(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok());
    let Some(&(_, name, first_is)) = CALLS.iter().find(|(known, ..)| *known == number) else {
        return Some(format!("system call {number}"));
    };
    // The kernel widens an `int` in different ways.
    let first = first.map(|first| first as u32 as i32);
    let argument = match (first_is, first) {
        (First::Descriptor, Some(n @ 0..)) => match target(n) {
            Some(target) => format!("({n} = {target})"),
            None => format!("({n})"),
        },
        (First::Process, Some(pid @ 1..)) => format!("(process {pid})"),
        _ => String::new(),
    };
    Some(format!("{name}{argument}"))
}

/// The meaning of the first argument of a system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum First {
    Descriptor,
    Process,
    Other,
}

/// The system calls in which a thread may wait for long.
const CALLS: &[(libc::c_long, &str, First)] = &[
    (libc::SYS_read, "read", First::Descriptor),
    (libc::SYS_readv, "readv", First::Descriptor),
    (libc::SYS_pread64, "pread", First::Descriptor),
    (libc::SYS_write, "write", First::Descriptor),
    (libc::SYS_writev, "writev", First::Descriptor),
    (libc::SYS_pwrite64, "pwrite", First::Descriptor),
    (libc::SYS_sendfile, "sendfile", First::Descriptor),
    (libc::SYS_recvfrom, "recv", First::Descriptor),
    (libc::SYS_recvmsg, "recvmsg", First::Descriptor),
    (libc::SYS_sendto, "send", First::Descriptor),
    (libc::SYS_sendmsg, "sendmsg", First::Descriptor),
    (libc::SYS_accept, "accept", First::Descriptor),
    (libc::SYS_accept4, "accept", First::Descriptor),
    (libc::SYS_connect, "connect", First::Descriptor),
    (libc::SYS_ioctl, "ioctl", First::Descriptor),
    (libc::SYS_fcntl, "fcntl", First::Descriptor),
    (libc::SYS_flock, "flock", First::Descriptor),
    (libc::SYS_fsync, "fsync", First::Descriptor),
    (libc::SYS_fdatasync, "fdatasync", First::Descriptor),
    (libc::SYS_ftruncate, "ftruncate", First::Descriptor),
    (libc::SYS_close, "close", First::Descriptor),
    (libc::SYS_wait4, "wait4", First::Process),
    (libc::SYS_waitid, "waitid", First::Other),
    (libc::SYS_openat, "open", First::Other),
    (libc::SYS_execve, "execve", First::Other),
    (libc::SYS_munmap, "munmap", First::Other),
    (libc::SYS_futex, "futex (a lock or a signal of another thread)", First::Other),
    (libc::SYS_ppoll, "poll", First::Other),
    (libc::SYS_pselect6, "select", First::Other),
    (libc::SYS_epoll_pwait, "epoll_wait", First::Other),
    (libc::SYS_nanosleep, "nanosleep", First::Other),
    (libc::SYS_clock_nanosleep, "clock_nanosleep", First::Other),
    (libc::SYS_restart_syscall, "a call that goes on after a stop", First::Other),
    (libc::SYS_rt_sigsuspend, "sigsuspend", First::Other),
    (libc::SYS_rt_sigtimedwait, "sigtimedwait", First::Other),
    (libc::SYS_io_uring_enter, "io_uring_enter", First::Descriptor),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_open, "open", First::Other),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_poll, "poll", First::Other),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_select, "select", First::Other),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_epoll_wait, "epoll_wait", First::Other),
    #[cfg(target_arch = "x86_64")]
    (libc::SYS_pause, "pause", First::Other),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_call_is_named_with_what_its_first_argument_means() {
        let told = |text: &str| call(text, |n| (n == 5).then(|| "pipe:[77]".to_owned()));
        let of = |number: libc::c_long, first: &str| {
            told(&format!("{number} {first} 0x0 0x7ff 0x7ff\n"))
        };
        assert_eq!(of(libc::SYS_read, "0x5").as_deref(), Some("read(5 = pipe:[77])"));
        assert_eq!(of(libc::SYS_read, "0x6").as_deref(), Some("read(6)"));
        assert_eq!(of(libc::SYS_read, "0xffffffff").as_deref(), Some("read"));
        assert_eq!(of(libc::SYS_wait4, "0x1b").as_deref(), Some("wait4(process 27)"));
        for any_child in ["0xffffffff", "0xffffffffffffffff"] {
            assert_eq!(of(libc::SYS_wait4, any_child).as_deref(), Some("wait4"));
        }
        assert_eq!(of(99_999, "0x5").as_deref(), Some("system call 99999"));
        for no_call in ["", "running\n", "-1 0x7ff 0x7ff\n"] {
            assert_eq!(told(no_call), None, "{no_call}");
        }
        assert_eq!(told(&libc::SYS_read.to_string()).as_deref(), Some("read"));
    }
}
