//! One rank's part of one collective, as a state machine.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use super::{
    flags::{Epoch, Flags, Seat},
    history::History,
    layout::{Place, Stretch},
    local::Local,
    message::{Description, Frame, Header},
    plan::Plan,
    task::{Index, Task, Verb},
};
use crate::error::Cause;

/// Runs one call after another, each by its schedule. The caller tells it what has happened and asks it what
/// to do.
///
/// It holds no buffer, no socket, no shared memory and no clock. [`Machine::poll`] says what to do next; the
/// `on_` methods say what has happened. A run of `Recv` steps is posted together, so that peers' messages may
/// arrive in any order. Every other step but `Flush` waits for the receives before it. A call on long data runs the
/// schedule once for each window, in turns. If the algorithm is [pipelined](drumline_schedule::Pipeline), a
/// turn works on several windows.
#[derive(Debug)]
pub struct Machine {
    plan: Arc<Plan>,
    /// The number of the call.
    sequence: u64,
    /// The calls before this one.
    history: History,
    /// The offset, in bytes, of the buffer that is registered for the call in this rank's arena. `None`: the
    /// call has no such buffer.
    registered: Option<u64>,
    /// How long the call may take.
    timeout: Duration,
    /// When the call fails with a time-out. `None` until someone reads the clock: a call that does not wait
    /// never reads it.
    deadline: Option<Instant>,
    turn: usize,
    stage: Stage,
    /// The number of receives that were posted and are not complete.
    receiving: usize,
    /// The progress of each peer, indexed by rank. Valid only if `is_touched`.
    peers: Vec<PeerProgress>,
    /// Whether `peers` was changed in this call.
    is_touched: bool,
    /// Whether the transport knows of this call.
    is_begun: bool,
    flags: Flags,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Another rank may still use the slots of this piece.
    Entry,
    /// The index of the next task.
    Task(usize),
}

#[derive(Debug, Default)]
struct PeerProgress {
    /// How many messages were handed to the transport, how many receives are complete, and how many messages
    /// have left their source.
    sent: u32,
    received: u32,
    flushed: usize,
    /// Payload bytes of the receives that were posted and are not complete, oldest first.
    expected: VecDeque<u64>,
    /// The header of the peer's next message, if it has arrived.
    header: Option<Header>,
    /// Why the peer takes no part any more, if it has left the group.
    left: Option<Box<Cause>>,
}

/// What the machine wants done.
#[derive(Clone, Copy, Debug)]
pub enum Action {
    /// Post a message with [this header](Machine::header). `src` must not change before [`Machine::on_sent`].
    Send { to: Rank, part: u32, src: Stretch },
    /// Put the payload of the next message from `from` into `dst`.
    Receive { from: Rank, dst: Stretch },
    /// Carry out [this computation](Machine::computation) in this window.
    Compute(Index, usize),
    /// Write [this rank's announcement](Machine::notice) to shared memory.
    Announce,
    /// Raise this rank's count of posts.
    Post,
    /// Look for the posts that are [missing](Machine::missing), if any are, and tell [`Machine::on_posted`].
    /// The call cannot go on without them.
    Watch,
    /// Do nothing until something happens.
    Wait,
    /// The collective is complete.
    Done,
}

/// A step that is carried out in memory.
#[derive(Clone, Copy, Debug)]
pub struct Computation<'a> {
    pub plan: &'a Plan,
    pub local: &'a Local,
    /// The window on which the step works.
    pub window: usize,
}

/// What this rank looks for in a neighbour's line.
#[derive(Clone, Copy, Debug)]
pub struct Awaited {
    /// The number of pieces before this one. It decides which of the two lines to read.
    pub piece: u64,
    /// The least count of posts.
    pub level: u64,
    /// The digest of this rank's own call.
    pub digest: u64,
}

/// What a rank announces to its neighbours about a piece.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Notice<'a> {
    /// The number of pieces before this one. It decides which of the two slots and lines the piece uses.
    pub piece: u64,
    pub call: &'a Frame,
    /// The number of the call.
    pub sequence: u64,
    /// The offset of this rank's registered buffer in its arena; `u64::MAX` without one.
    pub place: u64,
    pub digest: u64,
}

impl Machine {
    /// A machine that has nothing to do.
    pub fn new(flags: Flags) -> Machine {
        let plan = Arc::new(Plan::idle());
        Machine {
            sequence: 0,
            history: History::default(),
            plan,
            registered: None,
            timeout: Duration::ZERO,
            deadline: None,
            turn: 0,
            stage: Stage::Task(0),
            receiving: 0,
            peers: Vec::new(),
            is_touched: false,
            is_begun: false,
            flags,
        }
    }

