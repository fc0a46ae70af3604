//! The doors of a store's server: where clients connect, and which clients are accepted.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    time::{Duration, Instant},
};

use super::protocol::OPENING;
use crate::{
    auth::{Expected, Hello, Level, Secret},
    net::{
        Endpoint,
        gate::{Admission, Listener},
        site::{self, Site, is_here, resolve},
    },
};

/// An address of a store's server, and what clients must prove there.
///
/// All doors of a server lead to the same keys. So a client of a door without a secret can read and change
/// what clients of a door with a secret have stored.
///
/// ```
/// # use drumline_store as drumline;
/// use std::time::Duration;
///
/// use drumline::{
///     Endpoint,
///     auth::{Level, Secret},
///     store::{BYTES_MAX, Store, tcp::{Door, TcpStore, TcpStoreServer}},
/// };
///
/// let secret = Secret::random()?;
/// let endpoint = Endpoint::Unix(format!("doc-doors-{}", std::process::id()));
/// let doors = [
///     Door::Secured {
///         endpoint: endpoint.clone(),
///         secret: secret.clone(),
///         level: Level::Auth,
///     },
///     // For programs that run torch.
///     Door::Loopback { host: "127.0.0.1".into(), port: 0 },
/// ];
/// let server = TcpStoreServer::open(&doors, BYTES_MAX)?;
/// let port = server.address().map_or(0, |address| address.port());
///
/// let ours = TcpStore::connect_secured(&endpoint, &secret, Duration::from_secs(5))?;
/// let theirs = TcpStore::connect("127.0.0.1", port, Duration::from_secs(5))?;
/// ours.set("colour", b"green")?;
/// assert_eq!(theirs.get("colour")?, b"green");
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Door {
    /// Accepts processes of this user and of root on this machine, over TCP. `host` must be loopback. With
    /// port 0 the system chooses.
    Loopback {
        /// An address, or a name that resolves to one.
        host: String,
        /// The port.
        port: u16,
    },
    /// Accepts every process that can reach one address of this machine. If that is loopback, these are the
    /// processes of all users of the machine.
    Exposed {
        /// An address, or a name that resolves to one.
        host: String,
        /// The port.
        port: u16,
    },
    /// Accepts processes that know a secret, over TCP or an abstract Unix socket.
    Secured {
        /// The address.
        endpoint: Endpoint,
        /// The secret that both ends prove.
        secret: Secret,
        /// How TCP connections are protected.
        level: Level,
    },
}

impl Door {
    /// The address on which the door listens.
    pub(super) fn endpoint(&self) -> Endpoint {
        match self {
            Door::Loopback { host, port } | Door::Exposed { host, port } => {
                Endpoint::Tcp { host: host.clone(), port: *port }
            }
            Door::Secured { endpoint, .. } => endpoint.clone(),
        }
    }

    pub(super) fn secret(&self) -> Option<&Secret> {
        match self {
            Door::Loopback { .. } | Door::Exposed { .. } => None,
            Door::Secured { secret, .. } => Some(secret),
        }
    }

    pub(super) fn level(&self) -> Level {
        match self {
            Door::Loopback { .. } | Door::Exposed { .. } => Level::Auth,
            Door::Secured { level, .. } => *level,
        }
    }

    pub(super) fn admission(&self) -> Admission {
        match self {
            Door::Loopback { .. } | Door::Exposed { .. } => Admission::Opening {
                bytes: &OPENING,
                own_user_only: matches!(self, Door::Loopback { .. }),
            },
            Door::Secured { secret, level, .. } => Admission::Handshake {
                ours: Hello::STORE,
                expected: Expected::STORE,
                secret: Some(secret.clone()),
                level: *level,
            },
        }
    }

    /// Opens the listening socket. The error says what is wrong and what to do.
    pub(super) fn listen(&self) -> Result<Listener, String> {
        match self.endpoint() {
            Endpoint::Tcp { host, port } => {
                let must_be_loopback = matches!(self, Door::Loopback { .. });
                listen_on(&host, port, must_be_loopback)
            }
            Endpoint::Unix(name) => Listener::unix(&name).map_err(|error| match error.kind() {
                ErrorKind::AddrInUse => "the name is in use by another process".to_owned(),
                _ => error.to_string(),
            }),
        }
    }
}

fn listen_on(host: &str, port: u16, must_be_loopback: bool) -> Result<Listener, String> {
    let addresses = resolve(host, port, Instant::now() + RESOLVE_MAX)
        .map_err(|error| format!("the name {host} cannot be resolved: {error}"))?;
    let open = addresses.iter().find(|address| !address.ip().is_loopback());
    if let (true, Some(address)) = (must_be_loopback, open) {
        return Err(format!(
            "{address} can be reached from other machines, and this store knows no \
             authentication: give all processes of the job one DRUMLINE_SECRET or \
             DRUMLINE_SECRET_FILE, or, if you trust that network, set DRUMLINE_TRUST_STORE=1 \
             (in code: host_exposed, bind_exposed)"
        ));
    }
    let at = |address: SocketAddr| (Listener::tcp(address), address.ip().to_string());
    let loopback = addresses.iter().copied().find(|it| must_be_loopback && is_here(it.ip()));
    let (listener, ip) = match (site::of(host, &addresses), loopback) {
        (Site::At(address), _) | (Site::Everywhere, Some(address)) => at(address),
        (Site::Everywhere, None) => (Listener::everywhere(port), "this machine".to_owned()),
        (Site::Elsewhere(addresses), _) => {
            let addresses: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
            return Err(format!(
                "{host} stands for {}, which is not an address of this machine; start rank 0 there, or set \
                 MASTER_ADDR to an address of this machine",
                addresses.join(", ")
            ));
        }
    };
    listener.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => format!(
            "port {port} of {ip} is in use, perhaps by rank 0 of another job or by one left \
             over (`ss -ltnp sport = :{port}` shows it); pick another port with \
             MASTER_PORT, or leave the choice to `drumline run`"
        ),
        _ => format!("cannot listen on {ip}:{port}: {error}"),
    })
}

/// How long the resolver may take.
const RESOLVE_MAX: Duration = Duration::from_secs(30);
