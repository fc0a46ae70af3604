//! How a rank connects to the ranks of its host, and learns where the other ranks listen.
//!
//! Each rank leaves a [`Card`] on the [`Board`]. Ranks with equal cards find out whether they are on one host: whether
//! they reach the socket of the first of them. Ranks of one host connect over Unix sockets: each rank calls
//! every lower rank and is called by every higher one. The lowest rank accepts first, so ranks cannot wait
//! for each other in a ring. Ranks of different hosts only say where they listen. They call each other when
//! they first need to.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
    time::Duration,
};

use drumline_schedule::step::Rank;

use super::{
    board::{Board, Subject},
    card::Card,
    failure::Failure,
    steps::{Answer, Ask, Desk, Dialled, Outside},
    store::word,
    watch::look_every,
};
use crate::{
    membership::Membership,
    transport::{Bundle, Channel, Opening},
};

/// How a rank reaches its peers.
#[derive(Debug)]
pub struct Mesh<S> {
    /// The peers of this host with their open connections, in the order of ranks.
    pub near: Vec<(Rank, Bundle<S>)>,
    /// The addresses at which each peer of another host listens.
    pub far: BTreeMap<Rank, Vec<SocketAddr>>,
}

/// Exchanges cards on `board`, connects to the peers of this host, and learns the addresses of the others.
/// All ranks must call this. `streams` connections carry the data between two hosts.
///
/// # Errors
///
/// [`Failure::Connect`] names the rank that could not be reached, never came, or was refused.
pub async fn connect<W: Outside>(
    desk: &Desk<W>,
    board: &Board,
    streams: usize,
) -> Result<Mesh<W::Stream>, Failure<W::Error>> {
    let member = board.member();
    if member.world_size == 1 {
        return Ok(Mesh { near: Vec::new(), far: BTreeMap::new() });
    }
    let own = word(desk.ask(Ask::Card).await?);
    let cards = board.all_gather(desk, Subject::Card, &own).await?;
    let parse = |(rank, text): (Rank, &Vec<u8>)| match Card::parse(text) {
        Ok(card) => Ok((rank, card)),
        Err(problem) => Err(Failure::by(member, rank, &problem)),
    };
    let (_, own) = parse((member.rank, &own))?;
    let others = cards.iter().enumerate().filter(|(rank, _)| *rank != member.rank);
    let cards = others.map(parse).collect::<Result<BTreeMap<_, _>, _>>()?;
    let homes = homes(desk, board, &own, &cards).await?;
    let (near, far): (BTreeMap<Rank, Card>, BTreeMap<Rank, Card>) = cards
        .into_iter()
        .partition(|(rank, card)| card.is_near(&own) && homes[*rank] == homes[member.rank]);
    tracing::info!(
        group = member.name,
        rank = member.rank,
        over_unix_sockets = ?near.keys().collect::<Vec<_>>(),
        over_tcp = ?far.keys().collect::<Vec<_>>(),
        "reaches its peers"
    );
    let far = match far.is_empty() {
        true => BTreeMap::new(),
        false => exchange_addresses(desk, board, &own, &far, streams).await?,
    };
    let near = match near.is_empty() {
        true => Vec::new(),
        false => connect_near(desk, board, &near).await?,
    };
    Ok(Mesh { near, far })
}

