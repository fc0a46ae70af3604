//! The hosts of the ranks, and a group for each transport.

use std::collections::BTreeSet;

use drumline::{Config, GroupOptions, ProcessGroup};

use super::{bound::Bound, choice::Transport, options::Options, plain_stream::PlainStream};
use crate::{Error, Result};

/// Whether the settings ask for the backend `mpi`, whose ranks MPI's launcher has started.
#[must_use]
pub fn is_over_mpi() -> bool {
    std::env::var_os("DRUMLINE_BACKEND").is_some_and(|name| name == "mpi")
}

/// The number of each rank's host, by rank.
pub(super) struct Hosts(pub(super) Vec<u64>);

impl Hosts {
    /// Asks every rank for the number that its launcher has given to its host.
    pub(super) fn find(control: &ProcessGroup) -> Result<Hosts> {
        let own = std::env::var("GROUP_RANK").ok().and_then(|text| text.parse().ok());
        let mut all = vec![0_u64; control.world_size()];
        control.all_gather(&[own.unwrap_or(0)], &mut all).map_err(Error::Measure)?;
        Ok(Hosts(all))
    }

    pub(super) fn count(&self) -> usize {
        self.0.iter().collect::<BTreeSet<_>>().len()
    }

    /// The rank that rank 0 opens the plain stream to: one on another host, if there is any; `None` if rank 0
    /// is alone.
    fn other_end(&self) -> Option<usize> {
        let elsewhere = self.0.iter().position(|host| *host != self.0[0]);
        elsewhere.or((self.0.len() > 1).then_some(1))
    }
}

/// A group over one transport, and the bound that its operations are compared with.
pub(super) struct Carrier {
    pub(super) transport: String,
    pub(super) group: ProcessGroup,
    pub(super) bound: Bound,
}

impl Carrier {
    pub(super) fn for_each_transport(
        options: &Options,
        control: &ProcessGroup,
        hosts: &Hosts,
        config: &Config,
    ) -> Result<Vec<Carrier>> {
        if is_over_mpi() {
            return Carrier::mpi(control, config).map(|carrier| vec![carrier]);
        }
        let new = |&transport| Carrier::new(transport, control, hosts, config);
        options.transport.items.iter().map(new).collect()
    }

    /// MPI chooses what carries the data.
    fn mpi(control: &ProcessGroup, config: &Config) -> Result<Carrier> {
        let all: Vec<usize> = (0..control.world_size()).collect();
        let settings = GroupOptions::default().name("measured").config(config.clone());
        let group = control.new_group(&all, &settings).map_err(Error::Measure)?;
        Ok(Carrier { transport: "mpi".to_owned(), group, bound: Bound::copy() })
    }

    fn new(
        transport: Transport,
        control: &ProcessGroup,
        hosts: &Hosts,
        config: &Config,
    ) -> Result<Carrier> {
        let (shared_memory, unix_sockets) = match transport {
            Transport::Auto => (config.shared_memory, config.unix_sockets),
            Transport::Shm => (true, true),
            Transport::Unix => (false, true),
            Transport::Tcp => (false, false),
        };
        let config = config.clone().shared_memory(shared_memory).unix_sockets(unix_sockets);
        let all: Vec<usize> = (0..control.world_size()).collect();
        let settings = GroupOptions::default().name(transport.to_string()).config(config.clone());
        let group = control.new_group(&all, &settings).map_err(Error::Measure)?;

        let actual = match transport {
            Transport::Auto if drumline::algorithms::shares_memory(&group) => Transport::Shm,
            Transport::Auto if unix_sockets => Transport::Unix,
            Transport::Auto => Transport::Tcp,
            named => named,
        };
        if actual == Transport::Shm
            && !drumline::algorithms::shares_memory(&group)
            && hosts.0.len() > 1
        {
            return Err(Error::Usage(
                "--transport shm: ranks of this host share no memory; \
                 RUST_LOG=drumline=warn says why"
                    .to_owned(),
            ));
        }
        let is_one_host = hosts.count() == 1;
        let bound = match hosts.other_end() {
            Some(other) if !is_one_host => {
                Bound::Stream(PlainStream::open(control, other, Transport::Tcp)?)
            }
            Some(other) if actual != Transport::Shm => {
                Bound::Stream(PlainStream::open(control, other, actual)?)
            }
            _ => Bound::copy(),
        };
        let transport = match (actual, is_one_host) {
            (actual, true) | (actual @ Transport::Tcp, false) => actual.to_string(),
            (actual, false) => format!("{actual}+tcp"),
        };
        Ok(Carrier { transport, group, bound })
    }
}
