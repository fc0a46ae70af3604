//! One rank's part of one collective, as a state machine.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use drumline_schedule::{
    Schedule,
    step::{Buffer, Loc, Rank, Step},
};

use super::message::{Description, Header};
use crate::error::Cause;

/// Runs a schedule: what happened goes in, what to do comes out.
///
/// It holds no buffer, no socket and no clock. [`Machine::poll`] says what to do next; the `on_`
/// methods say what has happened. A run of `Recv` steps is posted together, so that messages
/// may arrive in any order of peers; every other step waits for the receives before it.
#[derive(Debug)]
pub(crate) struct Machine<'a> {
    description: Description,
    /// The calls before this one.
    history: &'a History,
    schedule: Arc<Schedule>,
    element_bytes: usize,
    /// Elements in [`Buffer::Data`] and in [`Buffer::Input`].
    extents: Extents,
    deadline: Instant,
    /// Index of the step to run next.
    next: usize,
    /// Receives that were posted and are not complete.
    receiving: usize,
    /// Whether the message of the `RecvReduce` at `next` has been asked for.
    staged: bool,
    /// By rank.
    peers: Vec<PeerProgress>,
}

/// How many elements the caller's buffers hold.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extents {
    pub(crate) data: usize,
    pub(crate) input: usize,
}

impl Extents {
    pub(crate) fn of(self, buffer: Buffer) -> usize {
        match buffer {
            Buffer::Data | Buffer::Scratch(_) => self.data,
            Buffer::Input => self.input,
            Buffer::Slot => self.data.max(self.input),
        }
    }
}

#[derive(Clone, Debug, Default)]
struct PeerProgress {
    /// Messages handed to the transport, and those that have left their source.
    posted: usize,
    flushed: usize,
    /// Receives complete.
    received: u32,
    /// Payload bytes of the receives that were posted and are not complete, oldest first.
    expected: VecDeque<u64>,
    /// The header of the next message, where it has arrived.
    header: Option<Header>,
}

/// What the machine wants done.
#[derive(Debug, PartialEq)]
pub(crate) enum Action<'a> {
    /// Post a message. `src` must stay as it is until [`Machine::on_sent`].
    Send { to: Rank, header: Header, src: Loc },
    /// Put the payload of the next message from `from` into `dst`.
    Receive { from: Rank, dst: Loc },
    /// Carry out a local step. A `RecvReduce` finds its message at [`Machine::staging`].
    Compute(&'a Step),
    /// Nothing, until something happens.
    Wait,
    /// The collective is complete.
    Done,
}

