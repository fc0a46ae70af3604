//! Connects every rank of a group with every other.
//!
//! Each rank leaves a [`Card`] on the [`Board`]. Ranks of one host meet over abstract Unix sockets,
//! which nobody outside of it can see and whose kernel says who is at the other end; others meet
//! over TCP, on the chosen addresses. No TCP port is opened unless a rank on another host needs it.

mod card;

use std::{
    collections::BTreeMap,
    io,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    thread,
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;
use rustix::event::{PollFd, PollFlags};

use self::card::Card;
pub(crate) use crate::membership::Membership;
use crate::{
    Config, Error, Result,
    auth::{Channel, Expected, Handshake, Hello, Nonce, Secret},
    board::{Board, Subject},
    net::{
        call::{Address, CallError, open, shake_hands},
        gate::{Admission, Gate, Listener},
        interface, sleep_until_ready,
        stream::Stream,
    },
};

/// The connections to one peer, none of which blocks.
#[derive(Debug)]
pub(crate) struct Connected {
    pub(crate) rank: Rank,
    /// Leave-taking and failures.
    pub(crate) control: Stream,
    /// The messages of collectives.
    pub(crate) data: Stream,
    /// Messages from rank to rank, outside of collectives.
    pub(crate) points: Stream,
    /// Whether the peer is on this host, in this network, and runs as the same user.
    pub(crate) same_host: bool,
}

/// The channels between two ranks, in the order of the slots that they fill.
const CHANNELS: [Channel; 3] = [Channel::Control, Channel::Data, Channel::Points];

type Slots = [Option<Stream>; CHANNELS.len()];

/// Exchanges cards through `board` and connects with all peers, in order of their ranks.
///
/// A rank connects to every lower rank and is connected to by every higher one. Rank 0 accepts
/// first, so no ring of ranks can wait for each other.
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
) -> Result<Vec<Connected>> {
    if member.world_size == 1 {
        return Ok(Vec::new());
    }
    let unix = match config.unix_sockets {
        true => Some(listen_on_unix(member)?),
        false => None,
    };
    let own = Card::of_this_process(unix.as_ref().map(|(name, _)| name.clone()))?;
    board.post(Subject::Card, own.to_string().as_bytes())?;
    let mut cards = BTreeMap::new();
    for rank in (0..member.world_size).filter(|&rank| rank != member.rank) {
        let text = board.read(Subject::Card, rank)?;
        cards.insert(rank, Card::parse(&text).map_err(|problem| member.about(rank, &problem))?);
    }
    let near = |rank: &Rank| cards.get(rank).is_some_and(|card| card.is_near(&own));
    let far: Vec<Rank> = cards.keys().copied().filter(|rank| !near(rank)).collect();

    let mut listeners = Vec::new();
    if let Some((_, listener)) = unix
        && (member.rank + 1..member.world_size).any(|rank| near(&rank))
    {
        listeners.push(listener);
    }
    if !far.is_empty() {
        let elsewhere: Vec<Rank> =
            far.iter().copied().filter(|rank| !cards[rank].is_same_network(&own)).collect();
        let bind = addresses_for_peers(config, &elsewhere)?;
        if far.iter().any(|&rank| rank > member.rank) {
            let mut open = Vec::with_capacity(bind.len());
            for ip in bind {
                let listener = listen_on(ip, member.rank, config)?;
                let address = listener.address().ok_or_else(|| {
                    member.error(format!("the system does not tell the port on {ip}"))
                })?;
                open.push(address.to_string());
                listeners.push(listener);
            }
            board.post(Subject::Address, open.join(" ").as_bytes())?;
        }
    }

    let mut slots: Vec<Slots> =
        std::iter::repeat_with(Default::default).take(member.world_size).collect();
    let caller = Caller { member, secret: &config.secret, deadline };
    for lower in 0..member.rank {
        let addresses = match &cards[&lower].unix {
            Some(name) if near(&lower) => vec![Address::Unix(name.clone())],
            _ => published_addresses(member, board, lower)?,
        };
        // Spread over what the peer offers, each rank beginning with another one.
        let addresses = addresses.iter().cycle().skip(member.rank % addresses.len());
        for ((slot, channel), address) in slots[lower].iter_mut().zip(CHANNELS).zip(addresses) {
            *slot = Some(caller.call(lower, address, channel)?);
        }
    }
    let gates = listeners.into_iter().map(|listener| member.gate(listener, config)).collect();
    accept(member, board, gates, &near, &mut slots, deadline)?;

    tell(member, &cards, &far);
    let complete = slots.into_iter().enumerate().filter_map(|(rank, slots)| match slots {
        [Some(control), Some(data), Some(points)] => {
            Some(Connected { rank, control, data, points, same_host: near(&rank) })
        }
        _ => None, // this rank itself
    });
    let connected: Vec<Connected> = complete.collect();
    for peer in connected.iter().filter(|peer| !peer.same_host) {
        let failed = |source| Error::io(format!("cannot set up rank {}", peer.rank), source);
        peer.control.watch_host().map_err(failed)?;
    }
    Ok(connected)
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

fn published_addresses(member: &Membership, board: &Board, rank: Rank) -> Result<Vec<Address>> {
    let published = board.read(Subject::Address, rank)?;
    let text = String::from_utf8_lossy(&published);
    let addresses: Result<Vec<SocketAddr>, _> = text.split(' ').map(str::parse).collect();
    match addresses {
        Ok(addresses) => Ok(addresses.into_iter().map(Address::Tcp).collect()),
        Err(_) => Err(member.about(rank, &format!("it published {text:?}, which is no address"))),
    }
}

/// Says once how the ranks are reached.
fn tell(member: &Membership, cards: &BTreeMap<Rank, Card>, far: &[Rank]) {
    let near: Vec<Rank> = cards.keys().copied().filter(|rank| !far.contains(rank)).collect();
    tracing::info!(
        group = member.name,
        rank = member.rank,
        over_unix_sockets = ?near,
        over_tcp = ?far,
        "reaches its peers"
    );
}

impl Membership {
    fn hello(&self, channel: Channel) -> Hello {
        Hello { channel, rank: self.rank, world_size: self.world_size, group: self.digest }
    }

    fn expect(&self, ranks: std::ops::Range<Rank>) -> Expected {
        Expected { ranks, world_size: self.world_size, group: self.digest }
    }

    /// Lets higher ranks in.
    fn gate(&self, listener: Listener, config: &Config) -> io::Result<Gate> {
        let admission = Admission::Handshake {
            ours: self.hello(Channel::Control),
            expected: self.expect(self.rank + 1..self.world_size),
            secret: config.secret.clone(),
        };
        Gate::new(listener, admission)
    }
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
            return Err(self.member.error(problem));
        }
    }

    fn attempt(
        &self,
        peer: Rank,
        address: &Address,
        channel: Channel,
    ) -> Result<Result<Stream, CallError>> {
        let hello = self.member.hello(channel);
        let expected = self.member.expect(peer..peer + 1);
        let mut handshake = Handshake::call(hello, expected, self.secret.clone(), Nonce::random()?);
        let has_secret = self.secret.is_some();
        Ok(open(address, self.deadline).map_err(CallError::from).and_then(|mut stream| {
            shake_hands(&mut stream, &mut handshake, has_secret, self.deadline)?;
            Ok(stream)
        }))
    }
}

