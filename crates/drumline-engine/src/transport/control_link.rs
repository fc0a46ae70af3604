//! The control stream to one peer.

use std::{
    io::{self, Read as _, Write as _},
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use super::{
    broken::{is_forged, is_silence},
    duplex::Duplex,
    later::Later,
    waits::Waits,
    wire::Control,
};
use crate::{
    error::{Cause, Reason},
    membership::SeenFailure,
};

/// The control connection to one peer.
#[derive(Debug)]
pub(crate) struct ControlLink<S> {
    peer: Rank,
    /// Whether the peer is on this host, and only the end of its process ends the stream.
    pub(crate) is_near: bool,
    /// Why the stream before this one broke.
    broke: Option<String>,
    stream: Later<S>,
    arrived: Vec<u8>,
    /// Messages, or the rest of one, that the stream has not taken yet.
    unsent: Vec<u8>,
    /// Why messages can no longer reach the peer.
    write_failed: Option<String>,
    state: PeerState,
    /// The failure after which the peer has left.
    seen: Option<SeenFailure>,
    /// Whether the peer has said anything.
    has_spoken: bool,
    /// Whether there may be something to read.
    ready: bool,
    /// How many beats, and how many messages about waiting, went out since the peer was last heard.
    beats: u32,
    unanswered: u32,
    /// When the first message that asks for an answer went out since then.
    asked: Option<Instant>,
    /// What the peer last said about its waiting.
    waits: Option<Waits>,
}

/// What a peer has last said of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PeerState {
    /// Nothing: it takes part.
    Present,
    /// It has left in good order.
    Left,
    /// Its stream broke. A new connection to it must tell whether it lives.
    Doubtful(Doubt),
    /// It is gone or has failed.
    Lost(Cause),
}

/// What is known of a peer whose stream broke.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Doubt {
    problem: String,
    /// Whether a new connection is under way.
    is_calling: bool,
    /// How often nothing has listened at its address.
    refused: u32,
}

/// So often nothing must listen at the address of a peer whose stream broke: what resets one connection may refuse another.
const REFUSED_MIN: u32 = 2;

impl<S: Duplex> ControlLink<S> {
    pub(crate) fn new(peer: Rank) -> ControlLink<S> {
        ControlLink {
            peer,
            is_near: false,
            broke: None,
            stream: Later::NOT_YET,
            arrived: Vec::new(),
            unsent: Vec::new(),
            write_failed: None,
            state: PeerState::Present,
            seen: None,
            has_spoken: false,
            ready: true,
            beats: 0,
            unanswered: 0,
            asked: None,
            waits: None,
        }
    }

    /// Starts afresh on `stream`.
    pub(crate) fn connect(&mut self, stream: S) {
        *self = ControlLink { is_near: self.is_near, ..ControlLink::new(self.peer) };
        self.stream.set(stream);
    }

    /// Whether the peer's stream broke, and a new connection to it is under way.
    pub(crate) fn is_called_again(&self) -> bool {
        matches!(self.state, PeerState::Doubtful(Doubt { is_calling: true, .. }))
    }

    /// Whether a new connection must be begun, to learn whether the peer lives. Says so once.
    pub(crate) fn must_be_called(&mut self) -> bool {
        match &mut self.state {
            PeerState::Doubtful(doubt) => !std::mem::replace(&mut doubt.is_calling, true),
            _ => false,
        }
    }

    /// The peer has answered a new connection, so it lives. It says there why the old one ended, if it knows.
    pub(crate) fn ask_why(&mut self, stream: S) {
        if let PeerState::Doubtful(Doubt { problem, .. }) = &self.state {
            let broke = Some(problem.clone());
            self.connect(stream);
            self.broke = broke;
        }
    }

    /// The peer lives, and no other connection to it can be made.
    pub(crate) fn on_sign_of_life(&mut self) {
        if let PeerState::Doubtful(Doubt { problem, .. }) = &self.state {
            self.state = lives(self.peer, problem);
        }
    }

