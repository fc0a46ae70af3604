//! A client's end of a connection to the store.

use std::{
    collections::VecDeque,
    io::{ErrorKind, Read as _, Write as _},
};

use drumline_store::store::tcp::protocol::Request;

use super::{action::ReplyFormat, shared_state::Transcript};
use crate::network::SimStream;

/// An open connection.
#[derive(Debug)]
pub(super) struct ClientConnection {
    pub(super) transcript: usize,
    stream: SimStream,
    unsent: VecDeque<u8>,
    /// Bytes that were read and not parsed yet.
    heard: Vec<u8>,
}

impl ClientConnection {
    pub(super) fn new(transcript: usize, stream: SimStream) -> ClientConnection {
        ClientConnection { transcript, stream, unsent: VecDeque::new(), heard: Vec::new() }
    }

    /// Writes and reads what it can. Returns whether the connection is broken.
    pub(super) fn pump(&mut self, transcript: &mut Transcript) -> bool {
        while !self.unsent.is_empty() {
            match self.stream.write(self.unsent.make_contiguous()) {
                Ok(count) => transcript.said.extend(self.unsent.drain(..count)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // There may still be bytes to read.
                Err(_) => self.unsent.clear(),
            }
        }
        let mut bytes = [0; 4096];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => return true,
                Ok(count) => {
                    self.heard.extend_from_slice(&bytes[..count]);
                    transcript.heard.extend_from_slice(&bytes[..count]);
                }
                Err(error) => return error.kind() != ErrorKind::WouldBlock,
            }
        }
    }

    /// Sends arbitrary bytes.
    pub(super) fn shout(&mut self, bytes: &[u8]) {
        self.unsent.extend(bytes);
    }

    pub(super) fn say(&mut self, requests: &[Request<'_>]) {
        let mut bytes = Vec::new();
        requests.iter().for_each(|request| request.encode(&mut bytes));
        self.unsent.extend(bytes);
    }

    /// The next reply, once it is complete.
    pub(super) fn take(&mut self, shape: ReplyFormat) -> Option<Vec<u8>> {
        let length = shape.length(&self.heard)?;
        Some(self.heard.drain(..length).collect())
    }

    /// Checks that no bytes are left when all requests are answered.
    pub(super) fn check_silence(&self) -> Result<(), String> {
        match self.heard.is_empty() {
            true => Ok(()),
            false => Err(format!("hears {} unasked", self.heard.escape_ascii())),
        }
    }
}
