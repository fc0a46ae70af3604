//! Messages over byte streams: three to every peer, one for control, one for collectives and one
//! for messages from rank to rank.
//!
//! Failures are told on control streams, which are read whenever their owner waits. A data
//! stream may be held up behind a message that nobody awaits yet; if it breaks, the control
//! stream of the same peer says why.
//!
//! Nothing here knows of sockets or sleeps: [`Sockets`](super::Sockets) gives it both, a
//! simulator others.

use std::{
    collections::BTreeMap,
    fmt,
    io::{self, Read, Write},
    time::{Duration, Instant},
};

use drumline_schedule::step::{Loc, Rank};

use super::{
    Waits,
    link::{ControlLink, DataLink, PeerState},
    points::{Desk, Ended, Point, PointLink},
    wire::Control,
};
use crate::{
    error::{Cause, CollectiveError},
    executor::{Header, History, Machine, Memory},
};

/// How long a broken stream may wait for the control stream to say why.
const GRACE: Duration = Duration::from_secs(2);

/// A stream of bytes in both directions that never blocks.
pub(crate) trait Duplex: Read + Write + Send + fmt::Debug {
    /// Nothing more will be written.
    fn end(&mut self) -> io::Result<()>;
}

/// What can happen to a peer.
#[cfg(feature = "internals")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum News {
    /// Its control stream has something to read.
    Control,
    /// Its data stream has something to read.
    Data,
    /// Its stream of messages from rank to rank can be read.
    Points,
    /// Its process has ended.
    Exit,
}

/// What a rank that sleeps wants to hear of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Interest {
    pub(crate) rank: Rank,
    /// That its control stream can be read.
    pub(crate) control: bool,
    /// That its data stream can be read, or written.
    pub(crate) data_in: bool,
    pub(crate) data_out: bool,
    /// The same of its stream of messages from rank to rank.
    pub(crate) points_in: bool,
    pub(crate) points_out: bool,
}

/// The streams of one rank to all of its peers.
#[derive(Debug)]
pub(crate) struct Streams<S> {
    peers: Vec<Peer<S>>,
    desk: Desk,
    /// Which peer is looked at first for a receive from any: each has its turn.
    first: usize,
}

/// The streams to one peer.
#[derive(Debug)]
pub(super) struct Peer<S> {
    pub(super) rank: Rank,
    pub(super) control: ControlLink<S>,
    pub(super) data: DataLink<S>,
    pub(super) points: PointLink<S>,
    /// When one of its streams was first seen broken.
    broken_since: Option<Instant>,
}

impl<S: Duplex> Streams<S> {
    /// Takes over (rank, control, data, points) of every peer.
    pub(crate) fn new(peers: impl IntoIterator<Item = (Rank, S, S, S)>) -> Streams<S> {
        let peer = |(rank, control, data, points)| Peer {
            rank,
            control: ControlLink::new(rank, control),
            data: DataLink::new(rank, data),
            points: PointLink::new(rank, points),
            broken_since: None,
        };
        Streams { peers: peers.into_iter().map(peer).collect(), desk: Desk::default(), first: 0 }
    }

    /// The control and data streams of all peers.
    pub(crate) fn streams(&self) -> impl Iterator<Item = [&S; 3]> {
        self.peers
            .iter()
            .map(|peer| [peer.control.stream(), peer.data.stream(), peer.points.stream()])
    }

    pub(super) fn peer(&mut self, rank: Rank) -> &mut Peer<S> {
        let Some(peer) = self.peers.iter_mut().find(|peer| peer.rank == rank) else {
            unreachable!("a schedule names only ranks of its group, and never the rank itself");
        };
        peer
    }

    /// Something has happened to a peer.
    #[cfg(feature = "internals")]
    pub(crate) fn on_news(&mut self, rank: Rank, news: News) {
        let peer = self.peer(rank);
        match news {
            News::Control => peer.control.on_readable(),
            News::Data => peer.data.on_readable(),
            News::Points => peer.points.on_readable(),
            News::Exit => peer.control.on_exit(),
        }
    }

    /// What news of each peer is worth a wake-up.
    pub(crate) fn interests(&self) -> impl Iterator<Item = Interest> {
        self.peers.iter().map(|peer| Interest {
            rank: peer.rank,
            control: *peer.control.state() == PeerState::Present,
            data_in: peer.data.wants_to_read(),
            data_out: peer.data.wants_to_write(),
            points_in: peer.points.wants_to_read(self.desk.awaits_any()),
            points_out: peer.points.wants_to_write(),
        })
    }

    pub(crate) fn begin(&mut self, machine: &mut Machine) -> Result<(), Cause> {
        self.peers.iter_mut().try_for_each(|peer| peer.data.begin(machine))
    }

    pub(crate) fn send(&mut self, to: Rank, header: Header, src: Loc) {
        self.peer(to).data.send(header, src);
    }

    pub(crate) fn receive(&mut self, from: Rank, dst: Loc) {
        self.peer(from).data.receive(dst);
    }

    /// Moves what can be moved; whether anything was.
    pub(crate) fn progress(
        &mut self,
        machine: &mut Machine,
        memory: &mut dyn Memory,
        now: Instant,
    ) -> Result<bool, Cause> {
        let mut moved = false;
        for peer in &mut self.peers {
            moved |= peer.data.write(machine, memory)?;
            moved |= peer.data.read(machine, memory)?;
        }
        if !moved {
            self.listen(Some(machine), now)?;
        }
        Ok(moved)
    }

