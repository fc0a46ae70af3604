//! Messages over byte streams. Each peer has a control stream, a stream for messages from rank to rank, and
//! one or [several](super::striped) streams for collectives. Peers on other hosts are connected when they are
//! first used.
//!
//! Failures are told on control streams, which are read whenever their owner waits. A data stream may be held
//! up behind a message that no call awaits yet. If it breaks, the control stream of the same peer says why.
//!
//! This module knows neither sockets nor sleeping. `drumline-group` provides both, and the simulator provides
//! its own.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;

use super::{
    control_link::PeerState,
    duplex::Duplex,
    peer::{Bond, Bundle, Peer},
    points::{Desk, Ended, Point},
    striped::Striped,
    waits::Waits,
    wire::Control,
};
use crate::{
    error::{Cause, CollectiveError},
    executor::{Header, History, Machine, Memory, Stretch},
    membership::SeenFailure,
};

/// How long a broken stream waits for the control stream to say why. Also, how long a receive from any rank
/// waits for a message of this rank to itself, after all other ranks have left.
const GRACE: Duration = Duration::from_secs(2);

/// What a stream is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StreamKind {
    /// Leave-taking and failures.
    Control,
    /// Messages from rank to rank.
    Points,
    /// Messages of collectives, on the stream of that number.
    Data(usize),
}

/// The events of a stream that should wake a sleeping rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interest {
    /// The peer.
    pub rank: Rank,
    /// Which of its streams.
    pub kind: StreamKind,
    /// Whether to wake up when the stream can be read.
    pub readable: bool,
    /// Whether to wake up when the stream can be written.
    pub writable: bool,
}

/// The streams of one rank to the peers that it has reached, or wants to reach.
#[derive(Debug)]
pub struct Streams<S> {
    rank: Rank,
    world_size: usize,
    peers: BTreeMap<Rank, Peer<S>>,
    /// Peers that must be called.
    wanted: Vec<Rank>,
    /// Peers that have not answered an offer.
    offered: BTreeSet<Rank>,
    /// The last message of this rank, for peers that connect later. `None` while this rank takes part.
    farewell: Option<Control>,
    /// What this rank last told its peers about its waiting.
    waits: Option<Waits>,
    desk: Desk,
    /// Since when no rank but this one can send a message to a receive from any rank.
    alone_since: Option<Instant>,
    /// The peer that is asked first for a receive from any rank. The peers take turns.
    first: Rank,
}

impl<S: Duplex> Streams<S> {
    /// The streams to `near` peers. Other peers must be called when they are [wanted](Streams::take_wanted).
    pub fn new(
        rank: Rank,
        world_size: usize,
        near: impl IntoIterator<Item = (Rank, Bundle<S>)>,
    ) -> Streams<S> {
        let near = near.into_iter().map(|(rank, streams)| (rank, Peer::near(rank, streams)));
        Streams {
            rank,
            world_size,
            peers: near.collect(),
            wanted: Vec::new(),
            offered: BTreeSet::new(),
            farewell: None,
            waits: None,
            desk: Desk::default(),
            alone_since: None,
            first: 0,
        }
    }

    /// A peer that is used from now on. It is called if it never was.
    fn used(&mut self, rank: Rank) -> &mut Peer<S> {
        self.peers.entry(rank).or_insert_with(|| {
            self.wanted.push(rank);
            Peer::called(rank)
        })
    }

    /// Calls these peers, too, to hear from them.
    pub fn want(&mut self, ranks: impl IntoIterator<Item = Rank>) {
        for rank in ranks {
            if rank != self.rank && self.farewell.is_none() {
                self.used(rank);
            }
        }
    }

    /// The peers that must be called now. Each call must end in [`Streams::called`] or
    /// [`Streams::unreachable`].
    pub fn take_wanted(&mut self) -> Vec<Rank> {
        let doubtful = self
            .peers
            .values_mut()
            .filter_map(|Peer { rank, control, .. }| control.must_be_called().then_some(*rank));
        std::mem::take(&mut self.wanted).into_iter().chain(doubtful).collect()
    }

    /// Whether `rank` is called because its connection broke, to learn whether it lives.
    pub fn is_called_again(&self, rank: Rank) -> bool {
        self.peers.get(&rank).is_some_and(|peer| peer.control.is_called_again())
    }

