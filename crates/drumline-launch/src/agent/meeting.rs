//! Opens the store in which the hosts of a job meet.

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr, TcpListener, ToSocketAddrs as _},
    path::Path,
    time::{Duration, Instant},
};

use drumline::{
    Config, Endpoint,
    auth::{Level, Secret},
    own_addresses,
    store::{
        FileStore, Store,
        etcd::{Cluster, EtcdStore, User},
        tcp::{Door, TcpStore, TcpStoreServer},
    },
};

use super::signed::Signed;
use crate::{
    Error, Result,
    job::{Etcd, Joining, Meeting},
    launch::Launch,
};

/// What this host needs to know to meet the others.
#[derive(Clone, Debug)]
pub(super) struct Own {
    joining: Joining,
    config: Config,
    secret: Secret,
    level: Level,
    run_id: String,
}

impl Own {
    pub(super) fn of(launch: &Launch<'_>) -> Own {
        Own {
            joining: launch.job.joining.clone(),
            config: launch.config.clone(),
            secret: launch.secret.secret().clone(),
            level: launch.level(),
            run_id: launch.run_id.clone(),
        }
    }
}

/// The open store.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) store: Signed,
    /// The address by which other hosts reach this one.
    pub(super) address: IpAddr,
    /// Whether the store ends with this process.
    pub(super) is_hosted: bool,
    /// The time from one beat to the next, at least.
    pub(super) beat_every: Duration,
    /// The store, for messages.
    pub(super) name: String,
}

/// Opens the store of `meeting`. The first host opens it for all; the others wait for it, at most until `deadline`.
pub(super) fn open(own: &Own, meeting: &Meeting, deadline: Instant) -> Result<Place> {
    match meeting {
        Meeting::Static { node_rank, host, port } => {
            at_first_host(own, (host, *port), Some(*node_rank == 0), deadline)
        }
        Meeting::Drumline { host, port } => {
            at_first_host(own, (host, *port), own.joining.is_first, deadline)
        }
        Meeting::File(path) => in_file(own, path),
        Meeting::Etcd(etcd) => in_etcd(own, etcd, deadline),
    }
}

/// A file keeps all that was ever written to it, and etcd writes every beat to its disk. Our own store has no such
/// limit.
const SLOW_BEAT: Duration = Duration::from_millis(500);

fn at_first_host(
    own: &Own,
    (host, port): (&str, u16),
    is_first: Option<bool>,
    deadline: Instant,
) -> Result<Place> {
    let endpoint = Endpoint::Tcp { host: host.to_owned(), port };
    let (secret, level) = (&own.secret, own.level);
    let at = match is_first {
        Some(false) => None,
        Some(true) | None => match listens(host, port)? {
            Listens::Yes(ip) => Some(ip),
            no if is_first == Some(true) => {
                return Err(Error::meeting(format!(
                    "this host is to be the first one, but cannot listen at {endpoint}: {}",
                    match no {
                        Listens::InUse =>
                            "the port is in use, by another process of this host (ss -ltnp shows it)",
                        _ => "that is not an address of this host",
                    }
                )));
            }
            _ => None,
        },
    };
    let (store, is_hosted, towards) = match at {
        Some(ip) => {
            let door = Door::Secured {
                endpoint: Endpoint::Tcp { host: ip.to_string(), port },
                secret: secret.clone(),
                level,
            };
            let server = TcpStoreServer::open(&[door], own.config.store_bytes_max)?;
            tracing::info!("this host is the first one: the others meet at {endpoint}");
            (TcpStore::to_own(server)?, true, SocketAddr::new(ip, port))
        }
        None => {
            tracing::info!("waits for the first host at {endpoint}");
            let left = deadline.saturating_duration_since(Instant::now());
            let store = TcpStore::connect_at(&endpoint, secret, level, left)
                .map_err(|error| Error::meeting(unreached(&endpoint, &error)))?;
            let address = resolve(host, port)?.into_iter().next();
            let address =
                address.ok_or_else(|| Error::meeting(format!("{host} has no address")))?;
            (store, false, address)
        }
    };
    Ok(Place {
        address: own_address(own, Some(towards))?,
        store: signed(own, Box::new(store)),
        is_hosted,
        beat_every: Duration::ZERO,
        name: endpoint.to_string(),
    })
}

