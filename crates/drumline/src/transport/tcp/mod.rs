//! Messages over streams (TCP, or Unix sockets on one host): to every peer one connection for
//! control and one for data.
//!
//! Failures are told on control connections, which are read whenever their owner waits. A data
//! connection may be held up behind a message that nobody awaits yet; if it breaks, the control
//! connection of the same peer says why.

mod link;

use std::{
    net::Shutdown,
    time::{Duration, Instant},
};

use drumline_schedule::step::{Loc, Rank};
use rustix::event::{PollFd, PollFlags};

use self::link::{ControlLink, DataLink, PeerState};
use super::{Transport, mesh::Connected, wire::Control};
use crate::{
    error::{Cause, CollectiveError},
    executor::{Header, History, Machine, Memory},
    net::{sleep_until_ready, stream::Stream},
};

/// How long a broken data connection may wait for the control connection to say why.
const GRACE: Duration = Duration::from_secs(2);

/// The connections of one rank.
#[derive(Debug)]
pub(crate) struct TcpTransport {
    peers: Vec<Peer>,
    /// Which data connections would be read, as of the last [`Transport::progress`].
    readable: Vec<bool>,
}

#[derive(Debug)]
struct Peer {
    rank: Rank,
    control: ControlLink<Stream>,
    data: DataLink<Stream>,
    /// Open for messages from rank to rank, which nothing sends yet.
    _points: Stream,
    /// When its data connection was first seen broken.
    broken_since: Option<Instant>,
}

impl TcpTransport {
    /// The transport of a world of one.
    pub(crate) fn alone() -> TcpTransport {
        TcpTransport::new(Vec::new())
    }

    /// Takes over the connections to all peers.
    pub(crate) fn new(connections: Vec<Connected>) -> TcpTransport {
        let peers: Vec<Peer> = connections
            .into_iter()
            .map(|Connected { rank, control, data, points, .. }| Peer {
                rank,
                control: ControlLink::new(rank, control),
                data: DataLink::new(rank, data),
                _points: points,
                broken_since: None,
            })
            .collect();
        let readable = vec![true; peers.len()];
        TcpTransport { peers, readable }
    }

    fn peer(&mut self, rank: Rank) -> &mut Peer {
        let Some(peer) = self.peers.iter_mut().find(|peer| peer.rank == rank) else {
            unreachable!("a schedule names only ranks of its group, and never the rank itself");
        };
        peer
    }

    /// Reads all control connections and fails if a peer's word ends the operation.
    fn listen(&mut self, machine: &Machine<'_>) -> Result<(), Cause> {
        for peer in &mut self.peers {
            peer.control.read();
            match peer.control.state() {
                PeerState::Present => {}
                // What it sent before it left may still be on its way, ahead of the end.
                PeerState::Left if peer.data.broken().is_none() => {}
                PeerState::Left => machine.on_left(peer.rank)?,
                PeerState::Lost(cause) => return Err(cause.clone()),
            }
            if let Some(problem) = peer.data.broken() {
                let since = *peer.broken_since.get_or_insert_with(Instant::now);
                if since.elapsed() >= GRACE && machine.awaited().contains(&peer.rank) {
                    let problem = problem.to_owned();
                    return Err(Cause::Disconnected { peer: peer.rank, problem });
                }
            }
        }
        Ok(())
    }
}

impl Transport for TcpTransport {
    fn begin(&mut self, machine: &mut Machine<'_>) -> Result<(), Cause> {
        self.peers.iter_mut().try_for_each(|peer| peer.data.begin(machine))
    }

    fn send(&mut self, to: Rank, header: Header, src: Loc) {
        self.peer(to).data.send(header, src);
    }

    fn receive(&mut self, from: Rank, dst: Loc) {
        self.peer(from).data.receive(dst);
    }

    fn progress(
        &mut self,
        machine: &mut Machine<'_>,
        memory: &mut dyn Memory,
    ) -> Result<bool, Cause> {
        let mut moved = false;
        for peer in &mut self.peers {
            moved |= peer.data.write(machine, memory)?;
            moved |= peer.data.read(machine, memory)?;
        }
        if !moved {
            self.listen(machine)?;
            for (readable, peer) in self.readable.iter_mut().zip(&self.peers) {
                *readable = peer.data.wants_to_read(machine);
            }
        }
        Ok(moved)
    }

    fn wait(&mut self, deadline: Instant) {
        let mut interests = Vec::with_capacity(2 * self.peers.len());
        let mut until = deadline;
        for (peer, &readable) in self.peers.iter().zip(&self.readable) {
            if *peer.control.state() == PeerState::Present {
                interests.push(PollFd::new(peer.control.stream(), PollFlags::IN));
            }
            let mut flags = PollFlags::empty();
            flags.set(PollFlags::IN, readable);
            flags.set(PollFlags::OUT, peer.data.wants_to_write());
            if !flags.is_empty() {
                interests.push(PollFd::new(peer.data.stream(), flags));
            }
            if let Some(since) = peer.broken_since
                && since.elapsed() < GRACE
            {
                until = until.min(since + GRACE);
            }
        }
        sleep_until_ready(&mut interests, until);
    }

    fn abort(&mut self, failure: &CollectiveError) {
        let word = Control::Abort { culprit: failure.culprit(), text: failure.to_string() };
        for peer in &mut self.peers {
            peer.control.say(&word);
        }
    }

    fn close(&mut self, deadline: Instant, history: &History) -> Result<(), Cause> {
        self.take_leave();
        loop {
            for peer in &mut self.peers {
                peer.control.read();
                if let PeerState::Lost(cause) = peer.control.state() {
                    return Err(cause.clone());
                }
            }
            let present = |peer: &&Peer| *peer.control.state() == PeerState::Present;
            let waiting_for: Vec<Rank> =
                self.peers.iter().filter(present).map(|peer| peer.rank).collect();
            if waiting_for.is_empty() {
                break;
            }
            if Instant::now() >= deadline {
                return Err(Cause::Timeout { waiting_for });
            }
            let mut interests: Vec<_> = self
                .peers
                .iter()
                .filter(present)
                .map(|peer| PollFd::new(peer.control.stream(), PollFlags::IN))
                .collect();
            sleep_until_ready(&mut interests, deadline);
        }
        for peer in &mut self.peers {
            if let Some(header) = peer.data.left_over() {
                return Err(history.explain(peer.rank, header.description));
            }
        }
        Ok(())
    }

    fn take_leave(&mut self) {
        for peer in &mut self.peers {
            // The end of the data comes before the word, as the peer expects it.
            if let Err(error) = peer.data.stream().shutdown(Shutdown::Write) {
                tracing::debug!(peer = peer.rank, %error, "data connection was closed already");
            }
            peer.control.say(&Control::Goodbye);
        }
    }
}
