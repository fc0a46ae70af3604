//! Where lines go that may be kept waiting: a terminal, a pipe or a file.
//!
//! A terminal that is stopped, a pager and a full pipe let a writer wait for as long as they like. So only a thread of
//! the [`Outlet`] writes. Who has something to write leaves it with the outlet:
//!
//! | what | if there is no room |
//! |---|---|
//! | [`Outlet::say`]: lines of this process | they are dropped and counted, and the count is written later |
//! | [`Outlet::pass_on`]: what another process has written | the caller waits, so that the other process does |

use std::{
    io,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    thread,
    time::Duration,
};

use drumline_shm::PerProcess;
use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

/// The most bytes of this process's own lines that wait.
const OWN_MAX: usize = 1024 * 1024;

/// With so many bytes waiting, whoever passes something on waits, too.
const PASSED_MAX: usize = 256 * 1024;

/// The same for somebody who must not be kept waiting.
const HURRIED_MAX: usize = 32 * 1024 * 1024;

/// The most bytes of one write. After each it is known that somebody reads.
const WRITE_BYTES: usize = 16 * 1024;

/// Removes the last line of a terminal, if that has no end yet.
pub const ERASE: &[u8] = b"\r\x1b[K";

/// A destination, and the thread that writes there.
pub struct Outlet {
    file: Box<dyn AsFd + Send + Sync>,
    name: String,
    is_terminal: bool,
    /// The text that tells how many lines were dropped.
    notice: fn(u64) -> String,
    state: Mutex<State>,
    /// There is something to write.
    work: Condvar,
    /// There is room.
    room: Condvar,
    /// Something was written.
    progress: Condvar,
}

#[derive(Debug, Default)]
struct State {
    waiting: Vec<u8>,
    /// How many of these bytes are this process's own.
    own: usize,
    /// Whether the next line replaces the last one.
    is_unfinished: bool,
    /// Lines that found no room, and of which nothing is told yet.
    dropped: u64,
    /// How many bytes have come, and how many of them are written.
    come: u64,
    written: u64,
    /// The number of `come` behind the last byte that was passed on.
    passed: u64,
    has_writer: bool,
    /// The destination takes nothing any more.
    is_broken: bool,
}

impl std::fmt::Debug for Outlet {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outlet").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Outlet {
    /// One that writes to `file`, which users know as `name`. `notice` tells how many lines were dropped; it may be
    /// empty.
    pub fn over(
        file: impl AsFd + Send + Sync + 'static,
        name: &str,
        notice: fn(u64) -> String,
    ) -> Arc<Outlet> {
        let is_terminal = rustix::termios::isatty(&file)
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        Arc::new(Outlet {
            file: Box::new(file),
            name: name.to_owned(),
            is_terminal,
            notice,
            state: Mutex::default(),
            work: Condvar::new(),
            room: Condvar::new(),
            progress: Condvar::new(),
        })
    }

