//! Streams whose bytes nobody can change unnoticed: what a [`Level`](crate::auth::Level) above
//! `auth` puts between a connection and its user. No sockets: it wraps any stream that does not
//! block.

mod blocks;
mod seal;
mod tls;

use std::io::{self, ErrorKind, IoSlice, Read, Write};

pub use self::seal::BLOCK_BYTES;
pub(crate) use self::{
    blocks::Blocks,
    tls::{Tls, answerer, caller},
};

/// What protects a stream. A handshake makes it.
#[derive(Debug)]
pub struct Layer {
    kind: Kind,
    /// Whether a write may return before all of its bytes are in the stream.
    takes_at_once: bool,
}

#[derive(Debug)]
enum Kind {
    Blocks(Box<Blocks>),
    Tls(Box<Tls>),
}

/// What one call of the same name on either kind of layer returns.
macro_rules! either {
    ($layer:expr, $inner:ident => $call:expr) => {
        match &mut $layer.kind {
            Kind::Blocks($inner) => $call,
            Kind::Tls($inner) => $call,
        }
    };
}

impl Layer {
    pub(crate) fn blocks(blocks: Blocks) -> Layer {
        Layer { kind: Kind::Blocks(Box::new(blocks)), takes_at_once: false }
    }

    pub(crate) fn tls(tls: Tls) -> Layer {
        Layer { kind: Kind::Tls(Box::new(tls)), takes_at_once: false }
    }

    /// For control: a word is taken whole, or not at all. See [`Secured`].
    pub(crate) fn that_takes_at_once(self) -> Layer {
        Layer { takes_at_once: true, ..self }
    }
}

/// A stream that does not block, under a [`Layer`].
///
/// A write seals a block of bytes. Where the stream takes only a part of the sealed block, the write
/// says [`WouldBlock`](ErrorKind::WouldBlock) until all is out; it is to be called again with the
/// same bytes, and then says how many it has taken. So what counts as written is in the stream, as
/// without a layer. Control is the exception: its words are short and its writer does not come back,
/// so a word counts as written when it is sealed, and what the stream has not taken follows with the
/// next write, read or flush ([`Secured::holds_output`]).
#[derive(Debug)]
pub struct Secured<S> {
    stream: S,
    layer: Layer,
    /// How many bytes of the user are sealed, wait for the stream, and do not yet count as written.
    owed: usize,
    /// Nothing more will be written.
    ends: bool,
}

impl<S> Secured<S> {
    /// `stream` under `layer`.
    pub fn new(stream: S, layer: Layer) -> Secured<S> {
        Secured { stream, layer, owed: 0, ends: false }
    }

    /// What carries it.
    pub fn inner(&self) -> &S {
        &self.stream
    }

    /// Whether there is something to read that has left the stream already. Nothing but a read will
    /// tell.
    pub fn holds_input(&self) -> bool {
        match &self.layer.kind {
            Kind::Blocks(blocks) => blocks.holds_input(),
            Kind::Tls(tls) => tls.holds_input(),
        }
    }

    /// Whether something sealed waits for the stream. A flush moves it.
    pub fn holds_output(&self) -> bool {
        match &self.layer.kind {
            Kind::Blocks(blocks) => blocks.holds_output(),
            Kind::Tls(tls) => tls.holds_output(),
        }
    }

    /// Whether [`Secured::end`] was called and all is out.
    pub fn has_ended(&self) -> bool {
        self.ends && !self.holds_output()
    }
}

impl<S: Read + Write> Secured<S> {
    /// Nothing more will be written: says so to the other end, which can then tell that nothing was
    /// cut off.
    pub fn end(&mut self) -> io::Result<()> {
        if !self.ends {
            self.ends = true;
            either!(self.layer, layer => layer.seal_end())?;
        }
        match self.flush() {
            // The rest follows.
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
        let taken = either!(self.layer, layer => layer.seal(parts))?;
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
            // Nobody else would.
            let _ = self.flush();
        }
        loop {
            if let Some(count) = either!(self.layer, layer => layer.open(bytes))? {
                return Ok(count);
            }
            if either!(self.layer, layer => layer.pull(&mut self.stream))? == 0 {
                // As a process that is killed looks, or a connection that somebody has cut.
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

    /// Moves what is sealed into the stream.
    fn flush(&mut self) -> io::Result<()> {
        if self.holds_output() {
            either!(self.layer, layer => layer.push(&mut self.stream))?;
        }
        Ok(())
    }
}
