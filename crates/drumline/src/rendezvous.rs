//! How the processes of a job find each other: from a URL and the environment to a shared store.
//!
//! | URL | what it needs |
//! |---|---|
//! | `env://` | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`: what `drumline run`, `torchrun` and Kubernetes operators set |
//! | `env://?rank=R&world_size=W` | `MASTER_ADDR`, `MASTER_PORT`; the URL wins over `RANK` and `WORLD_SIZE` |
//! | `tcp://host:port?rank=R&world_size=W` | nothing else |
//! | of any other scheme | [`register_rendezvous_handler`] |
//!
//! A program that has a store already needs no URL: [`Rendezvous::with_store`]. Ranks may meet
//! again at the same place after all groups of a job were destroyed, as often as they like.
//!
//! Under `drumline run` all that `env://` needs is there: `DRUMLINE_STORE` (`unix:@name` or
//! `tcp://host:port`) is where the launcher's store listens, which asks for the job's secret;
//! `MASTER_ADDR` and `MASTER_PORT` are then for programs that run torch.
//!
//! Otherwise rank 0 hosts the [`TcpStore`], on exactly the address that the host name stands for;
//! the others connect. Where another launcher hosts the store
//! (`TORCHELASTIC_USE_AGENT_STORE=True`), every rank is a client.
//!
//! # Who may join
//!
//! | store | with a secret ([`Config::secret`]) | without |
//! |---|---|---|
//! | of `drumline run` | both ends prove that they know it | an error |
//! | of rank 0 | both ends prove that they know it | on loopback: anybody on this host |
//! | of another launcher | anybody who reaches it | on loopback: anybody on this host |
//!
//! Without a secret the ranks agree on one through the store, and are as safe as that store is. On
//! other addresses than loopback this must be asked for ([`Config::trust_store`]). With a secret,
//! whoever gets at another launcher's store can disturb the job but not join it.
//!
//! ```
//! use drumline::{Config, rendezvous::rendezvous, store::Store};
//!
//! let job = rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1", &Config::default())?;
//! job.store.set("ready", b"yes")?;
//! assert_eq!((job.rank, job.world_size), (0, 1));
//! job.leave(std::time::Duration::from_secs(30));
//! # Ok::<(), drumline::Error>(())
//! ```

mod schemes;

