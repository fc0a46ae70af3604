//! Passes on what the workers write: to the terminal, file or pipe of the launcher, and to files of their own.
//!
//! One thread per stream reads, cuts lines and writes whole lines, so lines of two ranks never mix. A
//! stopped terminal or a slow pager holds up these threads but never the supervision. Every line
//! starts with its rank: `[3] text`. A line of more than 64 KiB continues in a line that starts with
//! `[3]+`. A file of one rank has the bytes that the rank wrote.

use std::{
    collections::VecDeque,
    io::{self, PipeWriter, Write},
    net::Shutdown,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::net::UnixStream,
    },
    sync::{Arc, Mutex, PoisonError},
    thread,
};

use drumline::named;
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
};

use crate::{
    Error, Job, Logs, Result,
    files::WorldFiles,
    lines::{Lines, Piece},
    prefix::{Labels, Prefix},
    sink::Sink,
    worker::Streams,
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

/// The destinations, and the threads that write there.
#[derive(Debug)]
pub(crate) struct Console {
    stdout: Arc<Mutex<Sink>>,
    stderr: Arc<Mutex<Sink>>,
    /// The files of all ranks for lines of stdout, and of stderr.
    filtered: [Option<Filtered>; 2],
    /// All files.
    files: Vec<Arc<Mutex<Sink>>>,
    /// The last lines of each rank's stderr.
    tails: Vec<Arc<Mutex<Tail>>>,
    labels: Labels,
    labels_stdout: bool,
    logs: Logs,
    notes: Option<PipeWriter>,
    /// The launcher's end of a socket pair. Shutting it down tells the readers to finish. It becomes
    /// readable when every reader has dropped its share of `far`.
    near: UnixStream,
    /// The readers' end; `None` once no more output can come.
    far: Option<Arc<UnixStream>>,
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
        let (near, far) = UnixStream::pair()
            .map_err(named("socketpair"))
            .map_err(Error::system("make a socket pair"))?;
        let (own_stdout, own_stderr) = (rustix::stdio::stdout(), rustix::stdio::stderr());
        let stdout = Arc::new(Mutex::new(Sink::of(own_stdout, "stdout")?));
        let stderr = match is_same_file(own_stdout, own_stderr) {
            true => Arc::clone(&stdout),
            false => Arc::new(Mutex::new(Sink::of(own_stderr, "stderr")?)),
        };
        let mut console = Console {
            stdout,
            stderr,
            filtered: [None, None],
            files: Vec::new(),
            tails: Vec::new(),
            labels: Labels::of(job, world),
            labels_stdout: job.labels_stdout,
            logs: job.logs.clone(),
            notes: None,
            near,
            far: Some(Arc::new(far)),
        };
        let filters = [&job.logs.stdout_filters, &job.logs.stderr_filters];
        let names = ["filtered_stdout.log", "filtered_stderr.log"];
        console.filtered = [0, 1].map(|i| {
            let path = files.log_of_all(names[i]).filter(|_| !filters[i].is_empty())?;
            let sink = console.keep(Sink::create(&path));
            Some(Filtered { sink, texts: filters[i].as_slice().into() })
        });
        let (read, write) =
            io::pipe().map_err(named("pipe2")).map_err(Error::system("make a pipe"))?;
        rustix::io::ioctl_fionbio(&write, true).map_err(Error::system("set up a pipe"))?;
        let sink = Some(Arc::clone(&console.stderr));
        console.read(Reader { sink, ..Reader::of(read.into(), Prefix::launcher()) })?;
        console.notes = Some(write);
        Ok(console)
    }

    /// How many columns a worker's line may fill on the terminal behind stderr; `None` without a
    /// terminal.
    pub(crate) fn columns(&self) -> Option<usize> {
        let terminal = lock(&self.stderr).terminal;
        let size = rustix::termios::tcgetwinsize(rustix::stdio::stderr()).ok().filter(|_| terminal);
        let taken = self.labels.prefix(0, false).width();
        size.map(|size| usize::from(size.ws_col).saturating_sub(taken))
            .filter(|&columns| columns > 0)
    }

    /// Passes on the output of the worker with the next local rank. If it `asks`, questions are shown that end without a
    /// line break.
    pub(crate) fn attach(
        &mut self,
        streams: Streams,
        files: &WorldFiles,
        asks: bool,
    ) -> Result<()> {
        let local_rank = self.tails.len();
        let tail = Arc::new(Mutex::new(Tail::new()));
        self.tails.push(Arc::clone(&tail));
        let prefix = |sink: &Mutex<Sink>| self.labels.prefix(local_rank, lock(sink).is_coloured());
        let on_stdout = if self.labels_stdout { prefix(&self.stdout) } else { Prefix::none() };
        let on_stderr = prefix(&self.stderr);
        let (is_shown, is_kept) =
            (self.logs.to_console(local_rank), self.logs.to_files(local_rank));
        let kept = [(is_kept.stdout, "stdout.log"), (is_kept.stderr, "stderr.log")];
        let [stdout_file, stderr_file] = kept.map(|(is_kept, name)| {
            let path = files.log(local_rank, name).filter(|_| is_kept);
            path.map(|path| self.keep(Sink::create(&path)))
        });
        let plain = self.labels.prefix(local_rank, false);
        let stdout = Reader {
            sink: is_shown.stdout.then(|| Arc::clone(&self.stdout)),
            file: stdout_file,
            filtered: self.filtered[0].clone().map(|filtered| (filtered, plain.clone())),
            asks,
            ..Reader::of(streams.stdout, on_stdout)
        };
        let stderr = Reader {
            sink: is_shown.stderr.then(|| Arc::clone(&self.stderr)),
            file: stderr_file,
            filtered: self.filtered[1].clone().map(|filtered| (filtered, plain)),
            tail: Some(tail),
            asks,
            ..Reader::of(streams.stderr, on_stderr)
        };
        self.read(stdout)?;
        self.read(stderr)
    }

    /// Prints a line of the launcher's own to stderr. This never blocks: if the pipe is full, the line
    /// is lost.
    pub(crate) fn note(&mut self, line: &str) {
        if let Some(notes) = &mut self.notes {
            let _ = notes.write_all(format!("{line}\n").as_bytes());
        }
    }

    /// Tells the readers to print the rest of the output and to end. [`Console::finished`] becomes
    /// readable when they have.
    pub(crate) fn finish(&mut self) {
        self.notes = None;
        self.far = None;
        let _ = self.near.shutdown(Shutdown::Write);
    }

    /// A descriptor that is readable once all output is printed.
    pub(crate) fn finished(&self) -> BorrowedFd<'_> {
        self.near.as_fd()
    }

    /// The last lines that the worker with this local rank wrote to stderr.
    pub(crate) fn tail(&self, local_rank: usize) -> Vec<Vec<u8>> {
        let tail = self.tails.get(local_rank);
        tail.map_or_else(Vec::new, |tail| lock(tail).iter().cloned().collect())
    }

    /// Whether all is read that the worker with this local rank has written to stderr.
    pub(crate) fn has_read_all(&self, local_rank: usize) -> bool {
        // The reader has the other share.
        self.tails.get(local_rank).is_none_or(|tail| Arc::strong_count(tail) == 1)
    }

    /// The files in which something is missing, and why.
    pub(crate) fn problems(&self) -> Vec<String> {
        self.files.iter().filter_map(|file| lock(file).problem()).collect()
    }

    /// Writes `text` to stderr.
    pub(crate) fn report(&self, text: &[u8]) {
        let mut sink = lock(&self.stderr);
        sink.clear_progress();
        sink.bytes(text);
        sink.flush();
    }

    fn keep(&mut self, file: Sink) -> Arc<Mutex<Sink>> {
        let file = Arc::new(Mutex::new(file));
        self.files.push(Arc::clone(&file));
        file
    }

    fn read(&self, reader: Reader) -> Result<()> {
        let Some(stop) = self.far.clone() else { return Ok(()) };
        // The stacks are small: there may be hundreds of these threads, and their buffers are on the heap.
        thread::Builder::new()
            .name("output".into())
            .stack_size(128 * 1024)
            .spawn(move || reader.run(&stop))
            .map_err(named("clone3"))
            .map_err(Error::system("start a thread for a worker's output"))?;
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
    sink: Option<Arc<Mutex<Sink>>>,
    /// Where all bytes go, too.
    file: Option<Arc<Mutex<Sink>>>,
    /// Where some lines go, too, and what they begin with there.
    filtered: Option<(Filtered, Prefix)>,
    tail: Option<Arc<Mutex<Tail>>>,
    /// Whether the next piece continues a line.
    is_continued: bool,
    /// Whether a line is shown before its end if nothing follows for a while: a question to the user.
    asks: bool,
}

