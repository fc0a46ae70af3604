//! The messages of collectives to and from one peer, as bytes of a stream.

use std::{
    collections::VecDeque,
    io::{IoSlice, Read as _, Write as _},
};

use drumline_schedule::step::Rank;

use super::{
    broken::{Broken, outcome},
    duplex::Duplex,
    later::Later,
    striped::Striped,
};
use crate::{
    error::Cause,
    executor::{Header, Machine, Memory, Stretch},
};

/// Data messages to and from one peer, over a non-blocking stream.
#[derive(Debug)]
pub(crate) struct DataLink<S> {
    peer: Rank,
    stream: Later<Striped<S>>,
    outgoing: VecDeque<Outgoing>,
    /// Places for messages that were asked for, in the order in which the messages come.
    places: VecDeque<Stretch>,
    incoming: Incoming,
    /// Why the stream carries no more, once that is so. By itself this is no error: the control connection
    /// tells whether the peer left, failed or died.
    broken: Option<Broken>,
    /// Whether there may be something to read. It is true until a read finds nothing.
    ready: bool,
}

#[derive(Debug)]
struct Outgoing {
    header: [u8; Header::BYTES],
    src: Stretch,
    /// Bytes written, of header and payload together.
    written: usize,
}

#[derive(Debug)]
enum Incoming {
    /// `have` bytes of a header have been read.
    Header { bytes: [u8; Header::BYTES], have: usize },
    /// The header has been read. The payload stays in the stream until the machine admits it.
    Held(Header),
    /// `have` bytes of the payload are in their place.
    Payload { dst: Stretch, have: usize },
}

const NOTHING: Incoming = Incoming::Header { bytes: [0; Header::BYTES], have: 0 };

impl<S: Duplex> DataLink<S> {
    /// A link whose stream is not there yet. Sends and receives wait for it.
    pub(crate) fn new(peer: Rank) -> DataLink<S> {
        DataLink {
            peer,
            stream: Later::NOT_YET,
            outgoing: VecDeque::new(),
            places: VecDeque::new(),
            incoming: NOTHING,
            broken: None,
            ready: true,
        }
    }

    pub(crate) fn connect(&mut self, stream: Striped<S>) {
        self.stream.set(stream);
        self.ready = true;
    }

    pub(crate) fn stream(&self) -> Option<&Striped<S>> {
        self.stream.get()
    }

    /// Whether sends or receives are not complete.
    pub(crate) fn is_pending(&self) -> bool {
        !self.outgoing.is_empty() || !self.places.is_empty()
    }

    pub(crate) fn send(&mut self, header: Header, src: Stretch) {
        self.outgoing.push_back(Outgoing { header: header.encode(), src, written: 0 });
    }

    pub(crate) fn receive(&mut self, dst: Stretch) {
        self.places.push_back(dst);
        // The message may be there already. Reading costs no more than asking.
        self.ready = true;
    }

    /// The stream can be read, or can be written again.
    pub(crate) fn on_readable(&mut self) {
        self.ready = true;
        // The next read or write finds the failure.
        let _ = self.stream.flush_held();
    }

    /// Tells the peer that this rank will send no more.
    pub(crate) fn end(&mut self) {
        if let Err(error) = self.stream.end() {
            tracing::debug!(peer = self.peer, %error, "data stream was closed already");
        }
    }

    /// Tells the machine, which begins a call, about a header that came before.
    pub(crate) fn begin(&mut self, machine: &mut Machine) -> Result<(), Cause> {
        match self.incoming {
            Incoming::Held(header) => machine.on_header(self.peer, header),
            _ => Ok(()),
        }
    }

    pub(crate) fn wants_to_write(&self) -> bool {
        !self.outgoing.is_empty() && self.broken.is_none()
    }

    /// Whether this rank wants to hear of more bytes. It does not while a message waits for its call.
    pub(crate) fn wants_to_read(&self) -> bool {
        let held_up = match self.incoming {
            Incoming::Held(_) => true,
            Incoming::Header { have, .. } => have == Header::BYTES,
            Incoming::Payload { .. } => false,
        };
        self.broken.is_none() && !held_up
    }

    /// Reads on after the last call. Returns whether the stream has ended, or a message has come that no call
    /// will take.
    pub(crate) fn drain(&mut self) -> bool {
        loop {
            match &mut self.incoming {
                Incoming::Header { bytes, have } if *have < Header::BYTES => {
                    if self.broken.is_some() {
                        return true;
                    }
                    let result = self.stream.read(&mut bytes[*have..]);
                    let Some(more) = outcome(result, &mut self.broken) else {
                        return self.broken.is_some();
                    };
                    if let Incoming::Header { have, .. } = &mut self.incoming {
                        *have += more;
                    }
                }
                Incoming::Header { .. } | Incoming::Held(_) | Incoming::Payload { .. } => {
                    return true;
                }
            }
        }
    }