    /// A new connection to the peer has failed. If `refused`, its host says that nothing listens there.
    pub(crate) fn on_unreachable(&mut self, refused: bool) {
        let peer = self.peer;
        let PeerState::Doubtful(doubt @ Doubt { is_calling: true, .. }) = &mut self.state else {
            return;
        };
        doubt.refused += u32::from(refused);
        self.state = match refused {
            true if doubt.refused < REFUSED_MIN => {
                doubt.is_calling = false;
                return;
            }
            true => PeerState::Lost(Cause::PeerExited { peer }),
            false => {
                let problem = format!(
                    "{}; its process may have ended, or something between the two ranks, such as a \
                     firewall, ended the connection",
                    doubt.problem
                );
                PeerState::Lost(Cause::Disconnected { peer, problem })
            }
        };
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

    /// Why a call that needs a peer that has left cannot go on.
    pub(crate) fn why_left(&self) -> Cause {
        self.after().unwrap_or(Cause::PeerLeft { peer: self.peer })
    }

    /// The failure after which the peer has left.
    pub(crate) fn after(&self) -> Option<Cause> {
        let SeenFailure { culprit, text } = self.seen.clone()?;
        Some(Cause::Reported { by: self.peer, culprit, reason: Reason::Other, text })
    }

    /// Sends a message to the peer. If the stream does not take all of it now, the rest follows later.
    pub(crate) fn say(&mut self, message: &Control) {
        if self.stream.is_there() && self.write_failed.is_none() {
            self.unsent.extend_from_slice(&message.encode());
            self.send();
        }
    }

    /// Whether some bytes of messages are not sent yet, and still can be.
    pub(crate) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
            || self.write_failed.is_none() && self.stream.get().is_some_and(Duplex::holds_output)
    }

    /// Why no message can reach the peer, although it seems to be there.
    pub(crate) fn write_failed(&self) -> Option<Cause> {
        let problem = self.write_failed.clone().filter(|_| self.state == PeerState::Present)?;
        Some(Cause::Disconnected { peer: self.peer, problem })
    }

