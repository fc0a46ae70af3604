//! A stream of bytes in both directions.

use std::{
    fmt,
    io::{self, Read, Write},
};

/// A stream of bytes in both directions that never blocks.
pub trait Duplex: Read + Write + Send + fmt::Debug {
    /// Nothing more will be written.
    fn end(&mut self) -> io::Result<()>;

    /// Whether it has taken bytes that it has not passed on. A flush does, when it can be written.
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