use std::{
    env,
    net::{Ipv6Addr, SocketAddr},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use crate::{
    Config, Endpoint, Error, Result,
    auth::Secret,
    net::call::resolve,
    store::{Store, tcp::TcpStore},
};

pub use self::schemes::register_rendezvous_handler;

/// Meets the other processes of the job, at most for [`Config::timeout`].
///
/// A rank that hosts the store returns when all ranks have joined, the others when they are
/// connected. The timeout also becomes the store's [`Store::timeout`]. Where `config` has no
/// secret, that of the environment is taken, as [`Secret::from_env`] reads it.
///
/// # Errors
///
/// [`Error::InvalidSetting`] if the URL or the environment is wrong; nothing has been opened then.
/// [`Error::Store`] if the store cannot be hosted or reached, if ranks are missing when the time is
/// over, or if two processes claim one rank.
pub fn rendezvous(url: &str, config: &Config) -> Result<Rendezvous> {
    let variable = |name: &str| Some(env::var_os(name)?.to_string_lossy().into_owned());
    let handler = schemes::handler_of(url);
    let plan = match &handler {
        Some(_) => None,
        None => Some(Plan::parse(url, &variable)?),
    };
    let secret = match &config.secret {
        Some(secret) => Some(secret.clone()),
        None => Secret::from_env()?,
    };
    let config = Config { secret, ..config.clone() };
    match (handler, plan) {
        (Some(handler), _) => handler(url, &config),
        (None, Some(plan)) => plan.meet(&config),
        (None, None) => unreachable!("without a handler there is a plan"),
    }
}

/// Whether a launcher started this process: `RANK` and `WORLD_SIZE` are set.
///
/// A program that also runs alone asks this before it uses `env://`.
pub fn is_launched() -> bool {
    env::var_os("RANK").is_some() && env::var_os("WORLD_SIZE").is_some()
}

/// A place in a job, and the store that its processes share.
#[derive(Debug)]
pub struct Rendezvous {
    /// The shared store. On the rank that hosts it, the server lives as long as this, its clones
    /// and the `Rendezvous` do: see [`Rendezvous::leave`].
    pub store: Arc<dyn Store>,
    /// This process, in `0..world_size`.
    pub rank: usize,
    /// How many processes the job has.
    pub world_size: usize,
    /// What only the processes of this job know: the one that all were given, or the one that
    /// they have agreed on through the store.
    pub secret: Secret,
    /// The store, if this library's own code has opened it.
    tcp: Option<Arc<TcpStore>>,
    /// Whether the rank has claimed its number in a store that lives as long as the job.
    claimed: bool,
}

impl Rendezvous {
    /// A place in a job whose processes share `store` already. Without a secret in `config` they
    /// agree on one through it, and are as safe as it is.
    ///
    /// ```
    /// use std::sync::Arc;
    ///
    /// use drumline::{Config, rendezvous::Rendezvous, store::HashStore};
    ///
    /// let place = Rendezvous::with_store(Arc::new(HashStore::new()), 0, 1, &Config::default())?;
    /// assert_eq!((place.rank, place.world_size), (0, 1));
    /// # Ok::<(), drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when `rank` is no rank of `world_size`; otherwise what the store
    /// says.
    pub fn with_store(
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        config: &Config,
    ) -> Result<Rendezvous> {
        if rank >= world_size {
            let problem =
                format!("rank {rank} does not exist in a job of {world_size}; ranks count from 0");
            return Err(Error::InvalidArgument { operation: "rendezvous", problem });
        }
        let secret = match &config.secret {
            Some(secret) => secret.clone(),
            None => agree_on_secret(&*store, "the store that the program has opened")?,
        };
        Ok(Rendezvous { store, rank, world_size, secret, tcp: None, claimed: false })
    }

    /// Where the store is, if it is not on this host alone: the way to it is the way to the other
    /// hosts.
    pub(crate) fn master(&self) -> Option<SocketAddr> {
        self.tcp.as_ref()?.address()
    }

    /// Ends this rank's use of the store in an order that cuts nobody off: the rank that hosts it
    /// waits until all others have closed their connections, by leaving or by dying, but at most
    /// for `patience`. Tells whether they have; on the other ranks returns `true` at once.
    ///
    /// Dropping a `Rendezvous` does not wait. That is right after an error, when the others are to
    /// notice.
    pub fn leave(self, patience: Duration) -> bool {
        let Some(tcp) = &self.tcp else { return true };
        if self.claimed && self.rank > 0 {
            // This rank may come back before the host has gone, to the next job at this place.
            let left = tcp.delete_key(&rank_key(self.rank)).and_then(|_| {
                match tcp.check(&[COMPLETE])? {
                    true => Ok(()),
                    false => tcp.leave_workers(),
                }
            });
            if let Err(error) = left {
                tracing::debug!(%error, "the store has gone before this rank has left it");
            }
        }
        tcp.wait_for_departure(patience)
    }
}

/// What a URL and an environment ask for, before anything is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Where the store is. Port 0 (let the system choose) only if nobody else must know it.
    pub store: Endpoint,
    /// Who hosts it.
    pub host: StoreHost,
    /// This process, in `0..world_size`.
    pub rank: usize,
    /// How many processes the job has.
    pub world_size: usize,
}

/// Who hosts the store of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StoreHost {
    /// The process of rank 0.
    RankZero,
    /// `drumline run`: a store that asks for the secret.
    Drumline,
    /// Another launcher: torch's store, which asks for nothing.
    Launcher,
}

