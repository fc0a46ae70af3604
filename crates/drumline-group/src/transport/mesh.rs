//! Connects a rank with the others of its host, and prepares it for meeting those of other hosts.
//!
//! Each rank leaves a [`Card`] on the [`Board`]. Ranks of one host meet over abstract Unix sockets,
//! which nobody outside of it can see and whose kernel says who is at the other end. Others meet
//! over TCP, on the chosen addresses, when they first need each other: see [`Far`]. No TCP port is
//! opened unless there are other hosts.

pub(crate) mod card;

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use drumline_engine::{
    membership::Membership,
    transport::{Bundle, Channel, Opening},
};
use drumline_schedule::step::Rank;
use drumline_store::{
    auth::{Handshake, Level, Nonce, Secret},
    net::{
        call::{Address, CallError, open, shake_hands},
        gate::{Admission, Gate, Listener},
        interface, sleep_until_ready,
        stream::Stream,
    },
};
use rustix::event::{PollFd, PollFlags};

use self::card::Card;
use super::{
    Far,
    greeting::{expect, hello, stream_of},
    stream::PeerStream,
};
use crate::{
    Config, Error, Result,
    board::{Board, Subject},
    config::STREAMS_MAX,
    progress_thread,
};

/// A peer on this host, in this network, of the same user.
#[derive(Debug)]
pub(crate) struct Near {
    pub(crate) rank: Rank,
    /// Which do not block.
    pub(crate) streams: Bundle<PeerStream>,
}

/// How a rank reaches its peers.
#[derive(Debug)]
pub(crate) struct Mesh {
    /// Those that are connected, in order of their ranks.
    pub(crate) near: Vec<Near>,
    /// How to call the others, if there are any.
    pub(crate) far: Option<Far>,
}

/// Exchanges cards through `board`, connects with the peers of this host, and learns how to
/// reach the others, each of which does the same.
///
/// On a host, a rank connects to every lower rank and is connected to by every higher one. The
/// lowest accepts first, so no ring of ranks can wait for each other.
///
/// # Errors
///
/// [`Error::InvalidSetting`] when ranks are on other hosts and the address or the secret for them
/// is missing; [`Error::Connect`] names who could not be reached, never came or was refused.
pub(crate) fn connect(
    member: &Membership,
    board: &Board,
    config: &Config,
    deadline: Instant,
) -> Result<Mesh> {
    if member.world_size == 1 {
        return Ok(Mesh { near: Vec::new(), far: None });
    }
    let unix = match config.unix_sockets {
        true => Some(listen_on_unix(member)?),
        false => None,
    };
    let own = Card::of_this_process(unix.as_ref().map(|(name, _)| name.clone()))?;
    let cards = board.all_gather(Subject::Card, own.to_string().as_bytes())?;
    let others = cards.iter().enumerate().filter(|(rank, _)| *rank != member.rank);
    let parse = |(rank, text): (Rank, &Vec<u8>)| match Card::parse(text) {
        Ok(card) => Ok((rank, card)),
        Err(problem) => Err(Error::connect_to(member, rank, &problem)),
    };
    let cards = others.map(parse).collect::<Result<BTreeMap<_, _>>>()?;
    let (near, far): (BTreeMap<Rank, Card>, BTreeMap<Rank, Card>) =
        cards.into_iter().partition(|(_, card)| card.is_near(&own));
    tell(member, &near, &far);

    let far = match far.is_empty() {
        true => None,
        false => Some(prepare_far(member, board, config, &own, &far)?),
    };
    let near = match unix {
        Some((_, listener)) if !near.is_empty() => {
            connect_near(member, board, config, &near, listener, deadline)?
        }
        _ => Vec::new(),
    };
    Ok(Mesh { near, far })
}

