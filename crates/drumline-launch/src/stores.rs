//! The stores of a world on one host: where its workers meet.
//!
//! ```text
//!                 first host of the world                        every other host
//!  steps          launcher's store, Unix socket                  launcher's store, Unix socket
//!  drumline       store of the ranks, TCP, asks for the secret ◄─ ranks connect to it
//!  torch          store for torch, loopback, this user only       a door on loopback, this user only
//!                     and TCP, asks for the secret ◄───────────── carries its clients
//! ```
//!
//! With `--torch-store network` the store for torch listens on the network, without a secret, and nothing is carried.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener},
    time::Duration,
};

use drumline::{
    auth::Level,
    interface_with,
    rendezvous::{Endpoint, own_addresses},
    steps::keys,
    store::{
        Store as _,
        tcp::{Door, Relay, TcpStore, TcpStoreServer},
    },
};
use rustix::io::Errno;

use crate::{
    Error, Result,
    environment::Rendezvous,
    job::TorchStore,
    launch::{Launch, new_run_id},
};

/// The stores of a world. They start before the first worker and end after the last. So the launcher has their actual
/// ports and need not guess.
#[derive(Debug)]
pub(crate) struct Stores {
    pub(crate) own: TcpStore,
    pub(crate) rendezvous: Rendezvous,
    _servers: Vec<TcpStoreServer>,
    _relay: Option<Relay>,
}

/// Where the ranks of all hosts meet: what the first host of a world tells the others.
///
/// As text, one line each: `ranks=tcp://10.0.0.1:4711` and `torch=tcp://10.0.0.1:4712`, or
/// `master=tcp://10.0.0.1:29500`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Announcement {
    ranks: Endpoint,
    torch: Option<Torch>,
}

/// Where the store for programs of torch is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Torch {
    /// Behind a door that asks for the secret.
    Secured(Endpoint),
    /// On the network.
    Exposed(SocketAddr),
}

/// The loopback address of this host: that of IPv6 only where there is none of IPv4.
fn loopback() -> IpAddr {
    let here = IpAddr::from(Ipv4Addr::LOCALHOST);
    match TcpListener::bind((here, 0)).map_err(|error| Errno::from_io_error(&error)) {
        Err(Some(Errno::ADDRNOTAVAIL | Errno::AFNOSUPPORT)) => Ipv6Addr::LOCALHOST.into(),
        _ => here,
    }
}

/// How long the store of the first host may take to answer another launcher, which meanwhile says nothing to the others.
const ANSWER_MAX: Duration = Duration::from_secs(1);