impl Plan {
    /// Works out the plan from `url` and the variables that `variable` looks up.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`], which names everything that is missing, or the wrong part and
    /// what it should be.
    pub fn parse(url: &str, variable: &dyn Fn(&str) -> Option<String>) -> Result<Plan> {
        let in_url = |problem: String| invalid(url, problem);
        let (scheme, rest) = url.split_once("://").unwrap_or((url, ""));
        let (place, query) = rest.split_once('?').unwrap_or((rest, ""));
        let place = place.strip_suffix('/').unwrap_or(place);

        let from_env = |name: &str| Setting {
            name: name.into(),
            text: variable(name).filter(|text| !text.is_empty()),
        };
        let from_url = |name: &str, text: Option<&str>| Setting {
            name: format!("{name} in {url}"),
            text: text.map(str::to_owned),
        };
        let given = from_env(DRUMLINE_STORE);
        let given = given.text.as_ref().filter(|_| scheme == "env" && place.is_empty());
        let given: Option<Endpoint> = match given {
            Some(text) => Some(text.parse().map_err(|problem| invalid(DRUMLINE_STORE, problem))?),
            None => None,
        };
        let (host, port, remedy) = match scheme {
            "env" if place.is_empty() => (
                from_env("MASTER_ADDR"),
                from_env("MASTER_PORT"),
                "start the program with `drumline run`, or set what is missing",
            ),
            "env" => {
                return Err(in_url(format!(
                    "env:// takes no address ({place}): MASTER_ADDR and MASTER_PORT tell it"
                )));
            }
            "tcp" => {
                let (host, port) = split_place(place).map_err(in_url)?;
                let remedy = "write tcp://host:port?rank=R&world_size=W";
                (from_url("host", host), from_url("port", port), remedy)
            }
            _ => {
                return Err(in_url(format!(
                    "{scheme} is not a known way to meet; known are env:// and tcp://, and what \
                     register_rendezvous_handler adds"
                )));
            }
        };
        let [rank, world_size] = parse_query(query).map_err(in_url)?;
        let (rank, world_size) = match scheme {
            "env" => (
                rank.map_or_else(|| from_env("RANK"), |text| from_url("rank", Some(text))),
                world_size.map_or_else(
                    || from_env("WORLD_SIZE"),
                    |text| from_url("world_size", Some(text)),
                ),
            ),
            _ => (from_url("rank", rank), from_url("world_size", world_size)),
        };

        let settings = [&rank, &world_size, &host, &port];
        // A store that is given takes the place of host and port.
        let needed = if given.is_some() { &settings[..2] } else { &settings[..] };
        let missing: Vec<_> = needed.iter().filter(|setting| setting.text.is_none()).collect();
        if !missing.is_empty() {
            let names: Vec<_> = missing.iter().map(|setting| setting.name.as_str()).collect();
            return Err(invalid(&names.join(", "), format!("not set; {remedy}")));
        }
        let (store, store_host) = match given {
            Some(store) => (store, StoreHost::Drumline),
            None => {
                let (host, port) = (host.host()?, port.number(0, u16::MAX.into())? as u16);
                let store_host = match is_launchers(&host, port, variable) {
                    true => StoreHost::Launcher,
                    false => StoreHost::RankZero,
                };
                (Endpoint::Tcp { host, port }, store_host)
            }
        };
        let plan = Plan {
            store,
            host: store_host,
            rank: rank.number(0, WORLD_SIZE_MAX)?,
            world_size: world_size.number(1, WORLD_SIZE_MAX)?,
        };
        if plan.rank >= plan.world_size {
            let problem = format!(
                "rank {} of a job of {}: ranks run from 0 to {}",
                plan.rank,
                plan.world_size,
                plan.world_size - 1
            );
            return Err(invalid(&rank.name, problem));
        }
        let has_others = plan.world_size > 1 || plan.host != StoreHost::RankZero;
        if matches!(plan.store, Endpoint::Tcp { port: 0, .. }) && has_others {
            let problem = "0: the others cannot know which port the system would choose".into();
            return Err(invalid(&port.name, problem));
        }
        Ok(plan)
    }

    /// Whether this process hosts the store.
    pub fn hosts_store(&self) -> bool {
        self.rank == 0 && self.host == StoreHost::RankZero
    }

