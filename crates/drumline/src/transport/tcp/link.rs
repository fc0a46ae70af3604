//! The two connections to one peer.

use std::{
    collections::VecDeque,
    io::{self, IoSlice, Read, Write},
};

use drumline_schedule::step::{Loc, Rank};

use super::super::wire::Control;
use crate::{
    error::Cause,
    executor::{Header, Machine, Memory},
    net::stream::is_silence,
};

/// Data messages to and from one peer, over a non-blocking stream.
#[derive(Debug)]
pub(super) struct DataLink<S> {
    peer: Rank,
    stream: S,
    outgoing: VecDeque<Outgoing>,
    /// Places for messages that were asked for, the first for the one that comes next.
    places: VecDeque<Loc>,
    incoming: Incoming,
    /// Why the stream carries no more, once that is so. Not an error by itself: the control
    /// connection tells whether the peer left, failed or died.
    broken: Option<String>,
}

#[derive(Debug)]
struct Outgoing {
    header: [u8; Header::BYTES],
    src: Loc,
    /// Bytes written, of header and payload together.
    written: usize,
}

#[derive(Debug)]
enum Incoming {
    /// `have` bytes of a header are there.
    Header { bytes: [u8; Header::BYTES], have: usize },
    /// The header is there; its payload waits in the stream until the machine admits it.
    Held(Header),
    /// `have` bytes of the payload are in their place.
    Payload { dst: Loc, have: usize },
}

const NOTHING: Incoming = Incoming::Header { bytes: [0; Header::BYTES], have: 0 };

impl<S: Read + Write> DataLink<S> {
    pub(super) fn new(peer: Rank, stream: S) -> DataLink<S> {
        DataLink {
            peer,
            stream,
            outgoing: VecDeque::new(),
            places: VecDeque::new(),
            incoming: NOTHING,
            broken: None,
        }
    }

    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    pub(super) fn send(&mut self, header: Header, src: Loc) {
        self.outgoing.push_back(Outgoing { header: header.encode(), src, written: 0 });
    }

    pub(super) fn receive(&mut self, dst: Loc) {
        self.places.push_back(dst);
    }

    /// Tells a new operation about the header that came before it began.
    pub(super) fn begin(&mut self, machine: &mut Machine<'_>) -> Result<(), Cause> {
        match self.incoming {
            Incoming::Held(header) => machine.on_header(self.peer, header),
            _ => Ok(()),
        }
    }

    pub(super) fn wants_to_write(&self) -> bool {
        !self.outgoing.is_empty() && self.broken.is_none()
    }

    pub(super) fn wants_to_read(&self, machine: &Machine<'_>) -> bool {
        let held = matches!(self.incoming, Incoming::Held(_));
        self.broken.is_none() && (!held || matches!(machine.admits(self.peer), Ok(true)))
    }

    /// The header of a message that was never taken, looked for after the last operation.
    pub(super) fn left_over(&mut self) -> Option<Header> {
        if let Incoming::Header { bytes, have } = &mut self.incoming {
            while *have < Header::BYTES {
                match self.stream.read(&mut bytes[*have..]) {
                    Ok(0) | Err(_) => return None,
                    Ok(more) => *have += more,
                }
            }
            return Header::decode(bytes);
        }
        match self.incoming {
            Incoming::Held(header) => Some(header),
            Incoming::Header { .. } | Incoming::Payload { .. } => None,
        }
    }

    pub(super) fn broken(&self) -> Option<&str> {
        self.broken.as_deref()
    }

