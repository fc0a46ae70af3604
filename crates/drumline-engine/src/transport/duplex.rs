//! A stream of bytes in both directions.

use std::{
    fmt,
    io::{self, Read, Write},
};

/// A stream of bytes in both directions that never blocks.
pub trait Duplex: Read + Write + Send + fmt::Debug {
    /// Ends this side of the stream: nothing more will be written.
    fn end(&mut self) -> io::Result<()>;

    /// Whether the stream holds written bytes that it has not passed on. `flush` passes them on once the
    /// stream can be written.
    fn holds_output(&self) -> bool {
        false
    }
}

#[cfg(test)]
impl Duplex for std::os::unix::net::UnixStream {
    fn end(&mut self) -> io::Result<()> {
        self.shutdown(std::net::Shutdown::Write)
    }
}
