//! The thread that hosts a store: the server's state machine over non-blocking sockets.

use std::{
    collections::BTreeMap,
    io::{self, ErrorKind, Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs as _},
    os::unix::net::UnixStream,
    sync::{Arc, Condvar, Mutex, PoisonError},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    net::listen,
};

use super::{
    endpoint,
    server::{ConnectionId, Server},
};
use crate::{Error, Result};

/// A store's server. It serves from a thread of its own until it is dropped.
///
/// ```
/// use std::time::Duration;
///
/// use drumline::store::{Store, tcp::{TcpStore, TcpStoreServer}};
///
/// let server = TcpStoreServer::bind("127.0.0.1", 0)?;
/// let store = TcpStore::connect("127.0.0.1", server.address().port(), Duration::from_secs(5))?;
/// store.set("colour", b"green")?;
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Debug)]
pub struct TcpStoreServer {
    address: SocketAddr,
    clients: Arc<Clients>,
    /// The thread ends when this end of the pair closes.
    stop: Option<UnixStream>,
    thread: Option<JoinHandle<()>>,
}

impl TcpStoreServer {
    /// Starts a server that listens on exactly the address that `host` stands for, on no other
    /// interface. Port 0 lets the system choose; [`TcpStoreServer::address`] tells which.
    ///
    /// Of several addresses behind a name the first is taken that belongs to this machine.
    ///
    /// # Errors
    ///
    /// [`Error::Store`] if `host` cannot be resolved or is another machine, or if the port is in
    /// use. [`Error::Io`] if the system has no thread or descriptor left.
    pub fn bind(host: &str, port: u16) -> Result<TcpStoreServer> {
        let name = endpoint(host, port);
        let listener = listen_on(host, port).map_err(|problem| Error::Store {
            store: name.clone(),
            operation: "listen".into(),
            problem,
        })?;
        TcpStoreServer::start(listener).map_err(|error| Error::io(format!("host {name}"), error))
    }

    /// Where the server listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Waits until at most `count` connections of store clients are open, or until `deadline`.
    /// Tells which.
    pub(super) fn wait_for_departure(&self, count: impl Fn() -> usize, deadline: Instant) -> bool {
        self.clients.wait_until(|clients| clients <= count(), deadline)
    }