/// Listens for peers that are not near, tells them where, and hears where they do.
fn prepare_far(
    member: &Membership,
    board: &Board,
    config: &Config,
    own: &Card,
    far: &BTreeMap<Rank, Card>,
) -> Result<Far> {
    if !(1..=STREAMS_MAX).contains(&config.streams) {
        return Err(Error::InvalidSetting {
            setting: "DRUMLINE_STREAMS".to_owned(),
            problem: format!("{} connections; there can be 1 to {STREAMS_MAX}", config.streams),
        });
    }
    if let (None, Level::Integrity | Level::Tls) = (&config.secret, config.security) {
        return Err(Error::InvalidSetting {
            setting: "DRUMLINE_SECURITY".to_owned(),
            problem: format!(
                "the level {} takes a secret: give all processes of the job one DRUMLINE_SECRET or \
                 DRUMLINE_SECRET_FILE",
                config.security
            ),
        });
    }
    let elsewhere = far.iter().filter(|(_, card)| !card.is_same_network(own));
    let elsewhere: Vec<Rank> = elsewhere.map(|(rank, _)| *rank).collect();
    if config.port_range.is_some() {
        progress_thread::get()?.end_lingering();
    }
    // First how many connections each makes of its data.
    let (mut gates, mut told) = (Vec::new(), vec![config.streams.to_string()]);
    for ip in addresses_for_peers(config, &elsewhere)? {
        let listener = listen_on(ip, member.rank, config)?;
        let address = listener.address().ok_or_else(|| {
            Error::connect(member, format!("the system does not tell the port on {ip}"))
        })?;
        told.push(address.to_string());
        gates.push(gate(member, listener, 0, config)?);
    }
    let told = board.all_gather(Subject::Address, told.join(" ").as_bytes())?;
    let addresses =
        far.keys().map(|rank| Ok((*rank, parse_addresses(member, *rank, &told[*rank], config)?)));
    Far::new(member, config, addresses.collect::<Result<_>>()?, gates)
}

/// On a host nothing limits one connection but memory.
const NEAR_STREAMS: usize = 1;

/// Connects with the peers of this host, which do the same.
fn connect_near(
    member: &Membership,
    board: &Board,
    config: &Config,
    near: &BTreeMap<Rank, Card>,
    listener: Listener,
    deadline: Instant,
) -> Result<Vec<Near>> {
    let mut peers: BTreeMap<Rank, Opening<PeerStream>> =
        near.keys().map(|rank| (*rank, Opening::new(NEAR_STREAMS))).collect();
    let caller = Caller { member, secret: &config.secret, deadline };
    for (rank, opening) in peers.range_mut(..member.rank) {
        let Some(name) = near.get(rank).and_then(|card| card.unix.clone()) else { continue };
        let address = Address::Unix(name);
        for channel in Opening::<PeerStream>::channels(NEAR_STREAMS) {
            if let Some(place) = opening.place(channel) {
                *place = Some(PeerStream(caller.call(*rank, &address, channel)?));
            }
        }
    }
    let gate = gate(member, listener, member.rank + 1, config)?;
    accept(member, board, gate, &mut peers, deadline)?;
    let near = |(rank, mut opening): (Rank, Opening<PeerStream>)| {
        Some(Near { rank, streams: opening.take()? })
    };
    Ok(peers.into_iter().filter_map(near).collect())
}

/// An abstract Unix socket under a name that cannot be foreseen.
fn listen_on_unix(member: &Membership) -> Result<(String, Listener)> {
    let Nonce(random) = Nonce::random()?;
    let random: String = random[..8].iter().map(|byte| format!("{byte:02x}")).collect();
    let name = format!("drumline-mesh-{random}-{}", member.rank);
    let listener = Listener::unix(&name)
        .map_err(|source| Error::io(format!("cannot listen on unix:@{name}"), source))?;
    Ok((name, listener))
}

