//! One rank's part of one collective, as a state machine.

use std::{collections::VecDeque, sync::Arc, time::Instant};

use drumline_schedule::{
    Pipeline, Schedule,
    step::{Loc, Rank, Step},
};

use super::{
    flags::{Epoch, Flags},
    history::History,
    layout::{Layout, Place},
    message::{Description, Header},
};
use crate::error::Cause;

/// Runs a schedule: what happened goes in, what to do comes out.
///
/// It holds no buffer, no socket, no shared memory and no clock. [`Machine::poll`] says what to
/// do next; the `on_` methods say what has happened. A run of `Recv` steps is posted together,
/// so that messages may arrive in any order of peers; every other step waits for the receives
/// before it. A long operation runs the schedule on one window after another, in turns; where the
/// algorithm is [pipelined](Pipeline), several windows are under way in a turn.
#[derive(Debug)]
pub(crate) struct Machine {
    description: Description,
    /// The calls before this one.
    history: History,
    schedule: Arc<Schedule>,
    element_bytes: usize,
    layout: Layout,
    pipeline: Pipeline,
    windows: usize,
    turn: usize,
    /// Bytes from the start of this rank's arena to its data, where that is registered.
    registered: Option<u64>,
    deadline: Instant,
    stage: Stage,
    /// Receives that were posted and are not complete.
    receiving: usize,
    /// Whether the message of the `RecvReduce` at hand has been asked for.
    staged: bool,
    /// By rank.
    peers: Vec<PeerProgress>,
    flags: Flags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// The slots that this piece uses may still be in use.
    Entry,
    /// Index of the step to run next.
    Step(usize),
}

#[derive(Clone, Debug, Default)]
struct PeerProgress {
    /// Messages handed to the transport, receives completed, and messages that have left their
    /// source.
    sent: u32,
    received: u32,
    flushed: usize,
    /// Payload bytes of the receives that were posted and are not complete, oldest first.
    expected: VecDeque<u64>,
    /// The header of the next message, where it has arrived.
    header: Option<Header>,
    /// Whether it has left the group.
    left: bool,
}

/// What the machine wants done.
#[derive(Debug, PartialEq)]
pub(crate) enum Action<'a> {
    /// Post a message. `src` must stay as it is until [`Machine::on_sent`].
    Send { to: Rank, header: Header, src: Place },
    /// Put the payload of the next message from `from` into `dst`.
    Receive { from: Rank, dst: Place },
    /// Carry out a local step, or one on shared memory, in that window. A `RecvReduce` finds its
    /// message at [`Machine::staging`].
    Compute(&'a Step, usize),
    /// Tell the neighbours in shared memory what is being called, in the line of that piece.
    Announce { piece: u64, header: Header },
    /// Raise this rank's count of posts.
    Post,
    /// Look at a neighbour's count of posts and tell [`Machine::on_posted`].
    Watch(Rank),
    /// Nothing, until something happens.
    Wait,
    /// The collective is complete.
    Done,
}

impl Machine {
    #[allow(clippy::too_many_arguments, reason = "each is a thing of its own")]
    pub(crate) fn new(
        description: Description,
        history: History,
        schedule: Arc<Schedule>,
        element_bytes: usize,
        layout: Layout,
        registered: Option<u64>,
        mut flags: Flags,
        deadline: Instant,
    ) -> Machine {
        flags.peers.iter_mut().for_each(|peer| peer.met = false);
        let peers = vec![PeerProgress::default(); schedule.world_size];
        let stage = Machine::beginning(&schedule);
        let windows = layout.windows();
        let pipeline = if windows > 1 { Pipeline::of(&schedule) } else { Pipeline::default() };
        Machine {
            description,
            history,
            schedule,
            element_bytes,
            layout,
            pipeline,
            windows,
            turn: 0,
            registered,
            deadline,
            stage,
            receiving: 0,
            staged: false,
            peers,
            flags,
        }
    }

    fn beginning(schedule: &Schedule) -> Stage {
        if schedule.posts() > 0 { Stage::Entry } else { Stage::Step(0) }
    }

