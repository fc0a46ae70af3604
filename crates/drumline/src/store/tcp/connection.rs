//! One connection of a client: blocking calls with deadlines.
//!
//! After an error the connection may stand in the middle of a reply; its owner drops it.

use std::{
    hash::{BuildHasher as _, RandomState},
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream, ToSocketAddrs as _},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use super::protocol::{Key, MAGIC, READY, Request, STOP_WAITING, VALUE_BYTES_MAX, WAIT_CANCELED};

/// How long one attempt to connect may take. The kernel repeats a lost first packet after 1 s and
/// 3 s; a fresh attempt does better than its later repetitions.
const ATTEMPT_MAX: Duration = Duration::from_secs(5);

/// The pause between attempts doubles from the first to the second of these.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// How long the server may take to confirm that a wait is cancelled.
const CANCEL_MAX: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Connection {
    stream: TcpStream,
    _open: OpenConnection,
}

/// Counts the connections that a client has.
#[derive(Debug)]
struct OpenConnection(Arc<AtomicUsize>);

impl OpenConnection {
    fn new(count: Arc<AtomicUsize>) -> OpenConnection {
        count.fetch_add(1, Ordering::SeqCst);
        OpenConnection(count)
    }
}

impl Drop for OpenConnection {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Connection {
    /// Connects to the first address of `host` that a store's server answers at, again and again
    /// until `deadline`. Every connection counts in `open`.
    pub(super) fn establish(
        host: &str,
        port: u16,
        deadline: Instant,
        open: &Arc<AtomicUsize>,
    ) -> io::Result<Connection> {
        let mut pause = PAUSE_MIN;
        loop {
            let error = match Connection::try_all(host, port, deadline, open) {
                Ok(connection) => return Ok(connection),
                Err(error) => error,
            };
            // Ranks that were started together should not knock together.
            let wait = pause.mul_f64(random_between(0.5, 1.0));
            if Instant::now() + wait >= deadline {
                return Err(error);
            }
            thread::sleep(wait);
            pause = PAUSE_MAX.min(pause * 2);
        }
    }

    /// Connects to `address`, once.
    pub(super) fn open(
        address: SocketAddr,
        deadline: Instant,
        open: &Arc<AtomicUsize>,
    ) -> io::Result<Connection> {
        let open = OpenConnection::new(Arc::clone(open));
        let stream = TcpStream::connect_timeout(&address, time_left(deadline)?)?;
        // Without a listener, a connection from an ephemeral port can meet itself.
        if stream.local_addr()? == stream.peer_addr()? {
            return Err(ErrorKind::ConnectionRefused.into());
        }
        stream.set_nodelay(true)?;
        let mut connection = Connection { stream, _open: open };
        let nonce = std::process::id();
        connection.send(&[Request::Validate(MAGIC), Request::Ping(nonce)], deadline)?;
        if u32::from_le_bytes(connection.read_array(deadline)?) != nonce {
            return Err(io::Error::other("what answers is not a store"));
        }
        Ok(connection)
    }

    fn try_all(
        host: &str,
        port: u16,
        deadline: Instant,
        open: &Arc<AtomicUsize>,
    ) -> io::Result<Connection> {
        let addresses = resolve(host, port, deadline)?;
        let mut last_error = io::Error::other(format!("the name {host} has no address"));
        for (index, &address) in addresses.iter().enumerate() {
            // One silent address must not use up the time of the others.
            let share = time_left(deadline)? / (addresses.len() - index) as u32;
            let until = Instant::now() + share.min(ATTEMPT_MAX);
            match Connection::open(address, until, open) {
                Ok(connection) => return Ok(connection),
                Err(error) => last_error = error,
            }
        }
        Err(last_error)
    }

    /// The server's address.
    pub(super) fn peer(&self) -> io::Result<SocketAddr> {
        self.stream.peer_addr()
    }

