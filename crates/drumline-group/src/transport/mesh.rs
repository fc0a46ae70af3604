//! The sockets behind [`drumline_engine::start_up::mesh`], which decides which ranks connect.
//!
//! Ranks of one host connect over abstract Unix sockets. These cannot be seen from outside the host, and the
//! kernel says which user is at the other end. Other ranks connect over TCP, on the chosen addresses, when
//! they first need each other: see [`Far`]. No TCP port is opened unless there are other hosts.

use std::{collections::BTreeMap, io, time::Instant};

use drumline_engine::{
    membership::Membership,
    start_up::{Answer, Ask, Dialled, card::Card, mesh},
    transport::{Bundle, Channel},
};
use drumline_schedule::step::Rank;
use drumline_store::{
    auth::{Handshake, Level, Nonce},
    net::{
        call::{Address, CallError, open, reach, shake_hands},
        gate::{Admission, Gate, Listener},
        sign, sleep_until_ready,
        stream::Stream,
    },
};
use rustix::{
    event::{PollFd, PollFlags},
    process::geteuid,
};

use super::{
    Far,
    greeting::{expect, hello, stream_of},
    stream::PeerStream,
};
use crate::{
    Config, Error, ErrorKind, Result, addresses::addresses_for_peers, board::Board,
    config::STREAMS_MAX, error::not_connected, progress_thread,
};

/// A peer on this host, in this network, of the same user.
#[derive(Debug)]
pub(crate) struct Near {
    pub(crate) rank: Rank,
    /// The streams to it, which do not block.
    pub(crate) streams: Bundle<PeerStream>,
}

/// How a rank reaches its peers.
#[derive(Debug)]
pub(crate) struct Mesh {
    /// The peers that are connected, in the order of their ranks.
    pub(crate) near: Vec<Near>,
    /// How to call the other peers, if there are any.
    pub(crate) far: Option<Far>,
}

/// Connects to the peers of this host, and learns how to reach the others. All ranks must call this.
///
/// # Errors
///
/// [`Setting`](crate::ErrorKind::Setting) when ranks are on other hosts, and the address or the secret for them is
/// missing; [`Connect`](crate::ErrorKind::Connect) names the rank that could not be reached, never came or was refused.
pub(crate) fn connect(
    member: &Membership,
    board: &Board,
    config: &Config,
    deadline: Instant,
) -> Result<Mesh> {
    let reached = BTreeMap::new();
    let (unix, near, far) = (None, None, Vec::new());
    let mut sockets = Sockets { member, config, deadline, unix, reached, near, far };
    let code = async |desk: &_, rules: &_| mesh::connect(desk, rules, config.streams).await;
    let connected = board.run(code, |question| match question {
        Ask::Card => sockets.card(),
        Ask::Listen(elsewhere) => sockets.listen(&elsewhere),
        Ask::Reach { peer, name } => {
            let reached = reach(&name)
                .map_err(|source| Error::io(format!("cannot connect to unix:@{name}"), source))?;
            let is_here = reached.is_some();
            sockets.reached.extend(reached.flatten().map(|stream| (peer, stream)));
            Ok(Answer::Number(is_here.into()))
        }
        Ask::Dial { peer, name, channel } => sockets.dial(peer, name, channel),
        Ask::Accept(until) => sockets.accept(until),
        question => board.ask(question),
    });
    let mesh::Mesh { near, far } = connected.map_err(|error| sockets.explain(error))?;
    let far = match far.is_empty() {
        true => None,
        false => Some(Far::new(member, config, far, sockets.far, board)?),
    };
    let near = near.into_iter().map(|(rank, streams)| Near { rank, streams }).collect();
    Ok(Mesh { near, far })
}

/// The sockets on which a rank listens, and what it needs to call peers.
struct Sockets<'a> {
    member: &'a Membership,
    config: &'a Config,
    deadline: Instant,
    unix: Option<Listener>,
    /// The stream to the first rank of this host, until it is dialled.
    reached: BTreeMap<Rank, Stream>,
    /// Accepts higher ranks of this host, once this rank begins to wait for them.
    near: Option<Gate>,
    far: Vec<Gate>,
}