/// The addresses to listen on for peers that are not near; `elsewhere` are those of them that are
/// on other hosts.
fn addresses_for_peers(config: &Config, elsewhere: &[Rank]) -> Result<Vec<IpAddr>> {
    let invalid = |setting: &str, problem: String| {
        Err(Error::InvalidSetting { setting: setting.to_owned(), problem })
    };
    let chosen = match (&config.socket_ifname, &config.bind_addresses[..]) {
        (Some(names), []) => interface::addresses_of(names, None)?,
        (None, []) => vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
        (None, addresses) => addresses.to_vec(),
        (Some(names), addresses) => {
            let problem = format!("both are set, to {names} and {addresses:?}; which is meant?");
            return invalid("DRUMLINE_SOCKET_IFNAME, DRUMLINE_BIND_ADDRESS", problem);
        }
    };
    if let Some(bind) = chosen.iter().find(|address| address.is_unspecified()) {
        let problem = format!(
            "{bind} is every address of this host, and peers need one; name it, or name the \
             interface with DRUMLINE_SOCKET_IFNAME"
        );
        return invalid("DRUMLINE_BIND_ADDRESS", problem);
    }
    if let (Some(bind), false) = (chosen.iter().find(|it| it.is_loopback()), elsewhere.is_empty()) {
        let problem = format!(
            "rank(s) {elsewhere:?} are on other hosts, or in containers with a network of their \
             own, and cannot reach this rank at {bind}: name the interface between them"
        );
        return invalid("DRUMLINE_SOCKET_IFNAME, DRUMLINE_BIND_ADDRESS", problem);
    }
    let open = chosen.iter().find(|address| !address.is_loopback());
    if let (Some(bind), None) = (open, &config.secret) {
        let problem = format!(
            "not set, and whoever reaches {bind} could join the job: give all its processes one \
             secret of 16 bytes or more, or the name of a file with it in DRUMLINE_SECRET_FILE"
        );
        return invalid("DRUMLINE_SECRET", problem);
    }
    Ok(chosen)
}

/// Listens on a port of the allowed ones. Ranks of one host begin to look for it at different
/// places.
fn listen_on(ip: IpAddr, rank: Rank, config: &Config) -> Result<Listener> {
    let failed = |source| Error::io(format!("cannot listen on {ip}"), source);
    let Some(range) = &config.port_range else {
        return Listener::tcp((ip, 0).into()).map_err(failed);
    };
    let ports = range.clone();
    for port in range.clone().cycle().skip(rank % ports.len()).take(ports.len()) {
        match Listener::tcp((ip, port).into()) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            result => return result.map_err(failed),
        }
    }
    let (first, last) = (range.start(), range.end());
    Err(Error::InvalidSetting {
        setting: "DRUMLINE_PORT_RANGE".to_owned(),
        problem: format!("all ports from {first} to {last} of {ip} are in use; allow some more"),
    })
}

pub(crate) fn parse_addresses(
    member: &Membership,
    rank: Rank,
    text: &[u8],
    config: &Config,
) -> Result<Vec<SocketAddr>> {
    let text = String::from_utf8_lossy(text);
    let parse = || {
        let (streams, addresses) = text.split_once(' ')?;
        let addresses: Result<_, _> = addresses.split(' ').map(str::parse).collect();
        Some((streams.parse::<usize>().ok()?, addresses.ok()?))
    };
    let Some((streams, addresses)) = parse() else {
        let shown: String = text.chars().take(100).collect();
        let problem = format!("it published {shown:?}, which is no address");
        return Err(Error::connect_to(member, rank, &problem));
    };
    if streams != config.streams {
        let own = config.streams;
        let problem = format!(
            "it sends data over {streams} connection(s), this rank over {own}: set \
             DRUMLINE_STREAMS alike on all ranks"
        );
        return Err(Error::connect_to(member, rank, &problem));
    }
    Ok(addresses)
}

