//! How the ranks of a plan meet: rank 0 or a launcher hosts the store, and each rank claims its number.

use std::{thread, time::Duration};

use drumline_engine::{
    membership::{GlobalRanks, Membership},
    start_up::{
        Answer, Ask, Failure,
        claim::{Joining, RANK_KEYS, WORLD, rank_key},
    },
};
use drumline_store::{
    auth::Nonce,
    net::{
        Endpoint,
        site::{is_loopback, is_loopback_name, reach_resolver},
    },
    store::{
        MissingKeys, Store,
        tcp::{Door, TcpStore, TcpStoreServer},
    },
};

use super::{
    place::{Rendezvous, agree_on_secret},
    plan::{Plan, StoreHost},
    settings::invalid,
};
use crate::{
    Config, Error, ErrorKind, Result,
    board::failed,
    start_up::{Outlook, WHY_COMES, run},
};

impl Plan {
    /// Opens the store of the plan and waits for the other ranks, at most for [`Config::timeout`]. Reads
    /// nothing from the environment.
    ///
    /// # Errors
    ///
    /// [`Setting`](crate::ErrorKind::Setting) if the store is no safe place to meet and the settings do not trust it;
    /// [`Store`](crate::ErrorKind::Store) as for [`rendezvous`](super::rendezvous).
    pub fn meet(&self, config: &Config) -> Result<Rendezvous> {
        let joining = Joining {
            rank: self.rank,
            world_size: self.world_size,
            rank_zero_hosts: self.host == StoreHost::RankZero,
            timeout: config.timeout,
            ticket: Nonce::random()?.0,
        };
        let mut opened: Option<TcpStore> = None;
        let outlook = Outlook::new(config, None);
        let joined = run(
            async |desk| joining.run(&desk).await,
            |question| match (question, &opened) {
                (Ask::Open(limit), _) => {
                    let tcp = self.open(config, limit)?;
                    tcp.set_timeout(config.timeout);
                    opened = Some(tcp);
                    Ok(Answer::Done)
                }
                (Ask::Leave(time), _) => {
                    opened = None;
                    thread::sleep(time);
                    Ok(Answer::Done)
                }
                (Ask::Assemble { limit, first, last }, Some(tcp)) => {
                    if first {
                        tcp.join_workers()?;
                    }
                    match tcp.await_workers(self.world_size, limit)? {
                        None => Ok(Answer::Done),
                        Some(_) if !last => Ok(Answer::Missing(Vec::new())),
                        Some(joined) => {
                            let error = tcp.too_few(joined, self.world_size, config.timeout);
                            Err(self.name_the_missing(tcp, error))
                        }
                    }
                }
                (question, Some(tcp)) => outlook.ask(tcp, question),
                (_, None) => unreachable!("a rank opens the store first"),
            },
        );
        let tcp = match (joined, opened) {
            (Ok(()), Some(tcp)) => tcp,
            (Err(Failure::Connect(problem)), Some(tcp)) => return Err(self.refused(&tcp, problem)),
            (Err(failure @ (Failure::Ended(_) | Failure::Refused(..))), Some(tcp)) => {
                let place = (self.rank, self.world_size);
                let member = Membership::new(WORLD, place, GlobalRanks::default());
                tcp.wait_for_departure(WHY_COMES);
                return Err(failed(&member, failure));
            }
            (Err(Failure::Outside(error)), _) => return Err(error),
            (_, None) => unreachable!("a rank opens the store first"),
        };
        let secret = match &config.secret {
            Some(secret) => secret.clone(),
            None => agree_on_secret(&tcp, tcp.name())?,
        };
        let claimed = self.host == StoreHost::RankZero;
        Ok(Rendezvous::in_own_store(tcp, (self.rank, self.world_size), secret, claimed, config))
    }

