//! A listener that takes many strangers at once and lets only those in who prove themselves.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Read as _},
    net::{IpAddr, SocketAddr, TcpListener},
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr as UnixAddr, UnixListener},
    },
    time::{Duration, Instant},
};

use drumline_shm::Unforked;
use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    io::Errno,
    process::{Resource, getrlimit},
};

use super::{call::say, owner, pacing, stream::Stream, warnings::Warnings};
use crate::{
    auth::{Expected, Handshake, Hello, Level, Nonce, Secret},
    text::escaped,
};

/// A socket that listens. A fork of this process does not: it would keep the address taken, and let callers
/// wait for an answer.
#[derive(Debug)]
pub enum Listener {
    /// A socket of TCP, and where it listens.
    Tcp(Unforked<TcpListener>, SocketAddr),
    /// A Unix socket.
    Unix(Unforked<UnixListener>),
}

/// The kernel's own limit is usually this too. std's 128 would make a large job's ranks wait for
/// a second attempt.
const BACKLOG: i32 = 4096;

impl Listener {
    /// Listens on exactly this address.
    pub fn tcp(address: SocketAddr) -> io::Result<Listener> {
        let listener = Unforked::open(|| TcpListener::bind(address))?;
        pacing::begin_without(&*listener);
        let bound = listener.local_addr()?;
        Listener::ready(Listener::Tcp(listener, bound))
    }

    /// Listens on an abstract Unix socket.
    pub fn unix(name: &str) -> io::Result<Listener> {
        let address = UnixAddr::from_abstract_name(name)?;
        let listener = Unforked::open(|| UnixListener::bind_addr(&address))?;
        Listener::ready(Listener::Unix(listener))
    }

    fn ready(listener: Listener) -> io::Result<Listener> {
        rustix::net::listen(&listener, BACKLOG)?;
        match &listener {
            Listener::Tcp(tcp, _) => tcp.set_nonblocking(true)?,
            Listener::Unix(unix) => unix.set_nonblocking(true)?,
        }
        Ok(listener)
    }

    /// Where a TCP listener listens.
    pub fn address(&self) -> Option<SocketAddr> {
        match self {
            Listener::Tcp(_, bound) => Some(*bound),
            Listener::Unix(_) => None,
        }
    }

    fn accept(&self) -> io::Result<Stream> {
        let stream = match self {
            Listener::Tcp(listener, _) => {
                Stream::Tcp(Unforked::open(|| listener.accept().map(|(stream, _)| stream))?)
            }
            Listener::Unix(listener) => {
                Stream::Unix(Unforked::open(|| listener.accept().map(|(stream, _)| stream))?)
            }
        };
        stream.set_nonblocking(true)?;
        stream.tune()?;
        Ok(stream)
    }
}

impl AsFd for Listener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        match self {
            Listener::Tcp(listener, _) => listener.as_fd(),
            Listener::Unix(listener) => listener.as_fd(),
        }
    }
}

/// What a [`Gate`] asks of those who come.
#[derive(Clone, Debug)]
pub enum Admission {
    /// To begin with these bytes, which show the protocol and no more.
    Opening {
        /// The bytes. They are taken off the stream.
        bytes: &'static [u8],
        /// Whether a process of another user is turned away; then the listener is on loopback.
        own_user_only: bool,
    },
    /// The handshake, as the one who answers.
    Handshake {
        /// The greeting of this end.
        ours: Hello,
        /// The greetings that are let in.
        expected: Expected,
        /// The secret that both ends prove, if there is one.
        secret: Option<Secret>,
        /// How connections over TCP are protected from then on.
        level: Level,
    },
}

/// The most connections that have not proven themselves. One more takes the place of the oldest,
/// so a stranger who only sits there keeps nobody out, and what strangers can make this process hold
/// is bounded: less than a kilobyte each here, and the socket's buffers in the kernel.
pub const GUESTS_MAX: usize = 256;

/// How many of them one address may have that others cannot push out.
pub const GUESTS_PER_SOURCE: usize = 16;

/// How long a connection may take to prove itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// How many connections are accepted before guests that have said something have their turn.
const ACCEPTED_AT_ONCE: usize = 64;

/// How long accepting pauses when the process has no descriptor left and no guest to close.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// One in four of the descriptors that this process may have: a door that asks for no secret leaves
/// them to the doors that do.
const RESERVED_PART: u64 = 4;