    /// Begins call number `sequence`. `registered` is the offset of the registered buffer that neighbours
    /// reach. The call fails after `timeout`, counted from `now`, or if `now` is `None` from when someone
    /// reads the clock.
    pub fn begin(
        &mut self,
        plan: &Arc<Plan>,
        sequence: u64,
        registered: Option<u64>,
        timeout: Duration,
        now: Option<Instant>,
    ) {
        if self.plan.posts == 0 {
            self.flags.forget_met();
        }
        if !Arc::ptr_eq(&self.plan, plan) {
            self.plan = plan.clone();
        }
        self.sequence = sequence;
        self.registered = registered;
        self.turn = 0;
        self.timeout = timeout;
        self.deadline = now.map(|now| now + timeout);
        self.receiving = 0;
        self.is_begun = false;
        if std::mem::take(&mut self.is_touched) {
            self.peers.iter_mut().for_each(PeerProgress::clear);
        }
        if plan.uses_messages {
            self.touch();
        }
        self.stage = self.beginning();
    }

    /// Ends the call and keeps its description.
    pub fn end(&mut self) {
        self.history.push(self.description());
    }

    /// Makes room for notes about peers.
    fn touch(&mut self) {
        self.is_touched = true;
        if self.peers.len() < self.plan.schedule.world_size {
            self.peers.resize_with(self.plan.schedule.world_size, PeerProgress::default);
        }
    }

    fn beginning(&self) -> Stage {
        if self.plan.posts > 0 { Stage::Entry } else { Stage::Task(0) }
    }

    /// Whether the transport has not been told of this call yet. True once in each call.
    pub fn is_new(&mut self) -> bool {
        !std::mem::replace(&mut self.is_begun, true)
    }

    /// Whether the call sends or receives.
    pub fn uses_messages(&self) -> bool {
        self.plan.uses_messages
    }

    pub(crate) fn history(&self) -> &History {
        &self.history
    }

    pub(crate) fn flags_mut(&mut self) -> (&mut Flags, &History) {
        (&mut self.flags, &self.history)
    }

    /// How long the call may take.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// When the call fails with a time-out. Counts from `now` if nobody has read the clock before.
    pub fn deadline(&mut self, now: Instant) -> Instant {
        *self.deadline.get_or_insert(now + self.timeout)
    }

    /// When the call fails with a time-out, if someone has read the clock.
    pub fn known_deadline(&self) -> Option<Instant> {
        self.deadline
    }

    /// The call does not fail with a time-out before `deadline`.
    pub fn extend(&mut self, deadline: Instant) {
        self.deadline = self.deadline.max(Some(deadline));
    }

    /// The description of the running call.
    pub fn description(&self) -> Description {
        self.plan.description(self.sequence)
    }

    /// The next thing to do. Call again after each action other than `Wait`.
    //
    // Rarely used functions are not inlined: if they were, the loop would load what they need in each turn.
    // That took a tenth of the time of a short call.
    pub fn poll(&mut self) -> Action {
        loop {
            let Stage::Task(index) = self.stage else { return self.enter() };
            let Some(task) = self.plan.tasks.list().get(index) else {
                match self.end_of_turn() {
                    Some(end) => return end,
                    None => continue,
                }
            };
            let next = Stage::Task(index + 1);
            let Some(window) = self.window(task) else {
                self.stage = next;
                continue;
            };
            let is_held_up = self.receiving > 0 && self.is_held_up(task.verb);
            let action = match task.verb {
                _ if is_held_up => return Action::Wait,
                Verb::Flush { to, upto } if !self.is_flushed(to, upto, window) => {
                    return Action::Wait;
                }
                Verb::Wait { .. } => return Action::Watch,
                Verb::Flush { .. } => {
                    self.stage = next;
                    continue;
                }
                Verb::Post => Action::Post,
                Verb::Compute(local) => Action::Compute(local, window),
                Verb::Send { to, src } => self.send(to, Place { loc: src, window }),
                Verb::Receive { from, dst } => self.expect(from, Place { loc: dst, window }),
            };
            self.stage = next;
            return action;
        }
    }

    /// Whether a step must wait while receives are not complete. Receives need not wait: so receives from
    /// several peers go on beside each other. A flush need not wait, because it concerns messages to a peer.
    #[inline(never)]
    fn is_held_up(&self, verb: Verb) -> bool {
        !matches!(verb, Verb::Receive { .. } | Verb::Flush { .. })
    }

    /// The window on which a task works in this turn. `None`: the task has nothing to do in this turn.
    fn window(&self, task: &Task) -> Option<usize> {
        task.window(self.turn, self.plan.windows)
    }