    /// Writes what the stream takes; whether anything moved.
    pub(super) fn write(
        &mut self,
        machine: &mut Machine<'_>,
        memory: &dyn Memory,
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
            match self.outcome(result) {
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

    /// Reads what the stream holds, as far as the machine admits it; whether anything moved.
    pub(super) fn read(
        &mut self,
        machine: &mut Machine<'_>,
        memory: &mut dyn Memory,
    ) -> Result<bool, Cause> {
        let mut moved = false;
        loop {
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
                        return Ok(moved);
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
                }
                Incoming::Header { .. } | Incoming::Payload { .. } if self.broken.is_some() => {
                    return Ok(moved);
                }
                Incoming::Header { bytes, have } => {
                    let result = self.stream.read(&mut bytes[*have..]);
                    let Some(bytes) = self.outcome(result) else { return Ok(moved) };
                    moved = true;
                    if let Incoming::Header { have, .. } = &mut self.incoming {
                        *have += bytes;
                    }
                }
                Incoming::Payload { dst, have } => {
                    let result = self.stream.read(&mut memory.bytes_mut(*dst)[*have..]);
                    let Some(bytes) = self.outcome(result) else { return Ok(moved) };
                    moved = true;
                    if let Incoming::Payload { have, .. } = &mut self.incoming {
                        *have += bytes;
                    }
                }
            }
        }
    }

    /// How many bytes moved, or `None` when none will move now.
    fn outcome(&mut self, result: io::Result<usize>) -> Option<usize> {
        match result {
            Ok(0) => {
                self.broken = Some("it was closed".to_owned());
                None
            }
            Ok(bytes) => Some(bytes),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Some(0),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
            Err(error) => {
                self.broken = Some(error.to_string());
                None
            }
        }
    }

    fn protocol(&self, problem: &str) -> Cause {
        Cause::Protocol { peer: self.peer, problem: problem.to_owned() }
    }
}

/// The control connection to one peer.
#[derive(Debug)]
pub(super) struct ControlLink<S> {
    peer: Rank,
    stream: S,
    arrived: Vec<u8>,
    state: PeerState,
}

/// What a peer has last said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum PeerState {
    /// Nothing: it takes part.
    Present,
    /// It has left in good order.
    Left,
    /// It is gone or has failed.
    Lost(Cause),
}

impl<S: Read + Write> ControlLink<S> {
    pub(super) fn new(peer: Rank, stream: S) -> ControlLink<S> {
        ControlLink { peer, stream, arrived: Vec::new(), state: PeerState::Present }
    }

    pub(super) fn stream(&self) -> &S {
        &self.stream
    }

    pub(super) fn state(&self) -> &PeerState {
        &self.state
    }

    /// Says something to the peer, as well as it goes: a peer that cannot hear is itself lost,
    /// and a message this small fits the connection's buffer.
    pub(super) fn say(&mut self, message: &Control) {
        if let Err(error) = self.stream.write_all(&message.encode()) {
            tracing::debug!(peer = self.peer, %error, "control message was not delivered");
        }
    }

    /// Reads what has arrived. The first word that ends a peer's part counts.
    pub(super) fn read(&mut self) {
        let mut chunk = [0; 1024];
        while self.state == PeerState::Present {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.state = PeerState::Lost(Cause::PeerExited { peer: self.peer }),
                Ok(bytes) => {
                    self.arrived.extend_from_slice(&chunk[..bytes]);
                    self.interpret();
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                // A reset is how the end of a process that had unread data looks.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    self.state = PeerState::Lost(Cause::PeerExited { peer: self.peer });
                }
                Err(error) if is_silence(&error) => {
                    self.state = PeerState::Lost(Cause::HostSilent { peer: self.peer });
                }
                Err(error) => {
                    let problem = error.to_string();
                    self.state = PeerState::Lost(Cause::Disconnected { peer: self.peer, problem });
                }
            }
        }
    }

    fn interpret(&mut self) {
        match Control::take(&mut self.arrived) {
            Ok(None) => {}
            Ok(Some(Control::Goodbye)) => self.state = PeerState::Left,
            Ok(Some(Control::Abort { culprit, text })) => {
                self.state = PeerState::Lost(Cause::Reported { by: self.peer, culprit, text });
            }
            Err(problem) => {
                let problem = format!("sent {problem}");
                self.state = PeerState::Lost(Cause::Protocol { peer: self.peer, problem });
            }
        }
    }
}