    /// The stderr of this process.
    pub fn stderr() -> &'static Arc<Outlet> {
        static STDERR: PerProcess<Arc<Outlet>> = PerProcess::new();
        STDERR.get(|| Outlet::over(rustix::stdio::stderr(), "stderr", notice))
    }

    /// The stdout of this process. It is its stderr if both are one file, so that lines do not mix.
    pub fn stdout() -> &'static Arc<Outlet> {
        static STDOUT: PerProcess<Arc<Outlet>> = PerProcess::new();
        let (stdout, stderr) = (rustix::stdio::stdout(), rustix::stdio::stderr());
        STDOUT.get(|| match is_same_file(stdout, stderr) {
            true => Arc::clone(Outlet::stderr()),
            false => Outlet::over(stdout, "stdout", notice),
        })
    }

    /// Whether lines can be drawn in place.
    pub fn is_terminal(&self) -> bool {
        self.is_terminal
    }

    /// How many columns the terminal has; `None` if it is none.
    pub fn columns(&self) -> Option<usize> {
        let size = rustix::termios::tcgetwinsize(self.file.as_fd()).ok();
        size.filter(|_| self.is_terminal).map(|size| usize::from(size.ws_col))
    }

    /// Writes whole lines of this process some time. It never waits.
    pub fn say(self: &Arc<Self>, lines: &[u8]) {
        let mut state = self.lock();
        if state.is_broken {
            return;
        }
        // Once a line is dropped, so are all until the count is told: what is missing is missing in one place.
        if state.dropped > 0 || state.own + lines.len() > OWN_MAX {
            state.dropped += lines.iter().filter(|&&byte| byte == b'\n').count() as u64;
        } else {
            state.own += lines.len();
            state.take(lines, false);
        }
        self.write_beside(state);
    }

    /// Writes what another process has written: whole lines and, if it `is_unfinished`, one that the next line replaces.
    /// Waits for room, unless it `hurries`. Call [`Outlet::hurry`] after changing that.
    pub fn pass_on(self: &Arc<Self>, bytes: &[u8], is_unfinished: bool, hurries: &AtomicBool) {
        if bytes.is_empty() {
            return;
        }
        let is_full = |state: &mut State| {
            let max = if hurries.load(Ordering::Relaxed) { HURRIED_MAX } else { PASSED_MAX };
            state.waiting.len() >= max && !state.is_broken
        };
        let state = self.room.wait_while(self.lock(), is_full);
        let mut state = state.unwrap_or_else(PoisonError::into_inner);
        if !state.is_broken {
            state.take(bytes, is_unfinished);
            state.passed = state.come;
            self.write_beside(state);
        }
    }

    /// Has those who wait for room look again whether they hurry.
    pub fn hurry(&self) {
        drop(self.lock());
        self.room.notify_all();
    }

    /// How many bytes are written. It grows while somebody reads.
    pub fn written(&self) -> u64 {
        self.lock().written
    }

    /// Whether something that was passed on is not written yet.
    pub fn owes(&self) -> bool {
        let state = self.lock();
        state.written < state.passed
    }

    /// Waits until all is written. `false`: nothing has been for this time.
    pub fn settle(&self, patience: Duration) -> bool {
        let mut state = self.lock();
        while state.is_behind() {
            let before = state.written;
            let waited = self.progress.wait_timeout_while(state, patience, |state| {
                state.is_behind() && state.written == before
            });
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if state.is_behind() && state.written == before {
                return false;
            }
        }
        true
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets the thread write. If the system gives none, the caller writes.
    fn write_beside(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        if !state.has_writer {
            let outlet = Arc::clone(self);
            let thread = thread::Builder::new().name("outlet".into()).stack_size(128 * 1024);
            state.has_writer = thread.spawn(move || outlet.run()).is_ok();
        }
        match state.has_writer {
            true => self.work.notify_one(),
            false => drop(self.write(state, &mut Vec::new())),
        }
    }

    fn run(&self) {
        let (mut state, mut bytes) = (self.lock(), Vec::new());
        loop {
            let waited = self.work.wait_while(state, |state| !state.has_work());
            state = self.write(waited.unwrap_or_else(PoisonError::into_inner), &mut bytes);
        }
    }

    /// Writes what waits, by way of `bytes`.
    fn write<'a>(
        &'a self,
        mut state: MutexGuard<'a, State>,
        bytes: &mut Vec<u8>,
    ) -> MutexGuard<'a, State> {
        bytes.clear();
        bytes.shrink_to(2 * PASSED_MAX);
        std::mem::swap(&mut state.waiting, bytes);
        state.own = 0;
        if state.dropped > 0 {
            let notice = (self.notice)(std::mem::take(&mut state.dropped));
            state.come += notice.len() as u64;
            bytes.extend_from_slice(notice.as_bytes());
        }
        let mut rest = &bytes[..];
        while !rest.is_empty() && !state.is_broken {
            drop(state);
            self.room.notify_all();
            let (piece, behind) = rest.split_at(whole_lines(rest));
            let outcome = write_all(self.file.as_fd(), piece);
            if let Err(error) = &outcome {
                let name = &self.name;
                tracing::warn!("cannot write {name} ({error}): the output is dropped from now on");
            }
            state = self.lock();
            state.written += piece.len() as u64;
            if outcome.is_err() {
                state.is_broken = true;
                state.written = state.come;
                (state.waiting, state.dropped) = (Vec::new(), 0);
                self.room.notify_all();
            }
            rest = behind;
            self.progress.notify_all();
        }
        state
    }
}

