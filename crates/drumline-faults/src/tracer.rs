//! Traces all threads of one program and stops them at system calls.

use std::{collections::HashMap, ffi::OsString, fs, io, os::unix::process::CommandExt as _};

use nix::{
    errno::Errno,
    sys::{
        ptrace::{self, Options},
        signal::Signal,
        wait::{WaitPidFlag, WaitStatus, waitpid},
    },
    unistd::Pid,
};

use crate::calls::{Fault, faults_of, name_of};

/// The outcome of a traced run.
#[derive(Debug)]
pub struct Outcome {
    /// How many calls were counted between the first two of the program's marks (`getpriority`).
    pub start_up: usize,
    /// How many calls were counted from the first mark on, up to the fault.
    pub calls: usize,
    /// The failed call, its thread and its fault.
    pub failed: Option<String>,
    /// The exit status of the program, or 128 and the number of the signal that ended it.
    pub status: i32,
}

/// A call that the kernel is carrying out.
enum Inside {
    Untouched,
    /// The call will return this error.
    Failing(i32),
}

struct Tracer {
    program: Pid,
    nth: usize,
    variant: usize,
    only: Option<String>,
    marks: usize,
    inside: HashMap<Pid, Inside>,
    outcome: Outcome,
}

/// Lets the parent trace this process, and replaces the program by `command`. Returns only on failure.
pub fn become_traced(command: &[OsString]) -> io::Error {
    if let Err(error) = ptrace::traceme() {
        return error.into();
    }
    match command.split_first() {
        Some((program, arguments)) => std::process::Command::new(program).args(arguments).exec(),
        None => io::Error::other("no program"),
    }
}

/// Traces `program`, a child that has called [`become_traced`]. Its `nth` counted call fails; with 0, none
/// fails. `variant` chooses one of the faults that this call may have. With `only`, only calls of that name
/// are counted.
///
/// # Errors
///
/// The child cannot be traced.
pub fn trace(
    program: i32,
    nth: usize,
    variant: usize,
    only: Option<String>,
) -> nix::Result<Outcome> {
    let program = Pid::from_raw(program);
    match waitpid(program, Some(WaitPidFlag::__WALL))? {
        WaitStatus::Stopped(..) => {}
        _ => return Err(Errno::EPERM),
    }
    ptrace::setoptions(
        program,
        Options::PTRACE_O_TRACESYSGOOD | Options::PTRACE_O_TRACECLONE | Options::PTRACE_O_EXITKILL,
    )?;
    ptrace::syscall(program, None)?;
    let outcome = Outcome { start_up: 0, calls: 0, failed: None, status: 0 };
    let inside = HashMap::new();
    Tracer { program, nth, variant, only, marks: 0, inside, outcome }.run()
}

impl Tracer {
    fn run(mut self) -> nix::Result<Outcome> {
        loop {
            match waitpid(None, Some(WaitPidFlag::__WALL))? {
                WaitStatus::Exited(pid, status) if pid == self.program => {
                    self.outcome.status = status;
                    return Ok(self.outcome);
                }
                WaitStatus::Signaled(pid, signal, _) if pid == self.program => {
                    self.outcome.status = 128 + signal as i32;
                    return Ok(self.outcome);
                }
                WaitStatus::PtraceSyscall(pid) => {
                    // A stopped thread may be killed. Then it has no registers to read.
                    gone_is_fine(self.at_call(pid))?;
                    self.go_on(pid, None)?;
                }
                WaitStatus::PtraceEvent(pid, ..) => self.go_on(pid, None)?,
                // A new thread begins with this stop.
                WaitStatus::Stopped(pid, Signal::SIGSTOP) => self.go_on(pid, None)?,
                WaitStatus::Stopped(pid, signal) => self.go_on(pid, Some(signal))?,
                _ => {}
            }
        }
    }

    /// Continues a thread. Until the fault it stops at every call; afterwards only where the kernel stops it
    /// anyway.
    fn go_on(&self, pid: Pid, signal: Option<Signal>) -> nix::Result<()> {
        let done = self.outcome.failed.is_some() && !self.inside.contains_key(&pid);
        gone_is_fine(if done { ptrace::cont(pid, signal) } else { ptrace::syscall(pid, signal) })
    }

    fn at_call(&mut self, pid: Pid) -> nix::Result<()> {
        let mut registers = ptrace::getregs(pid)?;
        match self.inside.remove(&pid) {
            Some(Inside::Untouched) => return Ok(()),
            Some(Inside::Failing(error)) => {
                registers.rax = i64::from(-error) as u64;
                return ptrace::setregs(pid, registers);
            }
            None => {}
        }
        let number = registers.orig_rax as i64;
        if number == libc::SYS_getpriority {
            self.marks += 1;
            if self.marks == 2 {
                self.outcome.start_up = self.outcome.calls;
            }
        }
        self.inside.insert(pid, Inside::Untouched);
        let is_meant = self.only.as_ref().is_none_or(|only| *only == name_of(number));
        let counts = self.marks > 0 && self.outcome.failed.is_none() && is_meant;
        let faults = if counts { faults_of(number, pid.as_raw(), registers.rdi) } else { &[] };
        if faults.is_empty() {
            return Ok(());
        }
        self.outcome.calls += 1;
        if self.outcome.calls != self.nth {
            return Ok(());
        }
        let what = match faults[self.variant % faults.len()] {
            Fault::Error(error) => {
                // No call has this number, so the kernel does nothing.
                registers.orig_rax = u64::MAX;
                self.inside.insert(pid, Inside::Failing(error));
                format!("{:?}: {}", Errno::from_raw(error), io::Error::from_raw_os_error(error))
            }
            Fault::Less => {
                registers.rdx = (registers.rdx / 2).max(1);
                format!("asked for only {}", registers.rdx)
            }
        };
        ptrace::setregs(pid, registers)?;
        let thread = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        self.outcome.failed = Some(format!("{} of {}: {what}", name_of(number), thread.trim()));
        Ok(())
    }
}

fn gone_is_fine(result: nix::Result<()>) -> nix::Result<()> {
    match result {
        Err(Errno::ESRCH) => Ok(()),
        other => other,
    }
}