impl Sockets<'_> {
    /// Adds why some connections were refused. The reason may be a failure of this rank.
    fn explain(&self, error: Error) -> Error {
        match (error.kind(), self.near.as_ref().and_then(Gate::objection)) {
            (kind @ ErrorKind::Connect, Some(reason)) => {
                let told = error.message();
                let told = format!("{told} (The last connection that did not get in: {reason})");
                error.told_as(kind, told)
            }
            _ => error,
        }
    }

    fn card(&mut self) -> Result<Answer<PeerStream>> {
        let mut own = None;
        if self.config.unix_sockets {
            let (name, listener) = listen_on_unix(self.member.rank)?;
            self.unix = Some(listener);
            own = Some(name);
        }
        let (boot, network) =
            sign::place().map_err(|error| Error::io("tell this host from others", error))?;
        let card = Card { boot, network, uid: geteuid().as_raw(), unix: own };
        Ok(Answer::Words(vec![card.to_string().into_bytes()]))
    }

    /// Listens for peers that are not near. Of these, `elsewhere` are on other hosts.
    fn listen(&mut self, elsewhere: &[Rank]) -> Result<Answer<PeerStream>> {
        let Sockets { member, config, .. } = *self;
        if !(1..=STREAMS_MAX).contains(&config.streams) {
            return Err(Error::setting(
                "DRUMLINE_STREAMS",
                format!("{} connections; there can be 1 to {STREAMS_MAX}", config.streams),
            ));
        }
        if config.security == Level::Tls && cfg!(not(feature = "tls")) {
            return Err(Error::setting(
                "DRUMLINE_SECURITY",
                "tls: this program is built without the feature `tls`",
            ));
        }
        if let (None, Level::Tls) = (&config.secret, config.security) {
            return Err(Error::setting(
                "DRUMLINE_SECURITY",
                format!(
                    "the level {} takes a secret: give all processes of the job one DRUMLINE_SECRET or \
                     DRUMLINE_SECRET_FILE",
                    config.security
                ),
            ));
        }
        if config.port_range.is_some() {
            progress_thread::get()?.end_lingering();
        }
        let mut told = Vec::new();
        for ip in addresses_for_peers(config, elsewhere)? {
            let listener = Listener::for_peers(ip, config.port_range.clone(), member.rank)?;
            let address = listener.address().ok_or_else(|| {
                not_connected(member, &format!("the system does not tell the port on {ip}"))
            })?;
            told.push(address.to_string());
            self.far.push(gate(member, listener, 0, config)?);
        }
        Ok(Answer::Words(vec![told.join(" ").into_bytes()]))
    }

    /// Connects to rank `peer` at its Unix socket and goes through the handshake.
    fn dial(&mut self, peer: Rank, name: String, channel: Channel) -> Result<Answer<PeerStream>> {
        let hello = hello(self.member, channel);
        let expected = expect(self.member, peer..peer + 1);
        let secret = self.config.secret.clone();
        let has_secret = secret.is_some();
        let handshake = Handshake::call(hello, expected, secret, Nonce::random()?);
        let opened = match self.reached.remove(&peer) {
            Some(stream) => Ok(stream),
            None => open(&Address::Unix(name), self.deadline).map_err(CallError::from),
        };
        let opened =
            opened.and_then(|stream| shake_hands(stream, handshake, has_secret, self.deadline));
        Ok(Answer::Dialled(match opened {
            Ok(stream) => Dialled::Open(PeerStream(stream)),
            Err(CallError::Refused(reason)) => Dialled::Refused(reason),
            Err(error @ CallError::HungUp(_)) => Dialled::HungUp(error.to_string()),
            Err(CallError::Io(error)) if error.kind() == io::ErrorKind::ConnectionRefused => {
                Dialled::Closed(error.to_string())
            }
            Err(error @ CallError::Io(_)) => Dialled::Failed(error.to_string()),
        }))
    }

    /// Accepts higher ranks of this host until one has come. Strangers are turned away and hold up no rank.
    fn accept(&mut self, until: Instant) -> Result<Answer<PeerStream>> {
        if let Some(listener) = self.unix.take() {
            self.near = Some(gate(self.member, listener, self.member.rank + 1, self.config)?);
        }
        let Some(gate) = &mut self.near else { return Ok(Answer::Came(Vec::new())) };
        let until = gate.deadline().map_or(until, |at| at.min(until));
        sleep_until_ready(&mut [PollFd::new(&*gate, PollFlags::IN)], until);
        let arrivals = gate
            .admit(Instant::now())
            .map_err(|source| Error::io("cannot accept connections of peers", source))?;
        let came = arrivals.into_iter().filter_map(|arrival| {
            let hello = arrival.hello?;
            Some((hello.rank, stream_of(hello.channel)?, PeerStream(arrival.stream)))
        });
        Ok(Answer::Came(came.collect()))
    }
}

/// Listens on an abstract Unix socket with a name that cannot be guessed.
pub(crate) fn listen_on_unix(rank: Rank) -> Result<(String, Listener)> {
    let name = format!("drumline-mesh-{}-{rank}", Nonce::name()?);
    let listener = Listener::unix(&name)
        .map_err(|source| Error::io(format!("cannot listen on unix:@{name}"), source))?;
    Ok((name, listener))
}

/// Accepts ranks from `first` on.
fn gate(member: &Membership, listener: Listener, first: Rank, config: &Config) -> Result<Gate> {
    let admission = Admission::Handshake {
        ours: hello(member, Channel::Control),
        expected: expect(member, first..member.world_size),
        secret: config.secret.clone(),
        level: config.security,
    };
    Gate::new(listener, admission)
        .map_err(|source| Error::io("cannot accept connections of peers", source))
}