    /// What the next operation goes on with.
    pub(crate) fn finish(mut self) -> (History, Flags) {
        self.history.push(self.description);
        (self.history, self.flags)
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

    /// Nothing is given up before then.
    pub(crate) fn extend(&mut self, deadline: Instant) {
        self.deadline = self.deadline.max(deadline);
    }

    pub(crate) fn description(&self) -> &Description {
        &self.description
    }

    /// The next thing to do. Call again after each action other than `Wait`.
    pub(crate) fn poll(&mut self) -> Action<'_> {
        let (index, window) = loop {
            let index = match self.stage {
                Stage::Entry => return self.enter(),
                Stage::Step(index) => index,
            };
            if index >= self.schedule.steps.len() {
                match self.end_of_turn() {
                    Some(end) => return end,
                    None => continue,
                }
            }
            match self.window(index) {
                Some(window) if !self.is_passed(index, window) => break (index, window),
                _ => self.stage = Stage::Step(index + 1),
            }
        };
        let step = &self.schedule.steps[index];
        if self.receiving > 0 && !matches!(step, Step::Recv { .. }) {
            return Action::Wait;
        }
        let place = |loc| Place { loc, window };
        match *step {
            Step::Recv { from, dst } => {
                self.stage = Stage::Step(index + 1);
                self.expect(from, place(dst))
            }
            Step::RecvReduce { from, dst, .. } if !self.staged => {
                self.staged = true;
                self.expect(from, place(Machine::staging(dst)))
            }
            Step::RecvReduce { .. }
            | Step::Reduce { .. }
            | Step::ReduceTree { .. }
            | Step::Copy { .. } => {
                self.staged = false;
                self.stage = Stage::Step(index + 1);
                Action::Compute(&self.schedule.steps[index], window)
            }
            Step::Send { to, src } => {
                self.stage = Stage::Step(index + 1);
                let src = place(src);
                let payload = self.bytes(src);
                let peer = &mut self.peers[to];
                let header = Header { description: self.description, part: peer.sent, payload };
                peer.sent += 1;
                Action::Send { to, header, src }
            }
            Step::Flush { .. } => Action::Wait,
            Step::Post => {
                self.stage = Stage::Step(index + 1);
                Action::Post
            }
            Step::Wait { peer, .. } => Action::Watch(peer),
        }
    }

    /// Whether a step that only waits has nothing to wait for. Messages that have left need not wait
    /// for others to come: so receives from several peers go on beside each other.
    fn is_passed(&self, index: usize, window: usize) -> bool {
        match self.schedule.steps[index] {
            Step::Flush { to, upto } => self.is_flushed(to, upto, window),
            Step::Wait { peer, upto } => {
                self.receiving == 0 && self.has_posted(peer, self.level(upto))
            }
            _ => false,
        }
    }

    /// The window that a step works on in this turn.
    fn window(&self, step: usize) -> Option<usize> {
        self.pipeline.window(step, self.turn, self.windows)
    }

    fn is_flushed(&self, to: Rank, upto: usize, window: usize) -> bool {
        let upto = self.pipeline.posted(&self.schedule, to, upto, window, self.windows);
        self.peers[to].flushed >= upto
    }

