//! Where output goes: a terminal, a pipe or a file.

use std::{
    fs::OpenOptions,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    path::Path,
    sync::{Arc, Once},
};

use rustix::{
    event::{PollFd, PollFlags, poll},
    io::Errno,
};

use crate::{Error, Result, prefix::Prefix};

/// A destination, and the bytes to write there next.
#[derive(Debug)]
pub(crate) struct Sink {
    /// `None` if it could not be opened.
    file: Option<OwnedFd>,
    name: String,
    /// Whether lines can be drawn in place.
    pub(crate) terminal: bool,
    /// Whether the cursor is in a progress line, which the next line replaces.
    in_progress: bool,
    /// Why writing failed, so that there is no use in trying again.
    problem: Option<io::Error>,
    buffer: Vec<u8>,
}

impl Sink {
    /// One that writes to the same as `file`, which users know as `name`.
    pub(crate) fn of(file: BorrowedFd<'_>, name: &str) -> Result<Sink> {
        let terminal =
            rustix::termios::isatty(file) && std::env::var_os("TERM").is_none_or(|t| t != "dumb");
        let file = file.try_clone_to_owned().map_err(Error::system("open stdout and stderr"))?;
        let mut sink = Sink::over(file, name);
        sink.terminal = terminal;
        Ok(sink)
    }

    /// A new file. If the disk does not take it, the job goes on without.
    pub(crate) fn create(path: &Path) -> Sink {
        outlive_the_limit_of_files();
        let name = path.display().to_string();
        // Appending, so that nothing is lost if somebody empties a file that is too long.
        match OpenOptions::new().append(true).create(true).open(path) {
            Ok(file) => Sink::over(file.into(), &name),
            Err(error) => {
                let mut sink = Sink::new(None, &name);
                sink.fail(error);
                sink
            }
        }
    }

    pub(crate) fn over(file: OwnedFd, name: &str) -> Sink {
        Sink::new(Some(file), name)
    }

    fn new(file: Option<OwnedFd>, name: &str) -> Sink {
        Sink {
            file,
            name: name.into(),
            terminal: false,
            in_progress: false,
            problem: None,
            buffer: Vec::new(),
        }
    }

    /// See <https://no-color.org>.
    pub(crate) fn is_coloured(&self) -> bool {
        self.terminal && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
    }

    /// Bytes as they are.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// A line. The next one may continue it.
    pub(crate) fn line(&mut self, prefix: &Prefix, is_continued: bool, text: &[u8]) {
        self.clear_progress();
        prefix.write(is_continued, &mut self.buffer);
        self.buffer.extend_from_slice(text);
        self.buffer.push(b'\n');
    }

    /// A line that later output overwrites.
    pub(crate) fn progress(&mut self, prefix: &Prefix, text: &[u8]) {
        if self.terminal {
            self.clear_progress();
            // Without wrapping, a text that is too long is cut instead of scrolling the screen.
            self.buffer.extend_from_slice(b"\x1b[?7l");
            prefix.write(false, &mut self.buffer);
            self.buffer.extend_from_slice(text);
            self.buffer.extend_from_slice(b"\x1b[?7h");
            self.in_progress = true;
        }
    }

    pub(crate) fn clear_progress(&mut self) {
        if std::mem::take(&mut self.in_progress) {
            self.buffer.extend_from_slice(b"\r\x1b[K");
        }
    }

    pub(crate) fn flush(&mut self) {
        if let Some(file) = &self.file
            && self.problem.is_none()
            && let Err(error) = write_all(file.as_fd(), &self.buffer)
        {
            // The job goes on if nobody takes its output.
            self.fail(error.into());
        }
        self.buffer.clear();
    }

    fn fail(&mut self, error: io::Error) {
        tracing::warn!("cannot write {} ({error}): the output is dropped from now on", self.name);
        self.problem = Some(error);
    }

    /// What is missing in the file, and why. `None` if nothing is.
    pub(crate) fn problem(&self) -> Option<String> {
        let error = self.problem.as_ref()?;
        Some(format!("{} is not complete: {error}", self.name))
    }
}

/// With a handler for the signal, a write beyond the limit (`ulimit -f`) is an error. Without one it ends the process.
fn outlive_the_limit_of_files() {
    static HANDLED: Once = Once::new();
    HANDLED.call_once(|| {
        // The flag is of no use. If there can be no handler, the limit ends the launcher as before.
        let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, Arc::default());
    });
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

#[cfg(test)]
mod tests {
    use std::{fs::File, io::pipe};

    use super::*;

    #[test]
    fn a_closed_destination_is_no_reason_to_stop() {
        let (read, write) = pipe().unwrap();
        let mut sink = Sink::over(write.into(), "stdout");
        drop(read);
        for _ in 0..2 {
            sink.line(&Prefix::none(), false, b"text");
            sink.flush();
        }
        assert!(sink.problem().is_some() && sink.buffer.is_empty());
    }

    #[test]
    fn a_full_disk_is_told_and_takes_no_memory() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut sink = Sink::over(full.into(), "a/stdout.log");
        for _ in 0..100 {
            sink.bytes(&[b'x'; 100_000]);
            sink.flush();
        }
        assert_eq!(
            sink.problem().unwrap(),
            "a/stdout.log is not complete: No space left on device (os error 28)"
        );
        assert!(sink.buffer.is_empty() && sink.buffer.capacity() < 200_000);
    }

    #[test]
    fn a_file_that_cannot_be_made_is_told() {
        let mut sink = Sink::create(Path::new("/proc/none/stdout.log"));
        sink.bytes(b"lost");
        sink.flush();
        assert!(
            sink.problem().unwrap().starts_with("/proc/none/stdout.log is not complete: No such")
        );
    }
}
