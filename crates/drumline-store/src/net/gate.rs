//! A listener that handles many unknown connections at once and accepts those that pass its [`Admission`].

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Read as _},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    ops::RangeInclusive,
    os::{
        fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd},
        linux::net::SocketAddrExt as _,
        unix::net::{SocketAddr as UnixAddr, UnixListener},
    },
    time::{Duration, Instant},
};

use drumline_shm::{Unforked, limit_of, named};
use rustix::{
    buffer::spare_capacity,
    event::{Timespec, epoll},
    io::Errno,
    net::{AddressFamily, SocketFlags, SocketType, bind, socket_with, sockopt},
    process::Resource,
};

use super::{
    call::{check_peer, say},
    owner, pacing,
    stream::Stream,
    warnings::Warnings,
};
use crate::{
    Error,
    auth::{Expected, Handshake, Hello, Level, Nonce, Secret},
    text::escaped,
};

/// A listening socket. A fork of this process does not keep it: otherwise the address would stay taken, and
/// callers would wait for an answer.
#[derive(Debug)]
pub enum Listener {
    /// A TCP socket, and its address.
    Tcp(Unforked<TcpListener>, SocketAddr),
    /// A Unix socket.
    Unix(Unforked<UnixListener>),
}

/// The length of the queue of connections. The kernel's limit is usually the same. With std's 128, some ranks
/// of a large job would need a second attempt.
const BACKLOG: i32 = 4096;

/// The system calls with which std makes a listener.
const LISTENS: &str = "socket, setsockopt, bind or listen";

impl Listener {
    /// Listens on exactly this address.
    pub fn tcp(address: SocketAddr) -> io::Result<Listener> {
        let listener = Unforked::open(|| TcpListener::bind(address)).map_err(named(LISTENS))?;
        Listener::on_tcp(listener)
    }

    /// Listens at an address for peers: at any port, or at one of `ports`. The search begins at the `first` of these.
    ///
    /// # Errors
    ///
    /// [`Setting`](drumline_error::ErrorKind::Setting) if all of them are in use; otherwise the system's.
    pub fn for_peers(
        ip: IpAddr,
        ports: Option<RangeInclusive<u16>>,
        first: usize,
    ) -> Result<Listener, Error> {
        let failed = |source| Error::io(format!("cannot listen on {ip}"), source);
        let Some(ports) = ports else { return Listener::tcp((ip, 0).into()).map_err(failed) };
        let count = ports.len();
        for port in ports.clone().cycle().skip(first % count.max(1)).take(count) {
            match Listener::tcp((ip, port).into()) {
                Err(error) if error.kind() == ErrorKind::AddrInUse => {}
                result => return result.map_err(failed),
            }
        }
        let (first, last) = (ports.start(), ports.end());
        Err(Error::setting(
            "DRUMLINE_PORT_RANGE",
            format!("all ports from {first} to {last} of {ip} are in use; allow some more"),
        ))
    }

    fn on_tcp(listener: Unforked<TcpListener>) -> io::Result<Listener> {
        pacing::begin_without(&*listener);
        let bound = listener.local_addr()?;
        Listener::ready(Listener::Tcp(listener, bound))
    }

    /// Listens on all addresses of this host, of both families if it has both.
    pub fn everywhere(port: u16) -> io::Result<Listener> {
        // One socket takes both, unless the system is set otherwise.
        let open = || {
            let flags = SocketFlags::CLOEXEC;
            let socket = socket_with(AddressFamily::INET6, SocketType::STREAM, flags, None)?;
            sockopt::set_ipv6_v6only(&socket, false)?;
            sockopt::set_socket_reuseaddr(&socket, true)?;
            bind(&socket, &SocketAddr::from((Ipv6Addr::UNSPECIFIED, port)))?;
            Ok(TcpListener::from(socket))
        };
        match Unforked::open(open) {
            Err(error) if error.raw_os_error() == Some(Errno::AFNOSUPPORT.raw_os_error()) => {
                Listener::tcp((Ipv4Addr::UNSPECIFIED, port).into())
            }
            listener => Listener::on_tcp(listener?),
        }
    }