/// For every rank, the first rank that it reaches over Unix sockets, which may be itself. Those with the same one are on
/// one host. Cards do not prove that: copies of one virtual machine have one boot id, and the number of their first
/// network namespace is always the same.
async fn homes<W: Outside>(
    desk: &Desk<W>,
    board: &Board,
    own: &Card,
    cards: &BTreeMap<Rank, Card>,
) -> Result<Vec<Rank>, Failure<W::Error>> {
    let member = board.member();
    let all: Vec<&Card> = cards.values().chain([own]).filter(|card| card.unix.is_some()).collect();
    let kinds: BTreeSet<_> = all.iter().map(|it| (&it.boot, &it.network, it.uid)).collect();
    if kinds.len() == all.len() {
        return Ok((0..member.world_size).collect());
    }
    let mut home = member.rank;
    let alike = cards.range(..member.rank).filter(|(_, card)| card.is_near(own));
    for (&peer, card) in alike {
        let Some(name) = card.unix.clone() else { continue };
        if let Answer::Number(1) = desk.ask(Ask::Reach { peer, name }).await? {
            home = peer;
            break;
        }
    }
    let told = board.all_gather(desk, Subject::Home, home.to_string().as_bytes()).await?;
    let parse = |(rank, text): (Rank, Vec<u8>)| match String::from_utf8_lossy(&text).parse() {
        Ok(home) if home <= rank => Ok(home),
        _ => Err(Failure::by(member, rank, "it does not say which ranks it reaches")),
    };
    told.into_iter().enumerate().map(parse).collect()
}

/// Tells ranks that are not near where this rank listens, and learns where they listen.
async fn exchange_addresses<W: Outside>(
    desk: &Desk<W>,
    board: &Board,
    own: &Card,
    far: &BTreeMap<Rank, Card>,
    streams: usize,
) -> Result<BTreeMap<Rank, Vec<SocketAddr>>, Failure<W::Error>> {
    // Whose card is near, and is not reached, is on a copy of this host.
    let is_elsewhere = |card: &Card| !card.is_same_network(own) || card.is_near(own);
    let elsewhere = far.iter().filter(|(_, card)| is_elsewhere(card));
    let elsewhere: Vec<Rank> = elsewhere.map(|(rank, _)| *rank).collect();
    let addresses = word(desk.ask(Ask::Listen(elsewhere)).await?);
    // The number of connections for data comes first.
    let own = [streams.to_string().as_bytes(), b" ", &addresses].concat();
    let told = board.all_gather(desk, Subject::Address, &own).await?;
    let parse = |rank: &Rank| {
        let addresses = parse_addresses(board.member(), *rank, &told[*rank], streams)?;
        Ok((*rank, addresses))
    };
    far.keys().map(parse).collect()
}

/// The addresses in rank `rank`'s word. This rank has `own` streams.
///
/// # Errors
///
/// [`Failure::Connect`] when the word has no valid address, or the rank has another number of streams.
pub fn parse_addresses<E>(
    member: &Membership,
    rank: Rank,
    text: &[u8],
    own: usize,
) -> Result<Vec<SocketAddr>, Failure<E>> {
    let text = String::from_utf8_lossy(text);
    let parse = || {
        let (streams, addresses) = text.split_once(' ')?;
        let addresses: Result<_, _> = addresses.split(' ').map(str::parse).collect();
        Some((streams.parse::<usize>().ok()?, addresses.ok()?))
    };
    let Some((streams, addresses)) = parse() else {
        let shown: String = text.chars().take(100).collect();
        let problem = format!("it published {shown:?}, which is no address");
        return Err(Failure::by(member, rank, &problem));
    };
    if streams != own {
        let problem = format!(
            "it sends data over {streams} connection(s), this rank over {own}: name as many \
             interfaces on all ranks, or set DRUMLINE_STREAMS alike"
        );
        return Err(Failure::by(member, rank, &problem));
    }
    Ok(addresses)
}

/// On one host only memory limits a connection, so one stream is enough.
const NEAR_STREAMS: usize = 1;

/// The streams of each peer that are open so far.
type Openings<S> = BTreeMap<Rank, Opening<S>>;

