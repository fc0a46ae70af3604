//! Streams whose bytes nobody can change unnoticed. They are what the [`Level`](crate::auth::Level) `tls`
//! puts between a connection and its user. This module has no sockets: it wraps any non-blocking stream.

#[cfg(feature = "tls")]
mod tls;
#[cfg(not(feature = "tls"))]
#[path = "secured/without_tls.rs"]
mod tls;

use std::io::{self, ErrorKind, IoSlice, Read, Write};

pub(crate) use self::tls::{Tls, answerer, caller};

/// The most bytes of the user that a layer seals at a time.
pub const BLOCK_BYTES: usize = 64 << 10;

/// What protects a stream. The handshake makes it.
#[derive(Debug)]
pub struct Layer {
    tls: Box<Tls>,
    /// Whether a write may return before all of its bytes are in the stream. So for a control connection, where a
    /// message is taken whole, or not at all. See [`Secured`].
    takes_at_once: bool,
}

impl Layer {
    pub(crate) fn new(tls: Tls, takes_at_once: bool) -> Layer {
        Layer { tls: Box::new(tls), takes_at_once }
    }
}

/// A non-blocking stream under a [`Layer`].
///
/// A write seals a block of bytes. If the stream takes only part of the sealed block, the write returns
/// [`WouldBlock`](ErrorKind::WouldBlock) until all of it is out. The caller must repeat the write with the
/// same bytes, and the write then returns how many it has taken. So bytes that count as written are in the
/// stream, as without a layer. Control connections are an exception, because their messages are short and
/// their writer does not repeat a write. There a message counts as written when it is sealed, and the rest
/// follows with the next write, read or flush ([`Secured::holds_output`]).
#[derive(Debug)]
pub struct Secured<S> {
    stream: S,
    layer: Layer,
    /// The number of the user's bytes that are sealed, wait for the stream, and do not yet count as written.
    owed: usize,
    /// Whether the user will write nothing more.
    ends: bool,
}

impl<S> Secured<S> {
    /// `stream` under `layer`.
    pub fn new(stream: S, layer: Layer) -> Secured<S> {
        Secured { stream, layer, owed: 0, ends: false }
    }

    /// The stream that carries it.
    pub fn inner(&self) -> &S {
        &self.stream
    }

    /// Whether there are bytes to read that have left the stream already. Only a read shows them.
    pub fn holds_input(&self) -> bool {
        self.layer.tls.holds_input()
    }

    /// Whether sealed bytes wait for the stream. A flush moves them.
    pub fn holds_output(&self) -> bool {
        self.layer.tls.holds_output()
    }

    /// Whether [`Secured::end`] was called and all bytes are out.
    pub fn has_ended(&self) -> bool {
        self.ends && !self.holds_output()
    }
}

impl<S: Read + Write> Secured<S> {
    /// Ends this side: nothing more will be written. Tells the other end, which then knows that nothing was
    /// cut off.
    pub fn end(&mut self) -> io::Result<()> {
        if !self.ends {
            self.ends = true;
            self.layer.tls.seal_end();
        }
        match self.flush() {
            // The rest follows later.
            Err(error) if error.kind() == ErrorKind::WouldBlock => Ok(()),
            flushed => flushed,
        }
    }

    fn write_parts(&mut self, parts: &[&[u8]]) -> io::Result<usize> {
        let length = parts.iter().map(|part| part.len()).sum::<usize>();
        if length == 0 {
            return Ok(0);
        }
        if self.ends {
            return Err(ErrorKind::BrokenPipe.into());
        }
        self.flush()?;
        if self.owed > 0 {
            return Ok(std::mem::take(&mut self.owed).min(length));
        }
        let mut taken = 0;
        for part in parts {
            let part = &part[..part.len().min(BLOCK_BYTES - taken)];
            self.layer.tls.seal(part)?;
            taken += part.len();
        }
        self.owed = if self.layer.takes_at_once { 0 } else { taken };
        match self.flush() {
            Err(error) if error.kind() == ErrorKind::WouldBlock && self.layer.takes_at_once => {}
            flushed => flushed?,
        }
        self.owed = 0;
        Ok(taken)
    }
}

impl<S: Read + Write> Read for Secured<S> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        if self.holds_output() && self.layer.takes_at_once {
            // No later write would send it.
            let _ = self.flush();
        }
        loop {
            if let Some(count) = self.layer.tls.open(bytes)? {
                return Ok(count);
            }
            if self.layer.tls.pull(&mut self.stream)? == 0 {
                // A killed process leaves this, or someone who has cut the connection.
                let problem = "it was cut off without the word that ends it";
                return Err(io::Error::new(ErrorKind::ConnectionReset, problem));
            }
        }
    }
}

impl<S: Read + Write> Write for Secured<S> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.write_parts(&[bytes])
    }

    fn write_vectored(&mut self, parts: &[IoSlice<'_>]) -> io::Result<usize> {
        match parts {
            [first, second] => self.write_parts(&[first, second]),
            _ => {
                self.write_parts(&[parts.iter().find(|part| !part.is_empty()).map_or(&[], |it| it)])
            }
        }
    }

    /// Moves sealed bytes into the stream.
    fn flush(&mut self) -> io::Result<()> {
        if self.holds_output() {
            self.layer.tls.push(&mut self.stream)?;
        }
        Ok(())
    }
}