    #[inline(never)]
    fn is_flushed(&self, to: Rank, upto: usize, window: usize) -> bool {
        let Plan { pipeline, schedule, windows, .. } = &*self.plan;
        let upto = pipeline.posted(schedule, to, upto, window, *windows);
        self.peers[to].flushed >= upto
    }

    /// Waits until no rank uses the slots of the piece before the last. This is so once every neighbour has
    /// posted in the last piece.
    #[inline(never)]
    fn enter(&mut self) -> Action {
        if self.flags.owed().is_some() {
            return Action::Watch;
        }
        self.stage = Stage::Task(0);
        Action::Announce
    }

    /// Passes all waits whose posts are there. Returns the first neighbour whose post is missing, and the
    /// count of posts to look for. `None`: no post is missing.
    ///
    /// `find` looks at a neighbour's line. If the line shows what is awaited, it returns the neighbour's
    /// count of posts.
    //
    // This is the fast path. The caller does what else a missing post needs.
    pub fn missing(
        &mut self,
        mut find: impl FnMut(Seat, Awaited) -> Option<u64>,
    ) -> Option<(Seat, u64)> {
        let Stage::Task(first) = self.stage else { return self.flags.owed() };
        let Epoch { base, pieces: piece, .. } = self.flags.epoch;
        let digest = self.digest();
        let Plan { tasks, .. } = &*self.plan;
        let mut missing = None;
        let mut index = first;
        for task in tasks.list().iter().skip(first) {
            let Verb::Wait { seat, upto } = task.verb else { break };
            let awaited = Awaited { piece, level: base + upto, digest };
            if !self.flags.meets(seat, awaited.level, || find(seat, awaited)) {
                missing = Some((seat, awaited.level));
                break;
            }
            index += 1;
        }
        self.stage = Stage::Task(index);
        missing
    }

    /// Whether all turns of the call are over.
    pub(crate) fn is_done(&self) -> bool {
        self.turn == self.plan.pipeline.turns(self.plan.windows)
    }

