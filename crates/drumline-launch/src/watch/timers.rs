//! Timers of torch: `TORCHELASTIC_ENABLE_FILE_TIMER`, `TORCHELASTIC_TIMER_FILE`.
//!
//! A program of torch says `with expires(after=60, scope="step")`. Its `FileTimerClient` opens a named pipe and writes
//! a line when the block begins, and another one when it ends:
//!
//! ```text
//! {"version": 1, "pid": 4713, "scope_id": "step", "expiration_time": 1790000000.5, "signal": 9}
//! {"version": 1, "pid": 4713, "scope_id": "step", "expiration_time": -1, "signal": 0}
//! ```
//!
//! If the block has not ended at that time, in seconds since 1970, the process gets the signal. No signal is sent to a
//! process that does not belong to the job.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, ErrorKind, Read},
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::FileTypeExt,
    },
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, mknodat, open},
    process::{Pid, Signal},
};

use super::{
    finding::Finding,
    guard::{Guard, LOOK_FOR, Ward},
};
use crate::{Error, Result, clock::since_1970, ending::signal_name, processes, waits};

/// What a writer sends at once. The kernel never mixes such lines (`PIPE_BUF`), and torch sends no longer ones.
const LINE_MAX: usize = 4096;

/// So many blocks may be open at once.
const TIMERS_MAX: usize = 65_536;

/// The name of the pipe. It is removed when this is dropped.
#[derive(Debug)]
pub(crate) struct TimerFile(PathBuf);

impl Drop for TimerFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Ends the processes whose timers expire.
#[derive(Debug)]
pub(crate) struct TimerGuard {
    path: PathBuf,
    /// Open for writing, too: so there is always a writer, and the pipe has no end.
    pipe: File,
    timers: Timers,
    /// The beginning of a line, the rest of which has not come.
    begun: Vec<u8>,
    /// Whether the rest of this line is left out.
    is_too_long: bool,
    has_warned: bool,
}

impl TimerGuard {
    /// Makes the pipe, in place of one that is left there.
    pub(crate) fn make(path: &Path) -> Result<(TimerGuard, TimerFile)> {
        let failed = |error: io::Error| {
            Error::system(format!("make the pipe TORCHELASTIC_TIMER_FILE={}", path.display()))(
                error,
            )
        };
        match fs::symlink_metadata(path) {
            Ok(left) if left.file_type().is_fifo() => fs::remove_file(path).map_err(failed)?,
            Ok(_) => {
                let there =
                    "there is something with this name that is not a pipe: choose another name";
                return Err(failed(io::Error::new(ErrorKind::AlreadyExists, there)));
            }
            Err(_) => {}
        }
        let mode = Mode::RUSR | Mode::WUSR;
        mknodat(CWD, path, FileType::Fifo, mode, 0).map_err(|error| failed(error.into()))?;
        let file = TimerFile(path.to_owned());
        // Somebody may have put something else there meanwhile.
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let pipe = open(path, flags, Mode::empty()).map(File::from).map_err(io::Error::from);
        let pipe = pipe.map_err(failed)?;
        if !pipe.metadata().map_err(failed)?.file_type().is_fifo() {
            return Err(failed(io::Error::other("it was replaced by something that is no pipe")));
        }
        let guard = TimerGuard {
            path: path.to_owned(),
            pipe,
            timers: Timers::default(),
            begun: Vec::new(),
            is_too_long: false,
            has_warned: false,
        };
        Ok((guard, file))
    }

    /// Reads what is there.
    fn hear(&mut self, now: Duration) {
        let mut bytes = [0; 64 * 1024];
        loop {
            let count = match self.pipe.read(&mut bytes) {
                Ok(count @ 1..) => count,
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                _ => return,
            };
            for part in bytes[..count].split_inclusive(|&byte| byte == b'\n') {
                self.take(now, part);
            }
        }
    }