    pub(crate) fn post(&mut self, mut point: Point, ended: &mut Vec<Ended>) {
        self.desk.number(&mut point);
        let to = match point.call.peer {
            Some(rank) => self.peers.iter_mut().find(|peer| peer.rank == rank),
            None => self.offering(point.call.tag),
        };
        match to {
            Some(peer) => peer.points.post(point, ended),
            // For this rank itself, or for any and nobody has offered anything yet.
            None => {
                self.desk.post(point, ended);
                // It may be there already; looking costs no more than asking.
                self.peers.iter_mut().for_each(|peer| peer.points.on_readable());
            }
        }
    }

    /// A peer that offers a message with that tag which no receive has met.
    fn offering(&mut self, tag: u64) -> Option<&mut Peer<S>> {
        let (count, first) = (self.peers.len(), self.first);
        let mut turns = (0..count).map(|turn| (first + turn) % count);
        let next = turns.find(|&index| self.peers[index].points.offers(tag))?;
        self.first = next + 1;
        self.peers.get_mut(next)
    }

    /// Moves messages from rank to rank; whether anything moved.
    pub(crate) fn progress_points(
        &mut self,
        idle: bool,
        now: Instant,
        ended: &mut Vec<Ended>,
    ) -> Result<bool, Cause> {
        let mut moved = false;
        for peer in &mut self.peers {
            moved |= peer.points.progress(&mut self.desk.any, ended)?;
        }
        if idle {
            self.peers.iter_mut().try_for_each(|peer| peer.data.read_ahead())?;
        }
        if !moved {
            self.listen(None, now)?;
        }
        Ok(moved)
    }

    pub(crate) fn points_mut(&mut self) -> impl Iterator<Item = &mut Point> {
        let named = self.peers.iter_mut().flat_map(|peer| peer.points.points_mut());
        named.chain(self.desk.points_mut())
    }

    pub(crate) fn take_points(&mut self) -> Vec<Point> {
        let named = self.peers.iter_mut().flat_map(|peer| peer.points.take_points());
        named.chain(self.desk.take_points()).collect()
    }

    /// Reads the control streams and fails if a peer's word ends the operation that runs, or a
    /// message from rank to rank.
    fn listen(&mut self, mut machine: Option<&mut Machine>, now: Instant) -> Result<(), Cause> {
        for peer in &mut self.peers {
            peer.control.read();
            if let (Some(machine), Some(waits)) = (&machine, peer.control.waits()) {
                machine.on_waits(peer.rank, waits.call)?;
            }
            // What stands on a broken stream and is waited for.
            let data = peer.data.broken();
            let points = peer.points.broken().filter(|_| peer.points.is_pending());
            match peer.control.state() {
                PeerState::Present => {}
                // What it sent before it left may still be on its way, ahead of the end.
                PeerState::Left => {
                    if let (Some(machine), Some(_)) = (&mut machine, data) {
                        machine.on_left(peer.rank);
                    }
                    if points.is_some() {
                        return Err(Cause::PeerLeft { peer: peer.rank });
                    }
                }
                PeerState::Lost(cause) => return Err(cause.clone()),
            }
            if data.or(points).is_none() {
                continue;
            }
            let since = *peer.broken_since.get_or_insert(now);
            let awaited = |machine: &Machine| machine.awaited().contains(&peer.rank);
            let data = data.filter(|_| machine.as_deref().is_some_and(awaited));
            if let Some(problem) = data.or(points)
                && now >= since + GRACE
            {
                let problem = problem.to_owned();
                return Err(Cause::Disconnected { peer: peer.rank, problem });
            }
        }
        let gone = |peer: &Peer<S>| {
            *peer.control.state() == PeerState::Left && peer.points.broken().is_some()
        };
        match self.peers.last() {
            // A receive from any rank, and nobody is left to send.
            Some(last) if self.desk.awaits_any() && self.peers.iter().all(gone) => {
                Err(Cause::PeerLeft { peer: last.rank })
            }
            _ => Ok(()),
        }
    }

    /// When there is something to say even if nothing arrives.
    pub(crate) fn next_deadline(&self, now: Instant) -> Option<Instant> {
        let graces = self.peers.iter().filter_map(|peer| peer.broken_since);
        graces.map(|since| since + GRACE).filter(|until| *until > now).min()
    }

    /// Tells all peers whom this rank waits for.
    pub(crate) fn tell(&mut self, waits: &Waits) {
        self.peers.iter_mut().for_each(|peer| peer.control.tell(waits));
    }

    /// What peers have said of whom they wait for.
    pub(crate) fn told(&self) -> BTreeMap<Rank, Waits> {
        let told = |peer: &Peer<S>| Some((peer.rank, peer.control.waits()?.clone()));
        self.peers.iter().filter_map(told).collect()
    }

    pub(crate) fn abort(&mut self, failure: &CollectiveError) {
        let word = Control::Abort { culprit: failure.culprit(), text: failure.to_string() };
        for peer in &mut self.peers {
            peer.control.say(&word);
        }
    }

    pub(crate) fn take_leave(&mut self) {
        for peer in &mut self.peers {
            // The end of the data comes before the word, as the peer expects it.
            peer.data.end();
            peer.points.end();
            peer.control.say(&Control::Goodbye);
        }
    }

    pub(crate) fn still_present(&mut self, history: &History) -> Result<Vec<Rank>, Cause> {
        let mut present = Vec::new();
        for peer in &mut self.peers {
            peer.control.read();
            // Its data may be slower than its goodbye.
            let drained = peer.data.drain();
            match peer.control.state() {
                PeerState::Left if drained => {}
                PeerState::Present | PeerState::Left => present.push(peer.rank),
                PeerState::Lost(cause) => return Err(cause.clone()),
            }
        }
        if present.is_empty() {
            for peer in &mut self.peers {
                if let Some(header) = peer.data.left_over() {
                    return Err(history.explain(peer.rank, header.description));
                }
            }
        }
        Ok(present)
    }
}