/// Listens, and yields the connections whose other end belongs here.
///
/// It never blocks. Its descriptor is readable when [`Gate::admit`] has something to do, which is
/// also to be called at [`Gate::deadline`].
#[derive(Debug)]
pub struct Gate {
    listener: Listener,
    admission: Admission,
    epoll: OwnedFd,
    /// In the order in which they came.
    guests: BTreeMap<u64, Guest>,
    next_guest: u64,
    /// Set while accepting pauses.
    accept_after: Option<Instant>,
    warnings: Warnings,
    /// What went wrong last with somebody who came.
    objection: Option<String>,
}

/// A connection that has not proven itself.
#[derive(Debug)]
struct Guest {
    stream: Stream,
    /// Where it calls from; none over a Unix socket.
    source: Option<IpAddr>,
    proof: Proof,
    deadline: Instant,
    /// Whether the gate waits until it can write to it.
    writes: bool,
}

/// What a guest has shown so far.
#[derive(Debug)]
enum Proof {
    Handshake(Box<Handshake>),
    Opening { missing: &'static [u8] },
}

/// A connection that is let in.
#[derive(Debug)]
pub struct Arrival {
    /// The connection.
    pub stream: Stream,
    /// Who it is; absent where [`Admission::Opening`] is.
    pub hello: Option<Hello>,
}

/// Stands for the listener among the guests' numbers.
const LISTENER: u64 = u64::MAX;

impl Gate {
    /// A gate at this socket.
    pub fn new(listener: Listener, admission: Admission) -> io::Result<Gate> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let token = epoll::EventData::new_u64(LISTENER);
        epoll::add(&epoll, &listener, token, epoll::EventFlags::IN)?;
        Ok(Gate {
            listener,
            admission,
            epoll,
            guests: BTreeMap::new(),
            next_guest: 0,
            accept_after: None,
            warnings: Warnings::default(),
            objection: None,
        })
    }