    /// Takes a line, or a part of one.
    fn take(&mut self, now: Duration, part: &[u8]) {
        let (text, is_whole) = match part.split_last() {
            Some((b'\n', text)) => (text, true),
            _ => (part, false),
        };
        self.is_too_long |= self.begun.len() + text.len() > LINE_MAX;
        if !self.is_too_long {
            self.begun.extend_from_slice(text);
        }
        if !is_whole {
            return;
        }
        let line = std::mem::take(&mut self.begun);
        let problem = match std::mem::take(&mut self.is_too_long) {
            true => Err("it is too long"),
            false => self.timers.hear(now, since_1970(SystemTime::now()), &line),
        };
        if let Err(problem) = problem
            && !std::mem::replace(&mut self.has_warned, true)
        {
            let start: Vec<u8> = line.iter().copied().take(200).collect();
            tracing::warn!(
                "a line of {} is no timer of torch's: {problem}; this and further ones are left out: {:?}",
                self.path.display(),
                String::from_utf8_lossy(&start),
            );
        }
    }
}

impl Guard for TimerGuard {
    fn descriptor(&self) -> Option<BorrowedFd<'_>> {
        Some(self.pipe.as_fd())
    }

    fn due(&self) -> Option<Duration> {
        self.timers.due()
    }

    fn look(&mut self, now: Duration, wards: &[Ward]) -> Option<Finding> {
        self.hear(now);
        while let Some(Expired { pid, scope, signal }) = self.timers.expired(now) {
            let Some(worker) = worker_of(pid, wards) else { continue };
            let (ward, name) = (&wards[worker], signal_name(signal.as_raw()));
            let whose = match ward.pid == pid {
                true => String::new(),
                false => format!(" of its process {pid}"),
            };
            let places = waits::within(LOOK_FOR, vec![(ward.rank, ward.pid)]);
            return Some(Finding {
                worker,
                signal,
                how: format!("the timer {scope:?}{whose} has expired ({name}, torch's expires)"),
                details: places.into_iter().flat_map(|(_, lines)| lines).collect(),
            });
        }
        None
    }
}

/// The worker that is this process, or that has started it.
fn worker_of(pid: Pid, wards: &[Ward]) -> Option<usize> {
    let living = || wards.iter().enumerate().filter(|(_, ward)| ward.lives());
    if let Some((worker, _)) = living().find(|(_, ward)| ward.pid == pid) {
        return Some(worker);
    }
    let table = processes::all();
    let mut living = living();
    let is_below = |ward: &Ward| processes::below(ward.pid, &table).iter().any(|it| it.pid == pid);
    living.find(|(_, ward)| is_below(ward)).map(|(worker, _)| worker)
}

/// The timers that run.
#[derive(Debug, Default)]
struct Timers(BTreeMap<(i32, String), (Duration, i32)>);

/// A timer that has expired.
#[derive(Debug, PartialEq, Eq)]
struct Expired {
    pid: Pid,
    scope: String,
    signal: Signal,
}

impl Timers {
    /// Hears a line at `now`, when it is `today` after 1970. The wall clock counts at this moment only, because it may
    /// be set.
    fn hear(&mut self, now: Duration, today: Duration, line: &[u8]) -> Result<(), &'static str> {
        let line: Line = serde_json::from_slice(line).map_err(|_| "it is no JSON of that kind")?;
        let key = (line.pid, line.scope_id);
        if line.expiration_time < 0.0 {
            self.0.remove(&key);
            return Ok(());
        }
        let at = Duration::try_from_secs_f64(line.expiration_time).map_err(|_| "its time")?;
        if self.0.len() >= TIMERS_MAX && !self.0.contains_key(&key) {
            return Err("there are too many");
        }
        self.0.insert(key, (now + at.saturating_sub(today), line.signal));
        Ok(())
    }

    /// When the next one expires.
    fn due(&self) -> Option<Duration> {
        self.0.values().map(|(at, _)| *at).min()
    }

    /// Takes away the first of those that have expired. A timer without a signal does nothing, as in torch.
    fn expired(&mut self, now: Duration) -> Option<Expired> {
        loop {
            let first = self.0.iter().min_by_key(|(_, (at, _))| *at);
            let key = first.filter(|(_, (at, _))| *at <= now).map(|(key, _)| key.clone())?;
            let (_, signal) = self.0.remove(&key)?;
            let (pid, scope) = key;
            if let (Some(pid), Some(signal)) = (Pid::from_raw(pid), Signal::from_named_raw(signal))
            {
                return Some(Expired { pid, scope, signal });
            }
        }
    }
}

