//! How the ranks of a plan meet: one hosts the store, or a launcher does, and each claims its number.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use drumline_engine::deadline;
use drumline_store::{
    Error as StoreError,
    net::{Endpoint, call::resolve},
    store::{
        Store,
        tcp::{Door, TcpStore, TcpStoreServer},
    },
};

use super::{Plan, Rendezvous, StoreHost, agree_on_secret, settings::invalid};
use crate::{Config, Error, Result};

impl Plan {
    /// Opens what the plan asks for and waits for the others, at most for [`Config::timeout`].
    /// Nothing is read from the environment.
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use drumline::{Config, rendezvous::Plan, store::Store as _};
    ///
    /// // Port 0: nobody else must know it.
    /// let plan = Plan::parse("tcp://127.0.0.1:0?rank=0&world_size=1", &|_| None)?;
    /// let meeting = plan.meet(&Config::default())?;
    /// meeting.store.set("key", b"value")?;
    /// assert!(meeting.leave(std::time::Duration::ZERO));
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if the store is no safe place to meet and nobody has said that it
    /// is to be trusted; [`Error::Store`], as [`rendezvous`](super::rendezvous).
    pub fn meet(&self, config: &Config) -> Result<Rendezvous> {
        let start = Instant::now();
        let tcp = self.join(config)?;
        tcp.wait_for_workers(self.world_size, config.timeout.saturating_sub(start.elapsed()))
            .map_err(|error| self.name_the_missing(&tcp, error.into()))?;
        let claimed = self.host == StoreHost::RankZero;
        if self.hosts_store() {
            tcp.set(COMPLETE, b"")?;
        }
        let secret = match &config.secret {
            Some(secret) => secret.clone(),
            None => agree_on_secret(&tcp, tcp.name())?,
        };
        let tcp = Arc::new(tcp);
        let (store, rank, world_size) = (tcp.clone(), self.rank, self.world_size);
        Ok(Rendezvous { store, rank, world_size, secret, tcp: Some(tcp), claimed })
    }

    /// The store of this job. At the same place there may still be that of the job before, whose
    /// host is just about to leave.
    fn join(&self, config: &Config) -> Result<TcpStore> {
        let start = Instant::now();
        let deadline = deadline::after(start, config.timeout);
        loop {
            let tcp = self.open(config, deadline.saturating_duration_since(Instant::now()))?;
            tcp.set_timeout(config.timeout);
            // A launcher's store may have seen this rank before, in an earlier attempt of the job.
            if self.host != StoreHost::RankZero {
                return Ok(tcp);
            }
            match self.claim_rank(&tcp) {
                Ok(Claim::Mine) => return Ok(tcp),
                Ok(Claim::Taken) => return Err(self.taken(&tcp)),
                Ok(Claim::Complete { without_us: false }) if start.elapsed() >= HOST_LEAVES_MAX => {
                    return Err(self.taken(&tcp));
                }
                Err(error) if self.hosts_store() || Instant::now() >= deadline => {
                    return Err(error);
                }
                Ok(Claim::Complete { .. } | Claim::OtherSize) if Instant::now() >= deadline => {
                    return Err(self.refused(
                        &tcp,
                        "the job at this place has all its ranks, or another number of ranks than \
                         this process was told; is WORLD_SIZE the same everywhere, and has an \
                         earlier job ended on rank 0?",
                    ));
                }
                Ok(Claim::Complete { .. } | Claim::OtherSize) | Err(_) => {
                    // A host that leaves waits for a moment in which nobody is connected.
                    drop(tcp);
                    thread::sleep(
                        JOIN_PAUSE.min(deadline.saturating_duration_since(Instant::now())),
                    );
                }
            }
        }
    }