/// Says once how the ranks are reached.
fn tell(member: &Membership, near: &BTreeMap<Rank, Card>, far: &BTreeMap<Rank, Card>) {
    tracing::info!(
        group = member.name,
        rank = member.rank,
        over_unix_sockets = ?near.keys().collect::<Vec<_>>(),
        over_tcp = ?far.keys().collect::<Vec<_>>(),
        "reaches its peers"
    );
}

/// Lets ranks from `first` on in.
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

/// Connects to lower ranks.
struct Caller<'a> {
    member: &'a Membership,
    secret: &'a Option<Secret>,
    deadline: Instant,
}

/// How long a rank calls again that is hung up on: it may have been crowded out by strangers.
const HUNG_UP_MAX: Duration = Duration::from_secs(10);

const PAUSE: Duration = Duration::from_millis(10);

impl Caller<'_> {
    /// Connects to rank `peer` at `address` and goes through the handshake.
    fn call(&self, peer: Rank, address: &Address, channel: Channel) -> Result<Stream> {
        let give_up = self.deadline.min(Instant::now() + HUNG_UP_MAX);
        loop {
            let problem = match self.attempt(peer, address, channel)? {
                Ok(stream) => return Ok(stream),
                Err(CallError::HungUp) if Instant::now() < give_up => {
                    thread::sleep(PAUSE);
                    continue;
                }
                Err(CallError::Refused(reason)) => format!("rank {peer} at {address}: {reason}"),
                Err(error) => format!(
                    "cannot connect to rank {peer} at {address}: {error}; has it exited, or does \
                     a firewall stand between?"
                ),
            };
            return Err(Error::connect(self.member, problem));
        }
    }

    fn attempt(
        &self,
        peer: Rank,
        address: &Address,
        channel: Channel,
    ) -> Result<Result<Stream, CallError>> {
        let hello = hello(self.member, channel);
        let expected = expect(self.member, peer..peer + 1);
        let handshake = Handshake::call(hello, expected, self.secret.clone(), Nonce::random()?);
        let has_secret = self.secret.is_some();
        Ok(open(address, self.deadline)
            .map_err(CallError::from)
            .and_then(|stream| shake_hands(stream, handshake, has_secret, self.deadline)))
    }
}

/// How often a rank that waits for others looks whether one has failed.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Lets all connections of every higher rank of this host in. Strangers are turned away and hold
/// up nobody.
fn accept(
    member: &Membership,
    board: &Board,
    mut gate: Gate,
    peers: &mut BTreeMap<Rank, Opening<PeerStream>>,
    deadline: Instant,
) -> Result<()> {
    let mut next_look = Instant::now() + LOOK_EVERY;
    loop {
        let incomplete = peers.iter().filter(|(_, opening)| !opening.is_complete());
        let missing: Vec<Rank> = incomplete.map(|(rank, _)| *rank).collect();
        if missing.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(Error::connect(
                member,
                format!(
                    "rank(s) {missing:?} did not connect in time; are they started, and can they \
                 reach this host?"
                ),
            ));
        }
        if Instant::now() >= next_look {
            board.check()?;
            next_look = Instant::now() + LOOK_EVERY;
        }
        let until = deadline.min(next_look);
        let until = gate.deadline().map_or(until, |at| at.min(until));
        sleep_until_ready(&mut [PollFd::new(&gate, PollFlags::IN)], until);
        let arrivals = gate.admit(Instant::now());
        for arrival in
            arrivals.map_err(|source| Error::io("cannot accept connections of peers", source))?
        {
            let Some(hello) = arrival.hello else { continue };
            let opening = peers.get_mut(&hello.rank);
            match opening.and_then(|opening| opening.place(stream_of(hello.channel)?)) {
                Some(place @ None) => *place = Some(PeerStream(arrival.stream)),
                _ => tracing::warn!(
                    rank = hello.rank,
                    channel = ?hello.channel,
                    "turned a connection away that is one too many, or came another way than agreed"
                ),
            }
        }
    }
}
