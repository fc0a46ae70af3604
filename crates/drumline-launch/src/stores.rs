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
    _ranks: Option<TcpStoreServer>,
    _torch: Option<TorchDoor>,
    pub(crate) rendezvous: Rendezvous,
}

/// Where programs of torch come in. It is open while this lives.
#[derive(Debug)]
enum TorchDoor {
    Here { _server: TcpStoreServer },
    Carried { _relay: Relay },
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
        let own = self.own_store()?;
        let torch = match self.job.torch_store {
            Some(store) => Some(self.serve(&[self.torch_door(store)])?),
            None => None,
        };
        let master = torch.as_ref().and_then(TcpStoreServer::address);
        let endpoint = own_endpoint(&own)?;
        Ok(Stores {
            own,
            _ranks: None,
            rendezvous: self.rendezvous(endpoint.clone(), endpoint, master, None),
            _torch: torch.map(|server| TorchDoor::Here { _server: server }),
        })
    }

    /// The stores of the first of several hosts, which the others reach at `address`.
    pub(crate) fn stores_of_first(&self, address: IpAddr) -> Result<(Stores, Announcement)> {
        let own = self.own_store()?;
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
        let endpoint = own_endpoint(&own)?;
        let stores = Stores {
            own,
            rendezvous: self.rendezvous(
                endpoint,
                announcement.ranks.clone(),
                master,
                Some(address),
            ),
            _ranks: Some(ranks),
            _torch: torch.map(|server| TorchDoor::Here { _server: server }),
        };
        Ok((stores, announcement))
    }

    /// The stores of another host than the first, which the others reach at `address`.
    pub(crate) fn stores_at(&self, announcement: &Announcement, address: IpAddr) -> Result<Stores> {
        let own = self.own_store()?;
        let (torch, master) = match (&announcement.torch, self.job.torch_store) {
            (None, _) | (_, None) => (None, None),
            (Some(Torch::Exposed(master)), _) => (None, Some(*master)),
            (Some(Torch::Secured(endpoint)), Some(store)) => {
                let proof = (self.secret.secret(), self.level());
                let relay = Relay::open(&self.torch_door(store), endpoint, proof, ANSWER_MAX)?;
                let master = relay.address();
                (Some(TorchDoor::Carried { _relay: relay }), master)
            }
        };
        // The way to the first host leads to all of them, unless the user says otherwise.
        let towards =
            address_of(&announcement.ranks).filter(|_| self.job.joining.local_addr.is_none());
        let found =
            towards.and_then(|it| own_addresses(&self.config, Some(it)).ok()?.first().copied());
        let endpoint = own_endpoint(&own)?;
        let ranks = announcement.ranks.clone();
        Ok(Stores {
            own,
            _ranks: None,
            rendezvous: self.rendezvous(endpoint, ranks, master, found.or(Some(address))),
            _torch: torch,
        })
    }

    pub(crate) fn level(&self) -> Level {
        self.job.security.unwrap_or(self.config.security)
    }

    /// The store in which this host's ranks tell the launcher about steps.
    fn own_store(&self) -> Result<TcpStore> {
        let endpoint = Endpoint::Unix(format!("drumline-run-{}", new_run_id()));
        Ok(TcpStore::to_own(self.serve(&[self.secured(endpoint)])?)?)
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
        Door::Secured { endpoint, secret: self.secret.secret().clone(), level: self.level() }
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

    fn rendezvous(
        &self,
        launcher: Endpoint,
        store: Endpoint,
        master: Option<SocketAddr>,
        reached_at: Option<IpAddr>,
    ) -> Rendezvous {
        let (secret_file, run_id) = (self.secret.path(), self.run_id.clone());
        let interface = reached_at.filter(|it| !it.is_loopback()).and_then(interface_with);
        Rendezvous { launcher, store, secret_file, master, interface, run_id }
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

fn own_endpoint(store: &TcpStore) -> Result<Endpoint> {
    store.name().parse().map_err(|_| no_address())
}

/// A server that runs has an address.
fn no_address() -> crate::Error {
    let error = std::io::Error::other("the store that was just started has no address");
    crate::Error::system("start a store")(error)
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