    /// Waits until nobody uses the slots of the piece before the last one any more: that is so
    /// once everybody has posted in the last one.
    fn enter(&mut self) -> Action<'_> {
        if let Some(previous) = self.flags.epoch.previous
            && let Some(late) = self.flags.peers.iter().find(|peer| peer.posted <= previous.base)
        {
            return Action::Watch(late.rank);
        }
        if let Some((peer, _)) = self.flags.owed() {
            return Action::Watch(peer);
        }
        self.stage = Stage::Step(0);
        let payload = self.registered.unwrap_or(u64::MAX);
        let header = Header { description: self.description, part: 0, payload };
        Action::Announce { piece: self.flags.epoch.pieces, header }
    }

    /// Goes on to the next turn, unless there is something to wait for or nothing left to do.
    fn end_of_turn(&mut self) -> Option<Action<'static>> {
        let turns = self.pipeline.turns(self.windows);
        if self.turn == turns {
            return Some(Action::Done);
        }
        if self.receiving > 0 {
            return Some(Action::Wait);
        }
        let posts = self.schedule.posts() as u64;
        if posts > 0 {
            self.flags.next_piece(posts, self.description);
        }
        self.turn += 1;
        if self.turn == turns {
            return Some(Action::Done);
        }
        self.stage = Machine::beginning(&self.schedule);
        None
    }

    fn expect(&mut self, from: Rank, dst: Place) -> Action<'_> {
        self.receiving += 1;
        let payload = self.bytes(dst);
        self.peers[from].expected.push_back(payload);
        Action::Receive { from, dst }
    }

    fn bytes(&self, place: Place) -> u64 {
        (self.layout.len(place) * self.element_bytes) as u64
    }

    /// A message to `to` has left its source.
    pub(crate) fn on_sent(&mut self, to: Rank) {
        self.peers[to].flushed += 1;
    }

    /// The header of the next message from `from` has arrived. It need not be awaited: a header
    /// of this operation that differs in any way is an error at once, because ranks that run
    /// different operations may wait for each other for ever.
    pub(crate) fn on_header(&mut self, from: Rank, header: Header) -> Result<(), Cause> {
        self.compare(from, header.description)?;
        self.peers[from].header = Some(header);
        Ok(())
    }

    fn compare(&self, peer: Rank, theirs: Description) -> Result<(), Cause> {
        let ours = self.description;
        if theirs.group() != ours.group() {
            return Err(protocol(peer, "sent a message of another group"));
        }
        if theirs.sequence() < ours.sequence() {
            return Err(self.history.explain(peer, theirs));
        }
        if theirs.sequence() == ours.sequence() && theirs != ours {
            return Err(Cause::mismatch(peer, theirs, Some(ours)));
        }
        Ok(())
    }

    /// A peer waits in a call. Ranks that run different operations may wait for each other for
    /// ever without a message between them.
    pub(crate) fn on_waits(&self, peer: Rank, theirs: Description) -> Result<(), Cause> {
        match theirs.group() == self.description.group()
            && theirs.sequence() < self.description.sequence()
        {
            true => self.history.compare(peer, theirs),
            false => self.compare(peer, theirs),
        }
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
        if header.part == peer.received && header.payload != expected && theirs.is_by_pair() {
            let elements = |bytes: u64| bytes / self.element_bytes.max(1) as u64;
            return Err(Cause::Mismatch {
                peer: from,
                theirs: format!(
                    "{theirs:?} with {} elements for rank {}",
                    elements(header.payload),
                    self.schedule.rank
                ),
                ours: format!(
                    "{:?} with {} elements from rank {from}",
                    self.description,
                    elements(expected)
                ),
            });
        }
        if header.part != peer.received || header.payload != expected {
            let problem = format!(
                "sent message {} of {} bytes where message {} of {expected} bytes belongs; is \
                 DRUMLINE_WINDOW_BYTES the same on all ranks?",
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

    /// The ranks that share memory with this one.
    pub(crate) fn neighbours(&self) -> impl Iterator<Item = Rank> {
        self.flags.peers.iter().map(|peer| peer.rank)
    }

    /// The neighbours whose announcements have not been compared yet.
    pub(crate) fn strangers(&self) -> impl Iterator<Item = Rank> {
        self.flags.peers.iter().filter(|peer| !peer.met).map(|peer| peer.rank)
    }

    /// The piece of which a neighbour that has posted so often has made an announcement that
    /// should be compared: hand it to [`Machine::on_announced`] before [`Machine::on_posted`].
    pub(crate) fn news(&self, peer: Rank, posted: u64) -> Option<u64> {
        let Epoch { base, pieces, previous } = self.flags.epoch;
        let known = self.flags.peers.iter().find(|known| known.rank == peer)?;
        match previous {
            Some(previous) if !known.met_before => (posted > previous.base).then_some(pieces - 1),
            _ => (posted > base && !known.met).then_some(pieces),
        }
    }

    /// What a neighbour says it calls, in the line of that piece.
    pub(crate) fn on_announced(
        &mut self,
        peer: Rank,
        piece: u64,
        header: Header,
    ) -> Result<(), Cause> {
        if piece < self.flags.epoch.pieces {
            let Some(previous) = self.flags.epoch.previous else { return Ok(()) };
            if header.description != previous.description {
                let ours = Some(previous.description);
                return Err(Cause::mismatch(peer, header.description, ours));
            }
            let mut known = self.flags.peers.iter_mut();
            if let Some(known) = known.find(|known| known.rank == peer) {
                known.met_before = true;
            }
            return Ok(());
        }
        // A rank whose operations need no shared memory for a while may be behind.
        if header.description.sequence() <= self.description.sequence() {
            self.compare(peer, header.description)?;
        } else if self.schedule.posts() > 0 {
            return Err(Cause::mismatch(peer, header.description, Some(self.description)));
        }
        if let Some(known) = self.flags.peers.iter_mut().find(|known| known.rank == peer) {
            known.met = true;
        }
        Ok(())
    }

    /// A neighbour has posted so often. Whether that lets this rank go on.
    pub(crate) fn on_posted(&mut self, peer: Rank, posted: u64) -> bool {
        self.flags.on_posted(peer, posted);
        self.watching().is_none_or(|(awaited, level)| awaited != peer || posted >= level)
    }

    /// Whether a neighbour is known to have come so far, in the same call. (It may have been seen
    /// there while this rank was still in the call before.)
    fn has_posted(&self, peer: Rank, level: u64) -> bool {
        let mut known = self.flags.peers.iter();
        known.any(|known| known.rank == peer && known.posted >= level && known.met)
    }

    fn level(&self, upto: usize) -> u64 {
        self.flags.epoch.base + upto as u64
    }

    /// The neighbours whose posts are missing.
    fn watched(&self) -> Vec<Rank> {
        let behind = |level: u64| {
            let late = self.flags.peers.iter().filter(move |peer| peer.posted < level);
            late.map(|peer| peer.rank).collect::<Vec<_>>()
        };
        match self.stage {
            Stage::Entry => match self.flags.epoch.previous {
                Some(previous) => behind(previous.base + 1),
                None => vec![],
            },
            Stage::Step(index) => {
                // The waits that follow each other are one wait for several.
                let waits = self.schedule.steps.get(index..).unwrap_or_default().iter();
                let waits = waits.map_while(|step| match *step {
                    Step::Wait { peer, upto } => Some((peer, upto)),
                    _ => None,
                });
                waits
                    .filter(|&(peer, upto)| !self.has_posted(peer, self.level(upto)))
                    .map(|(peer, _)| peer)
                    .collect()
            }
        }
    }

    /// The neighbour whose next post would let this rank go on, and the count to look for.
    pub(crate) fn watching(&self) -> Option<(Rank, u64)> {
        match self.stage {
            Stage::Entry => {
                let level = self.flags.epoch.previous?.base + 1;
                let late = self.flags.peers.iter().find(|peer| peer.posted < level);
                late.map(|late| (late.rank, level)).or_else(|| self.flags.owed())
            }
            Stage::Step(index) => match *self.schedule.steps.get(index)? {
                Step::Wait { peer, upto } if self.receiving == 0 => Some((peer, self.level(upto))),
                _ => None,
            },
        }
    }

    /// `peer` has left the group in good order.
    pub(crate) fn on_left(&mut self, peer: Rank) {
        self.peers[peer].left = true;
    }

    /// It is `now`, and nothing can be done: an error if that will stay so.
    pub(crate) fn on_stuck(&self, now: Instant) -> Result<(), Cause> {
        let any_left = self.peers.iter().any(|peer| peer.left);
        if !any_left && now < self.deadline {
            return Ok(());
        }
        let waiting_for = self.awaited();
        match waiting_for.iter().find(|peer| self.peers[**peer].left) {
            // What it posted before it left is enough if that is all that was missing.
            Some(_) if self.can_go_on() => Ok(()),
            Some(&peer) => Err(Cause::PeerLeft { peer }),
            None if now < self.deadline => Ok(()),
            None => Err(Cause::Timeout { waiting_for }),
        }
    }

    /// Whether the post that this rank waits for has been seen.
    fn can_go_on(&self) -> bool {
        self.watching().is_some_and(|(peer, level)| {
            self.flags.peers.iter().any(|known| known.rank == peer && known.posted >= level)
        })
    }

    /// The peers without whom nothing goes on.
    pub(crate) fn awaited(&self) -> Vec<Rank> {
        let watched = self.awaited_posts();
        let awaited = |rank: &Rank| self.awaits_message(*rank) || watched.contains(rank);
        (0..self.peers.len()).filter(awaited).collect()
    }

    /// Whether nothing goes on without that peer.
    pub(crate) fn awaits(&self, rank: Rank) -> bool {
        self.awaits_message(rank) || self.awaited_posts().contains(&rank)
    }

    /// Whether a message from that peer is missing, or one to it has not left.
    fn awaits_message(&self, rank: Rank) -> bool {
        let Stage::Step(index) = self.stage else { return !self.peers[rank].expected.is_empty() };
        let is_flushed = match (self.schedule.steps.get(index), self.window(index)) {
            (Some(&Step::Flush { to, upto }), Some(window)) if to == rank => {
                self.is_flushed(to, upto, window)
            }
            _ => true,
        };
        !self.peers[rank].expected.is_empty() || !is_flushed
    }

    /// The neighbours whose posts are all that is missing.
    fn awaited_posts(&self) -> Vec<Rank> {
        if self.receiving == 0 { self.watched() } else { vec![] }
    }
}

/// The scratch slot that no algorithm uses.
pub(super) const STAGING: usize = usize::MAX;

fn protocol(peer: Rank, problem: &str) -> Cause {
    Cause::Protocol { peer, problem: problem.to_owned() }
}