    /// Where a TCP listener listens.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.address()
    }

    /// When [`Gate::admit`] has something to do although nothing arrives.
    pub fn deadline(&self) -> Option<Instant> {
        let oldest = self.guests.first_key_value().map(|(_, guest)| guest.deadline);
        [oldest, self.accept_after].into_iter().flatten().min()
    }

    /// Why the last connection that did not get in was turned away: for the error of a rank that waits in vain.
    pub fn objection(&self) -> Option<&str> {
        self.objection.as_deref()
    }

    /// How many connections have not proven themselves yet.
    #[cfg(test)]
    pub(super) fn guests(&self) -> usize {
        self.guests.len()
    }

    /// Accepts who knocks, hears who speaks, turns away who is wrong or too slow, and returns
    /// who may come in. The caller tells the time.
    ///
    /// # Errors
    ///
    /// The system has no events for us; nothing that a stranger can bring about.
    pub fn admit(&mut self, now: Instant) -> io::Result<Vec<Arrival>> {
        if self.accept_after.is_some_and(|after| now >= after) {
            // If it fails, it is tried again.
            self.accept_after = Some(now + ACCEPT_PAUSE);
            self.listen_for(epoll::EventFlags::IN)?;
            self.accept_after = None;
        }
        let mut ready = Vec::with_capacity(ACCEPTED_AT_ONCE);
        let at_once = Timespec { tv_sec: 0, tv_nsec: 0 };
        match epoll::wait(&self.epoll, spare_capacity(&mut ready), Some(&at_once)) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
        let mut arrivals = Vec::new();
        for event in ready {
            match event.data.u64() {
                LISTENER => self.accept(now)?,
                id => arrivals.extend(self.hear(id, now)),
            }
        }
        while let Some(oldest) = self.guests.first_entry()
            && now >= oldest.get().deadline
        {
            let guest = oldest.remove();
            self.warn(&guest.stream, now, "it did not prove itself in time");
        }
        Ok(arrivals)
    }

    fn accept(&mut self, now: Instant) -> io::Result<()> {
        for _ in 0..ACCEPTED_AT_ONCE {
            match self.listener.accept() {
                Ok(stream) => self.receive(stream, now),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // It has gone before it was looked at.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => match self.guests.pop_first() {
                    Some(_) => tracing::debug!(%error, "closed a guest to accept another"),
                    None => {
                        // Without the pause, the gate would be ready at once for ever.
                        if let Some(held_back) = self.warnings.admit(now) {
                            tracing::warn!(%error, held_back, "cannot accept connections for a moment");
                        }
                        self.objection = Some(error.to_string());
                        self.accept_after = Some(now + ACCEPT_PAUSE);
                        self.listen_for(epoll::EventFlags::empty())?;
                        break;
                    }
                },
            }
        }
        Ok(())
    }

    /// Takes a fresh connection in as a guest.
    fn receive(&mut self, stream: Stream, now: Instant) {
        let proof = match self.question(&stream) {
            Ok(proof) => proof,
            Err(objection) => return self.warn(&stream, now, &objection),
        };
        let id = self.next_guest;
        let token = epoll::EventData::new_u64(id);
        if let Err(error) = epoll::add(&self.epoll, &stream, token, epoll::EventFlags::IN) {
            return self.warn(&stream, now, &error.to_string());
        }
        if self.guests.len() >= GUESTS_MAX
            && let Some(guest) = self.one_too_many().and_then(|id| self.guests.remove(&id))
        {
            self.warn(&guest.stream, now, "too many others came before it had proven itself");
        }
        self.next_guest += 1;
        let source = stream.peer_address().map(|address| address.ip());
        let deadline = now + PATIENCE;
        self.guests.insert(id, Guest { stream, source, proof, deadline, writes: false });
    }

    /// What a fresh connection is asked for, or why it is not even asked.
    fn question(&self, stream: &Stream) -> Result<Proof, String> {
        match &self.admission {
            Admission::Opening { bytes, own_user_only } => {
                if !leaves_descriptors(stream) {
                    return Err(
                        "three quarters of this process's descriptors are taken, and the rest is \
                         for who knows the secret"
                            .to_owned(),
                    );
                }
                if let (true, Stream::Tcp(tcp)) = (own_user_only, stream)
                    && let Some(objection) = owner::objection(tcp)
                {
                    return Err(objection);
                }
                Ok(Proof::Opening { missing: bytes })
            }
            Admission::Handshake { ours, expected, secret, level } => {
                if let Some(suspicion) = stream.suspicion(secret.is_some()) {
                    return Err(suspicion);
                }
                let nonce = Nonce::random().map_err(|error| error.to_string())?;
                let secret = secret.clone();
                let handshake = Handshake::answer(*ours, expected.clone(), secret, nonce)
                    .at(stream.level(*level));
                Ok(Proof::Handshake(Box::new(handshake)))
            }
        }
    }

    /// The oldest guest of the address that has the most. So an address with at most
    /// [`GUESTS_PER_SOURCE`] of them loses none to fewer other addresses than that.
    fn one_too_many(&self) -> Option<u64> {
        let mut counts = BTreeMap::<Option<IpAddr>, usize>::new();
        for guest in self.guests.values() {
            *counts.entry(guest.source).or_default() += 1;
        }
        let most = counts.values().copied().max()?;
        let has_most = |guest: &Guest| counts.get(&guest.source) == Some(&most);
        self.guests.iter().find(|(_, guest)| has_most(guest)).map(|(&id, _)| id)
    }

    /// Hears what a guest has to say; the guest, if that lets it in.
    fn hear(&mut self, id: u64, now: Instant) -> Option<Arrival> {
        let guest = self.guests.get_mut(&id)?;
        let heard = guest.hear();
        let heard = match heard {
            Ok(false) if guest.writes == guest.has_to_say() => return None,
            Ok(false) => {
                guest.writes = guest.has_to_say();
                let way = if guest.writes { epoll::EventFlags::OUT } else { epoll::EventFlags::IN };
                let token = epoll::EventData::new_u64(id);
                match epoll::modify(&self.epoll, &guest.stream, token, way) {
                    Ok(()) => return None,
                    Err(error) => Err(Farewell::Refused(error.to_string())),
                }
            }
            heard => heard.map(drop),
        };
        let guest = self.guests.remove(&id)?;
        let taken_out = epoll::delete(&self.epoll, &guest.stream)
            .map_err(|error| Farewell::Refused(error.to_string()));
        let Guest { stream, mut proof, .. } = guest;
        let peer = stream.peer();
        match heard.and(taken_out) {
            Ok(()) => {
                let (hello, layer) = match &mut proof {
                    Proof::Handshake(handshake) => {
                        (handshake.peer().copied(), handshake.take_layer())
                    }
                    Proof::Opening { .. } => (None, None),
                };
                match stream.under(layer) {
                    Ok(stream) => Some(Arrival { stream, hello }),
                    Err(error) => {
                        tracing::warn!(peer, %error, "turned a connection away");
                        self.objection = Some(error.to_string());
                        None
                    }
                }
            }
            Err(Farewell::Left(reason)) => {
                // A peer that is closing the group again, or a scanner of open ports.
                tracing::debug!(peer, reason, "a connection came and went");
                self.objection = Some(reason);
                None
            }
            Err(Farewell::Refused(reason)) => {
                self.warn(&stream, now, &reason);
                None
            }
        }
    }

    fn listen_for(&self, flags: epoll::EventFlags) -> io::Result<()> {
        let token = epoll::EventData::new_u64(LISTENER);
        Ok(epoll::modify(&self.epoll, &self.listener, token, flags)?)
    }

    fn warn(&mut self, stream: &Stream, now: Instant, reason: &str) {
        self.objection = Some(escaped(reason));
        if let Some(held_back) = self.warnings.admit(now) {
            let (peer, reason) = (stream.peer(), escaped(reason));
            tracing::warn!(peer, reason, held_back, "turned a connection away");
        }
    }
}