    /// Sends requests in one piece.
    pub(super) fn send(&mut self, requests: &[Request<'_>], deadline: Instant) -> io::Result<()> {
        let mut bytes = Vec::new();
        requests.iter().for_each(|request| request.encode(&mut bytes));
        let mut unsent = &bytes[..];
        while !unsent.is_empty() {
            self.stream.set_write_timeout(Some(time_left(deadline)?))?;
            match self.stream.write(unsent) {
                Ok(count) => unsent = &unsent[count..],
                Err(error) if is_to_be_repeated(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Reads a reply that is a number.
    pub(super) fn read_array<const N: usize>(&mut self, deadline: Instant) -> io::Result<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes, deadline)?;
        Ok(bytes)
    }

    /// Reads a reply that is a value.
    pub(super) fn read_value(&mut self, deadline: Instant) -> io::Result<Vec<u8>> {
        let length = u64::from_le_bytes(self.read_array(deadline)?);
        let length = usize::try_from(length).ok().filter(|&length| length <= VALUE_BYTES_MAX);
        let length = length.ok_or_else(|| io::Error::other("the value is longer than allowed"))?;
        let mut bytes = vec![0; length];
        self.fill(&mut bytes, deadline)?;
        Ok(bytes)
    }

    /// Waits until `keys` exist, or until `deadline`; returns the keys that are missing then.
    pub(super) fn wait<'k>(
        &mut self,
        keys: &[Key<'k>],
        deadline: Instant,
    ) -> io::Result<Vec<Key<'k>>> {
        // A deadline in the past still asks: the keys may be there.
        self.send(&[Request::Wait(keys.to_vec())], deadline.max(Instant::now() + CANCEL_MAX))?;
        match self.read_array(deadline) {
            Ok([STOP_WAITING]) => return Ok(Vec::new()),
            Ok(_) => return Err(unexpected_reply()),
            Err(error) if error.kind() == ErrorKind::TimedOut => {}
            Err(error) => return Err(error),
        }
        let until = Instant::now() + CANCEL_MAX;
        self.send(&[Request::CancelWait()], until)?;
        let [mut reply] = self.read_array(until)?;
        if reply == STOP_WAITING {
            // The keys' arrival and our patience's end crossed on the wire.
            [reply] = self.read_array(until)?;
        }
        if reply != WAIT_CANCELED {
            return Err(unexpected_reply());
        }
        self.missing(keys, until)
    }

    /// Those of `keys` that do not exist now.
    fn missing<'k>(&mut self, keys: &[Key<'k>], deadline: Instant) -> io::Result<Vec<Key<'k>>> {
        let checks: Vec<_> = keys.iter().map(|&key| Request::Check(vec![key])).collect();
        self.send(&checks, deadline)?;
        let mut missing = Vec::new();
        for &key in keys {
            if self.read_array(deadline)? != [READY] {
                missing.push(key);
            }
        }
        Ok(missing)
    }

    fn fill(&mut self, mut unread: &mut [u8], deadline: Instant) -> io::Result<()> {
        while !unread.is_empty() {
            self.stream.set_read_timeout(Some(time_left(deadline)?))?;
            match self.stream.read(unread) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(count) => unread = &mut unread[count..],
                Err(error) if is_to_be_repeated(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

/// The time `timeout` from now.
pub(super) fn deadline_after(timeout: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    Instant::now() + timeout.min(YEAR)
}

/// What is left until `deadline`, never zero, which sockets take for "unlimited".
fn time_left(deadline: Instant) -> io::Result<Duration> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(left) }
}

/// Resolving has no time-out of its own: it runs aside, and is left behind at the deadline.
fn resolve(host: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![(ip, port).into()]);
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    thread::Builder::new().name("drumline-resolve".into()).spawn(move || {
        let addresses = (name.as_str(), port).to_socket_addrs().map(Iterator::collect);
        // Nobody listens any more if it took too long.
        let _ = sender.send(addresses);
    })?;
    match receiver.recv_timeout(time_left(deadline)?) {
        Ok(addresses) => addresses,
        Err(_) => Err(io::Error::new(
            ErrorKind::TimedOut,
            format!("the name {host} could not be resolved in time"),
        )),
    }
}

/// The loop around the call looks at the clock; the socket's own time-out is no error yet.
fn is_to_be_repeated(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn unexpected_reply() -> io::Error {
    io::Error::other("the reply does not fit the request")
}

fn random_between(low: f64, high: f64) -> f64 {
    let random = RandomState::new().hash_one(Instant::now()) as f64 / u64::MAX as f64;
    low + (high - low) * random
}