    /// Whether a call to `rank` is still needed.
    pub fn is_calling(&self, rank: Rank) -> bool {
        let is_called = |peer: &Peer<S>| matches!(peer.bond, Bond::Called);
        self.is_called_again(rank) || self.peers.get(&rank).is_some_and(is_called)
    }

    /// A call has succeeded and has opened these streams to `rank`. Returns whether the control stream replaces one that
    /// broke.
    pub fn called(&mut self, rank: Rank, streams: Bundle<S>) -> bool {
        let Some(peer) = self.peers.get_mut(&rank) else { return false };
        let again = peer.control.is_called_again();
        if again {
            peer.control.ask_why(streams.control);
        } else if peer.offer(streams, self.farewell.as_ref()) {
            self.offered.insert(rank);
        }
        again
    }

    /// A peer has called and opened these streams. Returns whether they are in use now.
    pub fn came(&mut self, rank: Rank, streams: Bundle<S>) -> bool {
        let unbegun = self.wanted.iter().position(|wanted| *wanted == rank);
        if let Some(index) = unbegun {
            self.wanted.swap_remove(index);
        }
        let calls = unbegun.is_none() && self.peers.contains_key(&rank);
        let peer = self.peers.entry(rank).or_insert_with(|| Peer::called(rank));
        let is_used = peer.take(streams, calls && self.rank > rank, self.farewell.as_ref());
        if is_used {
            self.offered.remove(&rank);
            peer.greet(&self.waits);
        }
        is_used
    }

    /// A call has failed. If `refused`, the peer's host says that nothing listens there. Returns whether streams that the
    /// peer has opened meanwhile are in use now.
    pub fn unreachable(&mut self, rank: Rank, cause: Cause, refused: bool) -> bool {
        let Some(peer) = self.peers.get_mut(&rank) else { return false };
        peer.control.on_unreachable(refused);
        let is_used = peer.fail(cause, self.farewell.as_ref());
        if is_used {
            peer.greet(&self.waits);
        }
        is_used
    }

    /// A peer whose connection broke says elsewhere that it lives. No other connection to it can be made.
    pub fn lives(&mut self, rank: Rank) {
        if let Some(peer) = self.peers.get_mut(&rank) {
            peer.control.on_sign_of_life();
        }
    }

    /// The events of each stream for which a sleeping rank should wake up.
    pub fn interests(&self) -> impl Iterator<Item = (Interest, &S)> {
        let any = self.desk.awaits_any();
        self.peers.values().flat_map(move |Peer { rank, control, data, points, .. }| {
            let present = *control.state() == PeerState::Present;
            let to_points = [points.wants_to_read(any), points.wants_to_write()];
            let to_data = [data.wants_to_read(), data.wants_to_write()];
            let data = data.stream().into_iter().flat_map(Striped::each);
            let data = data.map(move |(number, stream, turns)| {
                let wanted = [0, 1].map(|way| to_data[way] && turns[way]);
                (StreamKind::Data(number), Some(stream), wanted)
            });
            let others = [
                (StreamKind::Control, control.stream(), [present, control.has_unsent()]),
                (StreamKind::Points, points.stream(), to_points),
            ];
            others.into_iter().chain(data).filter_map(|(kind, stream, [readable, writable])| {
                let stream = stream?;
                let writable = writable || stream.holds_output();
                Some((Interest { rank: *rank, kind, readable, writable }, stream))
            })
        })
    }

    /// Whether messages are under way or awaited.
    pub fn is_pending(&self) -> bool {
        let is_pending = |peer: &Peer<S>| peer.data.is_pending() || peer.points.is_pending();
        self.desk.awaits_any() || self.peers.values().any(is_pending)
    }

    /// A stream can be read, or can be written again.
    pub fn on_readable(&mut self, rank: Rank, kind: StreamKind) {
        let Some(peer) = self.peers.get_mut(&rank) else { return };
        match kind {
            StreamKind::Control => peer.control.on_readable(),
            StreamKind::Points => peer.points.on_readable(),
            StreamKind::Data(_) => peer.data.on_readable(),
        }
    }