impl State {
    fn take(&mut self, bytes: &[u8], is_unfinished: bool) {
        let before = self.waiting.len();
        if std::mem::replace(&mut self.is_unfinished, is_unfinished) {
            self.waiting.extend_from_slice(ERASE);
        }
        self.waiting.extend_from_slice(bytes);
        self.come += (self.waiting.len() - before) as u64;
    }

    fn has_work(&self) -> bool {
        !self.waiting.is_empty() || self.dropped > 0
    }

    fn is_behind(&self) -> bool {
        self.written < self.come || self.dropped > 0
    }
}

/// The length of the first piece to write: whole lines, if they are not too long, so that lines of several processes do
/// not mix in one file.
fn whole_lines(bytes: &[u8]) -> usize {
    let most = &bytes[..bytes.len().min(WRITE_BYTES)];
    let end = most.iter().rposition(|&byte| byte == b'\n').map_or(most.len(), |end| end + 1);
    if most.len() == bytes.len() { most.len() } else { end }
}

/// Like [`std::io::stderr`], for the subscriber of a log, as `with_writer` of `tracing_subscriber` takes it. A thread that
/// logs, which may be the one that serves the other ranks, does not wait for whoever reads the log: lines that nobody
/// reads are dropped and counted.
///
/// ```
/// use std::io::Write as _;
///
/// writeln!(drumline::log::stderr(), "one of the lines of a log")?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn stderr() -> Stderr {
    Stderr
}

/// Lines on their way to stderr. Each write is of whole lines.
#[derive(Clone, Copy, Debug)]
pub struct Stderr;

/// A line is written before the program goes on, and perhaps ends, unless nobody reads. On a busy machine the thread that
/// writes may come late. Who does not read keeps the program waiting once.
const HANDED_OVER: Duration = Duration::from_millis(200);

