//! The processes of this host, as `/proc` lists them.

use std::{fs, path::Path, sync::OnceLock};

use drumline::dumps_core;
use rustix::process::{Pid, getpid};

/// One process, as it was at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Process {
    pub(crate) pid: Pid,
    /// The number of its parent; 0 if that is in another namespace.
    parent: i32,
    /// The number of its process group; 0 if that is in another namespace. So are those of sessions.
    pub(crate) group: i32,
    pub(crate) session: i32,
    pub(crate) name: String,
    /// One letter, as in `ps`.
    pub(crate) state: char,
    /// The kernel's flags (`PF_`) of its first thread.
    flags: u32,
    threads: usize,
    /// The time of its start, in clock ticks since the start of the host.
    started: u64,
}

impl Process {
    /// Reads a process. `None` if it does not exist.
    pub(crate) fn read(pid: Pid) -> Option<Process> {
        if !has_own_numbers() {
            return None;
        }
        Process::read_from(Path::new("/proc").join(pid.to_string()).as_path(), pid)
    }

    /// The process, or the thread, of this directory of `/proc`.
    pub(crate) fn read_from(directory: &Path, pid: Pid) -> Option<Process> {
        let stat = fs::read(directory.join("stat")).ok()?;
        Process::parse(pid, &String::from_utf8_lossy(&stat))
    }

    /// Parses a line of `/proc`. The name may contain anything, including parentheses and line breaks.
    fn parse(pid: Pid, stat: &str) -> Option<Process> {
        let (head, fields) = stat.rsplit_once(')')?;
        let (_, name) = head.split_once('(')?;
        let mut fields = fields.split_ascii_whitespace();
        let state = fields.next()?.chars().next()?;
        let parent = fields.next()?.parse().ok()?;
        let group = fields.next()?.parse().ok()?;
        let session = fields.next()?.parse().ok()?;
        // `session` is the 6th field, the flags are the 9th, the number of threads the 20th, and the start the 22nd.
        let flags = fields.nth(9 - 6 - 1)?.parse().ok()?;
        let threads = fields.nth(20 - 9 - 1)?.parse().ok()?;
        let started = fields.nth(1)?.parse().ok()?;
        let name = name.escape_debug().to_string();
        Some(Process { pid, parent, group, session, name, state, flags, threads, started })
    }

    /// Whether the process has ended and its parent has not collected it yet. (Its first thread may end
    /// before the others.)
    pub(crate) fn has_ended(&self) -> bool {
        self.state == 'X' || (self.state == 'Z' && self.threads <= 1)
    }

    /// Whether it has made its process group.
    pub(crate) fn leads_its_group(&self) -> bool {
        self.group == self.pid.as_raw_pid()
    }

    /// Whether it was started with this variable, `NAME=value`, if this user may know.
    pub(crate) fn was_started_with(&self, variable: &str) -> bool {
        let list = fs::read(format!("/proc/{}/environ", self.pid)).unwrap_or_default();
        list.split(|&byte| byte == 0).any(|it| it == variable.as_bytes())
    }

    pub(crate) fn is_child_of(&self, parent: Pid) -> bool {
        self.parent == parent.as_raw_pid()
    }

    /// `None` if it is in another namespace.
    pub(crate) fn parent(&self) -> Option<Pid> {
        Pid::from_raw(self.parent)
    }

    /// Whether the kernel already takes it down: it ends, or its memory is being written to a file because of a crash.
    /// No signal changes any more how it ends.
    pub(crate) fn is_going_down(&self) -> bool {
        const EXITING: u32 = 0x4;
        let directory = Path::new("/proc").join(self.pid.to_string());
        // The first thread may end before the others.
        let all_exit = || {
            let tasks = directory.join("task");
            let mut threads = numbers_in(&tasks).into_iter();
            threads.all(|id| {
                Process::read_from(&tasks.join(id.to_string()), id)
                    .is_none_or(|it| it.flags & EXITING != 0)
            })
        };
        (self.flags & EXITING != 0 && all_exit()) || dumps_core(self.pid)
    }

    /// Whether both are the same process. Numbers are used again, so it compares the start, too.
    pub(crate) fn is(&self, other: &Process) -> bool {
        (self.pid, self.started) == (other.pid, other.started)
    }
}

