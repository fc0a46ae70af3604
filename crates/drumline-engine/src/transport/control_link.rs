//! The control stream to one peer.

use std::{
    io::{self, Read as _, Write as _},
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use super::{broken::is_silence, duplex::Duplex, later::Later, waits::Waits, wire::Control};
use crate::error::Cause;

/// The control connection to one peer.
#[derive(Debug)]
pub(crate) struct ControlLink<S> {
    peer: Rank,
    stream: Later<S>,
    arrived: Vec<u8>,
    /// Words, or the rest of one, that the stream has not taken yet.
    unsent: Vec<u8>,
    /// Why the peer can be told nothing more.
    deaf: Option<String>,
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
            unsent: Vec::new(),
            deaf: None,
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

    /// Says something to the peer. What the stream does not take now follows when it can be written.
    pub(crate) fn say(&mut self, message: &Control) {
        if self.stream.is_there() && self.deaf.is_none() {
            self.unsent.extend_from_slice(&message.encode());
            self.send();
        }
    }

    /// Whether the stream has not taken all words yet, and may do so.
    pub(crate) fn owes_word(&self) -> bool {
        !self.unsent.is_empty()
            || self.deaf.is_none() && self.stream.get().is_some_and(Duplex::holds_output)
    }

    /// Why a peer that seems to be there can be told nothing.
    pub(crate) fn deaf(&self) -> Option<Cause> {
        let problem = self.deaf.clone().filter(|_| self.state == PeerState::Present)?;
        Some(Cause::Disconnected { peer: self.peer, problem })
    }

    /// Sends what is unsent, as far as that goes now. A peer that cannot hear is itself lost: that is
    /// found by reading, and what it said before it left counts.
    fn send(&mut self) {
        if let Err(error) = self.write()
            && error.kind() != io::ErrorKind::WouldBlock
        {
            tracing::debug!(peer = self.peer, %error, "control message was not delivered");
            self.unsent.clear();
            self.deaf = Some(error.to_string());
        }
    }

    fn write(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
                Ok(bytes) => drop(self.unsent.drain(..bytes)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.stream.flush_held()
    }

    /// Says nothing, to be answered by the peer's kernel. A process that takes nothing for very
    /// long is spared, so that words that matter always find room.
    pub(crate) fn beat(&mut self) {
        if self.state == PeerState::Present && self.beats < BEATS_MAX {
            self.beats += 1;
            self.say_nothing();
        }
    }

    /// A beat; any word that is still to be sent is as good. So what is unsent stays bounded, however
    /// often a peer asks that does not listen.
    fn say_nothing(&mut self) {
        if !self.owes_word() {
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

    /// What the peer last said of its waiting. `None` if it has not answered a question for longer
    /// than `answer`: a rank that waits listens, so its process has been stopped since.
    pub(crate) fn waits_now(&self, now: Instant, answer: Duration) -> Option<&Waits> {
        let is_silent = |asked| now.saturating_duration_since(asked) > answer;
        self.waits().filter(|_| !self.asked.is_some_and(is_silent))
    }

    /// What the peer last said of its waiting.
    pub(crate) fn waits(&self) -> Option<&Waits> {
        self.waits.as_ref().filter(|_| self.state == PeerState::Present)
    }

    /// There is something to read, or the stream can be written again.
    pub(crate) fn on_readable(&mut self) {
        self.ready = true;
        self.send();
    }

    /// The peer's process has ended. Its last words count, if there are any.
    pub(crate) fn on_exit(&mut self) {
        self.ready = true;
        self.read();
        if self.state == PeerState::Present {
            self.state = PeerState::Lost(Cause::PeerExited { peer: self.peer });
        }
    }

    /// Reads what has arrived. The first word that ends a peer's part counts. Also goes on with what is
    /// unsent: whoever only reads would never hear that the stream can be written.
    pub(crate) fn read(&mut self) {
        if self.owes_word() {
            self.send();
        }
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
                self.say_nothing();
            }
            Ok(Some(Control::Goodbye)) => self.state = PeerState::Left,
            Ok(Some(Control::Abort { culprit, reason, text })) => {
                let by = self.peer;
                self.state = PeerState::Lost(Cause::Reported { by, culprit, reason, text });
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
    use crate::error::Reason;

    /// A link, and the other end of its stream, which takes nothing any more.
    fn full() -> (ControlLink<UnixStream>, UnixStream) {
        let (mut ours, theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        theirs.set_nonblocking(true).unwrap();
        while ours.write(&Control::Beat.encode()).is_ok() {}
        let mut link = ControlLink::new(1);
        link.connect(ours);
        (link, theirs)
    }

    fn heard(stream: &mut UnixStream) -> Vec<Control> {
        let (mut bytes, mut words) = (Vec::new(), Vec::new());
        let ended = stream.read_to_end(&mut bytes);
        assert_eq!(ended.unwrap_err().kind(), io::ErrorKind::WouldBlock);
        while let Some(word) = Control::take(&mut bytes).unwrap() {
            words.push(word);
        }
        words
    }

    #[test]
    fn a_word_that_the_stream_does_not_take_follows_when_it_does() {
        let (mut link, mut theirs) = full();
        let abort = Control::Abort {
            culprit: None,
            reason: Reason::Other,
            text: "out of order".to_owned(),
        };
        link.say(&abort);
        link.say(&Control::Goodbye);
        assert!(link.owes_word());
        link.on_readable();
        assert!(link.owes_word(), "nothing was taken meanwhile");
        heard(&mut theirs);
        link.on_readable();
        assert!(!link.owes_word());
        assert_eq!(heard(&mut theirs), [abort, Control::Goodbye]);
    }

    #[test]
    fn whoever_asks_and_does_not_listen_fills_no_memory() {
        let (mut link, mut theirs) = full();
        let waits = Control::Waits(Waits { call: None, messages: vec![2] }).encode();
        for _ in 0..1000 {
            theirs.write_all(&waits).unwrap();
            link.on_readable();
            link.read();
            link.beat();
        }
        assert_eq!(link.unsent, Control::Beat.encode());
    }

    #[test]
    fn nothing_is_owed_to_a_peer_that_is_gone() {
        let (mut link, theirs) = full();
        link.say(&Control::Goodbye);
        drop(theirs);
        link.on_readable();
        link.say(&Control::Goodbye);
        assert!(!link.owes_word());
    }

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