    /// What this rank has to announce.
    pub fn notice(&self) -> Notice<'_> {
        Notice {
            piece: self.flags.epoch.pieces,
            call: &self.plan.frame,
            sequence: self.sequence,
            place: self.registered.unwrap_or(u64::MAX),
            digest: self.digest(),
        }
    }

    /// The computation of `Action::Compute`.
    pub fn computation(&self, local: Index, window: usize) -> Computation<'_> {
        Computation { plan: &self.plan, local: self.plan.tasks.local(local), window }
    }

    /// Goes on to the next turn, unless receives are not complete or this was the last turn.
    #[inline(never)]
    fn end_of_turn(&mut self) -> Option<Action> {
        let turns = self.plan.pipeline.turns(self.plan.windows);
        if self.turn == turns {
            return Some(Action::Done);
        }
        if self.receiving > 0 {
            return Some(Action::Wait);
        }
        if self.plan.posts > 0 {
            self.flags.next_piece(self.plan.posts, self.sequence, self.digest());
        }
        self.turn += 1;
        if self.turn == turns {
            return Some(Action::Done);
        }
        self.stage = self.beginning();
        None
    }

    #[inline(never)]
    fn send(&mut self, to: Rank, src: Place) -> Action {
        let peer = &mut self.peers[to];
        peer.sent += 1;
        Action::Send { to, part: peer.sent - 1, src: self.plan.stretch(src) }
    }

    /// The header of a message.
    pub fn header(&self, part: u32, src: Stretch) -> Header {
        Header { description: self.description(), part, payload: src.len as u64 }
    }

    #[inline(never)]
    fn expect(&mut self, from: Rank, dst: Place) -> Action {
        let dst = self.plan.stretch(dst);
        self.receiving += 1;
        self.peers[from].expected.push_back(dst.len as u64);
        Action::Receive { from, dst }
    }

    /// A message to `to` has left its source.
    pub fn on_sent(&mut self, to: Rank) {
        self.peers[to].flushed += 1;
    }

    /// The header of the next message from `from` has arrived, awaited or not. If it belongs to the present
    /// call and differs from it in any way, the call fails at once, because ranks in different calls may wait
    /// for each other for ever.
    pub fn on_header(&mut self, from: Rank, header: Header) -> Result<(), Cause> {
        self.compare(from, header.description)?;
        self.touch();
        self.peers[from].header = Some(header);
        Ok(())
    }

    fn compare(&self, peer: Rank, theirs: Description) -> Result<(), Cause> {
        let ours = self.description();
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

    /// A peer says that it waits in a call. Fails if this rank made a different call: ranks in different
    /// calls may wait for each other for ever without a message between them.
    pub fn on_waits(&self, peer: Rank, theirs: Description) -> Result<(), Cause> {
        match theirs.group() == self.description().group() && theirs.sequence() < self.sequence {
            true => self.history.compare(peer, theirs),
            false => self.compare(peer, theirs),
        }
    }

    /// Whether the payload behind the header from `from` may be taken now.
    ///
    /// `false`: the peer runs ahead, and the message has to wait.
    pub fn admits(&self, from: Rank) -> Result<bool, Cause> {
        let Some(peer) = self.peers.get(from) else { return Ok(false) };
        let (Some(header), Some(&expected)) = (&peer.header, peer.expected.front()) else {
            return Ok(false);
        };
        let theirs = header.description;
        if theirs.sequence() != self.sequence {
            return Err(Cause::mismatch(from, theirs, Some(self.description())));
        }
        if header.part == peer.received && header.payload != expected && theirs.is_by_pair() {
            let elements = |bytes: u64| bytes / self.plan.element_bytes() as u64;
            return Err(Cause::Mismatch {
                peer: from,
                theirs: format!(
                    "{theirs:?} with {} elements for rank {}",
                    elements(header.payload),
                    self.plan.schedule.rank
                ),
                ours: format!(
                    "{:?} with {} elements from rank {from}",
                    self.description(),
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
    pub fn on_received(&mut self, from: Rank) {
        let peer = &mut self.peers[from];
        peer.header = None;
        peer.received += 1;
        peer.expected.pop_front();
        self.receiving -= 1;
    }

    /// The ranks that share memory with this one.
    pub fn neighbours(&self) -> impl Iterator<Item = Seat> + use<> {
        (0..self.flags.peers.len()).map(Seat)
    }

    /// The piece whose line of a neighbour this rank should read next. With it, if the announcement there has
    /// not been compared: the count of posts above which it can be.
    pub fn looks_at(&self, seat: Seat) -> (u64, Option<u64>) {
        let Epoch { base, pieces, previous } = self.flags.epoch;
        match previous {
            Some(previous) if !self.flags.has_met_before(seat) => (pieces - 1, Some(previous.base)),
            _ => (pieces, (!self.flags.has_met(seat)).then_some(base)),
        }
    }

    /// The digest of this rank's present call.
    fn digest(&self) -> u64 {
        self.plan.digest(self.sequence)
    }

    /// Whether the digest in a neighbour's line for `piece` is that of this rank's own call. If it is, the
    /// machine notes that; if not, compare the [description](Machine::on_announced).
    pub fn agrees(&mut self, seat: Seat, piece: u64, digest: u64) -> bool {
        let is_same = match self.flags.epoch.previous {
            Some(previous) if piece < self.flags.epoch.pieces => digest == previous.digest,
            _ => digest == self.digest() && self.plan.posts > 0,
        };
        if is_same {
            self.flags.on_met(seat, piece);
        }
        is_same
    }

    /// Compares a neighbour's announcement of a piece with this rank's call.
    #[cold]
    pub fn on_announced(&mut self, seat: Seat, piece: u64, header: Header) -> Result<(), Cause> {
        let peer = self.flags.of(seat).rank;
        if piece < self.flags.epoch.pieces {
            let Some(previous) = self.flags.epoch.previous else { return Ok(()) };
            let ours = match previous.sequence == self.sequence {
                true => Some(self.description()),
                false => self.history.find(previous.sequence),
            };
            return Err(Cause::mismatch(peer, header.description, ours));
        }
        // The neighbour may still be in an earlier call, if this rank's calls need no shared memory for a
        // while.
        if header.description.sequence() <= self.sequence {
            self.compare(peer, header.description)?;
        } else if self.plan.posts > 0 {
            return Err(Cause::mismatch(peer, header.description, Some(self.description())));
        }
        self.flags.on_met(seat, piece);
        Ok(())
    }

    /// One of a neighbour's lines says that it has posted this often. Returns the highest count known.
    pub fn on_posted(&mut self, seat: Seat, posted: u64) -> u64 {
        self.flags.on_posted(seat, posted)
    }

    /// Whether a neighbour is known to have posted `level` times in this same call. (Its count may have been
    /// read while this rank was still in the call before.)
    fn has_posted(&self, seat: Seat, level: u64) -> bool {
        self.flags.of(seat).posted >= level && self.flags.has_met(seat)
    }

    fn level(&self, upto: u64) -> u64 {
        self.flags.epoch.base + upto
    }

    /// The neighbours whose posts are missing, as far as is known, and the counts to look for.
    pub fn watched(&self) -> impl Iterator<Item = (Seat, u64)> {
        let tasks = match self.stage {
            Stage::Entry => None,
            Stage::Task(index) => self.plan.tasks.list().get(index..),
        };
        // Waits that follow each other form one wait for several neighbours.
        let waits = tasks.unwrap_or_default().iter().map_while(|task| match task.verb {
            Verb::Wait { seat, upto } => Some((seat, self.level(upto))),
            _ => None,
        });
        let is_entry = self.stage == Stage::Entry;
        let late = self.late_at_entry().filter(move |_| is_entry);
        late.chain(waits.filter(|&(seat, level)| !self.has_posted(seat, level)))
    }

    /// The neighbours that are not known to have posted in the last piece.
    fn late_at_entry(&self) -> impl Iterator<Item = (Seat, u64)> {
        let level = self.flags.epoch.previous.map_or(0, |previous| previous.base + 1);
        let is_late = move |seat: &Seat| self.flags.of(*seat).posted < level;
        self.neighbours().filter(is_late).map(move |seat| (seat, level))
    }

    /// The neighbour for whose post this rank waits first, and the count to look for.
    pub fn watching(&self) -> Option<(Seat, u64)> {
        match self.stage {
            Stage::Entry => self.flags.owed(),
            Stage::Task(index) => match self.plan.tasks.list().get(index)?.verb {
                Verb::Wait { seat, upto } if self.receiving == 0 => Some((seat, self.level(upto))),
                _ => None,
            },
        }
    }

    /// `peer` has left the group in good order. A call that needs it fails because of `why`.
    pub fn on_left(&mut self, peer: Rank, why: Cause) {
        self.touch();
        self.peers[peer].left = Some(Box::new(why));
    }

    /// Tells the machine that nothing can be done at the time `now`. Fails if the call can no longer go on,
    /// because a peer that it needs has left or the time limit has passed.
    pub fn on_stuck(&mut self, now: Instant) -> Result<(), Cause> {
        let deadline = self.deadline(now);
        let why_left = |peer: &Rank| self.peers.get(*peer)?.left.clone();
        let any_left = self.is_touched && self.peers.iter().any(|peer| peer.left.is_some());
        if !any_left && now < deadline {
            return Ok(());
        }
        let waiting_for = self.awaited();
        match waiting_for.iter().find_map(why_left) {
            // The peer's posts before it left are enough, if nothing else is missing.
            Some(_) if self.can_go_on() => Ok(()),
            Some(why) => Err(*why),
            None if now < deadline => Ok(()),
            None => Err(Cause::Timeout { waiting_for }),
        }
    }

    /// Whether the post that this rank waits for has been seen.
    fn can_go_on(&self) -> bool {
        self.watching().is_some_and(|(seat, level)| self.flags.of(seat).posted >= level)
    }

    /// The peers that the call needs in order to go on.
    pub fn awaited(&self) -> Vec<Rank> {
        let watched = self.awaited_posts();
        let awaited = |rank: &Rank| self.awaits_message(*rank) || watched.contains(rank);
        (0..self.plan.schedule.world_size).filter(awaited).collect()
    }

    /// Whether the call needs `rank` in order to go on.
    pub fn awaits(&self, rank: Rank) -> bool {
        self.awaits_message(rank) || self.awaited_posts().contains(&rank)
    }

    /// Whether a message from `rank` is missing, or a message to it has not left its source.
    fn awaits_message(&self, rank: Rank) -> bool {
        let Some(peer) = self.peers.get(rank) else { return false };
        let Stage::Task(index) = self.stage else { return !peer.expected.is_empty() };
        let is_flushed = |task: &Task| match (task.verb, self.window(task)) {
            (Verb::Flush { to, upto }, Some(window)) if to == rank => {
                self.is_flushed(to, upto, window)
            }
            _ => true,
        };
        !peer.expected.is_empty() || !self.plan.tasks.list().get(index).is_none_or(is_flushed)
    }

    /// The neighbours whose posts are missing. Empty while messages are missing, because those come first.
    fn awaited_posts(&self) -> Vec<Rank> {
        let watched = self.watched().map(|(seat, _)| self.flags.of(seat).rank);
        if self.receiving == 0 { watched.collect() } else { vec![] }
    }
}

impl PeerProgress {
    fn clear(&mut self) {
        self.expected.clear();
        let expected = std::mem::take(&mut self.expected);
        *self = PeerProgress { expected, ..PeerProgress::default() };
    }
}

fn protocol(peer: Rank, problem: &str) -> Cause {
    Cause::Protocol { peer, problem: problem.to_owned() }
}