/// How often a rank that waits for others looks whether one has failed.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// Lets all connections of every higher rank in. Strangers are turned away and hold up nobody.
fn accept(
    member: &Membership,
    board: &Board,
    gates: io::Result<Vec<Gate>>,
    near: &dyn Fn(&Rank) -> bool,
    slots: &mut [Slots],
    deadline: Instant,
) -> Result<()> {
    let failed = |source| Error::io("cannot accept connections of peers", source);
    let mut gates = gates.map_err(failed)?;
    let mut next_look = Instant::now() + LOOK_EVERY;
    loop {
        let missing: Vec<Rank> = (member.rank + 1..member.world_size)
            .filter(|&rank| slots[rank].iter().any(Option::is_none))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        if Instant::now() >= deadline {
            return Err(member.error(format!(
                "rank(s) {missing:?} did not connect in time; are they started, and can they \
                 reach this host?"
            )));
        }
        if Instant::now() >= next_look {
            board.check()?;
            next_look = Instant::now() + LOOK_EVERY;
        }
        let until = deadline.min(next_look);
        let until = gates.iter().filter_map(Gate::deadline).fold(until, Instant::min);
        let mut interests: Vec<_> =
            gates.iter().map(|gate| PollFd::new(gate, PollFlags::IN)).collect();
        sleep_until_ready(&mut interests, until);
        for gate in &mut gates {
            for arrival in gate.admit(Instant::now()).map_err(failed)? {
                let Some(hello) = arrival.hello else { continue };
                let index = CHANNELS.iter().position(|&channel| channel == hello.channel);
                let is_near = matches!(arrival.stream, Stream::Unix(_));
                match index.map(|index| &mut slots[hello.rank][index]) {
                    Some(slot @ None) if is_near == near(&hello.rank) => {
                        *slot = Some(arrival.stream);
                    }
                    _ => tracing::warn!(
                        rank = hello.rank,
                        channel = ?hello.channel,
                        "turned a connection away that is one too many, or came another way than \
                         agreed"
                    ),
                }
            }
        }
    }
}
