//! The connections to one peer for collectives and for control.

use std::{
    collections::VecDeque,
    io::{self, IoSlice, Read as _, Write as _},
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use super::{Waits, later::Later, streams::Duplex, striped::Striped, wire::Control};
use crate::{
    error::Cause,
    executor::{Header, Machine, Memory, Stretch},
};

/// Whether a peer's host has said nothing for too long, or cannot be reached.
pub fn is_silence(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::TimedOut
            | io::ErrorKind::HostUnreachable
            | io::ErrorKind::NetworkUnreachable
    )
}

/// Data messages to and from one peer, over a non-blocking stream.
#[derive(Debug)]
pub(crate) struct DataLink<S> {
    peer: Rank,
    stream: Later<Striped<S>>,
    outgoing: VecDeque<Outgoing>,
    /// Places for messages that were asked for, the first for the one that comes next.
    places: VecDeque<Stretch>,
    incoming: Incoming,
    /// Why the stream carries no more, once that is so. Not an error by itself: the control
    /// connection tells whether the peer left, failed or died.
    broken: Option<Broken>,
    /// Whether there may be something to read: so until a read finds nothing.
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
    /// `have` bytes of a header are there.
    Header { bytes: [u8; Header::BYTES], have: usize },
    /// The header is there; its payload waits in the stream until the machine admits it.
    Held(Header),
    /// `have` bytes of the payload are in their place.
    Payload { dst: Stretch, have: usize },
}

const NOTHING: Incoming = Incoming::Header { bytes: [0; Header::BYTES], have: 0 };

impl<S: Duplex> DataLink<S> {
    /// What is asked of it waits for its stream.
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

    /// Whether anything was asked of it that is not done.
    pub(crate) fn is_pending(&self) -> bool {
        !self.outgoing.is_empty() || !self.places.is_empty()
    }

    pub(crate) fn send(&mut self, header: Header, src: Stretch) {
        self.outgoing.push_back(Outgoing { header: header.encode(), src, written: 0 });
    }

    pub(crate) fn receive(&mut self, dst: Stretch) {
        self.places.push_back(dst);
        // It may be there already; looking costs no more than asking.
        self.ready = true;
    }

    /// There is something to read.
    pub(crate) fn on_readable(&mut self) {
        self.ready = true;
    }

    /// No more will be sent.
    pub(crate) fn end(&mut self) {
        if let Err(error) = self.stream.end() {
            tracing::debug!(peer = self.peer, %error, "data stream was closed already");
        }
    }

    /// Tells a new operation about the header that came before it began.
    pub(crate) fn begin(&mut self, machine: &mut Machine) -> Result<(), Cause> {
        match self.incoming {
            Incoming::Held(header) => machine.on_header(self.peer, header),
            _ => Ok(()),
        }
    }

    pub(crate) fn wants_to_write(&self) -> bool {
        !self.outgoing.is_empty() && self.broken.is_none()
    }

    /// Whether news of more bytes would be of use: not while a message is held up.
    pub(crate) fn wants_to_read(&self) -> bool {
        let held_up = match self.incoming {
            Incoming::Held(_) => true,
            Incoming::Header { have, .. } => have == Header::BYTES,
            Incoming::Payload { .. } => false,
        };
        self.broken.is_none() && !held_up
    }

    /// Reads on after the last operation. Whether the end has come, or a message that nobody will
    /// take.
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

    /// The header of a message that was never taken, once it has been drained.
    pub(crate) fn left_over(&self) -> Option<Header> {
        match &self.incoming {
            Incoming::Header { bytes, have } if *have == Header::BYTES => Header::decode(bytes),
            Incoming::Held(header) => Some(*header),
            Incoming::Header { .. } | Incoming::Payload { .. } => None,
        }
    }

    /// Reads the header of what comes next, while no operation runs that would: else the stream
    /// would stay readable, and nobody could sleep on it.
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