impl Launch<'_> {
    /// The stores of the only host.
    pub(crate) fn stores_alone(&self) -> Result<Stores> {
        let torch = self.job.torch_store.map(|store| self.serve(&[self.torch_door(store)]));
        let torch = torch.transpose()?;
        let master = torch.as_ref().and_then(TcpStoreServer::address);
        self.stores(None, master, None, torch.into_iter().collect(), None)
    }

    /// The stores of the first of several hosts, which the others reach at `address`.
    pub(crate) fn stores_of_first(&self, address: IpAddr) -> Result<(Stores, Announcement)> {
        let secured = |port| self.secured(tcp((address, port).into()));
        let ranks = self.serve_at(address, 0, |port| vec![secured(port)])?;
        let (torch, place, master) = match self.job.torch_store {
            None => (None, None, None),
            Some(TorchStore::Network { port }) => {
                let host = address.to_string();
                let door = |port| vec![Door::Exposed { host: host.clone(), port }];
                let server = self.serve_at(address, port, door)?;
                let master = server.address();
                (Some(server), master.map(Torch::Exposed), master)
            }
            Some(store) => {
                let doors = |port| vec![secured(port), self.torch_door(store)];
                let server = self.serve_at(address, 0, doors)?;
                let place = Torch::Secured(server.endpoint().clone());
                let master = server.endpoints().nth(1).and_then(address_of);
                (Some(server), Some(place), master)
            }
        };
        let announcement = Announcement { ranks: ranks.endpoint().clone(), torch: place };
        let (meeting, reached_at) = (announcement.ranks.clone(), Some(address));
        let servers = [ranks].into_iter().chain(torch).collect();
        let stores = self.stores(Some(meeting), master, reached_at, servers, None)?;
        Ok((stores, announcement))
    }

    /// The stores of another host than the first, which the others reach at `address`.
    pub(crate) fn stores_at(&self, announcement: &Announcement, address: IpAddr) -> Result<Stores> {
        let (relay, master) = match (&announcement.torch, self.job.torch_store) {
            (None, _) | (_, None) => (None, None),
            (Some(Torch::Exposed(master)), _) => (None, Some(*master)),
            (Some(Torch::Secured(endpoint)), Some(store)) => {
                let proof = (&self.secret.secret, self.level());
                let relay = Relay::open(&self.torch_door(store), endpoint, proof, ANSWER_MAX)?;
                let master = relay.address();
                (Some(relay), master)
            }
        };
        // The way to the first host leads to all of them, unless the user says otherwise.
        let towards =
            address_of(&announcement.ranks).filter(|_| self.job.joining.local_addr.is_none());
        let found =
            towards.and_then(|it| own_addresses(&self.config, Some(it)).ok()?.first().copied());
        let ranks = announcement.ranks.clone();
        self.stores(Some(ranks), master, found.or(Some(address)), Vec::new(), relay)
    }

    /// Opens the store in which this host's ranks tell the launcher about steps. There the only host's ranks meet, too; those
    /// of several hosts meet at `ranks`.
    fn stores(
        &self,
        ranks: Option<Endpoint>,
        master: Option<SocketAddr>,
        reached_at: Option<IpAddr>,
        servers: Vec<TcpStoreServer>,
        relay: Option<Relay>,
    ) -> Result<Stores> {
        let launcher = Endpoint::Unix(format!("drumline-run-{}", new_run_id()));
        let own = TcpStore::to_own(self.serve(&[self.secured(launcher.clone())])?)?;
        let rendezvous = Rendezvous {
            store: ranks.unwrap_or_else(|| launcher.clone()),
            launcher,
            secret_file: self.secret.path(),
            master,
            interface: reached_at.filter(|it| !it.is_loopback()).and_then(interface_with),
            run_id: self.run_id.clone(),
        };
        Ok(Stores { own, rendezvous, _servers: servers, _relay: relay })
    }

    pub(crate) fn level(&self) -> Level {
        self.job.security.unwrap_or(self.config.security)
    }

    fn serve(&self, doors: &[Door]) -> Result<TcpStoreServer> {
        Ok(TcpStoreServer::open(doors, self.config.store_bytes_max)?)
    }

    /// Opens `doors` of a port of `address`: of `wanted`, or if that is 0, of one that the settings allow.
    fn serve_at(
        &self,
        address: IpAddr,
        wanted: u16,
        doors: impl Fn(u16) -> Vec<Door>,
    ) -> Result<TcpStoreServer> {
        let range = match &self.config.port_range {
            Some(range) if wanted == 0 => range.clone(),
            _ => return self.serve(&doors(wanted)),
        };
        let is_free = |port| TcpListener::bind((address, port)).is_ok();
        for port in range.clone().filter(|&port| is_free(port)) {
            match self.serve(&doors(port)) {
                // A rank or another launcher was faster.
                Err(_) if !is_free(port) => {}
                served => return served,
            }
        }
        let (first, last) = (range.start(), range.end());
        Err(Error::meeting(format!(
            "DRUMLINE_PORT_RANGE: all ports from {first} to {last} of {address} are in use; allow some more: the first \
             host needs two for stores, and every host one for each rank and group"
        )))
    }

    fn secured(&self, endpoint: Endpoint) -> Door {
        Door::Secured { endpoint, secret: self.secret.secret.clone(), level: self.level() }
    }

    fn torch_door(&self, store: TorchStore) -> Door {
        let host = loopback().to_string();
        match store {
            TorchStore::User { port } => Door::Loopback { host, port },
            TorchStore::Anyone { port } | TorchStore::Network { port } => {
                Door::Exposed { host, port }
            }
        }
    }
}

fn tcp(address: SocketAddr) -> Endpoint {
    Endpoint::Tcp { host: address.ip().to_string(), port: address.port() }
}

/// The address in an endpoint that names one.
fn address_of(endpoint: &Endpoint) -> Option<SocketAddr> {
    match endpoint {
        Endpoint::Tcp { host, port } => Some((host.parse::<IpAddr>().ok()?, *port).into()),
        Endpoint::Unix(_) => None,
    }
}