impl Reader {
    /// Drops what it reads.
    fn of(stream: OwnedFd, prefix: Prefix) -> Reader {
        Reader {
            stream,
            prefix,
            sink: None,
            file: None,
            filtered: None,
            tail: None,
            is_continued: false,
            asks: false,
        }
    }

    fn run(mut self, stop: &UnixStream) {
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
                        let mut file = lock(file);
                        file.bytes(bytes);
                        file.flush();
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
        let sink = self.sink.clone();
        let mut sink = sink.as_deref().map(lock);
        cut(&mut |piece| self.print(sink.as_deref_mut(), piece));
        if let Some(sink) = &mut sink {
            sink.flush();
        }
        if let Some((filtered, _)) = &self.filtered {
            lock(&filtered.sink).flush();
        }
    }

    fn print(&mut self, sink: Option<&mut Sink>, piece: Piece<'_>) {
        let text = match piece {
            Piece::Progress(text) => {
                if let Some(sink) = sink {
                    sink.progress(&self.prefix, text);
                }
                return;
            }
            Piece::Line(text) | Piece::Part(text) => text,
        };
        if let Some(sink) = sink {
            sink.line(&self.prefix, self.is_continued, text);
        }
        if let Some((filtered, prefix)) = self.filtered.as_ref().filter(|(it, _)| it.wants(text)) {
            lock(&filtered.sink).line(prefix, self.is_continued, text);
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

fn is_same_file(a: BorrowedFd<'_>, b: BorrowedFd<'_>) -> bool {
    let identity = |fd| rustix::fs::fstat(fd).map(|stat| (stat.st_dev, stat.st_ino));
    matches!((identity(a), identity(b)), (Ok(a), Ok(b)) if a == b)
}

/// The mutex guards bytes, which stay valid if another thread panics.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::{PipeReader, Read};

    use super::*;

    fn sink(terminal: bool) -> (Arc<Mutex<Sink>>, PipeReader) {
        let (read, write) = io::pipe().unwrap();
        let mut sink = Sink::over(write.into(), "stdout");
        sink.terminal = terminal;
        (Arc::new(Mutex::new(sink)), read)
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
        let (read, mut write) = io::pipe().unwrap();
        write.write_all(input).unwrap();
        read
    }

    fn text(mut pipe: PipeReader) -> String {
        let mut text = String::new();
        pipe.read_to_string(&mut text).unwrap();
        text
    }

    /// The output of a sink for `input`.
    fn printed(terminal: bool, input: &[u8]) -> String {
        let (sink, printed) = sink(terminal);
        let (_near, far) = UnixStream::pair().unwrap();
        Reader { sink: Some(sink), ..reader(pipe_with(input)) }.run(&far);
        text(printed)
    }

    #[test]
    fn every_line_gets_a_prefix_and_an_end() {
        assert_eq!(printed(false, b"a\n\nb"), "[1]  a\n[1]  \n[1]  b\n");
    }

    #[test]
    fn progress_is_drawn_in_place_on_terminals_and_dropped_elsewhere() {
        assert_eq!(printed(false, b"1%\r2%\rdone\r\n"), "[1]  done\n");
        let shown = |text| format!("\x1b[?7l[1]  {text}\x1b[?7h\r\x1b[K");
        assert_eq!(
            printed(true, b"1%\r2%\rdone\n"),
            format!("{}{}[1]  done\n", shown("1%"), shown("2%"))
        );
    }

    #[test]
    fn a_file_has_all_bytes_and_another_one_the_lines_that_contain_a_text() {
        let input = b"1%\r\xff error\nfine\nWarning, or an erro\nno end: error";
        let ((shown_sink, shown), (file, kept), (filtered_sink, filtered)) =
            (sink(false), sink(false), sink(false));
        let (_near, far) = UnixStream::pair().unwrap();
        let texts = ["error".to_owned(), "Warning,".to_owned()];
        let to_filtered = Filtered { sink: filtered_sink, texts: texts.as_slice().into() };
        let reader = Reader {
            sink: Some(shown_sink),
            file: Some(file),
            filtered: Some((to_filtered, Prefix::none())),
            ..reader(pipe_with(input))
        };
        reader.run(&far);
        let (mut kept, mut bytes) = (kept, Vec::new());
        kept.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, input);
        drop((shown, far));
        let mut lines = Vec::new();
        { filtered }.read_to_end(&mut lines).unwrap();
        assert_eq!(lines, b"\xff error\nWarning, or an erro\nno end: error\n");
    }

    #[test]
    fn long_lines_can_be_put_together_again() {
        let long = "x".repeat(50_000) + &"y".repeat(100_000);
        let (sink, printed) = sink(false);
        let written = thread::spawn(move || text(printed));
        let mut reader = Reader { sink: Some(sink), ..reader(pipe_with(b"")) };
        let mut lines = Lines::default();
        reader.pass_on(|emit| lines.push(long.as_bytes(), emit));
        reader.pass_on(|emit| lines.push(b"\nz\n", emit));
        drop(reader);
        let written = written.join().unwrap();
        assert_eq!(written.replace("\n[1] +", ""), format!("[1]  {long}\n[1]  z\n"));
    }

    #[test]
    fn the_tail_is_bounded_also_of_what_is_not_shown() {
        let tail = Arc::new(Mutex::new(Tail::new()));
        let mut reader = Reader { tail: Some(Arc::clone(&tail)), ..reader(pipe_with(b"")) };
        for i in 0..100 {
            let line = format!("{i} {}", "x".repeat(10_000));
            reader.print(None, Piece::Line(line.as_bytes()));
        }
        let tail = lock(&tail);
        assert_eq!(tail.len(), TAIL_LINES);
        assert!(tail[0].starts_with(b"80 ") && tail.iter().all(|l| l.len() == TAIL_LINE_BYTES));
    }

    #[test]
    fn at_the_end_an_open_pipe_is_emptied_and_left() {
        let (sink, printed) = sink(false);
        let (read, mut write) = io::pipe().unwrap();
        write.write_all(b"last words\n").unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        near.shutdown(Shutdown::Write).unwrap();
        Reader { sink: Some(sink), ..reader(read) }.run(&far);
        assert_eq!(text(printed), "[1]  last words\n");
        drop(write);
    }
}