    /// The process of a peer on this host has ended.
    pub fn on_exit(&mut self, rank: Rank) {
        if let Some(peer) = self.peers.get_mut(&rank) {
            peer.control.on_exit();
        }
    }

    /// Whether there are connections to other hosts.
    pub fn has_far(&self) -> bool {
        self.peers.values().any(|peer| !peer.control.is_near)
    }

    /// Sends a beat to all peers on other hosts, so that their kernels answer.
    pub fn beat(&mut self) {
        let far = self.peers.values_mut().filter(|peer| !peer.control.is_near);
        far.for_each(|peer| peer.control.beat());
    }

    /// See [`Transport::begin`](super::Transport::begin).
    pub fn begin(&mut self, machine: &mut Machine) -> Result<(), Cause> {
        self.peers.values_mut().try_for_each(|peer| peer.data.begin(machine))
    }

    /// See [`Transport::send`](super::Transport::send).
    pub fn send(&mut self, to: Rank, header: Header, src: Stretch) {
        self.used(to).data.send(header, src);
    }

    /// See [`Transport::receive`](super::Transport::receive).
    pub fn receive(&mut self, from: Rank, dst: Stretch) {
        self.used(from).data.receive(dst);
    }

    /// Moves what can be moved. Returns whether anything moved.
    pub fn progress(
        &mut self,
        machine: &mut Machine,
        memory: &mut Memory<'_>,
        now: Instant,
    ) -> Result<bool, Cause> {
        let mut moved = self.agree();
        for peer in self.peers.values_mut() {
            // A peer leaves only when it has all that it wanted. If this rank wrote now, no error would tell
            // that nobody reads it.
            if peer.data.wants_to_write() && *peer.control.state() == PeerState::Left {
                return Err(peer.control.why_left());
            }
            moved |= peer.data.write(machine, memory)?;
            moved |= peer.data.read(machine, memory)?;
        }
        if !moved {
            self.listen(Some(machine), now)?;
        }
        Ok(moved)
    }

    /// Looks which peers have answered an offer. Returns whether any has.
    fn agree(&mut self) -> bool {
        let Streams { peers, offered, waits, .. } = self;
        let before = offered.len();
        offered.retain(|rank| {
            let Some(peer) = peers.get_mut(rank) else { return false };
            let agreed = peer.agree();
            if agreed {
                peer.greet(waits);
            }
            !agreed
        });
        offered.len() < before
    }

    /// See [`Connections::post`](super::Connections::post).
    pub fn post(&mut self, mut point: Point, ended: &mut Vec<Ended>) {
        self.desk.number(&mut point);
        let to = match point.call.peer {
            Some(rank) if rank == self.rank => None,
            Some(rank) => Some(self.used(rank)),
            None => self.offering(point.call.tag),
        };
        match to {
            Some(peer) => peer.points.post(point, ended),
            // A message of this rank to itself, or a receive from any rank that no offer has met.
            None => {
                self.desk.post(point, ended);
                if self.desk.awaits_any() {
                    self.want(0..self.world_size);
                }
                // An offer may be there already. Reading costs no more than asking.
                self.peers.values_mut().for_each(|peer| peer.points.on_readable());
            }
        }
    }

    /// A peer that offers a message with this tag that no receive has met.
    fn offering(&mut self, tag: u64) -> Option<&mut Peer<S>> {
        let turns = self.peers.range(self.first..).chain(self.peers.range(..self.first));
        let mut offering = turns.filter(|(_, peer)| peer.points.offers(tag));
        let next = *offering.next()?.0;
        self.first = next + 1;
        self.peers.get_mut(&next)
    }

    /// Moves messages from rank to rank. Returns whether anything moved.
    pub fn progress_points(
        &mut self,
        idle: bool,
        now: Instant,
        ended: &mut Vec<Ended>,
    ) -> Result<bool, Cause> {
        let mut moved = self.agree();
        for peer in self.peers.values_mut() {
            moved |= peer.points.progress(&mut self.desk.any, ended)?;
        }
        if idle {
            self.peers.values_mut().try_for_each(|peer| peer.data.read_ahead())?;
        }
        if !moved {
            self.listen(None, now)?;
        }
        Ok(moved)
    }