    /// Listens on an abstract Unix socket.
    pub fn unix(name: &str) -> io::Result<Listener> {
        let address = UnixAddr::from_abstract_name(name)?;
        let listener = Unforked::open(|| UnixListener::bind_addr(&address));
        let listener = listener.map_err(named(LISTENS))?;
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

    /// The address of a TCP listener.
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

/// What a [`Gate`] demands of a connection.
#[derive(Clone, Debug)]
pub enum Admission {
    /// To begin with these bytes. They show the protocol, and nothing else.
    Opening {
        /// The bytes. They are taken off the stream.
        bytes: &'static [u8],
        /// Whether processes of other users are turned away. The listener must be on loopback then.
        own_user_only: bool,
    },
    /// The handshake. This end is the answerer.
    Handshake {
        /// The greeting of this end.
        ours: Hello,
        /// The greetings that are accepted.
        expected: Expected,
        /// The secret that both ends prove, if there is one.
        secret: Option<Secret>,
        /// How TCP connections are protected after the handshake.
        level: Level,
    },
}

/// The most connections that have not proven themselves. One more takes the place of the oldest, so a
/// stranger that only waits keeps nobody out. This also limits the memory that strangers take: less than a
/// kilobyte each in this process, and the socket's buffers in the kernel.
pub const GUESTS_MAX: usize = 256;

/// The number of such connections of one address that other addresses cannot push out.
pub const GUESTS_PER_SOURCE: usize = 16;

/// How long a connection may take to prove itself.
const PATIENCE: Duration = Duration::from_secs(5);

/// The number of connections that are accepted before guests that have sent something have their turn.
const ACCEPTED_AT_ONCE: usize = 64;

/// How long accepting pauses when the process has no descriptor left and no guest to close.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long accepting pauses after a stranger was turned away. Strangers who call without a break then wake this
/// process a hundred times a second and not for every call: a wake-up interrupts the rank that computes on
/// that core. The kernel keeps the calls of ranks in its queue meanwhile.
const BREATH: Duration = Duration::from_millis(10);

/// One in this many of the process's descriptors is reserved. A door without a secret leaves these to doors
/// with one.
const RESERVED_PART: u64 = 4;

/// Listens, and returns the connections whose other end belongs to the job.
///
/// It never blocks. Call [`Gate::admit`] when its descriptor is readable, and at [`Gate::deadline`].
#[derive(Debug)]
pub struct Gate {
    listener: Listener,
    admission: Admission,
    epoll: OwnedFd,
    /// In the order in which they connected.
    guests: BTreeMap<u64, Guest>,
    next_guest: u64,
    /// Set while accepting pauses.
    accept_after: Option<Instant>,
    warnings: Warnings,
    /// Why a connection was last turned away.
    objection: Option<String>,
    /// The number of connections that were turned away.
    turned_away: u64,
}

/// A connection that has not proven itself.
#[derive(Debug)]
struct Guest {
    stream: Stream,
    /// Its address; `None` over a Unix socket.
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

/// A connection that was accepted.
#[derive(Debug)]
pub struct Arrival {
    /// The connection.
    pub stream: Stream,
    /// Its greeting; `None` with [`Admission::Opening`].
    pub hello: Option<Hello>,
}

/// The key of the listener among the numbers of guests.
const LISTENER: u64 = u64::MAX;

impl Gate {
    /// A gate on `listener`.
    pub fn new(listener: Listener, admission: Admission) -> io::Result<Gate> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(named("epoll_create1"))?;
        let token = epoll::EventData::new_u64(LISTENER);
        epoll::add(&epoll, &listener, token, epoll::EventFlags::IN).map_err(named("epoll_ctl"))?;
        Ok(Gate {
            listener,
            admission,
            epoll,
            guests: BTreeMap::new(),
            next_guest: 0,
            accept_after: None,
            warnings: Warnings::default(),
            objection: None,
            turned_away: 0,
        })
    }

    /// The address of a TCP listener.
    pub fn address(&self) -> Option<SocketAddr> {
        self.listener.address()
    }

    /// When [`Gate::admit`] has something to do even if nothing arrives.
    pub fn deadline(&self) -> Option<Instant> {
        let oldest = self.guests.first_key_value().map(|(_, guest)| guest.deadline);
        [oldest, self.accept_after].into_iter().flatten().min()
    }

    /// Why a connection was last turned away: for the error of a rank that waits in vain.
    pub fn objection(&self) -> Option<&str> {
        self.objection.as_deref()
    }

    /// The number of connections that have not proven themselves yet.
    #[cfg(test)]
    pub(super) fn guests(&self) -> usize {
        self.guests.len()
    }

    /// Accepts connections, reads what guests have sent, turns away guests that are wrong or too slow, and
    /// returns those that are accepted. `now` is the time.
    ///
    /// # Errors
    ///
    /// The system cannot report events. Strangers cannot cause that.
    pub fn admit(&mut self, now: Instant) -> io::Result<Vec<Arrival>> {
        if self.accept_after.is_some_and(|after| now >= after) {
            // If this fails, it is tried again.
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
                LISTENER => self.accept(now, &mut arrivals)?,
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

    fn accept(&mut self, now: Instant, arrivals: &mut Vec<Arrival>) -> io::Result<()> {
        let turned_away = self.turned_away;
        for _ in 0..ACCEPTED_AT_ONCE {
            match self.listener.accept() {
                Ok(stream) => arrivals.extend(self.receive(stream, now)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                // The connection ended before it was accepted.
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {}
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => match self.guests.pop_first() {
                    Some(_) => tracing::debug!(%error, "closed a guest to accept another"),
                    None => {
                        // Without the pause, the gate would stay ready for ever.
                        if let Some(held_back) = self.warnings.admit(now) {
                            tracing::warn!(%error, held_back, "cannot accept connections for a moment");
                        }
                        self.objection = Some(error.to_string());
                        return self.pause_until(now + ACCEPT_PAUSE);
                    }
                },
            }
        }
        match self.turned_away == turned_away {
            true => Ok(()),
            false => self.pause_until(now + BREATH),
        }
    }

    fn pause_until(&mut self, after: Instant) -> io::Result<()> {
        self.accept_after = Some(after);
        self.listen_for(epoll::EventFlags::empty())
    }

    /// Takes a new connection as a guest, unless what it has sent already decides.
    fn receive(&mut self, stream: Stream, now: Instant) -> Option<Arrival> {
        let proof = match self.question(&stream) {
            Ok(proof) => proof,
            Err(objection) => {
                self.warn(&stream, now, &objection);
                return None;
            }
        };
        let source = stream.peer_address().map(|address| address.ip());
        let mut guest = Guest { stream, source, proof, deadline: now + PATIENCE, writes: false };
        match guest.hear() {
            Ok(false) => self.keep(guest, now),
            Ok(true) => return self.admit_guest(guest),
            Err(farewell) => self.dismiss(&guest, farewell, now),
        }
        None
    }

    fn keep(&mut self, mut guest: Guest, now: Instant) {
        guest.writes = guest.has_to_say();
        let id = self.next_guest;
        let token = epoll::EventData::new_u64(id);
        if let Err(error) = epoll::add(&self.epoll, &guest.stream, token, guest.awaits()) {
            return self.warn(&guest.stream, now, &error.to_string());
        }
        if self.guests.len() >= GUESTS_MAX
            && let Some(guest) = self.one_too_many().and_then(|id| self.guests.remove(&id))
        {
            self.warn(&guest.stream, now, "too many others came before it had proven itself");
        }
        self.next_guest += 1;
        self.guests.insert(id, guest);
    }

    /// What a new connection must prove, or why it is turned away at once.
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
                check_peer(stream, secret.is_some()).map_err(|error| error.to_string())?;
                let nonce = Nonce::random().map_err(|error| error.to_string())?;
                let secret = secret.clone();
                let handshake = Handshake::answer(*ours, expected.clone(), secret, nonce)
                    .at(stream.level(*level));
                Ok(Proof::Handshake(Box::new(handshake)))
            }
        }
    }

    /// The oldest guest of the address that has the most guests. So an address with at most
    /// [`GUESTS_PER_SOURCE`] guests loses none while there are fewer other addresses than that.
    fn one_too_many(&self) -> Option<u64> {
        let mut counts = BTreeMap::<Option<IpAddr>, usize>::new();
        for guest in self.guests.values() {
            *counts.entry(guest.source).or_default() += 1;
        }
        let most = counts.values().copied().max()?;
        let has_most = |guest: &Guest| counts.get(&guest.source) == Some(&most);
        self.guests.iter().find(|(_, guest)| has_most(guest)).map(|(&id, _)| id)
    }

    /// Reads what a guest has sent. Returns the guest if it is accepted.
    fn hear(&mut self, id: u64, now: Instant) -> Option<Arrival> {
        let guest = self.guests.get_mut(&id)?;
        let heard = guest.hear();
        let heard = match heard {
            Ok(false) if guest.writes == guest.has_to_say() => return None,
            Ok(false) => {
                guest.writes = guest.has_to_say();
                let token = epoll::EventData::new_u64(id);
                match epoll::modify(&self.epoll, &guest.stream, token, guest.awaits()) {
                    Ok(()) => return None,
                    Err(error) => Err(Farewell::Refused(error.to_string())),
                }
            }
            heard => heard.map(drop),
        };
        let guest = self.guests.remove(&id)?;
        let taken_out = epoll::delete(&self.epoll, &guest.stream)
            .map_err(|error| Farewell::Refused(error.to_string()));
        match heard.and(taken_out) {
            Ok(()) => self.admit_guest(guest),
            Err(farewell) => {
                self.dismiss(&guest, farewell, now);
                None
            }
        }
    }

    /// Makes a connection of a guest that has proven itself.
    fn admit_guest(&mut self, guest: Guest) -> Option<Arrival> {
        let Guest { stream, mut proof, .. } = guest;
        let peer = stream.peer();
        let (hello, layer) = match &mut proof {
            Proof::Handshake(handshake) => (handshake.peer().copied(), handshake.take_layer()),
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

    fn dismiss(&mut self, guest: &Guest, farewell: Farewell, now: Instant) {
        match farewell {
            Farewell::Left(reason) => {
                // Perhaps a peer that is closing the group, or a scanner of open ports.
                tracing::debug!(peer = guest.stream.peer(), reason, "a connection came and went");
                self.turned_away += 1;
                self.objection = Some(reason);
            }
            Farewell::Refused(reason) => self.warn(&guest.stream, now, &reason),
        }
    }

    fn listen_for(&self, flags: epoll::EventFlags) -> io::Result<()> {
        let token = epoll::EventData::new_u64(LISTENER);
        Ok(epoll::modify(&self.epoll, &self.listener, token, flags)?)
    }

    fn warn(&mut self, stream: &Stream, now: Instant, reason: &str) {
        self.turned_away += 1;
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

/// Why a guest is not accepted.
enum Farewell {
    /// It went away.
    Left(String),
    /// It sent something wrong.
    Refused(String),
}

impl Guest {
    /// Reads on and answers. Returns whether the handshake is done.
    fn hear(&mut self) -> Result<bool, Farewell> {
        match &mut self.proof {
            Proof::Handshake(handshake) => shake(&mut self.stream, handshake),
            Proof::Opening { missing } => hear_opening(&mut self.stream, missing),
        }
    }

    /// What the gate waits for, as `writes` says.
    fn awaits(&self) -> epoll::EventFlags {
        if self.writes { epoll::EventFlags::OUT } else { epoll::EventFlags::IN }
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
            // The guest gets the last bytes of the handshake before this end hangs up.
            let _ = say(stream, handshake);
            return Err(Farewell::Refused(refusal.to_string()));
        }
    }
}

/// Reads what has arrived. `None`: nothing yet.
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

/// Whether a door without a secret may keep this connection. The system gives a new descriptor the lowest
/// free number, so the number shows how many are taken.
fn leaves_descriptors(stream: &Stream) -> bool {
    let number = u64::try_from(stream.as_fd().as_raw_fd()).unwrap_or(u64::MAX);
    limit_of(Resource::Nofile)
        .and_then(|limit| limit.current)
        .is_none_or(|limit| number < limit - limit / RESERVED_PART)
}
