//! Files that output goes to, and text on its way to the console.

use std::{
    fs::File,
    io,
    os::fd::AsFd,
    path::PathBuf,
    sync::{Arc, Once},
};

use drumline::{ERASE, files, write_all};

use crate::prefix::Prefix;

/// A file of output. Whoever writes to it waits for the disk.
#[derive(Debug)]
pub(crate) struct Sink {
    /// `None` before it is open, or if it could not be opened.
    file: Option<File>,
    path: PathBuf,
    /// Why writing failed, so that there is no use in trying again.
    problem: Option<io::Error>,
}

impl Sink {
    pub(crate) fn at(path: PathBuf) -> Sink {
        outlive_the_limit_of_files();
        Sink { file: None, path, problem: None }
    }

    /// Makes the file. If the disk does not take it, the job goes on without.
    pub(crate) fn open(&mut self) {
        if self.file.is_none() && self.problem.is_none() {
            // Appending, so that nothing is lost if somebody empties a file that is too long.
            match files::append(&self.path) {
                Ok(file) => self.file = Some(file),
                Err(error) => self.fail(error),
            }
        }
    }

    pub(crate) fn write(&mut self, bytes: &[u8]) {
        if let Some(file) = &self.file
            && self.problem.is_none()
            && let Err(error) = write_all(file.as_fd(), bytes)
        {
            // The job goes on if the disk does not take its output.
            self.fail(error);
        }
    }

    fn fail(&mut self, error: io::Error) {
        let path = self.path.display();
        tracing::warn!("cannot write {path} ({error}): the output is dropped from now on");
        self.problem = Some(error);
    }

    /// What is missing in the file, and why. `None` if nothing is.
    pub(crate) fn problem(&self) -> Option<String> {
        let error = self.problem.as_ref()?;
        Some(format!("{} is not complete: {error}", self.path.display()))
    }
}

/// Whole lines for the console, perhaps with one at the end that the next line replaces.
#[derive(Debug, Default)]
pub(crate) struct Text {
    pub(crate) bytes: Vec<u8>,
    /// Whether lines can be drawn in place.
    is_terminal: bool,
    /// Whether the last line is to be replaced by the next one.
    pub(crate) is_unfinished: bool,
}

impl Text {
    pub(crate) fn new(is_terminal: bool) -> Text {
        Text { is_terminal, ..Text::default() }
    }

    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.is_unfinished = false;
    }

    /// A line. The next one may continue it.
    pub(crate) fn line(&mut self, prefix: &Prefix, is_continued: bool, text: &[u8]) {
        self.erase();
        prefix.write(is_continued, &mut self.bytes);
        self.bytes.extend_from_slice(text);
        self.bytes.push(b'\n');
    }

    /// A line that later output overwrites.
    pub(crate) fn progress(&mut self, prefix: &Prefix, text: &[u8]) {
        if self.is_terminal {
            self.erase();
            // Without wrapping, a text that is too long is cut instead of scrolling the screen.
            self.bytes.extend_from_slice(b"\x1b[?7l");
            prefix.write(false, &mut self.bytes);
            self.bytes.extend_from_slice(text);
            self.bytes.extend_from_slice(b"\x1b[?7h");
            self.is_unfinished = true;
        }
    }

    fn erase(&mut self) {
        if std::mem::take(&mut self.is_unfinished) {
            self.bytes.extend_from_slice(ERASE);
        }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told() {
        let full = File::options().write(true).open("/dev/full").unwrap();
        let mut sink = Sink { file: Some(full), ..Sink::at("/dev/full".into()) };
        for _ in 0..2 {
            sink.write(b"lost");
        }
        assert_eq!(
            sink.problem().unwrap(),
            "/dev/full is not complete: No space left on device (os error 28)"
        );
    }

    #[test]
    fn a_file_that_cannot_be_made_is_told() {
        let mut sink = Sink::at("/proc/none/stdout.log".into());
        sink.open();
        sink.write(b"lost");
        assert!(
            sink.problem().unwrap().starts_with("/proc/none/stdout.log is not complete: No such")
        );
    }
}