impl Stores {
    /// Whether one of these ranks has begun a [step](drumline::step).
    pub(crate) fn has_stepped(&self, local_ranks: usize) -> bool {
        self.has_any(keys::FIRST, local_ranks)
    }

    /// Whether one of these ranks has said something under this key. Of a thousand ranks that have said nothing at all, it
    /// does not ask for each.
    pub(crate) fn has_any(&self, key: &str, local_ranks: usize) -> bool {
        let is_empty = self.own.num_keys().is_ok_and(|keys| keys == 0);
        !is_empty && (0..local_ranks).any(|rank| self.has(key, rank))
    }

    /// Whether this rank has said something under this key.
    pub(crate) fn has(&self, key: &str, local_rank: usize) -> bool {
        self.own.check(&[&format!("{key}{local_rank}")]).unwrap_or(false)
    }

    /// What this rank has said under this key.
    pub(crate) fn told(&self, key: &str, local_rank: usize) -> Option<Vec<u8>> {
        self.has(key, local_rank).then(|| self.own.get(&format!("{key}{local_rank}")).ok())?
    }

    /// With how many ranks the others go on if this rank dies, if it has said so.
    pub(crate) fn regroups(&self, local_rank: usize) -> Option<usize> {
        str::from_utf8(&self.told(keys::REGROUPS, local_rank)?).ok()?.parse().ok()
    }

    /// The ranks, by their numbers in the job, that others have left behind.
    pub(crate) fn left_behind(&self) -> Vec<usize> {
        let told = self.own.check(&[keys::LEFT_BEHIND]).unwrap_or(false);
        let text = told.then(|| self.own.get(keys::LEFT_BEHIND).ok()).flatten().unwrap_or_default();
        let words = String::from_utf8_lossy(&text).into_owned();
        words.split(' ').filter_map(|rank| rank.parse().ok()).collect()
    }

    /// Tells those that have left this rank behind that it runs no more on this host.
    pub(crate) fn tell_end(&self, rank: usize) {
        // Who hears nothing waits a little longer.
        drop(self.own.set(&format!("{}{rank}", keys::ENDED), b""));
    }

    /// Tells all ranks of this host.
    pub(crate) fn tell(&self, key: &str, value: &str) -> Result<()> {
        Ok(self.own.set(key, value.as_bytes())?)
    }
}

impl Announcement {
    pub(crate) fn to_text(&self) -> String {
        let torch = match &self.torch {
            None => String::new(),
            Some(Torch::Secured(endpoint)) => format!("torch={endpoint}\n"),
            Some(Torch::Exposed(master)) => format!("master={}\n", tcp(*master)),
        };
        format!("ranks={}\n{torch}", self.ranks)
    }

    /// `None` if it is not understood.
    pub(crate) fn from_text(text: &str) -> Option<Announcement> {
        let (mut ranks, mut torch) = (None, None);
        for line in text.lines() {
            let (name, value) = line.split_once('=')?;
            let endpoint: Endpoint = value.parse().ok()?;
            match (name, endpoint) {
                ("ranks", endpoint) => ranks = Some(endpoint),
                ("torch", endpoint) => torch = Some(Torch::Secured(endpoint)),
                ("master", endpoint) => torch = Some(Torch::Exposed(address_of(&endpoint)?)),
                _ => return None,
            }
        }
        Some(Announcement { ranks: ranks?, torch })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_announcement_survives_its_text() {
        let ranks: Endpoint = "tcp://10.0.0.1:4711".parse().unwrap();
        let torch = Torch::Secured("tcp://[fd00::1]:4712".parse().unwrap());
        let exposed = Torch::Exposed(([10, 0, 0, 1], 29500).into());
        for torch in [None, Some(torch), Some(exposed)] {
            let announcement = Announcement { ranks: ranks.clone(), torch };
            assert_eq!(Announcement::from_text(&announcement.to_text()), Some(announcement));
        }
        for text in ["", "ranks=", "ranks=tcp://h:1\nx=tcp://h:1\n", "torch=tcp://h:1\n", "ranks"] {
            assert_eq!(Announcement::from_text(text), None, "{text}");
        }
    }
}