    fn start(listener: TcpListener) -> io::Result<TcpStoreServer> {
        let address = listener.local_addr()?;
        if !address.ip().is_loopback() {
            tracing::warn!(
                %address,
                "the store has no authentication: whoever can reach this address can join the job"
            );
        }
        let (stop, stopped) = UnixStream::pair()?;
        let clients = Arc::new(Clients::default());
        let host = Host {
            listener,
            accept_after: None,
            stopped,
            server: Server::default(),
            streams: BTreeMap::new(),
            clients: Arc::clone(&clients),
        };
        let thread = thread::Builder::new().name("drumline-store".into()).spawn(|| host.run())?;
        Ok(TcpStoreServer { address, clients, stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for TcpStoreServer {
    /// Stops serving: every connection closes.
    fn drop(&mut self) {
        self.stop = None;
        if self.thread.take().is_some_and(|thread| thread.join().is_err()) {
            tracing::error!(address = %self.address, "the store's thread has panicked");
        }
    }
}

/// How many connections of store clients are open, for those who wait for it to change.
#[derive(Debug, Default)]
struct Clients {
    count: Mutex<usize>,
    changed: Condvar,
}

impl Clients {
    fn update(&self, count: usize) {
        let mut present = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        if *present != count {
            *present = count;
            self.changed.notify_all();
        }
    }

    fn wait_until(&self, condition: impl Fn(usize) -> bool, deadline: Instant) -> bool {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let patience = deadline.saturating_duration_since(Instant::now());
        let (count, _) = self
            .changed
            .wait_timeout_while(count, patience, |count| !condition(*count))
            .unwrap_or_else(PoisonError::into_inner);
        condition(*count)
    }
}

/// How long accepting pauses when the process has no descriptor left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How many bytes are taken from one connection before the others have their turn.
const READ_BYTES: usize = 64 << 10;

/// What the thread owns.
struct Host {
    listener: TcpListener,
    /// Set while accepting pauses.
    accept_after: Option<Instant>,
    stopped: UnixStream,
    server: Server,
    streams: BTreeMap<ConnectionId, TcpStream>,
    clients: Arc<Clients>,
}

/// What poll found.
#[derive(Default)]
struct Ready {
    stop: bool,
    accept: bool,
    connections: Vec<ConnectionId>,
}

impl Host {
    fn run(mut self) {
        loop {
            let ready = match self.poll() {
                Ok(ready) => ready,
                Err(error) => {
                    tracing::error!(%error, "the store stops serving: poll failed");
                    return;
                }
            };
            if ready.stop {
                return;
            }
            for id in ready.connections {
                self.read(id);
            }
            if ready.accept {
                self.accept();
            }
            // Before the replies leave, so that a client that has one is counted, and again
            // after, because writing closes what is broken.
            self.clients.update(self.server.clients());
            self.write();
            self.clients.update(self.server.clients());
        }
    }

    fn poll(&self) -> io::Result<Ready> {
        let now = Instant::now();
        let pause = self.accept_after.map(|after| after.saturating_duration_since(now));
        let accepting = pause.is_none_or(|pause| pause.is_zero());

        let mut fds = Vec::with_capacity(2 + self.streams.len());
        fds.push(PollFd::new(&self.stopped, PollFlags::IN));
        // While accepting pauses, the entry stays in its place and asks for nothing.
        let asked = if accepting { PollFlags::IN } else { PollFlags::empty() };
        fds.push(PollFd::new(&self.listener, asked));
        for (&id, stream) in &self.streams {
            let blocked = !self.server.output(id).is_empty();
            let asked = if blocked { PollFlags::IN | PollFlags::OUT } else { PollFlags::IN };
            fds.push(PollFd::new(stream, asked));
        }
        let timeout = pause
            .filter(|_| !accepting)
            .map(|pause| Timespec { tv_sec: 0, tv_nsec: pause.subsec_nanos().into() });
        match poll(&mut fds, timeout.as_ref()) {
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => return Ok(Ready::default()),
            Err(error) => return Err(error.into()),
        }
        let is_ready = |index: usize| !fds[index].revents().is_empty();
        let connections = self.streams.keys().zip(2..);
        Ok(Ready {
            stop: is_ready(0),
            accept: accepting && is_ready(1),
            connections: connections
                .filter(|&(_, index)| is_ready(index))
                .map(|(&id, _)| id)
                .collect(),
        })
    }

    fn accept(&mut self) {
        self.accept_after = None;
        loop {
            match self.listener.accept() {
                Ok((stream, peer)) => match prepare(&stream) {
                    Ok(()) => {
                        self.streams.insert(self.server.connect(), stream);
                    }
                    Err(error) => tracing::debug!(%peer, %error, "cannot use a connection"),
                },
                Err(error) if error.kind() == ErrorKind::WouldBlock => return,
                Err(error) if is_gone_before_accept(&error) => {}
                Err(error) => {
                    // Without the pause, poll would return at once for ever.
                    tracing::warn!(%error, "cannot accept connections for a moment");
                    self.accept_after = Some(Instant::now() + ACCEPT_PAUSE);
                    return;
                }
            }
        }
    }

    fn read(&mut self, id: ConnectionId) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let mut bytes = [0; READ_BYTES];
        match stream.read(&mut bytes) {
            Ok(0) => self.close(id),
            Ok(count) => self.server.receive(id, &bytes[..count]),
            Err(error) if is_transient(&error) => {}
            Err(_) => self.close(id),
        }
    }

    /// Writes as much as the sockets take and closes what the server has refused.
    ///
    /// One connection's request may release the wait of any other: all are looked at.
    fn write(&mut self) {
        let mut broken = Vec::new();
        for (&id, stream) in &mut self.streams {
            while !self.server.output(id).is_empty() {
                match stream.write(self.server.output(id)) {
                    Ok(count) => self.server.written(id, count),
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                    Err(_) => {
                        broken.push(id);
                        break;
                    }
                }
            }
        }
        for id in broken {
            self.close(id);
        }
        for (id, refusal) in self.server.take_refused() {
            if let Some(stream) = self.streams.remove(&id) {
                let peer = stream.peer_addr().map_or("?".into(), |peer| peer.to_string());
                tracing::warn!(%peer, %refusal, "the store closes a connection");
            }
        }
    }

    fn close(&mut self, id: ConnectionId) {
        self.server.disconnect(id);
        self.streams.remove(&id);
    }
}

/// The listening socket, or why there is none and what to do.
fn listen_on(host: &str, port: u16) -> Result<TcpListener, String> {
    let addresses: Vec<SocketAddr> = match host.parse::<IpAddr>() {
        Ok(ip) => vec![(ip, port).into()],
        Err(_) => (host, port)
            .to_socket_addrs()
            .map_err(|error| format!("the name {host} cannot be resolved: {error}"))?
            .collect(),
    };
    let mut not_ours = Vec::new();
    for address in addresses {
        match TcpListener::bind(address) {
            Ok(listener) => {
                // std's backlog of 128 makes a large job's ranks wait for a second attempt.
                let widened = listen(&listener, 4096).map_err(io::Error::from);
                return widened
                    .and_then(|()| listener.set_nonblocking(true))
                    .map(|()| listener)
                    .map_err(|error| error.to_string());
            }
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {
                not_ours.push(address.ip().to_string());
            }
            // The next address would do, but the ranks would find the stranger on this one.
            Err(error) if error.kind() == ErrorKind::AddrInUse => {
                return Err(format!(
                    "port {port} of {} is in use, perhaps by rank 0 of another job or by one left \
                     over (`ss -ltnp sport = :{port}` shows it); pick another port with \
                     MASTER_PORT, or leave the choice to `drumline run`",
                    address.ip()
                ));
            }
            Err(error) => return Err(format!("cannot listen on {address}: {error}")),
        }
    }
    Err(format!(
        "{host} stands for {}, which is not an address of this machine; start rank 0 there, or set \
         MASTER_ADDR to an address of this machine",
        not_ours.join(", ")
    ))
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nonblocking(true)?;
    stream.set_nodelay(true)
}

fn is_transient(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn is_gone_before_accept(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::Interrupted | ErrorKind::ConnectionAborted)
}