    /// The header of a message that no call has taken. Call this after [`DataLink::drain`].
    pub(crate) fn left_over(&self) -> Option<Header> {
        match &self.incoming {
            Incoming::Header { bytes, have } if *have == Header::BYTES => Header::decode(bytes),
            Incoming::Held(header) => Some(*header),
            Incoming::Header { .. } | Incoming::Payload { .. } => None,
        }
    }

    /// Reads the header of the next message while no collective runs. Otherwise the stream would stay
    /// readable, and no thread could sleep on it.
    pub(crate) fn read_ahead(&mut self) -> Result<(), Cause> {
        while self.ready && self.broken.is_none() {
            let Incoming::Header { bytes, have } = &mut self.incoming else { break };
            let result = self.stream.read(&mut bytes[*have..]);
            let Some(more) = outcome(result, &mut self.broken) else {
                self.ready = false;
                break;
            };
            *have += more;
            if *have == Header::BYTES {
                let header = Header::decode(bytes);
                let stranger = || self.protocol("sent something that is no message");
                self.incoming = Incoming::Held(header.ok_or_else(stranger)?);
            }
        }
        Ok(())
    }

    pub(crate) fn broken(&self) -> Option<&Broken> {
        self.broken.as_ref()
    }

    /// Writes as much as the stream takes. Returns whether anything moved.
    pub(crate) fn write(
        &mut self,
        machine: &mut Machine,
        memory: &Memory<'_>,
    ) -> Result<bool, Cause> {
        let mut moved = false;
        while self.broken.is_none()
            && let Some(message) = self.outgoing.front_mut()
        {
            let payload = memory.bytes(message.src);
            let total = Header::BYTES + payload.len();
            let result = if message.written < Header::BYTES {
                let header = IoSlice::new(&message.header[message.written..]);
                self.stream.write_vectored(&[header, IoSlice::new(payload)])
            } else {
                self.stream.write(&payload[message.written - Header::BYTES..])
            };
            match outcome(result, &mut self.broken) {
                Some(bytes) => {
                    moved = true;
                    let Some(message) = self.outgoing.front_mut() else { break };
                    message.written += bytes;
                    if message.written == total {
                        self.outgoing.pop_front();
                        machine.on_sent(self.peer);
                    }
                }
                None => break,
            }
        }
        Ok(moved)
    }

    /// Reads as much as the machine admits. Returns whether anything moved.
    pub(crate) fn read(
        &mut self,
        machine: &mut Machine,
        memory: &mut Memory<'_>,
    ) -> Result<bool, Cause> {
        let mut moved = false;
        while self.ready {
            match &mut self.incoming {
                Incoming::Header { bytes, have } if *have == Header::BYTES => {
                    let Some(header) = Header::decode(bytes) else {
                        return Err(self.protocol("sent something that is no message"));
                    };
                    self.incoming = Incoming::Held(header);
                    machine.on_header(self.peer, header)?;
                }
                Incoming::Held(_) => {
                    if !machine.admits(self.peer)? {
                        self.ready = false;
                        break;
                    }
                    let Some(dst) = self.places.pop_front() else {
                        unreachable!("the machine admits only what it has asked for");
                    };
                    self.incoming = Incoming::Payload { dst, have: 0 };
                    moved = true;
                }
                Incoming::Payload { dst, have } if *have == memory.bytes(*dst).len() => {
                    self.incoming = NOTHING;
                    machine.on_received(self.peer);
                    moved = true;
                    if self.places.is_empty() {
                        // The next message belongs to a later call. It stays in the stream.
                        break;
                    }
                }
                Incoming::Header { .. } | Incoming::Payload { .. } if self.broken.is_some() => {
                    self.ready = false;
                }
                Incoming::Header { bytes, have } => {
                    let result = self.stream.read(&mut bytes[*have..]);
                    let Some(bytes) = outcome(result, &mut self.broken) else {
                        self.ready = false;
                        break;
                    };
                    moved = true;
                    if let Incoming::Header { have, .. } = &mut self.incoming {
                        *have += bytes;
                    }
                }
                Incoming::Payload { dst, have } => {
                    let result = self.stream.read(&mut memory.bytes_mut(*dst)[*have..]);
                    let Some(bytes) = outcome(result, &mut self.broken) else {
                        self.ready = false;
                        break;
                    };
                    moved = true;
                    if let Incoming::Payload { have, .. } = &mut self.incoming {
                        *have += bytes;
                    }
                }
            }
        }
        Ok(moved)
    }

    fn protocol(&self, problem: &str) -> Cause {
        Cause::Protocol { peer: self.peer, problem: problem.to_owned() }
    }
}