    /// Writes what the stream takes; whether anything moved.
    pub(crate) fn write(
        &mut self,
        machine: &mut Machine,
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

    /// Reads what the stream holds, as far as the machine admits it; whether anything moved.
    pub(crate) fn read(
        &mut self,
        machine: &mut Machine,
        memory: &mut dyn Memory,
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
                        // What comes next is of a later operation. It stays in the stream.
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

/// Why a stream carries no more.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The peer has closed it.
    Closed,
    Failed(io::Error),
}

impl Broken {
    /// What that says of the peer, if its control connection says nothing.
    pub(crate) fn cause(&self, peer: Rank) -> Cause {
        match self {
            Broken::Failed(error) if is_silence(error) => Cause::HostSilent { peer },
            Broken::Failed(error) => Cause::Disconnected { peer, problem: error.to_string() },
            Broken::Closed => Cause::Disconnected { peer, problem: "it was closed".to_owned() },
        }
    }
}

/// How many bytes moved, or `None` when none will move now.
pub(crate) fn outcome(result: io::Result<usize>, broken: &mut Option<Broken>) -> Option<usize> {
    match result {
        Ok(0) => {
            *broken = Some(Broken::Closed);
            None
        }
        Ok(bytes) => Some(bytes),
        Err(error) if error.kind() == io::ErrorKind::Interrupted => Some(0),
        Err(error) if error.kind() == io::ErrorKind::WouldBlock => None,
        Err(error) => {
            *broken = Some(Broken::Failed(error));
            None
        }
    }
}

/// The control connection to one peer.
#[derive(Debug)]
pub(crate) struct ControlLink<S> {
    peer: Rank,
    stream: Later<S>,
    arrived: Vec<u8>,
    state: PeerState,
    /// Whether the peer has said anything.
    has_spoken: bool,
    /// Whether there may be something to read.
    ready: bool,
    /// How many beats, and words about waiting, went out since the peer was last heard.
    beats: u32,
    unanswered: u32,
    /// When the first of them went out that asks for an answer.
    asked: Option<Instant>,
    /// What it last said of its waiting.
    waits: Option<Waits>,
}

/// What a peer has last said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerState {
    /// Nothing: it takes part.
    Present,
    /// It has left in good order.
    Left,
    /// It is gone or has failed.
    Lost(Cause),
}

impl<S: Duplex> ControlLink<S> {
    pub(crate) fn new(peer: Rank) -> ControlLink<S> {
        ControlLink {
            peer,
            stream: Later::NOT_YET,
            arrived: Vec::new(),
            state: PeerState::Present,
            has_spoken: false,
            ready: true,
            beats: 0,
            unanswered: 0,
            asked: None,
            waits: None,
        }
    }

    /// Begins anew on this stream.
    pub(crate) fn connect(&mut self, stream: S) {
        *self = ControlLink::new(self.peer);
        self.stream.set(stream);
    }

    pub(crate) fn stream(&self) -> Option<&S> {
        self.stream.get()
    }

    /// Whether the peer has said anything.
    pub(crate) fn has_spoken(&self) -> bool {
        self.has_spoken
    }

    pub(crate) fn state(&self) -> &PeerState {
        &self.state
    }

    /// Says something to the peer, as well as it goes: a peer that cannot hear is itself lost,
    /// and a message this small fits the connection's buffer.
    pub(crate) fn say(&mut self, message: &Control) {
        if self.stream.is_there()
            && let Err(error) = self.stream.write_all(&message.encode())
        {
            tracing::debug!(peer = self.peer, %error, "control message was not delivered");
        }
    }

    /// Says nothing, to be answered by the peer's kernel. A process that takes nothing for very
    /// long is spared, so that words that matter always find room.
    pub(crate) fn beat(&mut self) {
        if self.state == PeerState::Present && self.beats < BEATS_MAX {
            self.beats += 1;
            self.say(&Control::Beat);
        }
    }

    /// Says whom this rank waits for. A peer that listens answers with a beat; one that does not
    /// is spared. One that has left waits for all others, and must know whom to blame.
    pub(crate) fn tell(&mut self, waits: &Waits) {
        let listens = matches!(self.state, PeerState::Present | PeerState::Left);
        if listens && self.unanswered < UNANSWERED_MAX {
            self.unanswered += 1;
            self.say(&Control::Waits(waits.clone()));
        }
    }