impl AsFd for Gate {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.epoll.as_fd()
    }
}

/// Why a guest does not become a peer.
enum Farewell {
    /// It went away.
    Left(String),
    /// What it said is wrong.
    Refused(String),
}

impl Guest {
    /// Reads on and answers; whether the handshake is done.
    fn hear(&mut self) -> Result<bool, Farewell> {
        match &mut self.proof {
            Proof::Handshake(handshake) => shake(&mut self.stream, handshake),
            Proof::Opening { missing } => hear_opening(&mut self.stream, missing),
        }
    }

    fn has_to_say(&self) -> bool {
        match &self.proof {
            Proof::Handshake(handshake) => !handshake.output().is_empty(),
            Proof::Opening { .. } => false,
        }
    }
}

fn hear_opening(stream: &mut Stream, missing: &mut &'static [u8]) -> Result<bool, Farewell> {
    let mut bytes = [0; Hello::BYTES];
    while !missing.is_empty() {
        let wanted = missing.len().min(bytes.len());
        let Some(count) = read(stream, &mut bytes[..wanted])? else { return Ok(false) };
        *missing = missing.strip_prefix(&bytes[..count]).ok_or_else(|| {
            Farewell::Refused("it does not begin as a TCP store's client does".to_owned())
        })?;
    }
    Ok(true)
}

fn shake(stream: &mut Stream, handshake: &mut Handshake) -> Result<bool, Farewell> {
    let mut bytes = [0; Hello::BYTES];
    loop {
        if !say(stream, handshake).map_err(|error| Farewell::Left(error.to_string()))? {
            return Ok(false);
        }
        let wanted = handshake.wanted().min(bytes.len());
        if wanted == 0 {
            return Ok(true);
        }
        let Some(count) = read(stream, &mut bytes[..wanted])? else { return Ok(false) };
        if let Err(refusal) = handshake.receive(&bytes[..count]) {
            // What it can still be told, it is told before it is hung up on.
            let _ = say(stream, handshake);
            return Err(Farewell::Refused(refusal.to_string()));
        }
    }
}

/// Reads what is there; `None`: nothing yet.
fn read(stream: &mut Stream, bytes: &mut [u8]) -> Result<Option<usize>, Farewell> {
    loop {
        match stream.read(bytes) {
            Ok(0) => return Err(Farewell::Left("it left before it had proven itself".to_owned())),
            Ok(count) => return Ok(Some(count)),
            Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(None),
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(Farewell::Left(error.to_string())),
        }
    }
}

/// Whether a door that asks for no secret may keep this connection. A process's descriptors are
/// numbered from below: a new one has the number of those that are taken.
fn leaves_descriptors(stream: &Stream) -> bool {
    let number = u64::try_from(stream.as_fd().as_raw_fd()).unwrap_or(u64::MAX);
    getrlimit(Resource::Nofile).current.is_none_or(|limit| number < limit - limit / RESERVED_PART)
}
