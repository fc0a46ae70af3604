//! Opens the store in which the hosts of a job meet.

use std::{
    io::ErrorKind,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use drumline::{
    Config, ErrorOrigin,
    auth::{Level, Secret},
    rendezvous::{Endpoint, own_addresses},
    site::{self, Site},
    store::{
        FileStore, Store,
        tcp::{Door, TcpStore, TcpStoreServer},
    },
};

#[cfg(feature = "etcd")]
use drumline::store::etcd::{Cluster, EtcdStore, User};

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
            secret: launch.secret.secret.clone(),
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
        Meeting::File(path) => patiently(deadline, PLACE, || in_file(own, path, deadline)),
        Meeting::Etcd(etcd) => patiently(deadline, PLACE, || in_etcd(own, etcd, deadline)),
    }
}

/// Tries again until `deadline` what may only fail for a while: the disk or the network may be away, and in a cluster the
/// name of the first host may come later than this host. Tells once that it waits for `what`.
fn patiently<T>(deadline: Instant, what: &str, mut open: impl FnMut() -> Result<T>) -> Result<T> {
    let mut is_told = false;
    loop {
        match open() {
            Err(error)
                if error.origin() != ErrorOrigin::User
                    && Instant::now() + TRIED_EVERY < deadline =>
            {
                if !std::mem::replace(&mut is_told, true) {
                    tracing::warn!("waits for {what}: {error}");
                }
                thread::sleep(TRIED_EVERY);
            }
            opened => return opened,
        }
    }
}

const PLACE: &str = "the place where the hosts meet";

/// The pause between two looks for a place or a name.
const TRIED_EVERY: Duration = Duration::from_millis(500);

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
    let server = match is_first {
        Some(false) => None,
        _ => {
            let _ = patiently(deadline, "the first host", || resolve(host, port, deadline));
            serve(own, (host, port), is_first == Some(true), deadline)?
        }
    };
    let (store, is_hosted) = match server {
        Some(server) => {
            tracing::info!("this host is the first one: the others meet at {endpoint}");
            (TcpStore::to_own(server)?, true)
        }
        None => {
            tracing::info!("waits for the first host at {endpoint}");
            let left = deadline.saturating_duration_since(Instant::now());
            let store = TcpStore::connect_at(&endpoint, secret, level, left)
                .map_err(|error| Error::meeting(unreached(&endpoint, (host, port), &error)))?;
            (store, false)
        }
    };
    Ok(Place {
        address: own_address(own, on_the_way([host], store.address()), deadline)?,
        // The store has this job only: a host with another --rdzv-id is told so.
        store: Signed::over(Box::new(store), own.secret.clone(), "drumline/".into()),
        is_hosted,
        beat_every: Duration::ZERO,
        name: endpoint.to_string(),
    })
}

/// Opens the store if this host is the first one: if it can listen there.
fn serve(
    own: &Own,
    (host, port): (&str, u16),
    must_be: bool,
    deadline: Instant,
) -> Result<Option<TcpStoreServer>> {
    let (mut again, mut looks) = (0..TRIES_MAX, 0..LOOKS_MAX);
    let problem = loop {
        let ip = match listens(host, port, deadline)? {
            Listens::Yes(ip) => ip,
            // Perhaps another launcher only tries it at this moment. If both took that for a first host, both
            // would wait for one.
            Listens::InUse if looks.next().is_some() => {
                // Two launchers that began together must not go on in step.
                thread::sleep(
                    TRIED_AT_ONCE + Duration::from_millis((std::process::id() % 7).into()),
                );
                continue;
            }
            Listens::InUse => {
                break "the port is in use, by another process of this host (ss -ltnp shows it)";
            }
            Listens::Elsewhere => break "that is not an address of this host",
        };
        let endpoint = Endpoint::Tcp { host: ip.to_string(), port };
        let door = Door::Secured { endpoint, secret: own.secret.clone(), level: own.level };
        match TcpStoreServer::open(&[door], own.config.store_bytes_max) {
            Ok(server) => {
                if ip.is_loopback() {
                    tracing::warn!(
                        "launchers of other hosts do not reach {host}, which is {ip} here: name an address of this host"
                    );
                }
                return Ok(Some(server));
            }
            // Another launcher of this machine was faster, or tried it at this moment: then the port may be free
            // again, until one of the two takes it.
            Err(error) => match listens(host, port, deadline) {
                Ok(Listens::InUse | Listens::Yes(_)) if again.next().is_some() => {
                    thread::sleep(TRIED_AT_ONCE);
                }
                _ => return Err(error.into()),
            },
        }
    };
    match must_be {
        true => Err(Error::meeting(format!(
            "this host is to be the first one, but cannot listen at {host}:{port}: {problem}"
        ))),
        false => Ok(None),
    }
}