/// Whether `/proc` is there and has the numbers of this process's namespace. In a new namespace it may be that of
/// another one, where the same numbers are other processes.
fn has_own_numbers() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        let own = fs::read_link("/proc/self");
        own.is_ok_and(|own| own.as_os_str() == getpid().to_string().as_str())
    })
}

/// All processes.
pub(crate) fn all() -> Vec<Process> {
    if !has_own_numbers() {
        return Vec::new();
    }
    numbers_in(Path::new("/proc")).into_iter().filter_map(Process::read).collect()
}

/// The children of this process, also those that have ended. Only this process takes children off the kernel's list, by
/// collecting them, and new ones come last: so all are found, except for some of those that come meanwhile.
pub(crate) fn children() -> Vec<Pid> {
    if !has_own_numbers() {
        return Vec::new();
    }
    let tasks = Path::new("/proc/self/task");
    let list = |thread: Pid| fs::read_to_string(tasks.join(format!("{thread}/children"))).ok();
    let number = |text: &str| Pid::from_raw(text.parse().ok()?);
    let lists: Option<Vec<String>> = numbers_in(tasks).into_iter().map(list).collect();
    match lists {
        Some(lists) => {
            lists.iter().flat_map(|it| it.split_whitespace().filter_map(number)).collect()
        }
        // The kernel is built without these lists.
        None => all().into_iter().filter(|it| it.is_child_of(getpid())).map(|it| it.pid).collect(),
    }
}

/// The processes or threads that have a directory in `directory`.
pub(crate) fn numbers_in(directory: &Path) -> Vec<Pid> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries.filter_map(|entry| Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)).collect()
}

/// The processes that `root` has started, directly or through others. Parents come before their children.
pub(crate) fn below(root: Pid, processes: &[Process]) -> Vec<&Process> {
    let mut found: Vec<&Process> = Vec::new();
    let mut parent = root.as_raw_pid();
    for next in 0.. {
        // The table is no snapshot: a number that was used again could close a circle.
        let children = processes.iter().filter(|process| process.parent == parent);
        let children: Vec<_> =
            children.filter(|child| child.pid != root && !found.contains(child)).collect();
        found.extend(children);
        match found.get(next) {
            Some(process) => parent = process.pid.as_raw_pid(),
            None => break,
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::process::{Command, Stdio};

    use super::*;

    fn pid(number: i32) -> Pid {
        Pid::from_raw(number).unwrap()
    }

    #[test]
    fn a_name_may_contain_anything() {
        let numbers = (5..=52).map(|n| n.to_string()).collect::<Vec<_>>().join(" ");
        let stat = format!("7 (a) S 1 (\n) D 4 {numbers}\n");
        let process = Process::parse(pid(7), &stat).unwrap();
        let expected = Process {
            pid: pid(7),
            parent: 4,
            group: 5,
            session: 6,
            name: "a) S 1 (\\n".into(),
            state: 'D',
            flags: 9,
            threads: 20,
            started: 22,
        };
        assert_eq!(process, expected);
        for torn in ["", "7 (a", "7 (a)", "7 (a) S", "7 (a) S 1 5 6"] {
            assert_eq!(Process::parse(pid(7), torn), None, "{torn}");
        }
    }

    #[test]
    fn descendants_are_found_also_where_numbers_make_a_circle() {
        let process = |number, parent| Process {
            pid: pid(number),
            parent,
            group: 0,
            session: 0,
            name: String::new(),
            state: 'S',
            flags: 0,
            threads: 1,
            started: 0,
        };
        let table = [process(9, 5), process(5, 9), process(3, 2), process(5, 3), process(2, 1)];
        let found: Vec<_> = below(pid(2), &table).iter().map(|p| p.pid.as_raw_pid()).collect();
        assert_eq!(found, [3, 5, 9, 5]);
    }

    #[test]
    fn a_child_of_this_process_is_listed() {
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let table = all();
        let below = below(getpid(), &table);
        assert!(below.iter().any(|process| process.pid == Pid::from_child(&child)));
        assert!(children().contains(&Pid::from_child(&child)));
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
