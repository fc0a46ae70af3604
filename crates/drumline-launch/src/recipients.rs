//! Which processes of a rank get a signal.
//!
//! A rank that handles SIGTERM finishes its step and saves. If the processes that it has started got the signal, too,
//! its loaders of data would be gone before it has. So the signal goes to the rank alone if the rank handles it. A rank
//! that does not would only die, and so its whole process group gets it.
//!
//! Shells are no such ranks: `sh -c "python train.py; cleanup"` passes nothing on, and handles some signals only to wait
//! for its child. So the signal goes to the programs below a shell that handle it, and to the shell if it has a trap.

use std::{cell::OnceCell, fs};

use rustix::process::{Pid, Signal};

use crate::{
    processes::{self, Process},
    signals::mask,
};

/// What shells are called.
const SHELLS: [&str; 7] = ["sh", "bash", "dash", "ash", "busybox", "ksh", "zsh"];

/// The processes of this host, as far as somebody has asked for them.
#[derive(Debug, Default)]
pub(crate) struct Table(OnceCell<Vec<Process>>);

impl Table {
    /// Those processes of the rank with the process `root` that get this signal in place of its whole group. Empty: none
    /// of them handles it.
    pub(crate) fn recipients(&self, root: Pid, signal: Signal) -> Vec<Pid> {
        let look = |pid| {
            let takes = takes(&fs::read_to_string(format!("/proc/{pid}/status")).ok()?, signal);
            Some((Process::read(pid).is_some_and(|it| SHELLS.contains(&&*it.name)), takes))
        };
        let children = |pid: Pid| -> Vec<Pid> {
            let all = self.0.get_or_init(processes::all).iter();
            all.filter(move |it| it.is_child_of(pid) && it.pid != root).map(|it| it.pid).collect()
        };
        below(root, &look, &children)
    }
}

/// The same, if `look` tells whether a process is a shell, and whether it handles the signal.
fn below(
    root: Pid,
    look: &impl Fn(Pid) -> Option<(bool, bool)>,
    children: &impl Fn(Pid) -> Vec<Pid>,
) -> Vec<Pid> {
    let (mut shells, mut programs) = (Vec::new(), Vec::new());
    let (mut open, mut seen) = (vec![root], vec![root]);
    while let Some(pid) = open.pop() {
        match look(pid) {
            Some((false, true)) => programs.push(pid),
            Some((true, takes)) => {
                shells.extend(takes.then_some(pid));
                // The table is no snapshot: a number that was used again could close a circle.
                let new: Vec<Pid> =
                    children(pid).into_iter().filter(|it| !seen.contains(it)).collect();
                seen.extend(&new);
                open.extend(new);
            }
            Some((false, false)) | None => {}
        }
    }
    if programs.is_empty() { programs } else { [programs, shells].concat() }
}

/// Whether a process with this `/proc/PID/status` handles the signal, waits for it, or ignores it.
fn takes(status: &str, signal: Signal) -> bool {
    let masks = ["SigCgt:", "SigIgn:", "SigBlk:"].map(|name| mask(status, name));
    masks.iter().any(|mask| mask >> (signal.as_raw() - 1) & 1 == 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pid(number: i32) -> Pid {
        Pid::from_raw(number).unwrap()
    }

    /// A process: its parent, whether it is a shell, whether it handles the signal.
    type Row = (i32, i32, bool, bool);

    fn found(table: &[Row]) -> Vec<i32> {
        let look = |it: Pid| {
            let row = table.iter().find(|row| row.0 == it.as_raw_pid());
            row.map(|&(_, _, is_shell, takes)| (is_shell, takes))
        };
        let children = |parent: Pid| {
            let rows = table.iter().filter(|row| row.1 == parent.as_raw_pid());
            rows.map(|row| pid(row.0)).collect()
        };
        let mut found: Vec<i32> =
            below(pid(1), &look, &children).iter().map(|it| it.as_raw_pid()).collect();
        found.sort_unstable();
        found
    }

    #[test]
    fn a_rank_that_handles_a_signal_gets_it_alone_and_shells_let_it_through() {
        const SHELL: bool = true;
        const TAKES: bool = true;
        for (what, table, wanted) in [
            ("alone", vec![(1, 0, false, TAKES), (2, 1, false, TAKES)], vec![1]),
            ("no handler", vec![(1, 0, false, false), (2, 1, false, TAKES)], vec![]),
            ("a shell", vec![(1, 0, SHELL, false), (2, 1, false, TAKES)], vec![2]),
            ("a shell alone", vec![(1, 0, SHELL, TAKES), (2, 1, false, false)], vec![]),
            ("a trap, too", vec![(1, 0, SHELL, TAKES), (2, 1, false, TAKES)], vec![1, 2]),
            (
                "a pipe and a shell in a shell",
                vec![
                    (1, 0, SHELL, false),
                    (2, 1, SHELL, false),
                    (3, 1, false, false),
                    (4, 2, false, TAKES),
                    (5, 4, false, TAKES),
                ],
                vec![4],
            ),
            ("a circle", vec![(1, 2, SHELL, false), (2, 1, SHELL, false)], vec![]),
            ("it has gone", vec![], vec![]),
        ] {
            assert_eq!(found(&table), wanted, "{what}");
        }
    }

    #[test]
    fn what_a_process_handles_is_read() {
        let status =
            "SigBlk:\t0000000000000200\nSigIgn:\t0000000000000001\nSigCgt:\t0000000000004000\n";
        for (signal, wanted) in [
            (Signal::TERM, true),
            (Signal::HUP, true),
            (Signal::USR1, true),
            (Signal::INT, false),
            (Signal::USR2, false),
        ] {
            assert_eq!(takes(status, signal), wanted, "{signal:?}");
        }
        let this = rustix::process::getpid();
        assert_eq!(Table::default().recipients(this, Signal::PIPE), [this], "ignored by Rust");
        assert_eq!(Table::default().recipients(this, Signal::VTALARM), []);
    }
}