/// Connects to the peers of this host.
async fn connect_near<W: Outside>(
    desk: &Desk<W>,
    board: &Board,
    near: &BTreeMap<Rank, Card>,
) -> Result<Vec<(Rank, Bundle<W::Stream>)>, Failure<W::Error>> {
    let mut peers: Openings<W::Stream> =
        near.keys().map(|rank| (*rank, Opening::new(NEAR_STREAMS))).collect();
    for (rank, opening) in peers.range_mut(..board.member().rank) {
        let Some(name) = near.get(rank).and_then(|card| card.unix.as_deref()) else { continue };
        for channel in Opening::<W::Stream>::channels(NEAR_STREAMS) {
            if let Some(place) = opening.place(channel) {
                *place = Some(call(desk, board, *rank, name, channel).await?);
            }
        }
    }
    accept(desk, board, &mut peers).await?;
    let near = |(rank, mut opening): (Rank, Opening<W::Stream>)| Some((rank, opening.take()?));
    Ok(peers.into_iter().filter_map(near).collect())
}

/// How long a rank calls again after a peer has hung up. Strangers may have crowded it out.
const HUNG_UP_MAX: Duration = Duration::from_secs(10);

const PAUSE: Duration = Duration::from_millis(10);

/// Connects to rank `peer` at its Unix socket.
async fn call<W: Outside>(
    desk: &Desk<W>,
    board: &Board,
    peer: Rank,
    name: &str,
    channel: Channel,
) -> Result<W::Stream, Failure<W::Error>> {
    let give_up = board.deadline().min(desk.now() + HUNG_UP_MAX);
    let mut before = String::new();
    loop {
        let call = desk.ask(Ask::Dial { peer, name: name.to_owned(), channel }).await?;
        let Answer::Dialled(dialled) = call else { unreachable!("a call ends as calls do") };
        let told = |error| {
            format!(
                "cannot connect to rank {peer} at unix:@{name}: {error}{before}; has it exited, or \
                 does a firewall stand between?"
            )
        };
        let failure = match dialled {
            Dialled::Open(stream) => return Ok(stream),
            Dialled::HungUp(error) if desk.now() < give_up => {
                board.check(desk).await?;
                before = format!(" (before that, {error})");
                desk.ask(Ask::Pause(PAUSE)).await?;
                continue;
            }
            Dialled::Refused(reason) => {
                Failure::Connect(format!("rank {peer} at unix:@{name}: {reason}"))
            }
            Dialled::HungUp(error) | Dialled::Failed(error) => Failure::Connect(told(error)),
            Dialled::Closed(error) => Failure::Refused(peer, told(error)),
        };
        // A rank that has failed and lives closes its socket as well, and then says why.
        board.settle(desk).await?;
        return Err(failure);
    }
}

/// Accepts all connections of every higher rank of this host.
async fn accept<W: Outside>(
    desk: &Desk<W>,
    board: &Board,
    peers: &mut Openings<W::Stream>,
) -> Result<(), Failure<W::Error>> {
    let deadline = board.deadline();
    let every = look_every(board.member().world_size);
    let mut next_look = desk.now() + every;
    loop {
        let incomplete = peers.iter().filter(|(_, opening)| !opening.is_complete());
        let missing: Vec<Rank> = incomplete.map(|(rank, _)| *rank).collect();
        if missing.is_empty() {
            return Ok(());
        }
        if desk.now() >= deadline {
            return Err(Failure::Connect(format!(
                "rank(s) {missing:?} did not connect in time; are they started, and can they \
                 reach this host?"
            )));
        }
        if desk.now() >= next_look {
            board.check(desk).await?;
            next_look = desk.now() + every;
        }
        let Answer::Came(arrivals) = desk.ask(Ask::Accept(deadline.min(next_look))).await? else {
            unreachable!("a wait for peers ends with those that have come")
        };
        for (rank, channel, stream) in arrivals {
            match peers.get_mut(&rank).and_then(|opening| opening.place(channel)) {
                // A rank calls again only if it has lost its connection before it knew that it was accepted.
                Some(place) => *place = Some(stream),
                None => tracing::warn!(
                    rank,
                    ?channel,
                    "turned a connection away that came another way than agreed"
                ),
            }
        }
    }
}
