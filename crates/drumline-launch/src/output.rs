//! Prints the workers' output to the terminal, file or pipe of the launcher.
//!
//! One thread per stream reads, cuts lines and writes whole lines, so lines of two ranks never mix. A
//! stopped terminal or a slow pager holds up these threads but never the supervision. Every line
//! starts with its rank: `[3] text`. A line of more than 64 KiB continues in a line that starts with
//! `[3]+`.

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

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

use crate::{
    Error, Result,
    lines::{Lines, Piece},
    worker::Streams,
};

/// How many lines of each rank's stderr are kept for the report.
const TAIL_LINES: usize = 20;

/// How many bytes of each of these lines are kept.
const TAIL_LINE_BYTES: usize = 4 * 1024;

/// How many bytes are still read from a worker's pipe when the job is over. A process that has left the
/// worker's group may keep writing there for ever. More than a pipe holds, so nothing that was written
/// in time is lost.
const LEFTOVER_MAX: usize = 1024 * 1024;

/// The two destinations, and the threads that write there.
#[derive(Debug)]
pub(crate) struct Console {
    stdout: Arc<Mutex<Sink>>,
    stderr: Arc<Mutex<Sink>>,
    /// The last lines of each rank's stderr.
    tails: Vec<Arc<Mutex<Tail>>>,
    /// The width of the rank in a prefix, in characters.
    rank_width: usize,
    labels_stdout: bool,
    notes: Option<PipeWriter>,
    /// The launcher's end of a socket pair. Shutting it down tells the readers to finish. It becomes
    /// readable when every reader has dropped its share of `far`.
    near: UnixStream,
    /// The readers' end; `None` once no more output can come.
    far: Option<Arc<UnixStream>>,
}

type Tail = VecDeque<Vec<u8>>;

impl Console {
    /// Writes to the stdout and stderr of this process.
    pub(crate) fn open(ranks: usize, labels_stdout: bool) -> Result<Console> {
        let (near, far) = UnixStream::pair().map_err(Error::system("make a socket pair"))?;
        let stdout = Arc::new(Mutex::new(Sink::of(rustix::stdio::stdout())?));
        let stderr = if is_same_file(rustix::stdio::stdout(), rustix::stdio::stderr()) {
            Arc::clone(&stdout)
        } else {
            Arc::new(Mutex::new(Sink::of(rustix::stdio::stderr())?))
        };
        let rank_width = ranks.saturating_sub(1).to_string().len();
        let mut console = Console {
            stdout,
            stderr,
            tails: Vec::new(),
            rank_width,
            labels_stdout,
            notes: None,
            near,
            far: Some(Arc::new(far)),
        };
        let (read, write) = io::pipe().map_err(Error::system("make a pipe"))?;
        rustix::io::ioctl_fionbio(&write, true).map_err(Error::system("set up a pipe"))?;
        console.read(read.into(), &console.stderr, Prefix::launcher(), None)?;
        console.notes = Some(write);
        Ok(console)
    }

    /// How many columns a worker's line may fill on the terminal behind stderr; `None` without a
    /// terminal.
    pub(crate) fn columns(&self) -> Option<usize> {
        let terminal = lock(&self.stderr).terminal;
        let size = rustix::termios::tcgetwinsize(rustix::stdio::stderr()).ok().filter(|_| terminal);
        size.map(|size| usize::from(size.ws_col).saturating_sub(self.rank_width + "[] ".len()))
            .filter(|&columns| columns > 0)
    }

