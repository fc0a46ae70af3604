//! Connects every rank of a group with every other.

use std::{
    io::{self, Read, Write},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    time::{Duration, Instant},
};

use drumline_schedule::step::Rank;
use rustix::event::{PollFd, PollFlags};

use super::{
    super::wire::{Channel, Hello},
    TcpTransport, sleep_until_ready,
};
use crate::{Error, Result, store::Store};

/// Who meets whom.
#[derive(Clone, Debug)]
pub(crate) struct Membership {
    /// Name of the group, for errors.
    pub(crate) name: String,
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    /// A number that only this group's ranks know, to tell strangers and left-over processes of
    /// an earlier group apart.
    pub(crate) digest: u64,
}

/// Listens on `bind`, exchanges addresses through `store`, and connects with all peers.
///
/// A rank connects to every lower rank and is connected to by every higher one. Rank 0 accepts
/// first, so no ring of ranks can wait for each other.
pub(crate) fn connect(
    member: &Membership,
    store: &dyn Store,
    bind: IpAddr,
    deadline: Instant,
) -> Result<TcpTransport> {
    if member.world_size == 1 {
        return Ok(TcpTransport::alone());
    }
    let listener = TcpListener::bind((bind, 0))
        .map_err(|source| Error::io(format!("cannot listen on {bind}"), source))?;
    let address = listener
        .local_addr()
        .map_err(|source| Error::io(format!("cannot tell the port on {bind}"), source))?;
    store.set(&address_key(member.rank), address.to_string().as_bytes())?;
    tracing::info!(group = member.name, rank = member.rank, %address, "listening for peers");

    let mut slots: Vec<[Option<TcpStream>; 2]> =
        std::iter::repeat_with(Default::default).take(member.world_size).collect();
    for (lower, slot) in slots.iter_mut().enumerate().take(member.rank) {
        let published = store.get(&address_key(lower))?;
        let address: SocketAddr = std::str::from_utf8(&published)
            .ok()
            .and_then(|text| text.parse().ok())
            .ok_or_else(|| {
                let text = String::from_utf8_lossy(&published);
                member.error(format!("rank {lower} published {text:?}, which is no address"))
            })?;
        for channel in Channel::ALL {
            let stream = call(member, lower, address, channel, deadline)?;
            slot[channel as usize] = Some(stream);
        }
    }
    accept(member, &listener, &mut slots, deadline)?;

    let mut connections = Vec::with_capacity(member.world_size - 1);
    for (rank, [control, data]) in slots.into_iter().enumerate() {
        let (Some(control), Some(data)) = (control, data) else { continue };
        for stream in [&control, &data] {
            stream
                .set_nonblocking(true)
                .and_then(|()| stream.set_nodelay(true))
                .map_err(|source| Error::io(format!("cannot set up rank {rank}"), source))?;
        }
        connections.push((rank, control, data));
    }
    Ok(TcpTransport::new(connections))
}

fn address_key(rank: Rank) -> String {
    format!("address/{rank}")
}

impl Membership {
    fn hello(&self, channel: Channel) -> Hello {
        Hello { channel, rank: self.rank, world_size: self.world_size, group: self.digest }
    }

    fn error(&self, problem: String) -> Error {
        Error::Connect { group: self.name.clone(), rank: self.rank, problem }
    }

    /// Why the sender of `hello` cannot be a peer.
    fn refuses(&self, hello: &Hello) -> Option<String> {
        if hello.group != self.digest {
            return Some("it belongs to another group".to_owned());
        }
        if hello.world_size != self.world_size {
            return Some(format!(
                "it counts {} ranks, this rank {}",
                hello.world_size, self.world_size
            ));
        }
        None
    }
}

