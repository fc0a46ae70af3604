//! A client's end of a connection to the store.

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read as _, Write as _},
};

use drumline_store::store::tcp::protocol::Request;

use super::{script::Shape, world::Line};
use crate::network::Stream;

/// An open connection.
#[derive(Debug)]
pub(super) struct Phone {
    pub(super) line: usize,
    stream: Stream,
    unsent: VecDeque<u8>,
    /// What it has read and not looked at.
    heard: Vec<u8>,
}

impl Phone {
    pub(super) fn new(line: usize, stream: Stream) -> Phone {
        Phone { line, stream, unsent: VecDeque::new(), heard: Vec::new() }
    }

    /// Writes and reads what the connection takes and gives. Whether it is broken.
    pub(super) fn pump(&mut self, line: &mut Line) -> bool {
        while !self.unsent.is_empty() {
            match self.stream.write(self.unsent.make_contiguous()) {
                Ok(count) => line.said.extend(self.unsent.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // There may still be something to read.
                Err(_) => self.unsent.clear(),
            }
        }
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return true,
                Ok(count) => {
                    self.heard.extend_from_slice(&bytes[..count]);
                    line.heard.extend_from_slice(&bytes[..count]);
                }
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
    }

    /// Says anything.
    pub(super) fn shout(&mut self, bytes: &[u8]) {
        self.unsent.extend(bytes);
    }

    pub(super) fn say(&mut self, requests: &[Request<'_>]) {
        let mut bytes = Vec::new();
        requests.iter().for_each(|request| request.encode(&mut bytes));
        self.unsent.extend(bytes);
    }

    /// The next reply, once it is complete.
    pub(super) fn take(&mut self, shape: Shape) -> Option<Vec<u8>> {
        let length = shape.length(&self.heard)?;
        Some(self.heard.drain(..length).collect())
    }

    /// Nothing may be left when all questions are answered.
    pub(super) fn check_silence(&self) -> Result<(), String> {
        match self.heard.is_empty() {
            true => Ok(()),
            false => Err(format!("hears {} unasked", self.heard.escape_ascii())),
        }
    }
}
