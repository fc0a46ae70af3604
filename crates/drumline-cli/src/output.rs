//! The stdout of the command.

use std::io::{self, ErrorKind, Write};

use crate::{Error, Result};

/// Like [`io::Stdout`], but a closed pipe is no error: its reader has seen enough. `print!` would panic.
#[derive(Debug)]
pub(crate) struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match io::stdout().write(bytes) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(bytes.len()),
            other => other,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        io::stdout().flush()
    }
}

pub(crate) fn print(text: &str) -> Result<()> {
    Stdout.write_all(text.as_bytes()).map_err(Error::Print)
}