    /// Sends unsent bytes, as many as the stream takes. A failure is only noted, in `write_failed`. If the
    /// peer is lost, reading finds out, and what the peer said before it left counts.
    fn send(&mut self) {
        if let Err(error) = self.write()
            && error.kind() != io::ErrorKind::WouldBlock
        {
            tracing::debug!(peer = self.peer, %error, "control message was not delivered");
            self.unsent.clear();
            self.write_failed = Some(error.to_string());
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

    /// Sends a beat, to which the peer's kernel answers. Once a process has taken nothing for very long, it
    /// gets no more beats, so that there is always room for important messages.
    pub(crate) fn beat(&mut self) {
        if self.state == PeerState::Present && self.beats < BEATS_MAX {
            self.beats += 1;
            self.say_nothing();
        }
    }

    /// Sends a beat, unless other bytes are still unsent, because these do as well. So a peer that asks often
    /// and does not read cannot make the unsent bytes grow without limit.
    fn say_nothing(&mut self) {
        if !self.has_unsent() {
            self.say(&Control::Beat);
        }
    }

    /// Tells the peer for which ranks this rank waits. The peer answers with a beat if it reads. A peer that
    /// does not read is told no more after a while. A peer that has said goodbye is told, too: it waits for
    /// all others to do so, and must know which rank to blame.
    pub(crate) fn tell(&mut self, waits: &Waits) {
        let listens = matches!(self.state, PeerState::Present | PeerState::Left);
        if listens && self.unanswered < UNANSWERED_MAX {
            self.unanswered += 1;
            self.say(&Control::Waits(waits.clone()));
        }
    }

    /// Tells the same, and expects an answer from `now` on.
    pub(crate) fn ask(&mut self, waits: &Waits, now: Instant) {
        self.tell(waits);
        self.asked.get_or_insert(now);
    }

    /// What the peer last said about its waiting. `None` if it has left a question unanswered for longer than
    /// `answer`: a rank that waits reads, so its process must have been stopped since.
    pub(crate) fn waits_now(&self, now: Instant, answer: Duration) -> Option<&Waits> {
        let is_silent = |asked| now.saturating_duration_since(asked) > answer;
        self.waits().filter(|_| !self.asked.is_some_and(is_silent))
    }

    /// What the peer last said about its waiting.
    pub(crate) fn waits(&self) -> Option<&Waits> {
        self.waits.as_ref().filter(|_| self.state == PeerState::Present)
    }

    /// The stream can be read, or can be written again.
    pub(crate) fn on_readable(&mut self) {
        self.ready = true;
        self.send();
    }

    /// The peer's process has ended. Its last messages still count.
    pub(crate) fn on_exit(&mut self) {
        self.ready = true;
        self.read();
        if self.state == PeerState::Present {
            self.state = PeerState::Lost(Cause::PeerExited { peer: self.peer });
        }
    }

    /// Reads what has arrived, up to a message that ends the peer's part. Also sends unsent bytes: a caller
    /// that only reads never learns that the stream can be written.
    pub(crate) fn read(&mut self) {
        if self.has_unsent() {
            self.send();
        }
        let mut chunk = [0; 1024];
        while self.ready && self.state == PeerState::Present {
            match self.stream.read(&mut chunk) {
                Ok(0) => self.on_end("it was closed".to_owned()),
                Ok(bytes) => {
                    (self.beats, self.unanswered, self.asked) = (0, 0, None);
                    self.arrived.extend_from_slice(&chunk[..bytes]);
                    while self.state == PeerState::Present && self.interpret() {}
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => self.ready = false,
                Err(error) if is_silence(&error) => {
                    self.state = PeerState::Lost(Cause::HostSilent { peer: self.peer });
                }
                Err(error) if is_forged(&error) => {
                    let problem = error.to_string();
                    self.state = PeerState::Lost(Cause::Disconnected { peer: self.peer, problem });
                }
                Err(error) => self.on_end(error.to_string()),
            }
        }
    }

    /// The stream has ended. On this host, only the peer's end does that, and it resets a stream with unread data.
    /// Between hosts, anything on the way may do it.
    fn on_end(&mut self, problem: String) {
        self.state = match &self.broke {
            Some(broke) => lives(self.peer, broke),
            None if self.is_near => PeerState::Lost(Cause::PeerExited { peer: self.peer }),
            None => PeerState::Doubtful(Doubt { problem, is_calling: false, refused: 0 }),
        };
    }

    /// Takes one message. Returns whether there was one.
    fn interpret(&mut self) -> bool {
        match Control::take(&mut self.arrived) {
            Ok(None) => return false,
            Ok(Some(Control::Beat)) => {}
            Ok(Some(Control::Waits(waits))) => {
                self.waits = Some(waits);
                self.say_nothing();
            }
            Ok(Some(Control::Goodbye(seen))) => {
                (self.state, self.seen) = (PeerState::Left, seen);
            }
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
        if let (Some(broke), PeerState::Present) = (&self.broke, &self.state) {
            self.state = lives(self.peer, broke);
        }
        true
    }
}

/// Why a peer that lives can take no part any more: `problem` has broken its stream.
fn lives(peer: Rank, problem: &str) -> PeerState {
    let problem = format!(
        "{problem}; its process lives, so something between the two ranks, such as a firewall, ended the \
         connection"
    );
    PeerState::Lost(Cause::Disconnected { peer, problem })
}

/// The number of messages about waiting that fit the buffers of any connection, beside the answers to those
/// of the peer. Each takes about a kilobyte there, if it names few ranks.
const UNANSWERED_MAX: u32 = 32;

/// The number of beats that fit the buffers of any connection beside other messages.
const BEATS_MAX: u32 = 4096;

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;
    /// A link, and the other end of its full stream.
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
        link.say(&Control::Goodbye(None));
        assert!(link.has_unsent());
        link.on_readable();
        assert!(link.has_unsent(), "nothing was taken meanwhile");
        heard(&mut theirs);
        link.on_readable();
        assert!(!link.has_unsent());
        assert_eq!(heard(&mut theirs), [abort, Control::Goodbye(None)]);
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
        link.say(&Control::Goodbye(None));
        drop(theirs);
        link.on_readable();
        link.say(&Control::Goodbye(None));
        assert!(!link.has_unsent());
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