    /// The store, behind the secret if there is one and whoever hosts it knows of secrets.
    fn open(&self, config: &Config, timeout: Duration) -> Result<TcpStore> {
        let host = |door| {
            let server = TcpStoreServer::open(&[door], config.store_bytes_max)?;
            Ok::<_, Error>(TcpStore::to_own(server)?)
        };
        match (&config.secret, &self.store, self.host) {
            (Some(secret), store, StoreHost::RankZero) if self.rank == 0 => {
                let (endpoint, secret) = (store.clone(), secret.clone());
                host(Door::Secured { endpoint, secret, level: config.security })
            }
            (Some(_), Endpoint::Tcp { host, port }, StoreHost::Launcher) => {
                Ok(TcpStore::connect(host, *port, timeout)?)
            }
            (Some(secret), store, _) => {
                Ok(TcpStore::connect_at(store, secret, config.security, timeout)?)
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
                    false => Ok(TcpStore::connect(&name, port, timeout)?),
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

    /// Two processes with one rank would overwrite each other's keys and hang much later.
    fn claim_rank(&self, tcp: &TcpStore) -> Result<Claim> {
        let key = rank_key(self.rank);
        if self.hosts_store() {
            tcp.set(WORLD_SIZE, self.world_size.to_string().as_bytes())?;
        } else {
            match tcp.wait(&[WORLD_SIZE], WORLD_SIZE_COMES_MAX) {
                Ok(()) if tcp.get(WORLD_SIZE)? != self.world_size.to_string().as_bytes() => {
                    return Ok(Claim::OtherSize);
                }
                Ok(()) | Err(StoreError::StoreTimeout { .. }) => {}
                // The host leaves. Whoever listens there next has not been asked for its size.
                Err(error) => return Err(error.into()),
            }
        }
        if tcp.check(&[COMPLETE])? {
            return Ok(Claim::Complete { without_us: !tcp.check(&[&key])? });
        }
        Ok(if tcp.add(&key, 1)? == 1 { Claim::Mine } else { Claim::Taken })
    }

    fn taken(&self, tcp: &TcpStore) -> Error {
        self.refused(
            tcp,
            "another process has joined with this rank: give each its own RANK, and another \
             MASTER_PORT to a job that runs beside this one",
        )
    }

    fn refused(&self, tcp: &TcpStore, problem: &str) -> Error {
        Error::Store {
            store: tcp.name().into(),
            operation: format!("join as rank {}", self.rank),
            problem: problem.into(),
        }
    }

    /// Adds to the host's time-out who has not come. (Processes that run torch leave no name.)
    fn name_the_missing(&self, tcp: &TcpStore, error: Error) -> Error {
        let keys: Vec<_> = (0..self.world_size.min(RANKS_NAMED_MAX)).map(rank_key).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        match (error, tcp.wait(&keys, Duration::ZERO)) {
            (
                Error::Store { store, operation, problem },
                Err(StoreError::StoreTimeout { keys: missing, .. }),
            ) if self.hosts_store() => {
                let ranks: Vec<_> =
                    missing.iter().filter_map(|key| key.strip_prefix(RANK_KEYS)).collect();
                let problem = format!("{problem}; not heard from: rank {}", ranks.join(", "));
                Error::Store { store, operation, problem }
            }
            (error, _) => error,
        }
    }
}

/// Takes back that rank `rank` is in the job: it may come back before the host has gone, to the
/// next job at this place.
pub(super) fn take_back_claim(tcp: &TcpStore, rank: usize) -> Result<()> {
    tcp.delete_key(&rank_key(rank))?;
    match tcp.check(&[COMPLETE])? {
        true => Ok(()),
        false => Ok(tcp.leave_workers()?),
    }
}

/// What comes of asking for a rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Claim {
    /// Nobody else has it.
    Mine,
    /// Another process of this job has it.
    Taken,
    /// The job here has another number of ranks: it is an earlier one, or one of the two is wrong.
    OtherSize,
    /// All ranks have joined. Either the job is an earlier one, or this process is one too many.
    Complete {
        /// Whether nobody, or nobody any more, has this rank.
        without_us: bool,
    },
}

/// How long the ranks of an earlier job may take to leave, until a rank that is taken counts as
/// taken twice.
const HOST_LEAVES_MAX: Duration = Duration::from_secs(10);

const JOIN_PAUSE: Duration = Duration::from_millis(20);

/// How long a host may take to say how many ranks there are. One that runs torch never does.
const WORLD_SIZE_COMES_MAX: Duration = Duration::from_secs(1);

/// Whether all that `host` stands for is on this machine. A name that nobody knows is not.
fn is_loopback(host: &str, timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout.min(RESOLVE_MAX);
    resolve(host, 0, deadline).is_ok_and(|addresses| {
        !addresses.is_empty() && addresses.iter().all(|address| address.ip().is_loopback())
    })
}

/// How long the name service may take to say what a name stands for.
const RESOLVE_MAX: Duration = Duration::from_secs(5);

/// How many ranks the host has been told of.
const WORLD_SIZE: &str = "drumline/world_size";

/// Says that all ranks have joined.
const COMPLETE: &str = "drumline/complete";

/// Where each rank of ours leaves its name.
const RANK_KEYS: &str = "drumline/rank/";

/// How many ranks are asked about when some are missing.
const RANKS_NAMED_MAX: usize = 1024;

fn rank_key(rank: usize) -> String {
    format!("{RANK_KEYS}{rank}")
}