    /// Refuses at once if a launcher says that there are other hosts, and a store without a secret would be out of
    /// their reach: the own name of a host is often loopback.
    pub(super) fn check_reach(
        &self,
        config: &Config,
        variable: &dyn Fn(&str) -> Option<String>,
    ) -> Result<()> {
        let number = |name| variable(name)?.parse::<usize>().ok();
        let has_others = number("LOCAL_WORLD_SIZE").is_some_and(|local| local < self.world_size);
        let is_open = config.secret.is_none() && !config.trust_store;
        match &self.store {
            Endpoint::Tcp { host, .. }
                if has_others && is_open && self.hosts_store() && !is_loopback_name(host) =>
            {
                Err(self.refuse_to_trust())
            }
            _ => Ok(()),
        }
    }

    /// Opens the store. It asks for the secret if there is one and if the host of the store supports that.
    fn open(&self, config: &Config, timeout: Duration) -> Result<TcpStore> {
        let host = |door: Door| {
            // A server has no time limit of its own.
            if let Endpoint::Tcp { host, port } = &self.store {
                reach_resolver(host, *port, timeout)?;
            }
            let server = TcpStoreServer::open(&[door], config.store_bytes_max)?;
            TcpStore::to_own(server)
        };
        let connect = match config.trust_store {
            true => TcpStore::connect_trusting,
            false => TcpStore::connect,
        };
        match (&config.secret, &self.store, self.host) {
            (Some(secret), store, StoreHost::RankZero) if self.rank == 0 => {
                let (endpoint, secret) = (store.clone(), secret.clone());
                host(Door::Secured { endpoint, secret, level: config.security })
            }
            (Some(_), Endpoint::Tcp { host, port }, StoreHost::Launcher) => {
                connect(host, *port, timeout)
            }
            (Some(secret), store, _) => {
                TcpStore::connect_at(store, secret, config.security, timeout)
            }
            (None, _, StoreHost::Drumline) | (None, Endpoint::Unix(_), _) => Err(invalid(
                "DRUMLINE_SECRET_FILE",
                format!("not set, but the store at {} asks for the job's secret", self.store),
            )),
            (None, Endpoint::Tcp { host: name, port }, _) => {
                if !config.trust_store && !is_loopback(name, timeout) {
                    return Err(self.refuse_to_trust());
                }
                let (name, port) = (name.clone(), *port);
                match self.hosts_store() {
                    true if config.trust_store => host(Door::Exposed { host: name, port }),
                    true => host(Door::Loopback { host: name, port }),
                    false => Ok(connect(&name, port, timeout)?),
                }
            }
        }
    }

    fn refuse_to_trust(&self) -> Error {
        let problem = format!(
            "not set, and whoever reaches {} could join the job: give all its processes one \
             secret of 16 bytes or more, or the name of a file with it in DRUMLINE_SECRET_FILE; \
             or, if you trust everybody on that network, set DRUMLINE_TRUST_STORE=1",
            self.store
        );
        invalid("DRUMLINE_SECRET", problem)
    }

    fn refused(&self, tcp: &TcpStore, problem: String) -> Error {
        Error::store(tcp.name(), &format!("join as rank {}", self.rank), problem)
    }

    /// Adds the ranks that have not come to the host's time-out. (Processes that use torch leave no name.)
    fn name_the_missing(&self, tcp: &TcpStore, error: Error) -> Error {
        let keys: Vec<_> = (0..self.world_size.min(RANKS_NAMED_MAX)).map(rank_key).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        let waited = tcp.wait(&keys, Duration::ZERO).err();
        let missing = waited.as_ref().and_then(|waited| waited.detail::<MissingKeys>());
        match (error.kind(), missing) {
            (kind @ ErrorKind::Store, Some(missing)) if self.hosts_store() => {
                let ranks: Vec<_> =
                    missing.keys.iter().filter_map(|key| key.strip_prefix(RANK_KEYS)).collect();
                let (told, ranks) = (error.message(), ranks.join(", "));
                error.told_as(kind, format!("{told}; not heard from: rank {ranks}"))
            }
            _ => error,
        }
    }
}

/// The most ranks about which the store is asked when some are missing.
const RANKS_NAMED_MAX: usize = 1024;