    /// The sends and receives that are under way.
    pub fn points_mut(&mut self) -> impl Iterator<Item = &mut Point> {
        let named = self.peers.values_mut().flat_map(|peer| peer.points.points_mut());
        named.chain(self.desk.points_mut())
    }

    /// See [`Connections::take_points`](super::Connections::take_points).
    pub fn take_points(&mut self) -> Vec<Point> {
        let named = self.peers.values_mut().flat_map(|peer| peer.points.take_points());
        named.chain(self.desk.take_points()).collect()
    }

    /// Reads the control streams. Fails if a message there ends the running collective, or a send or receive.
    fn listen(&mut self, mut machine: Option<&mut Machine>, now: Instant) -> Result<(), Cause> {
        for peer in self.peers.values_mut() {
            if let Bond::Unreachable(cause) = &peer.bond {
                match machine.is_some() && peer.data.is_pending() || peer.points.is_pending() {
                    true => return Err(cause.clone()),
                    false => continue,
                }
            }
            peer.control.read();
            let in_call = peer.control.waits().and_then(|waits| waits.call.as_ref());
            if let (Some(machine), Some(in_call)) = (&machine, in_call) {
                machine.on_waits(peer.rank, in_call.call)?;
            }
            // The broken streams on which this rank waits for something.
            let data = peer.data.broken();
            if let Some(forged) =
                [data, peer.points.broken()].into_iter().flatten().find(|it| it.is_forged())
            {
                return Err(forged.cause(peer.rank));
            }
            let points = peer.points.broken().filter(|_| peer.points.is_pending());
            match peer.control.state() {
                PeerState::Present => {}
                PeerState::Doubtful(_) => continue,
                // Messages that the peer sent before it left may still be on their way.
                PeerState::Left => {
                    if let (Some(machine), Some(_)) = (&mut machine, data) {
                        machine.on_left(peer.rank, peer.control.why_left());
                    }
                    if points.is_some() {
                        return Err(peer.control.why_left());
                    }
                }
                PeerState::Lost(cause) => return Err(cause.clone()),
            }
            let write_failed = peer.control.write_failed();
            if data.or(points).is_none() && write_failed.is_none() {
                continue;
            }
            let since = *peer.broken_since.get_or_insert(now);
            // A goodbye of the peer may still be on its way. If none comes within the grace, the peer waits
            // for messages that cannot reach it.
            if let Some(cause) = write_failed
                && now >= since + GRACE
            {
                return Err(cause);
            }
            let awaited = |machine: &Machine| machine.awaits(peer.rank);
            let data = data.filter(|_| machine.as_deref().is_some_and(awaited));
            if let Some(broken) = data.or(points)
                && now >= since + GRACE
            {
                return Err(broken.cause(peer.rank));
            }
        }
        let all_gone = !self.peers.is_empty() && self.peers.values().all(Peer::is_gone);
        if !(all_gone && self.desk.awaits_any()) {
            self.alone_since = None;
            return Ok(());
        }
        match now >= *self.alone_since.get_or_insert(now) + GRACE {
            true => Err(self.nobody_left()),
            false => Ok(()),
        }
    }

    /// The cause of failure for a receive from any rank when no rank is left that could send.
    fn nobody_left(&self) -> Cause {
        if let Some(cause) = self.peers.values().find_map(|peer| peer.control.after()) {
            return cause;
        }
        let (mut left, mut unreachable) = (Vec::new(), Vec::new());
        for Peer { rank, bond, .. } in self.peers.values() {
            match bond {
                Bond::Unreachable(Cause::Unreachable { problem, .. }) => {
                    unreachable.push((*rank, problem.clone()));
                }
                _ => left.push(*rank),
            }
        }
        Cause::NobodyLeft { left, unreachable }
    }