    /// Prints the output of the worker with the next rank.
    pub(crate) fn attach(&mut self, streams: Streams) -> Result<()> {
        let rank = self.tails.len();
        let tail = Arc::new(Mutex::new(Tail::new()));
        let prefix =
            |sink: &Mutex<Sink>| Prefix::rank(rank, self.rank_width, lock(sink).is_coloured());
        let on_stdout = match self.labels_stdout {
            true => prefix(&self.stdout),
            false => Prefix { start: Vec::new(), continued: Vec::new() },
        };
        self.read(streams.stdout, &self.stdout, on_stdout, None)?;
        self.read(streams.stderr, &self.stderr, prefix(&self.stderr), Some(Arc::clone(&tail)))?;
        self.tails.push(tail);
        Ok(())
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

    /// The last lines that `rank` wrote to stderr.
    pub(crate) fn tail(&self, rank: usize) -> Vec<Vec<u8>> {
        self.tails.get(rank).map_or_else(Vec::new, |tail| lock(tail).iter().cloned().collect())
    }

    /// Writes `text` to stderr.
    pub(crate) fn report(&self, text: &[u8]) {
        let mut sink = lock(&self.stderr);
        sink.clear_progress();
        sink.buffer.extend_from_slice(text);
        sink.flush();
    }

    fn read(
        &self,
        stream: OwnedFd,
        sink: &Arc<Mutex<Sink>>,
        prefix: Prefix,
        tail: Option<Arc<Mutex<Tail>>>,
    ) -> Result<()> {
        let reader = Reader { stream, sink: Arc::clone(sink), prefix, tail, is_continued: false };
        let Some(stop) = self.far.clone() else { return Ok(()) };
        // The stacks are small: there may be hundreds of these threads, and their buffers are on the heap.
        thread::Builder::new()
            .name("output".into())
            .stack_size(128 * 1024)
            .spawn(move || reader.run(&stop))
            .map_err(Error::system("start a thread for a worker's output"))?;
        Ok(())
    }
}

/// Reads one stream until its end.
struct Reader {
    stream: OwnedFd,
    sink: Arc<Mutex<Sink>>,
    prefix: Prefix,
    tail: Option<Arc<Mutex<Tail>>>,
    /// Whether the next piece continues a line.
    is_continued: bool,
}

impl Reader {
    fn run(mut self, stop: &UnixStream) {
        let mut lines = Lines::default();
        let mut buffer = vec![0; 64 * 1024];
        let mut leftover = LEFTOVER_MAX;
        while leftover > 0 {
            let mut ready =
                [PollFd::new(&self.stream, PollFlags::IN), PollFd::new(stop, PollFlags::IN)];
            match poll(&mut ready, None) {
                Err(Errno::INTR) => continue,
                Err(_) => break,
                Ok(_) if ready[0].revents().is_empty() => break,
                Ok(_) => {}
            }
            let is_last_call = !ready[1].revents().is_empty();
            match rustix::io::read(&self.stream, &mut buffer) {
                Err(Errno::INTR) => continue,
                Err(_) | Ok(0) => break,
                Ok(count) => {
                    let sink = Arc::clone(&self.sink);
                    let mut sink = lock(&sink);
                    lines.push(&buffer[..count], |piece| self.print(&mut sink, piece));
                    sink.flush();
                    leftover -= if is_last_call { count.min(leftover) } else { 0 };
                }
            }
        }
        let sink = Arc::clone(&self.sink);
        let mut sink = lock(&sink);
        lines.finish(|piece| self.print(&mut sink, piece));
        sink.flush();
    }

