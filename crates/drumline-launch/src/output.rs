//! Passes on what the workers write: to the terminal, file or pipe of the launcher, and to files of their own.
//!
//! One thread per stream reads, cuts lines and passes whole lines on, so lines of two ranks never mix. A
//! stopped terminal or a slow pager holds up these threads, and through its pipe the rank, but never the supervision.
//! When a rank has ended, the rest of its output waits in memory, so that the report has its last words. Every line
//! starts with its rank: `[3] text`. A line of more than 64 KiB continues in a line that starts with
//! `[3]+`. A file of one rank has the bytes that the rank wrote.

use std::{
    collections::VecDeque,
    net::Shutdown,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    sync::{
        Arc, Mutex, PoisonError, TryLockError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use drumline::Outlet;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::{
    Error, Job, Logs, Result,
    files::WorldFiles,
    lines::{Lines, Piece},
    prefix::{Labels, Prefix},
    sink::{Sink, Text},
    world::World,
};

/// How many lines of each rank's stderr are kept for the report.
const TAIL_LINES: usize = 20;

/// How many bytes of each of these lines are kept.
const TAIL_LINE_BYTES: usize = 4 * 1024;

/// How many bytes are still read from a worker's pipe when the job is over. A process that has left the
/// worker's group may keep writing there for ever. More than a pipe holds, so nothing that was written
/// in time is lost.
const LEFTOVER_MAX: usize = 1024 * 1024;

/// How long the end of a job waits for a reader that does not read, once a signal has ended the job or only lines of the
/// launcher's own are left.
const PATIENCE: Duration = Duration::from_secs(2);

/// Writes a line of the launcher's own to stderr, some time.
pub(crate) fn say(line: &str) {
    report(format!("drumline: {line}\n").as_bytes());
}

/// Writes whole lines of the launcher's own to stderr, some time.
pub(crate) fn report(lines: &[u8]) {
    if !lines.is_empty() {
        Outlet::stderr().say(lines);
    }
}

/// How long the end of a job still waits for those who read its output.
#[derive(Debug)]
pub(crate) struct Patience {
    written: u64,
    since: Instant,
}

impl Patience {
    pub(crate) fn begin() -> Patience {
        Patience { written: written(), since: Instant::now() }
    }

    /// Whether nobody has read anything for a while.
    pub(crate) fn is_over(&mut self) -> bool {
        let written = written();
        if written != self.written {
            *self = Patience { written, since: Instant::now() };
        }
        self.since.elapsed() >= PATIENCE
    }
}

/// How many bytes are written to stdout and stderr.
fn written() -> u64 {
    outlets().iter().map(|outlet| outlet.written()).sum()
}

fn outlets() -> [&'static Arc<Outlet>; 2] {
    [Outlet::stdout(), Outlet::stderr()]
}

/// Waits until stdout and stderr have taken everything, or until `is_tired` says that this takes too long. It is asked many
/// times a second. Output of ranks is not given up before that; nobody waits long for a reader who only misses lines of the
/// launcher's own. Nobody waits a second time for a reader who was given up and has not read since.
pub(crate) fn see_out(mut is_tired: impl FnMut() -> bool) {
    const TURN: Duration = Duration::from_millis(20);
    /// What was written when the reader was given up.
    static GIVEN_UP: AtomicU64 = AtomicU64::new(u64::MAX);
    let mut patience = Patience::begin();
    let is_given_up = || GIVEN_UP.load(Ordering::Relaxed) == written();
    while !is_given_up() && !outlets().iter().all(|outlet| outlet.settle(TURN)) {
        let is_tired = is_tired() || !outlets().iter().any(|outlet| outlet.owes());
        if is_tired && patience.is_over() {
            GIVEN_UP.store(written(), Ordering::Relaxed);
        }
    }
}

/// Waits until all that this process has to say is written, but not for a reader who does not read. For the end of a
/// process, and before it becomes another program.
pub fn flush() {
    see_out(|| true);
}

/// The destinations, and the threads that read what workers write.
#[derive(Debug)]
pub(crate) struct Console {
    /// The files of all ranks for lines of stdout, and of stderr.
    filtered: [Option<Filtered>; 2],
    /// All files, and their names.
    files: Vec<(String, Arc<Mutex<Sink>>)>,
    workers: Vec<Heard>,
    labels: Labels,
    labels_stdout: bool,
    logs: Logs,
    /// The launcher's end of a socket pair. Shutting it down tells the readers to finish. It becomes
    /// readable when every reader has dropped its share of `far`.
    near: UnixStream,
    /// The readers' end; `None` once no more output can come.
    far: Option<Arc<UnixStream>>,
}

/// What the launcher hears of a worker.
#[derive(Debug)]
struct Heard {
    /// The last lines of its stderr.
    tail: Arc<Mutex<Tail>>,
    /// Whether it has ended. Then nobody but the launcher waits for its readers, who do not wait any longer.
    has_ended: Arc<AtomicBool>,
}

type Tail = VecDeque<Vec<u8>>;

/// A file for the lines that contain one of some texts.
#[derive(Clone, Debug)]
struct Filtered {
    sink: Arc<Mutex<Sink>>,
    texts: Arc<[String]>,
}

impl Console {
    /// Writes to the stdout and stderr of this process, and to `files`.
    pub(crate) fn open(job: &Job, world: &World, files: &WorldFiles) -> Result<Console> {
        let (near, far) =
            UnixStream::pair().map_err(Error::call("socketpair", "make a socket pair"))?;
        let mut console = Console {
            filtered: [None, None],
            files: Vec::new(),
            workers: Vec::new(),
            labels: Labels::of(job, world),
            labels_stdout: job.labels_stdout,
            logs: job.logs.clone(),
            near,
            far: Some(Arc::new(far)),
        };
        let filters = [&job.logs.stdout_filters, &job.logs.stderr_filters];
        let names = ["filtered_stdout.log", "filtered_stderr.log"];
        console.filtered = [0, 1].map(|i| {
            let path = files.log_of_all(names[i]).filter(|_| !filters[i].is_empty())?;
            let sink = console.keep(path);
            Some(Filtered { sink, texts: filters[i].as_slice().into() })
        });
        Ok(console)
    }

    /// How many columns a worker's line may fill on the terminal behind stderr; `None` without a
    /// terminal.
    pub(crate) fn columns(&self) -> Option<usize> {
        let taken = self.labels.prefix(0, false).width();
        let columns = Outlet::stderr().columns()?.saturating_sub(taken);
        Some(columns).filter(|&columns| columns > 0)
    }

    /// Passes on the output of the worker with the next local rank. If it `asks`, questions are shown that end without a
    /// line break.
    pub(crate) fn attach(
        &mut self,
        streams: [OwnedFd; 2],
        files: &WorldFiles,
        asks: bool,
    ) -> Result<()> {
        let local_rank = self.workers.len();
        let (tail, has_ended) = (Arc::default(), Arc::new(AtomicBool::new(false)));
        self.workers.push(Heard { tail: Arc::clone(&tail), has_ended: Arc::clone(&has_ended) });
        let (shown, kept) = (self.logs.to_console(local_rank), self.logs.to_files(local_rank));
        let (shown, kept) = ([shown.stdout, shown.stderr], [kept.stdout, kept.stderr]);
        for (i, stream) in streams.into_iter().enumerate() {
            let (is_stderr, outlet) = (i == 1, outlets()[i]);
            let prefix = match is_stderr || self.labels_stdout {
                true => self.labels.prefix(local_rank, is_coloured(outlet)),
                false => Prefix::default(),
            };
            let file = files.log(local_rank, ["stdout.log", "stderr.log"][i]);
            let plain = self.labels.prefix(local_rank, false);
            let reader = Reader {
                outlet: shown[i].then(|| Arc::clone(outlet)),
                file: file.filter(|_| kept[i]).map(|path| self.keep(path)),
                filtered: self.filtered[i].clone().map(|filtered| (filtered, plain)),
                tail: is_stderr.then(|| Arc::clone(&tail)),
                asks,
                has_ended: Arc::clone(&has_ended),
                ..Reader::of(stream, prefix)
            };
            self.read(reader)?;
        }
        Ok(())
    }

    /// The worker with this local rank has ended: the rest of its output is read at once, even if nobody takes it yet.
    pub(crate) fn has_ended(&self, local_rank: usize) {
        if let Some(worker) = self.workers.get(local_rank) {
            worker.has_ended.store(true, Ordering::Relaxed);
            outlets().iter().for_each(|outlet| outlet.hurry());
        }
    }

    /// Tells the readers to pass on the rest of the output and to end. [`Console::finished`] becomes
    /// readable when they have.
    pub(crate) fn finish(&mut self) {
        self.far = None;
        let _ = self.near.shutdown(Shutdown::Write);
        (0..self.workers.len()).for_each(|local_rank| self.has_ended(local_rank));
    }

    /// A descriptor that is readable once all output is read.
    pub(crate) fn finished(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }

    /// The last lines that the worker with this local rank wrote to stderr.
    pub(crate) fn tail(&self, local_rank: usize) -> Vec<Vec<u8>> {
        let worker = self.workers.get(local_rank);
        worker.map_or_else(Vec::new, |worker| lock(&worker.tail).iter().cloned().collect())
    }

    /// Whether all is read that the worker with this local rank has written to stderr.
    pub(crate) fn has_read_all(&self, local_rank: usize) -> bool {
        // The reader has the other share.
        self.workers.get(local_rank).is_none_or(|worker| Arc::strong_count(&worker.tail) == 1)
    }

    /// The files in which something is missing, and why.
    pub(crate) fn problems(&self) -> Vec<String> {
        let problem = |(name, file): &(String, Arc<Mutex<Sink>>)| match file.try_lock() {
            Ok(file) => file.problem(),
            Err(TryLockError::Poisoned(file)) => file.into_inner().problem(),
            // A reader waits for the disk.
            Err(TryLockError::WouldBlock) => {
                Some(format!("{name} is not complete: its disk does not take what is written"))
            }
        };
        self.files.iter().filter_map(problem).collect()
    }

    fn keep(&mut self, path: PathBuf) -> Arc<Mutex<Sink>> {
        let name = path.display().to_string();
        let file = Arc::new(Mutex::new(Sink::at(path)));
        self.files.push((name, Arc::clone(&file)));
        file
    }

    fn read(&self, reader: Reader) -> Result<()> {
        let Some(stop) = self.far.clone() else { return Ok(()) };
        // The stacks are small: there may be hundreds of these threads, and their buffers are on the heap.
        thread::Builder::new()
            .name("output".into())
            .stack_size(128 * 1024)
            .spawn(move || reader.run(&stop))
            .map_err(Error::call("clone3", "start a thread for a worker's output"))?;
        Ok(())
    }
}

/// After so long a line that has no end yet is a question.
const ASKS_AFTER: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Reads one stream until its end.
struct Reader {
    stream: OwnedFd,
    prefix: Prefix,
    /// Where lines are shown; `None` if they are not.
    outlet: Option<Arc<Outlet>>,
    /// Where all bytes go, too.
    file: Option<Arc<Mutex<Sink>>>,
    /// Where some lines go, too, and what they begin with there.
    filtered: Option<(Filtered, Prefix)>,
    tail: Option<Arc<Mutex<Tail>>>,
    /// Whether the next piece continues a line.
    is_continued: bool,
    /// Whether a line is shown before its end if nothing follows for a while: a question to the user.
    asks: bool,
    has_ended: Arc<AtomicBool>,
    /// What is shown next, and what goes to the filtered file.
    shown: Text,
    chosen: Vec<u8>,
}

impl Reader {
    /// Drops what it reads.
    fn of(stream: OwnedFd, prefix: Prefix) -> Reader {
        Reader {
            stream,
            prefix,
            outlet: None,
            file: None,
            filtered: None,
            tail: None,
            is_continued: false,
            asks: false,
            has_ended: Arc::default(),
            shown: Text::default(),
            chosen: Vec::new(),
        }
    }

    fn run(mut self, stop: &UnixStream) {
        self.shown = Text::new(self.outlet.as_ref().is_some_and(|it| it.is_terminal()));
        let filtered = self.filtered.iter().map(|(filtered, _)| &filtered.sink);
        self.file.iter().chain(filtered).for_each(|file| lock(file).open());
        let mut lines = Lines::default();
        let mut buffer = vec![0; 64 * 1024];
        let mut leftover = LEFTOVER_MAX;
        let mut has_asked = false;
        while leftover > 0 {
            let mut ready =
                [PollFd::new(&self.stream, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            let question = lines.unfinished().filter(|_| self.asks && !has_asked);
            match poll(&mut ready, question.and(Some(&ASKS_AFTER))) {
                Err(Errno::INTR) => continue,
                Ok(0) => {
                    has_asked = true;
                    let question = question.map(<[u8]>::to_vec).unwrap_or_default();
                    self.pass_on(|emit| emit(Piece::Progress(&question)));
                    continue;
                }
                Err(_) => break,
                Ok(_) if ready[0].revents().is_empty() => break,
                Ok(_) => {}
            }
            let is_last_call = !ready[1].revents().is_empty();
            match rustix::io::read(&self.stream, &mut buffer) {
                Err(Errno::INTR) => continue,
                Err(_) | Ok(0) => break,
                Ok(count) => {
                    let bytes = &buffer[..count];
                    if let Some(file) = &self.file {
                        lock(file).write(bytes);
                    }
                    self.pass_on(|emit| lines.push(bytes, emit));
                    has_asked = false;
                    leftover -= if is_last_call { count.min(leftover) } else { 0 };
                }
            }
        }
        self.pass_on(|emit| lines.finish(emit));
    }

    /// Shows the pieces that `cut` emits, without a line of another rank between them.
    fn pass_on(&mut self, cut: impl FnOnce(&mut dyn FnMut(Piece<'_>))) {
        self.shown.clear();
        self.chosen.clear();
        cut(&mut |piece| self.print(piece));
        if let Some(outlet) = &self.outlet {
            let Text { bytes, is_unfinished, .. } = &self.shown;
            outlet.pass_on(bytes, *is_unfinished, &self.has_ended);
        }
        if let Some((filtered, _)) = self.filtered.as_ref().filter(|_| !self.chosen.is_empty()) {
            lock(&filtered.sink).write(&self.chosen);
        }
    }

    fn print(&mut self, piece: Piece<'_>) {
        let is_shown = self.outlet.is_some();
        let text = match piece {
            Piece::Progress(text) => {
                if is_shown {
                    self.shown.progress(&self.prefix, text);
                }
                return;
            }
            Piece::Line(text) | Piece::Part(text) => text,
        };
        if is_shown {
            self.shown.line(&self.prefix, self.is_continued, text);
        }
        if let Some((_, prefix)) = self.filtered.as_ref().filter(|(it, _)| it.wants(text)) {
            prefix.write(self.is_continued, &mut self.chosen);
            self.chosen.extend_from_slice(text);
            self.chosen.push(b'\n');
        }
        self.is_continued = matches!(piece, Piece::Part(_));
        if let Some(tail) = &self.tail {
            let mut tail = lock(tail);
            if tail.len() == TAIL_LINES {
                tail.pop_front();
            }
            tail.push_back(text[..text.len().min(TAIL_LINE_BYTES)].to_vec());
        }
    }
}

impl Filtered {
    fn wants(&self, line: &[u8]) -> bool {
        let contains =
            |text: &[u8]| text.is_empty() || line.windows(text.len()).any(|part| part == text);
        self.texts.iter().any(|text| contains(text.as_bytes()))
    }
}

/// See <https://no-color.org>.
fn is_coloured(outlet: &Outlet) -> bool {
    outlet.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

/// The mutex guards bytes, which stay valid if another thread panics.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::{
        fs::File,
        io::{PipeReader, Read, Seek, Write, pipe},
    };

    use super::*;

    /// An outlet, and the file to which it writes.
    fn outlet() -> (Arc<Outlet>, File) {
        let file = tempfile::tempfile().unwrap();
        (Outlet::over(file.try_clone().unwrap(), "stdout", |_| String::new()), file)
    }

    /// The lines of rank 1 of 12, which no terminal colours.
    fn prefix() -> Prefix {
        let ranks = std::num::NonZeroUsize::new(12).unwrap();
        let job = Job::new("train", ranks);
        Labels::of(&job, &World::alone(&job, 0)).prefix(1, false)
    }

    fn reader(stream: impl Into<OwnedFd>) -> Reader {
        Reader::of(stream.into(), prefix())
    }

    /// The end of a pipe from which `input` comes.
    fn pipe_with(input: &[u8]) -> PipeReader {
        let (read, mut write) = pipe().unwrap();
        write.write_all(input).unwrap();
        read
    }

    /// What the outlet has written to the file.
    fn text((outlet, mut file): (Arc<Outlet>, File)) -> String {
        assert!(outlet.settle(Duration::from_secs(60)));
        let mut text = String::new();
        file.rewind().unwrap();
        file.read_to_string(&mut text).unwrap();
        text
    }

    /// What is printed of `input`.
    fn printed(input: &[u8]) -> String {
        let (outlet, file) = outlet();
        let (_near, far) = UnixStream::pair().unwrap();
        Reader { outlet: Some(Arc::clone(&outlet)), ..reader(pipe_with(input)) }.run(&far);
        text((outlet, file))
    }

    #[test]
    fn every_line_gets_a_prefix_and_an_end() {
        assert_eq!(printed(b"a\n\nb"), "[1]  a\n[1]  \n[1]  b\n");
    }

    #[test]
    fn progress_is_drawn_in_place_on_terminals_and_dropped_elsewhere() {
        assert_eq!(printed(b"1%\r2%\rdone\r\n"), "[1]  done\n");
        let (outlet, file) = outlet();
        let shown = Text::new(true);
        let mut reader =
            Reader { outlet: Some(Arc::clone(&outlet)), shown, ..reader(pipe_with(b"")) };
        let mut lines = Lines::default();
        reader.pass_on(|emit| lines.push(b"1%\r2%\r", emit));
        reader.pass_on(|emit| lines.push(b"done\n", emit));
        let shown = |text| format!("\x1b[?7l[1]  {text}\x1b[?7h\r\x1b[K");
        let wanted = format!("{}{}[1]  done\n", shown("1%"), shown("2%"));
        assert_eq!(text((outlet, file)), wanted);
    }

    #[test]
    fn a_file_has_all_bytes_and_another_one_the_lines_that_contain_a_text() {
        let input = b"1%\r\xff error\nfine\nWarning, or an erro\nno end: error";
        let files = tempfile::tempdir().unwrap();
        let file = |name: &str| Arc::new(Mutex::new(Sink::at(files.path().join(name))));
        let read = |name: &str| std::fs::read(files.path().join(name)).unwrap();
        let (_near, far) = UnixStream::pair().unwrap();
        let texts = ["error".to_owned(), "Warning,".to_owned()];
        let to_filtered = Filtered { sink: file("filtered"), texts: texts.as_slice().into() };
        let reader = Reader {
            file: Some(file("all")),
            filtered: Some((to_filtered, Prefix::default())),
            ..reader(pipe_with(input))
        };
        reader.run(&far);
        assert_eq!(read("all"), input);
        assert_eq!(read("filtered"), b"\xff error\nWarning, or an erro\nno end: error\n");
    }

    #[test]
    fn long_lines_can_be_put_together_again() {
        let long = "x".repeat(50_000) + &"y".repeat(100_000);
        let (outlet, file) = outlet();
        let mut reader = Reader { outlet: Some(Arc::clone(&outlet)), ..reader(pipe_with(b"")) };
        let mut lines = Lines::default();
        reader.pass_on(|emit| lines.push(long.as_bytes(), emit));
        reader.pass_on(|emit| lines.push(b"\nz\n", emit));
        let written = text((outlet, file));
        assert_eq!(written.replace("\n[1] +", ""), format!("[1]  {long}\n[1]  z\n"));
    }

    #[test]
    fn the_tail_is_bounded_also_of_what_is_not_shown() {
        let tail = Arc::new(Mutex::new(Tail::new()));
        let mut reader = Reader { tail: Some(Arc::clone(&tail)), ..reader(pipe_with(b"")) };
        for i in 0..100 {
            let line = format!("{i} {}", "x".repeat(10_000));
            reader.print(Piece::Line(line.as_bytes()));
        }
        let tail = lock(&tail);
        assert_eq!(tail.len(), TAIL_LINES);
        assert!(tail[0].starts_with(b"80 ") && tail.iter().all(|l| l.len() == TAIL_LINE_BYTES));
    }

    #[test]
    fn at_the_end_an_open_pipe_is_emptied_and_left() {
        let (outlet, file) = outlet();
        let (read, mut write) = pipe().unwrap();
        write.write_all(b"last words\n").unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        near.shutdown(Shutdown::Write).unwrap();
        Reader { outlet: Some(Arc::clone(&outlet)), ..reader(read) }.run(&far);
        assert_eq!(text((outlet, file)), "[1]  last words\n");
        drop(write);
    }

    /// Of a rank that has ended the last words are read although nobody takes what it has written before.
    #[test]
    fn last_words_are_heard_although_nobody_reads_the_output() {
        let (_unread, write) = pipe().unwrap();
        let outlet = Outlet::over(write, "stderr", |_| String::new());
        let (read, mut words) = pipe().unwrap();
        let (_near, far) = UnixStream::pair().unwrap();
        let (tail, has_ended) = (Arc::<Mutex<Tail>>::default(), Arc::<AtomicBool>::default());
        let reader = Reader {
            outlet: Some(Arc::clone(&outlet)),
            tail: Some(Arc::clone(&tail)),
            has_ended: Arc::clone(&has_ended),
            ..reader(read)
        };
        let reading = thread::spawn(move || reader.run(&far));
        // More than pipes, reader and outlet hold.
        let writing = thread::spawn(move || {
            words.write_all(&[[b'x'; 1023].as_slice(), b"\n"].concat().repeat(1024)).unwrap();
            words.write_all(b"last words\n").unwrap();
        });
        while !outlet.owes() {
            thread::yield_now();
        }
        has_ended.store(true, Ordering::Relaxed);
        outlet.hurry();
        writing.join().unwrap();
        reading.join().unwrap();
        assert_eq!(lock(&tail).back().unwrap(), b"last words");
        assert!(outlet.owes());
    }
}