    /// When this rank has something to report even if nothing arrives.
    pub fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let graces = self.peers.values().filter_map(|peer| peer.broken_since);
        let graces = graces.chain(self.alone_since);
        graces.map(|since| since + GRACE).filter(|until| *until > now).min()
    }

    /// Tells all peers for which ranks this rank waits, also peers that connect later. If nothing has
    /// changed, only peers that can answer are told.
    pub fn tell(&mut self, waits: &Waits, now: Instant) {
        let is_news = self.waits.as_ref().is_none_or(|told| told != waits);
        for peer in self.peers.values_mut().filter(|peer| peer.is_agreed()) {
            if is_news || *peer.control.state() == PeerState::Present {
                peer.control.ask(waits, now);
            }
        }
        self.waits = waits.is_any().then(|| waits.clone());
    }

    /// What each peer has said about its waiting. Leaves out peers that have not answered for longer than
    /// `answer`.
    pub fn told(&mut self, now: Instant, answer: Duration) -> BTreeMap<Rank, Waits> {
        let agreed = self.peers.values_mut().filter(|peer| peer.is_agreed());
        let told = |peer: &mut Peer<S>| {
            peer.control.read();
            Some((peer.rank, peer.control.waits_now(now, answer)?.clone()))
        };
        agreed.filter_map(told).collect()
    }

    /// See [`Connections::left`](super::Connections::left).
    pub fn left(&self, rank: Rank) -> Option<Cause> {
        let control = &self.peers.get(&rank)?.control;
        (*control.state() == PeerState::Left).then(|| control.why_left())
    }

    /// See [`Connections::has_met_all`](super::Connections::has_met_all).
    pub fn has_met_all(&mut self) -> bool {
        self.agree();
        let is_met = |peer: &Peer<S>| matches!(peer.bond, Bond::Agreed | Bond::Unreachable(_));
        self.peers.len() + 1 == self.world_size && self.peers.values().all(is_met)
    }

    /// See [`Connections::lost`](super::Connections::lost).
    pub fn lost(&mut self, rank: Rank) -> Option<Cause> {
        let control = &mut self.peers.get_mut(&rank)?.control;
        control.read();
        match control.state() {
            PeerState::Lost(cause) => Some(cause.clone()),
            PeerState::Present | PeerState::Doubtful(_) | PeerState::Left => None,
        }
    }

    /// See [`Transport::abort`](super::Transport::abort).
    pub fn abort(&mut self, failure: &CollectiveError) {
        self.part(Control::Abort {
            culprit: failure.culprit(),
            reason: failure.cause.reason(),
            text: failure.to_string(),
        });
    }

    /// See [`Transport::take_leave`](super::Transport::take_leave).
    pub fn take_leave(&mut self, seen: Option<SeenFailure>) {
        self.part(Control::Goodbye(seen));
    }

    /// Sends the last message of this rank to all peers, and to peers that connect later. A call to a peer
    /// that is under way continues to its end: if this rank broke it off, a peer that has accepted it already
    /// would not learn why.
    fn part(&mut self, word: Control) {
        for rank in std::mem::take(&mut self.wanted) {
            // After an abort, sends and receives posted to this peer are ended elsewhere.
            if let Control::Goodbye(_) = word {
                self.peers.remove(&rank);
            }
        }
        self.peers.values_mut().for_each(|peer| peer.part(&word));
        self.farewell = Some(word);
    }

    /// The last message of this rank. `None` while it takes part.
    pub fn farewell(&self) -> Option<&Control> {
        self.farewell.as_ref()
    }

    /// Whether bytes of this rank's messages to some peer are not sent yet.
    pub fn has_unsent(&self) -> bool {
        self.peers.values().any(|peer| peer.control.has_unsent())
    }

    /// See [`Transport::still_present`](super::Transport::still_present).
    pub fn still_present(&mut self, history: &History) -> Result<Vec<Rank>, Cause> {
        self.agree();
        let mut present = Vec::new();
        for peer in self.peers.values_mut() {
            if let Bond::Unreachable(_) = peer.bond {
                continue;
            }
            peer.control.read();
            // The peer's data may arrive after its goodbye.
            let drained = peer.data.drain();
            match peer.control.state() {
                // The peer waits for this rank's goodbye.
                PeerState::Left if drained && !peer.control.has_unsent() => {}
                PeerState::Present | PeerState::Doubtful(_) | PeerState::Left => {
                    present.push(peer.rank);
                }
                PeerState::Lost(cause) => return Err(cause.clone()),
            }
        }
        if present.is_empty() {
            for peer in self.peers.values_mut() {
                if let Some(header) = peer.data.left_over() {
                    return Err(history.explain(peer.rank, header.description));
                }
            }
        }
        Ok(present)
    }
}

#[cfg(test)]
mod tests;