/// Connects to rank `peer` at `address` and exchanges greetings.
fn call(
    member: &Membership,
    peer: Rank,
    address: SocketAddr,
    channel: Channel,
    deadline: Instant,
) -> Result<TcpStream> {
    let attempt = || -> io::Result<(TcpStream, [u8; Hello::BYTES])> {
        let mut stream = TcpStream::connect_timeout(&address, time_left(deadline)?)?;
        stream.set_read_timeout(Some(time_left(deadline)?))?;
        stream.set_write_timeout(Some(time_left(deadline)?))?;
        stream.write_all(&member.hello(channel).encode())?;
        let mut reply = [0; Hello::BYTES];
        stream.read_exact(&mut reply)?;
        Ok((stream, reply))
    };
    let (stream, reply) = attempt().map_err(|error| {
        member.error(format!(
            "cannot connect to rank {peer} at {address}: {error}; has it exited, or does a \
             firewall stand between?"
        ))
    })?;
    let hello = Hello::decode(&reply);
    let refused = match &hello {
        Err(problem) => Some(problem.clone()),
        Ok(hello) if hello.rank != peer => Some(format!("it says that it is rank {}", hello.rank)),
        Ok(hello) => member.refuses(hello),
    };
    match refused {
        None => Ok(stream),
        Some(reason) => Err(member.error(format!("rank {peer} at {address}: {reason}"))),
    }
}

fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(io::ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Connections that have not greeted yet. More are not accepted until one of these has.
const GUESTS_MAX: usize = 256;

/// A connection whose greeting has arrived in part.
struct Guest {
    stream: TcpStream,
    greeting: [u8; Hello::BYTES],
    have: usize,
}

/// Accepts both connections of every higher rank. Strangers are turned away and hold up nobody.
fn accept(
    member: &Membership,
    listener: &TcpListener,
    slots: &mut [[Option<TcpStream>; 2]],
    deadline: Instant,
) -> Result<()> {
    let failed = |source| Error::io("cannot accept connections of peers", source);
    listener.set_nonblocking(true).map_err(failed)?;
    let mut guests: Vec<Guest> = Vec::new();
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
        let mut interests: Vec<PollFd<'_>> =
            guests.iter().map(|guest| PollFd::new(&guest.stream, PollFlags::IN)).collect();
        if guests.len() < GUESTS_MAX {
            interests.push(PollFd::new(listener, PollFlags::IN));
        }
        sleep_until_ready(&mut interests, deadline);

        let (mut waiting, mut ready) = (Vec::new(), Vec::new());
        for mut guest in guests {
            match guest.listen() {
                Ok(true) => ready.push(guest),
                Ok(false) => waiting.push(guest),
                Err(error) => tracing::warn!(%error, "a connection ended before its greeting"),
            }
        }
        guests = waiting;
        for guest in ready {
            admit(member, guest, slots);
        }
        while guests.len() < GUESTS_MAX {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(true).map_err(failed)?;
                    guests.push(Guest { stream, greeting: [0; Hello::BYTES], have: 0 });
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(failed(error)),
            }
        }
    }
}

impl Guest {
    /// Reads on; whether the greeting is complete.
    fn listen(&mut self) -> io::Result<bool> {
        while self.have < Hello::BYTES {
            match self.stream.read(&mut self.greeting[self.have..]) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(bytes) => self.have += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(true)
    }
}

/// Gives a guest its place, or turns it away. Either way it gets our greeting, so that a peer
/// of another release or group can tell what is wrong.
fn admit(member: &Membership, mut guest: Guest, slots: &mut [[Option<TcpStream>; 2]]) {
    let hello = Hello::decode(&guest.greeting);
    let channel = hello.as_ref().map_or(Channel::Control, |hello| hello.channel);
    // Thirty-two bytes always fit the empty send buffer of a fresh connection.
    let replied = guest.stream.write_all(&member.hello(channel).encode());
    let refused = match (&hello, replied) {
        (_, Err(error)) => Some(error.to_string()),
        (Err(problem), _) => Some(problem.clone()),
        (Ok(hello), _) if hello.rank <= member.rank || hello.rank >= member.world_size => {
            Some(format!("it says that it is rank {}", hello.rank))
        }
        (Ok(hello), _) => member.refuses(hello),
    };
    match (hello, refused) {
        (Ok(hello), None) => {
            let slot = &mut slots[hello.rank][hello.channel as usize];
            if slot.is_some() {
                tracing::warn!(rank = hello.rank, "turned a second connection of a rank away");
                return;
            }
            *slot = Some(guest.stream);
        }
        (_, reason) => {
            tracing::warn!(reason = reason.unwrap_or_default(), "turned a connection away");
        }
    }
}