impl<'a> Machine<'a> {
    pub(crate) fn new(
        description: Description,
        history: &'a History,
        schedule: Arc<Schedule>,
        element_bytes: usize,
        extents: Extents,
        deadline: Instant,
    ) -> Machine<'a> {
        let peers = vec![PeerProgress::default(); schedule.world_size];
        Machine {
            description,
            history,
            schedule,
            element_bytes,
            extents,
            deadline,
            next: 0,
            receiving: 0,
            staged: false,
            peers,
        }
    }

    /// Where the message of a `RecvReduce` into `dst` is put before it is combined.
    ///
    /// Whole messages are staged; combining while they arrive would save a pass over memory.
    pub(crate) fn staging(dst: Loc) -> Loc {
        Loc::scratch(STAGING, dst.span)
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The next thing to do. Call again after each action other than `Wait`.
    pub(crate) fn poll(&mut self) -> Action<'_> {
        let Some(step) = self.schedule.steps.get(self.next) else {
            return if self.receiving == 0 { Action::Done } else { Action::Wait };
        };
        if self.receiving > 0 && !matches!(step, Step::Recv { .. }) {
            return Action::Wait;
        }
        match *step {
            Step::Recv { from, dst } => {
                self.next += 1;
                self.expect(from, dst)
            }
            Step::RecvReduce { from, dst, .. } if !self.staged => {
                self.staged = true;
                self.expect(from, Machine::staging(dst))
            }
            Step::RecvReduce { .. }
            | Step::Reduce { .. }
            | Step::ReduceTree { .. }
            | Step::Copy { .. } => {
                self.staged = false;
                self.next += 1;
                Action::Compute(&self.schedule.steps[self.next - 1])
            }
            Step::Send { to, src } => {
                self.next += 1;
                let part = self.peers[to].posted as u32;
                self.peers[to].posted += 1;
                let payload = self.bytes(src);
                Action::Send {
                    to,
                    header: Header { description: self.description, part, payload },
                    src,
                }
            }
            Step::Flush { to, upto } if self.peers[to].flushed < upto => Action::Wait,
            Step::Flush { .. } => {
                self.next += 1;
                self.poll()
            }
            Step::Post | Step::Wait { .. } => {
                unreachable!("only algorithms that use private memory are run")
            }
        }
    }

    fn expect(&mut self, from: Rank, dst: Loc) -> Action<'_> {
        self.receiving += 1;
        let payload = self.bytes(dst);
        self.peers[from].expected.push_back(payload);
        Action::Receive { from, dst }
    }

    fn bytes(&self, loc: Loc) -> u64 {
        (loc.span.resolve(self.extents.of(loc.buffer)).len() * self.element_bytes) as u64
    }

    /// A message to `to` has left its source.
    pub(crate) fn on_sent(&mut self, to: Rank) {
        self.peers[to].flushed += 1;
    }

    /// The header of the next message from `from` has arrived. It need not be awaited: a header
    /// of this operation that differs in any way is an error at once, because ranks that run
    /// different operations may wait for each other for ever.
    pub(crate) fn on_header(&mut self, from: Rank, header: Header) -> Result<(), Cause> {
        let (ours, theirs) = (self.description, header.description);
        if theirs.group() != ours.group() {
            return Err(protocol(from, "sent a message of another group"));
        }
        if theirs.sequence() < ours.sequence() {
            return Err(self.history.explain(from, theirs));
        }
        if theirs.sequence() == ours.sequence() && theirs != ours {
            return Err(Cause::mismatch(from, theirs, Some(ours)));
        }
        self.peers[from].header = Some(header);
        Ok(())
    }

    /// Whether the payload behind the header from `from` may be taken now.
    ///
    /// `false` means that it is not this operation's turn: the peer runs ahead.
    pub(crate) fn admits(&self, from: Rank) -> Result<bool, Cause> {
        let peer = &self.peers[from];
        let (Some(header), Some(&expected)) = (&peer.header, peer.expected.front()) else {
            return Ok(false);
        };
        let theirs = header.description;
        if theirs.sequence() != self.description.sequence() {
            return Err(Cause::mismatch(from, theirs, Some(self.description)));
        }
        if header.part != peer.received || header.payload != expected {
            let problem = format!(
                "sent message {} of {} bytes where message {} of {expected} bytes belongs",
                header.part, header.payload, peer.received
            );
            return Err(protocol(from, &problem));
        }
        Ok(true)
    }

    /// The payload of the message from `from` is in its place.
    pub(crate) fn on_received(&mut self, from: Rank) {
        let peer = &mut self.peers[from];
        peer.header = None;
        peer.received += 1;
        peer.expected.pop_front();
        self.receiving -= 1;
    }

    /// `peer` has left the group in good order: an error only if it is still needed.
    pub(crate) fn on_left(&self, peer: Rank) -> Result<(), Cause> {
        match self.awaited().contains(&peer) {
            true => Err(Cause::PeerLeft { peer }),
            false => Ok(()),
        }
    }

    /// It is `now`.
    pub(crate) fn on_time(&self, now: Instant) -> Result<(), Cause> {
        if now < self.deadline {
            return Ok(());
        }
        Err(Cause::Timeout { waiting_for: self.awaited() })
    }

    /// The peers without whom nothing goes on.
    pub(crate) fn awaited(&self) -> Vec<Rank> {
        let flushing = match self.schedule.steps.get(self.next) {
            Some(Step::Flush { to, upto }) if self.peers[*to].flushed < *upto => Some(*to),
            _ => None,
        };
        (0..self.peers.len())
            .filter(|&rank| !self.peers[rank].expected.is_empty() || flushing == Some(rank))
            .collect()
    }
}

/// The last calls of a group, to explain messages that come too late.
#[derive(Debug, Default)]
pub(crate) struct History(VecDeque<Description>);

impl History {
    const CALLS_MAX: usize = 64;

    pub(crate) fn push(&mut self, description: Description) {
        if self.0.len() == History::CALLS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(description);
    }

    /// Why `peer` sent a message of `theirs`, a call that this rank has completed without it.
    pub(crate) fn explain(&self, peer: Rank, theirs: Description) -> Cause {
        let same_call = |ours: &&Description| ours.sequence() == theirs.sequence();
        Cause::mismatch(peer, theirs, self.0.iter().find(same_call).copied())
    }
}

/// The scratch slot that no algorithm uses.
pub(super) const STAGING: usize = usize::MAX;

fn protocol(peer: Rank, problem: &str) -> Cause {
    Cause::Protocol { peer, problem: problem.to_owned() }
}