/// A line, as torch writes it.
#[derive(serde::Deserialize)]
struct Line {
    pid: i32,
    scope_id: String,
    expiration_time: f64,
    signal: i32,
}

#[cfg(test)]
mod tests {
    use super::*;

    const TODAY: Duration = Duration::from_secs(1_790_000_000);

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn line(pid: i32, scope: &str, time: f64, signal: i32) -> Vec<u8> {
        format!(
            r#"{{"version": 1, "pid": {pid}, "scope_id": "{scope}", "expiration_time": {time}, "signal": {signal}}}"#
        )
        .into_bytes()
    }

    fn expired(timers: &mut Timers, now: Duration) -> Option<(i32, String, Signal)> {
        timers.expired(now).map(|it| (it.pid.as_raw_pid(), it.scope, it.signal))
    }

    #[test]
    fn what_is_not_released_in_time_expires() {
        let mut timers = Timers::default();
        let after = |seconds: f64| TODAY.as_secs_f64() + seconds;
        timers.hear(at(5), TODAY, &line(7, "a", after(10.0), 9)).unwrap();
        timers.hear(at(5), TODAY, &line(7, "b", after(4.0), 15)).unwrap();
        timers.hear(at(5), TODAY, &line(8, "a", after(1.0), 9)).unwrap();
        timers.hear(at(5), TODAY, &line(8, "a", -1.0, 0)).unwrap();
        assert_eq!(timers.due(), Some(at(9)));
        assert_eq!(expired(&mut timers, at(8)), None);
        assert_eq!(expired(&mut timers, at(20)), Some((7, "b".into(), Signal::TERM)));
        assert_eq!(expired(&mut timers, at(20)), Some((7, "a".into(), Signal::KILL)));
        assert_eq!((expired(&mut timers, at(20)), timers.due()), (None, None));
    }

    #[test]
    fn a_timer_is_set_again_by_its_name_and_one_without_a_signal_does_nothing() {
        let mut timers = Timers::default();
        let after = |seconds: f64| TODAY.as_secs_f64() + seconds;
        timers.hear(at(0), TODAY, &line(7, "a", after(1.0), 9)).unwrap();
        timers.hear(at(0), TODAY, &line(7, "a", after(100.0), 9)).unwrap();
        timers.hear(at(0), TODAY, &line(7, "b", after(2.0), 0)).unwrap();
        // Long ago: it has expired already.
        timers.hear(at(0), TODAY, &line(9, "c", 3.0, 9)).unwrap();
        assert_eq!(expired(&mut timers, at(50)), Some((9, "c".into(), Signal::KILL)));
        assert_eq!(expired(&mut timers, at(50)), None);
        assert_eq!(timers.due(), Some(at(100)));
    }

    #[test]
    fn what_is_no_line_of_torch_is_refused() {
        let mut timers = Timers::default();
        let lines: [&[u8]; 6] = [
            b"",
            b"{",
            b"\xff\xfe",
            b"[1, 2]",
            br#"{"pid": 1, "scope_id": 3, "expiration_time": 1, "signal": 9}"#,
            br#"{"pid": 1, "scope_id": "a", "expiration_time": 1e300, "signal": 9}"#,
        ];
        for bad in lines {
            assert!(timers.hear(at(0), TODAY, bad).is_err(), "{}", String::from_utf8_lossy(bad));
        }
        assert_eq!(timers.due(), None);
    }
}