/// How often a host tries to listen at a port that seems to be free.
const TRIES_MAX: usize = 20;

/// How often a host looks again at a port that is in use.
const LOOKS_MAX: usize = 4;

/// Longer than another launcher takes to find out whether it can listen.
const TRIED_AT_ONCE: Duration = Duration::from_millis(5);

fn in_file(own: &Own, path: &Path, deadline: Instant) -> Result<Place> {
    // Nobody knows how many hosts will close it.
    let store = FileStore::open(path, 0)?;
    Ok(Place {
        address: own_address(own, None, deadline)?,
        store: signed(own, Box::new(store)),
        is_hosted: false,
        beat_every: SLOW_BEAT,
        name: format!("the file {}", path.display()),
    })
}

#[cfg(not(feature = "etcd"))]
fn in_etcd(_own: &Own, _etcd: &Etcd, _deadline: Instant) -> Result<Place> {
    Err(Error::meeting("etcd: this program is built without the feature `etcd`"))
}

#[cfg(feature = "etcd")]
fn in_etcd(own: &Own, etcd: &Etcd, deadline: Instant) -> Result<Place> {
    let cluster = Cluster {
        servers: etcd.servers.clone(),
        prefix: etcd.prefix.clone(),
        ca: etcd.ca.clone(),
        certificate: etcd.certificate.clone(),
        user: User::from_env()?,
    };
    let left = deadline.saturating_duration_since(Instant::now());
    let store = EtcdStore::open(&cluster, &own.run_id, left.min(ETCD_ANSWERS_WITHIN))?;
    let servers = etcd.servers.iter().filter_map(|url| url.split_once("://"));
    let servers = servers.map(|(_, place)| place.rsplit_once(':').map_or(place, |(host, _)| host));
    Ok(Place {
        address: own_address(own, on_the_way(servers, store.address()), deadline)?,
        name: store.name().to_owned(),
        store: signed(own, Box::new(store)),
        is_hosted: false,
        beat_every: SLOW_BEAT,
    })
}

/// How long etcd may take to answer, now and later. What is asked later is asked again.
#[cfg(feature = "etcd")]
const ETCD_ANSWERS_WITHIN: Duration = Duration::from_secs(5);

/// A store that may have other jobs, too.
fn signed(own: &Own, store: Box<dyn Store>) -> Signed {
    Signed::over(store, own.secret.clone(), format!("drumline/{}/", own.run_id))
}

/// Whether this process can listen somewhere.
enum Listens {
    /// At this address, which may be the one that stands for all addresses of this host.
    Yes(IpAddr),
    /// Another process of this host does.
    InUse,
    /// It is no address of this host.
    Elsewhere,
}