    fn print(&mut self, sink: &mut Sink, piece: Piece<'_>) {
        let text = match piece {
            Piece::Progress(text) => return sink.progress(&self.prefix.start, text),
            Piece::Line(text) | Piece::Part(text) => text,
        };
        let prefix = if self.is_continued { &self.prefix.continued } else { &self.prefix.start };
        sink.line(prefix, text);
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

/// The beginning of lines.
#[derive(Debug)]
struct Prefix {
    start: Vec<u8>,
    continued: Vec<u8>,
}

impl Prefix {
    fn rank(rank: usize, width: usize, is_coloured: bool) -> Prefix {
        // Cyan, yellow, green, magenta, blue, red.
        const COLOURS: [u8; 6] = [36, 33, 32, 35, 34, 31];
        let (on, off) = match is_coloured {
            true => (format!("\x1b[{}m", COLOURS[rank % COLOURS.len()]), "\x1b[0m"),
            false => (String::new(), ""),
        };
        let pad = width.saturating_sub(rank.to_string().len());
        let prefix = |mark| format!("{on}[{rank}]{off}{:pad$}{mark}", "").into_bytes();
        Prefix { start: prefix(' '), continued: prefix('+') }
    }

    fn launcher() -> Prefix {
        Prefix { start: b"drumline: ".to_vec(), continued: b"drumline:+".to_vec() }
    }
}

/// A destination, and the bytes to write there next.
#[derive(Debug)]
struct Sink {
    file: OwnedFd,
    /// Whether lines can be drawn in place.
    terminal: bool,
    /// Whether the cursor is in a progress line, which the next line replaces.
    in_progress: bool,
    /// Whether writing failed, so that there is no use in trying again.
    broken: bool,
    buffer: Vec<u8>,
}

impl Sink {
    fn of(file: BorrowedFd<'_>) -> Result<Sink> {
        let terminal =
            rustix::termios::isatty(file) && std::env::var_os("TERM").is_none_or(|t| t != "dumb");
        let file = file.try_clone_to_owned().map_err(Error::system("open stdout and stderr"))?;
        Ok(Sink { file, terminal, in_progress: false, broken: false, buffer: Vec::new() })
    }

    /// See <https://no-color.org>.
    fn is_coloured(&self) -> bool {
        self.terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
    }

    fn line(&mut self, prefix: &[u8], text: &[u8]) {
        self.clear_progress();
        self.buffer.extend_from_slice(prefix);
        self.buffer.extend_from_slice(text);
        self.buffer.push(b'\n');
    }

    fn progress(&mut self, prefix: &[u8], text: &[u8]) {
        if self.terminal {
            self.clear_progress();
            // Without wrapping, a text that is too long is cut instead of scrolling the screen.
            self.buffer.extend_from_slice(b"\x1b[?7l");
            self.buffer.extend_from_slice(prefix);
            self.buffer.extend_from_slice(text);
            self.buffer.extend_from_slice(b"\x1b[?7h");
            self.in_progress = true;
        }
    }

    fn clear_progress(&mut self) {
        if std::mem::take(&mut self.in_progress) {
            self.buffer.extend_from_slice(b"\r\x1b[K");
        }
    }

    fn flush(&mut self) {
        if !self.broken
            && let Err(error) = write_all(self.file.as_fd(), &self.buffer)
        {
            // The job goes on if nobody reads its output.
            self.broken = true;
            tracing::warn!("cannot write the ranks' output ({error}): dropped from now on");
        }
        self.buffer.clear();
    }
}

/// Writes all `bytes`, also to a terminal that another program made non-blocking.
fn write_all(file: BorrowedFd<'_>, mut bytes: &[u8]) -> rustix::io::Result<()> {
    while !bytes.is_empty() {
        match rustix::io::write(file, bytes) {
            Ok(count) => bytes = &bytes[count..],
            Err(Errno::INTR) => {}
            Err(Errno::AGAIN) => {
                poll(&mut [PollFd::from_borrowed_fd(file, PollFlags::OUT)], None)?;
            }
            Err(error) => return Err(error),
        }
    }
    Ok(())
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
    use std::io::Read;

    use super::*;

    fn sink(terminal: bool) -> (Sink, io::PipeReader) {
        let (read, write) = io::pipe().unwrap();
        let file = write.into();
        (Sink { file, terminal, in_progress: false, broken: false, buffer: Vec::new() }, read)
    }

    /// The output of a sink for `input` from rank 1 of 12.
    fn printed(terminal: bool, input: &[u8]) -> String {
        let (sink, mut printed) = sink(terminal);
        let (read, mut write) = io::pipe().unwrap();
        write.write_all(input).unwrap();
        drop(write);
        let prefix = Prefix::rank(1, 2, false);
        let sink = Arc::new(Mutex::new(sink));
        let reader = Reader { stream: read.into(), sink, prefix, tail: None, is_continued: false };
        let (_near, far) = UnixStream::pair().unwrap();
        reader.run(&far);
        let mut text = String::new();
        printed.read_to_string(&mut text).unwrap();
        text
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
    fn long_lines_can_be_put_together_again() {
        let long = "x".repeat(50_000) + &"y".repeat(100_000);
        let (sink, read) = sink(false);
        let mut reader = Reader {
            stream: read.into(),
            sink: Arc::new(Mutex::new(sink)),
            prefix: Prefix::rank(0, 1, false),
            tail: None,
            is_continued: false,
        };
        let (mut lines, (mut sink, _read)) = (Lines::default(), self::sink(false));
        lines.push(long.as_bytes(), |piece| reader.print(&mut sink, piece));
        lines.push(b"\nz\n", |piece| reader.print(&mut sink, piece));
        let text = String::from_utf8(sink.buffer).unwrap();
        assert_eq!(text.replace("\n[0]+", ""), format!("[0] {long}\n[0] z\n"));
    }

    #[test]
    fn the_tail_is_bounded() {
        let (sink, read) = sink(false);
        let tail = Arc::new(Mutex::new(Tail::new()));
        let mut reader = Reader {
            stream: read.into(),
            sink: Arc::new(Mutex::new(sink)),
            prefix: Prefix::rank(0, 1, false),
            tail: Some(Arc::clone(&tail)),
            is_continued: false,
        };
        let (mut sink, _read) = self::sink(false);
        for i in 0..100 {
            let line = format!("{i} {}", "x".repeat(10_000));
            reader.print(&mut sink, Piece::Line(line.as_bytes()));
        }
        let tail = lock(&tail);
        assert_eq!(tail.len(), TAIL_LINES);
        assert!(tail[0].starts_with(b"80 ") && tail.iter().all(|l| l.len() == TAIL_LINE_BYTES));
    }

    #[test]
    fn a_closed_destination_is_no_reason_to_stop() {
        let (mut sink, read) = sink(false);
        drop(read);
        for _ in 0..2 {
            sink.line(b"[0] ", b"text");
            sink.flush();
        }
        assert!(sink.broken && sink.buffer.is_empty());
    }

    #[test]
    fn at_the_end_an_open_pipe_is_emptied_and_left() {
        let (sink, mut printed) = sink(false);
        let (read, mut write) = io::pipe().unwrap();
        write.write_all(b"last words\n").unwrap();
        let (near, far) = UnixStream::pair().unwrap();
        near.shutdown(Shutdown::Write).unwrap();
        let prefix = Prefix::rank(0, 1, false);
        let sink = Arc::new(Mutex::new(sink));
        Reader { stream: read.into(), sink, prefix, tail: None, is_continued: false }.run(&far);
        let mut text = String::new();
        printed.read_to_string(&mut text).unwrap();
        assert_eq!(text, "[0] last words\n");
        drop(write);
    }
}