    /// Opens what the plan asks for and waits for the others, at most for [`Config::timeout`].
    /// Nothing is read from the environment.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`] if the store is no safe place to meet and nobody has said that it
    /// is to be trusted; [`Error::Store`], as [`rendezvous`].
    pub fn meet(&self, config: &Config) -> Result<Rendezvous> {
        let start = Instant::now();
        let tcp = self.join(config)?;
        tcp.wait_for_workers(self.world_size, config.timeout.saturating_sub(start.elapsed()))
            .map_err(|error| self.name_the_missing(&tcp, error))?;
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
        let deadline = start + config.timeout;
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
                    thread::sleep(
                        JOIN_PAUSE.min(deadline.saturating_duration_since(Instant::now())),
                    );
                }
            }
        }
    }

    /// The store, behind the secret if there is one and whoever hosts it knows of secrets.
    fn open(&self, config: &Config, timeout: Duration) -> Result<TcpStore> {
        match (&config.secret, &self.store, self.host) {
            (Some(secret), store, StoreHost::RankZero) if self.rank == 0 => {
                TcpStore::host_secured(store, secret)
            }
            (Some(_), Endpoint::Tcp { host, port }, StoreHost::Launcher) => {
                TcpStore::connect(host, *port, timeout)
            }
            (Some(secret), store, _) => TcpStore::connect_secured(store, secret, timeout),
            (None, _, StoreHost::Drumline) | (None, Endpoint::Unix(_), _) => Err(invalid(
                "DRUMLINE_SECRET_FILE",
                format!("not set, but the store at {} asks for the job's secret", self.store),
            )),
            (None, Endpoint::Tcp { host, port }, _) => {
                if !config.trust_store && !is_loopback(host, timeout) {
                    return Err(self.refuse_to_trust());
                }
                match self.hosts_store() {
                    true if config.trust_store => TcpStore::host_exposed(host, *port),
                    true => TcpStore::host(host, *port),
                    false => TcpStore::connect(host, *port, timeout),
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
        } else if tcp.wait(&[WORLD_SIZE], WORLD_SIZE_COMES_MAX).is_ok()
            && tcp.get(WORLD_SIZE)? != self.world_size.to_string().as_bytes()
        {
            return Ok(Claim::OtherSize);
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
                Err(Error::StoreTimeout { keys: missing, .. }),
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

/// As in torch, the launcher's store is meant only if it is at this place.
fn is_launchers(host: &str, port: u16, variable: &dyn Fn(&str) -> Option<String>) -> bool {
    let is = |name, value: &str| variable(name).as_deref().map(without_brackets) == Some(value);
    is("TORCHELASTIC_USE_AGENT_STORE", "True")
        && is("MASTER_ADDR", host)
        && is("MASTER_PORT", &port.to_string())
}

/// Whether all that `host` stands for is on this machine. A name that nobody knows is not.
fn is_loopback(host: &str, timeout: Duration) -> bool {
    let deadline = Instant::now() + timeout.min(RESOLVE_MAX);
    resolve(host, 0, deadline).is_ok_and(|addresses| {
        !addresses.is_empty() && addresses.iter().all(|address| address.ip().is_loopback())
    })
}

/// The first rank's proposal is everybody's secret.
fn agree_on_secret(store: &dyn Store, name: &str) -> Result<Secret> {
    let proposal = Secret::random()?;
    let agreed = Secret::new(store.compare_set(SECRET_KEY, b"", proposal.expose())?)?;
    tracing::info!(
        store = name,
        "no DRUMLINE_SECRET is set: the ranks agree on one through this store, and the job is \
         only as safe as the store is"
    );
    Ok(agreed)
}

/// Where `drumline run` says that its store is.
const DRUMLINE_STORE: &str = "DRUMLINE_STORE";

/// Where the ranks leave the secret that they have agreed on, if nobody gave them one.
const SECRET_KEY: &str = "drumline/secret";

/// How long the name service may take to say what a name stands for.
const RESOLVE_MAX: Duration = Duration::from_secs(5);

/// Far above any job: a slip of the finger is not to become a huge wait.
const WORLD_SIZE_MAX: usize = 1 << 20;

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

/// A text, and where it comes from.
struct Setting {
    name: String,
    text: Option<String>,
}

impl Setting {
    fn text(&self) -> &str {
        self.text.as_deref().unwrap_or_default()
    }

    fn number(&self, min: usize, max: usize) -> Result<usize> {
        let text = self.text();
        // `parse` would take "+1".
        let digits = Some(text).filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
        digits
            .and_then(|digits| digits.parse().ok())
            .filter(|number| (min..=max).contains(number))
            .ok_or_else(|| {
                invalid(&self.name, format!("`{text}` is not a whole number from {min} to {max}"))
            })
    }

    fn host(&self) -> Result<String> {
        let host = without_brackets(self.text());
        let is_allowed = |c: char| c.is_ascii_alphanumeric() || "-._:%".contains(c);
        if host.is_empty() || !host.chars().all(is_allowed) {
            let problem = format!("`{host}` is neither a host name nor an address");
            return Err(invalid(&self.name, problem));
        }
        Ok(host.into())
    }
}

/// The values of `rank` and `world_size`.
fn parse_query(query: &str) -> Result<[Option<&str>; 2], String> {
    let names = ["rank", "world_size"];
    let mut values = [None; 2];
    for parameter in query.split('&').filter(|parameter| !parameter.is_empty()) {
        let (name, value) = parameter.split_once('=').unwrap_or((parameter, ""));
        let index = names.iter().position(|&known| known == name).ok_or_else(|| {
            format!("the parameter `{name}` is unknown; known are {}", names.join(", "))
        })?;
        if values[index].replace(value).is_some() {
            return Err(format!("the parameter `{name}` is given twice"));
        }
    }
    Ok(values)
}

/// `host:port` or `[IPv6 address]:port`; either part may be missing.
fn split_place(place: &str) -> Result<(Option<&str>, Option<&str>), String> {
    let bad_address =
        || format!("an IPv6 address stands in brackets: tcp://[::1]:29500, not {place}");
    let (host, port) = match place.strip_prefix('[') {
        Some(rest) => {
            let (host, rest) = rest.split_once(']').ok_or_else(bad_address)?;
            host.parse::<Ipv6Addr>().map_err(|_| bad_address())?;
            match rest.strip_prefix(':') {
                None if !rest.is_empty() => return Err(bad_address()),
                port => (host, port),
            }
        }
        None => match place.split_once(':') {
            Some((_, port)) if port.contains(':') => return Err(bad_address()),
            Some((host, port)) => (host, Some(port)),
            None => (place, None),
        },
    };
    let given = |text: &&str| !text.is_empty();
    Ok((Some(host).filter(given), port.filter(given)))
}

fn without_brackets(host: &str) -> &str {
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

fn invalid(setting: &str, problem: String) -> Error {
    Error::InvalidSetting { setting: setting.into(), problem }
}