/// Tries it. A host's own name says nothing: others may know it by another one.
fn listens(host: &str, port: u16, deadline: Instant) -> Result<Listens> {
    let any = [IpAddr::from(Ipv6Addr::UNSPECIFIED), Ipv4Addr::UNSPECIFIED.into()];
    let (ip, tried) = match site::of(host, &resolve(host, port, deadline)?) {
        Site::Elsewhere(_) => return Ok(Listens::Elsewhere),
        Site::At(address) => (address.ip(), TcpListener::bind(address)),
        Site::Everywhere => match TcpListener::bind((any[0], port)) {
            Err(error) if error.kind() != ErrorKind::AddrInUse => {
                (any[1], TcpListener::bind((any[1], port)))
            }
            tried => (any[0], tried),
        },
    };
    match tried {
        Ok(_) => Ok(Listens::Yes(ip)),
        Err(error) if error.kind() == ErrorKind::AddrInUse => Ok(Listens::InUse),
        Err(error) => Err(Error::meeting(format!("cannot listen at {ip}:{port}: {error}"))),
    }
}

/// The addresses of a name. The resolver may take until `deadline`.
fn resolve(host: &str, port: u16, deadline: Instant) -> Result<Vec<SocketAddr>> {
    site::resolve(host, port, deadline).map_err(|error| {
        Error::meeting(format!(
            "the name {host} cannot be resolved on this host: {error}; write an address in its place"
        ))
    })
}

/// The address of the place where hosts meet, if the way there is the way to the other hosts. If it is on this host, it
/// must be called so: the own name of a host often leads to loopback on this host only.
fn on_the_way<'a>(
    names: impl IntoIterator<Item = &'a str>,
    address: Option<SocketAddr>,
) -> Option<SocketAddr> {
    let is_loopback = |name: &str| site::is_loopback_name(name.trim_matches(['[', ']']));
    let is_meant = names.into_iter().any(is_loopback);
    address.filter(|address| !address.ip().is_loopback() || is_meant)
}

/// The address that the other hosts get of this one.
fn own_address(own: &Own, towards: Option<SocketAddr>, deadline: Instant) -> Result<IpAddr> {
    if let Some(name) = &own.joining.local_addr {
        let mut addresses = resolve(name, 0, deadline)?;
        addresses.sort_by_key(|it| towards.is_some_and(|place| place.is_ipv6() != it.is_ipv6()));
        let is_told = |it: &&SocketAddr| site::is_loopback_name(name) || !it.ip().is_loopback();
        if let Some(address) = addresses.iter().find(is_told) {
            return Ok(address.ip());
        }
    }
    let addresses = own_addresses(&own.config, towards)?;
    addresses.first().copied().ok_or_else(|| {
        Error::meeting("this host has no address that others reach: give one by --local-addr")
    })
}

/// Why the first host is not reached. A stranger may listen there.
fn unreached(endpoint: &Endpoint, address: (&str, u16), error: &drumline::Error) -> String {
    let until = Instant::now() + STRANGER_MAX;
    let listens = resolve(address.0, address.1, until).is_ok_and(|addresses| {
        addresses.iter().any(|it| TcpStream::connect_timeout(it, STRANGER_MAX).is_ok())
    });
    let hint = match listens {
        true => {
            "a process listens there, but it is no launcher of drumline with the same secret: a torchrun, perhaps? \
             (ss -ltnp shows it on that host)."
        }
        false => {
            "is `drumline run` started there, with the same --rdzv-endpoint, and does its firewall let this port \
             through?"
        }
    };
    format!("the first host is not reached at {endpoint}: {hint} The last error was: {error}")
}

/// How long a stranger, and the resolver, may take to answer.
const STRANGER_MAX: Duration = Duration::from_secs(1);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_is_told_only_where_it_is_meant() {
        let way = |name: &str, address: &str| {
            let address = address.parse().unwrap();
            on_the_way([name], Some(SocketAddr::new(address, 1))).is_some()
        };
        assert!(way("localhost", "127.0.0.1") && way("127.0.1.1", "127.0.1.1"));
        assert!(way("[::1]", "::1") && way("host0", "10.0.0.1") && way("10.0.0.1", "10.0.0.1"));
        // The own name of a host, and its own store at all addresses.
        assert!(!way("host0", "127.0.1.1") && !way("host0", "::1") && !way("0.0.0.0", "127.0.0.1"));
    }
}