fn in_file(own: &Own, path: &Path) -> Result<Place> {
    // Nobody knows how many hosts will close it.
    let store = FileStore::open(path, 0)?;
    Ok(Place {
        address: own_address(own, None)?,
        store: signed(own, Box::new(store)),
        is_hosted: false,
        beat_every: SLOW_BEAT,
        name: format!("the file {}", path.display()),
    })
}

fn in_etcd(own: &Own, etcd: &Etcd, deadline: Instant) -> Result<Place> {
    let cluster = Cluster {
        servers: etcd.servers.clone(),
        prefix: etcd.prefix.clone(),
        ca: etcd.ca.clone(),
        certificate: etcd.certificate.clone(),
        user: User::from_env()?,
    };
    let left = deadline.saturating_duration_since(Instant::now());
    let store = EtcdStore::open(&cluster, &own.run_id, left)
        .map_err(|error| Error::meeting(error.to_string()))?;
    Ok(Place {
        address: own_address(own, store.address())?,
        name: store.name().to_owned(),
        store: signed(own, Box::new(store)),
        is_hosted: false,
        beat_every: SLOW_BEAT,
    })
}

/// The store behind the keys of this job.
fn signed(own: &Own, store: Box<dyn Store>) -> Signed {
    Signed::over(store, own.secret.clone(), format!("drumline/{}/", own.run_id))
}

/// Whether this process can listen somewhere.
enum Listens {
    Yes(IpAddr),
    /// Another process of this host does.
    InUse,
    /// It is no address of this host.
    Elsewhere,
}

/// Tries it. A host's own name says nothing: others may know it by another one.
fn listens(host: &str, port: u16) -> Result<Listens> {
    let mut listens = Listens::Elsewhere;
    for address in resolve(host, port)? {
        match TcpListener::bind(address) {
            Ok(_) => return Ok(Listens::Yes(address.ip())),
            Err(error) if error.kind() == ErrorKind::AddrInUse => listens = Listens::InUse,
            Err(error) if error.kind() == ErrorKind::AddrNotAvailable => {}
            Err(error) => {
                return Err(Error::meeting(format!("cannot listen at {address}: {error}")));
            }
        }
    }
    Ok(listens)
}

fn resolve(host: &str, port: u16) -> Result<Vec<SocketAddr>> {
    let addresses = match host.parse::<IpAddr>() {
        Ok(ip) => return Ok(vec![(ip, port).into()]),
        Err(_) => (host, port).to_socket_addrs(),
    };
    addresses.map(Iterator::collect).map_err(|error| {
        Error::meeting(format!(
            "the name of the first host, {host}, cannot be resolved on this one: {error}; write its address"
        ))
    })
}

/// The address that the other hosts get of this one.
fn own_address(own: &Own, towards: Option<SocketAddr>) -> Result<IpAddr> {
    if let Some(name) = &own.joining.local_addr {
        let address = resolve(name, 0)?.first().map(SocketAddr::ip);
        return address
            .ok_or_else(|| Error::meeting(format!("--local-addr {name} has no address")));
    }
    let addresses = own_addresses(&own.config, towards)?;
    addresses.first().copied().ok_or_else(|| {
        Error::meeting("this host has no address that others reach: give one by --local-addr")
    })
}

fn unreached(endpoint: &Endpoint, error: &drumline::store::Error) -> String {
    format!(
        "the first host is not reached at {endpoint}: {error}; is `drumline run` started there, with the same \
         --rdzv-endpoint and secret, and does a firewall let this port through?"
    )
}