impl io::Write for Stderr {
    fn write(&mut self, lines: &[u8]) -> io::Result<usize> {
        let outlet = Outlet::stderr();
        let is_read = !outlet.lock().is_behind();
        outlet.say(lines);
        if is_read {
            outlet.settle(HANDED_OVER);
        }
        Ok(lines.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What tells users that lines are missing.
fn notice(dropped: u64) -> String {
    match dropped {
        1 => "drumline: a line was dropped, because nobody read it\n".into(),
        _ => format!("drumline: {dropped} lines were dropped, because nobody read them\n"),
    }
}

/// Writes all `bytes`, also to a terminal that another program made non-blocking.
pub fn write_all(file: BorrowedFd<'_>, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                match poll(&mut [PollFd::from_borrowed_fd(file, PollFlags::OUT)], None) {
                    Ok(_) | Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn is_same_file(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> bool {
    let identity = |fd| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, PipeReader, Read, pipe};

    use super::*;

    /// Far longer than any test needs.
    const HANG: Duration = Duration::from_secs(60);

    static WAITS: AtomicBool = AtomicBool::new(false);

    fn to_pipe() -> (Arc<Outlet>, PipeReader) {
        let (read, write) = pipe().unwrap();
        (Outlet::over(write, "a pipe", notice), read)
    }

    /// The next `count` bytes.
    fn next(pipe: &mut PipeReader, count: u64) -> String {
        let mut text = String::new();
        assert_eq!(pipe.take(count).read_to_string(&mut text).unwrap() as u64, count);
        text
    }

    #[test]
    fn lines_that_nobody_reads_are_dropped_and_counted_where_they_are_missing() {
        let (outlet, mut read) = to_pipe();
        let padding = "x".repeat(1000);
        let of = |line: usize| format!("{line:05} {padding}\n");
        // More than pipe and outlet hold. The thread that writes may begin at any time, so there may be several gaps.
        let lines = 4 * 1024;
        for line in 0..lines {
            outlet.say(of(line).as_bytes());
        }
        assert!(!outlet.settle(Duration::ZERO));
        let (mut at, mut dropped) = (0, 0);
        let mut reader = BufReader::new(&mut read);
        while at < lines {
            let mut line = String::new();
            reader.read_line(&mut line).unwrap();
            match line.strip_prefix("drumline: ") {
                None => {
                    assert_eq!(line, of(at));
                    at += 1;
                }
                Some(told) => {
                    let count = told.split_once(' ').unwrap().0.parse().unwrap_or(1);
                    assert_eq!(line, notice(count));
                    at += count as usize;
                    dropped += count as usize;
                }
            }
        }
        assert!(at == lines && dropped > 0 && lines - dropped >= 1024, "{dropped} of {at}");
        // All goes on.
        outlet.say(b"here\n");
        assert_eq!(next(reader.into_inner(), 5), "here\n");
        assert!(outlet.settle(HANG));
    }

    #[test]
    fn what_is_passed_on_waits_for_its_reader_and_what_hurries_does_not() {
        let (outlet, mut read) = to_pipe();
        let piece = [b'x'; 64 * 1024];
        let (hurries, all) = (AtomicBool::new(false), 4 << 20);
        thread::scope(|threads| {
            let passing = threads.spawn(|| {
                for _ in 0..all / piece.len() {
                    outlet.pass_on(&piece, false, &hurries);
                }
            });
            while !outlet.owes() {
                thread::yield_now();
            }
            // Who waits for room leaves some to own lines.
            outlet.say(b"\n");
            assert_eq!(outlet.lock().dropped, 0);
            hurries.store(true, Ordering::Relaxed);
            outlet.hurry();
            passing.join().unwrap();
            assert_eq!(next(&mut read, all as u64 + 1).len(), all + 1);
        });
        assert!(outlet.settle(HANG) && !outlet.owes());
    }

    #[test]
    fn a_line_that_is_drawn_in_place_is_erased_by_the_next_one() {
        let (outlet, mut read) = to_pipe();
        outlet.pass_on(b"1%", true, &WAITS);
        outlet.pass_on(b"2%", true, &WAITS);
        outlet.say(b"done\n");
        outlet.say(b"end\n");
        assert_eq!(next(&mut read, 19), "1%\r\x1b[K2%\r\x1b[Kdone\nen");
    }

    #[test]
    fn a_closed_destination_keeps_nobody_waiting() {
        let (outlet, read) = to_pipe();
        drop(read);
        for _ in 0..100 {
            outlet.pass_on(&[b'x'; 100_000], false, &WAITS);
            outlet.say(b"text\n");
        }
        assert!(outlet.settle(HANG));
        let state = outlet.lock();
        assert!(state.is_broken && state.waiting.capacity() == 0 && state.dropped == 0);
    }

    #[test]
    fn pieces_end_where_lines_do() {
        assert_eq!(whole_lines(b"a\nb"), 3);
        let long = [[b'x'; WRITE_BYTES - 5].as_slice(), b"\nyyyyyyy\n"].concat();
        assert_eq!(whole_lines(&long), WRITE_BYTES - 4);
        assert_eq!(whole_lines(&[b'x'; 2 * WRITE_BYTES]), WRITE_BYTES);
    }
}