    /// The same; from `now` on an answer is expected.
    pub(crate) fn ask(&mut self, waits: &Waits, now: Instant) {
        self.tell(waits);
        self.asked.get_or_insert(now);
    }

    /// What the peer last said of its waiting, unless it has left what it was asked unanswered for
    /// longer than `answer`: whoever waits listens, so it has been stopped since.
    pub(crate) fn waits_now(&self, now: Instant, answer: Duration) -> Option<&Waits> {
        let is_silent = |asked| now.saturating_duration_since(asked) > answer;
        self.waits().filter(|_| !self.asked.is_some_and(is_silent))
    }

    /// What the peer last said of its waiting.
    pub(crate) fn waits(&self) -> Option<&Waits> {
        self.waits.as_ref().filter(|_| self.state == PeerState::Present)
    }

    /// There is something to read.
    pub(crate) fn on_readable(&mut self) {
        self.ready = true;
    }

    /// The peer's process has ended. Its last words count, if there are any.
    pub(crate) fn on_exit(&mut self) {
        self.ready = true;
        self.read();
        if self.state == PeerState::Present {
            self.state = PeerState::Lost(Cause::PeerExited { peer: self.peer });
        }
    }

    /// Reads what has arrived. The first word that ends a peer's part counts.
    pub(crate) fn read(&mut self) {
        let mut chunk = [0; 1024];
        while self.ready && self.state == PeerState::Present {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.state = PeerState::Lost(Cause::PeerExited { peer: self.peer }),
                Ok(bytes) => {
                    (self.beats, self.unanswered, self.asked) = (0, 0, None);
                    self.arrived.extend_from_slice(&chunk[..bytes]);
                    while self.state == PeerState::Present && self.interpret() {}
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.ready = false,
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

    /// Takes one message, if one is there.
    fn interpret(&mut self) -> bool {
        match Control::take(&mut self.arrived) {
            Ok(None) => return false,
            Ok(Some(Control::Beat)) => {}
            Ok(Some(Control::Waits(waits))) => {
                self.waits = Some(waits);
                self.say(&Control::Beat);
            }
            Ok(Some(Control::Goodbye)) => self.state = PeerState::Left,
            Ok(Some(Control::Abort { culprit, text })) => {
                self.state = PeerState::Lost(Cause::Reported { by: self.peer, culprit, text });
            }
            Err(problem) => {
                let problem = format!("sent {problem}");
                self.state = PeerState::Lost(Cause::Protocol { peer: self.peer, problem });
            }
        }
        self.has_spoken = true;
        true
    }
}

/// Words about waiting that fit any connection's buffers beside the answers to the peer's: each
/// takes about a kilobyte there, if it names few ranks.
const UNANSWERED_MAX: u32 = 32;

/// Beats that fit any connection's buffers beside other messages.
const BEATS_MAX: u32 = 4096;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn who_says_that_it_waits_and_does_not_answer_has_stopped() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut link = ControlLink::new(1);
        link.connect(ours);
        let waits = Waits { call: None, messages: vec![2] };
        theirs.write_all(&Control::Waits(waits.clone()).encode()).unwrap();
        link.read();
        let (asked, answer) = (Instant::now(), Duration::from_secs(1));
        assert_eq!(link.waits_now(asked + 9 * answer, answer), Some(&waits), "nobody has asked");
        link.ask(&waits, asked);
        assert_eq!(link.waits_now(asked + answer, answer), Some(&waits), "there is time");
        link.ask(&waits, asked + answer);
        assert_eq!(link.waits_now(asked + 2 * answer, answer), None);
        theirs.write_all(&Control::Beat.encode()).unwrap();
        link.on_readable();
        link.read();
        assert_eq!(link.waits_now(asked + 2 * answer, answer), Some(&waits), "it has answered");
    }
}
