//! From a URL to the group of the whole job.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use super::ProcessGroup;
use crate::{Config, Error, Result, rendezvous::rendezvous};

/// Connects all processes of the job to one group, named `world`.
///
/// `url` says how they meet: `env://` reads what a launcher has put into the environment,
/// `tcp://host:port?rank=R&world_size=W` says it all. See [`crate::rendezvous`].
///
/// ```
/// use drumline::{Config, ProcessGroup, init_process_group, is_launched};
///
/// // Runs under `drumline run` and `torchrun` as well as alone.
/// let group = match is_launched() {
///     true => init_process_group("env://", &Config::from_env()?)?,
///     false => ProcessGroup::alone(),
/// };
/// group.barrier()?;
/// group.destroy()?;
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::InvalidSetting`] names the part of the URL or the variable that is missing or wrong;
/// [`Error::Store`] and [`Error::Connect`] say who could not be reached, or who never came.
pub fn init_process_group(url: &str, config: &Config) -> Result<ProcessGroup> {
    let place = rendezvous(url, config.timeout)?;
    let mut config = config.clone();
    if config.bind_address.is_none() {
        config.bind_address = Some(address_towards(place.master())?);
    }
    let (store, rank, world_size) = (place.store.clone(), place.rank, place.world_size);
    let group = ProcessGroup::connect("world", store, rank, world_size, &config)?;
    group.inner.lock().rendezvous = Some(place);
    Ok(group)
}

/// The address of this host on the route to `master`: the other hosts can reach it there, and
/// on one host it is loopback. (A host's own name often resolves to something useless.)
fn address_towards(master: SocketAddr) -> Result<IpAddr> {
    let any = match master {
        SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
        SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
    };
    // Connecting a datagram socket sends nothing; it only asks the routing table.
    UdpSocket::bind((any, 0))
        .and_then(|socket| socket.connect(master).and_then(|()| socket.local_addr()))
        .map(|address| address.ip())
        .map_err(|source| Error::io(format!("cannot find a route to the master {master}"), source))
}
