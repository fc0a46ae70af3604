//! How the processes of a job find each other: from a URL and the environment to a shared store.
//!
//! | URL | what it needs |
//! |---|---|
//! | `env://` | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`: what `drumline run`, `torchrun` and Kubernetes operators set |
//! | `env://?rank=R&world_size=W` | `MASTER_ADDR`, `MASTER_PORT`; the URL wins over `RANK` and `WORLD_SIZE` |
//! | `tcp://host:port?rank=R&world_size=W` | nothing else |
//!
//! Rank 0 hosts the [`TcpStore`], on exactly the address that the host name stands for; the others
//! connect. Where a launcher hosts the store (`TORCHELASTIC_USE_AGENT_STORE=True`), every rank is
//! a client.
//!
//! ```
//! use std::time::Duration;
//!
//! use drumline::{rendezvous::rendezvous, store::Store};
//!
//! let url = "tcp://127.0.0.1:0?rank=0&world_size=1";
//! let job = rendezvous(url, Duration::from_secs(30))?;
//! job.store.set("ready", b"yes")?;
//! assert_eq!((job.rank, job.world_size), (0, 1));
//! job.leave(Duration::from_secs(30));
//! # Ok::<(), drumline::Error>(())
//! ```

use std::{
    env,
    net::{Ipv6Addr, SocketAddr},
    sync::Arc,
    time::{Duration, Instant},
};

use crate::{
    Error, Result,
    store::{Store, tcp::TcpStore},
};

/// Meets the other processes of the job, at most for `timeout`.
///
/// Rank 0 returns when all ranks have joined, the others when they are connected. `timeout` also
/// becomes the store's [`Store::timeout`].
///
/// # Errors
///
/// [`Error::InvalidSetting`] if the URL or the environment is wrong; nothing has been opened then.
/// [`Error::Store`] if the store cannot be hosted or reached, if ranks are missing when the time is
/// over, or if two processes claim one rank.
pub fn rendezvous(url: &str, timeout: Duration) -> Result<Rendezvous> {
    let variable = |name: &str| Some(env::var_os(name)?.to_string_lossy().into_owned());
    Plan::parse(url, &variable)?.meet(timeout)
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
    tcp: Arc<TcpStore>,
}

impl Rendezvous {
    /// Where the store is: the way to it is the way to the other hosts.
    pub(crate) fn master(&self) -> SocketAddr {
        self.tcp.address()
    }

    /// Ends this rank's use of the store in an order that cuts nobody off: the rank that hosts it
    /// waits until all others have closed their connections, by leaving or by dying, but at most
    /// for `patience`. Tells whether they have; on the other ranks returns `true` at once.
    ///
    /// Dropping a `Rendezvous` does not wait. That is right after an error, when the others are to
    /// notice.
    pub fn leave(self, patience: Duration) -> bool {
        self.tcp.wait_for_departure(patience)
    }
}

/// What a URL and an environment ask for, before anything is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Plan {
    /// Where the store is, as a name or an address without brackets.
    pub host: String,
    /// The store's port. 0 (let the system choose) only if nobody else must know it.
    pub port: u16,
    /// This process, in `0..world_size`.
    pub rank: usize,
    /// How many processes the job has.
    pub world_size: usize,
    /// Whether the launcher hosts the store. If not, rank 0 does.
    pub launcher_hosts: bool,
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
                    "{scheme} is not a known way to meet; known are env:// and tcp://"
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
        let missing: Vec<_> = settings.iter().filter(|setting| setting.text.is_none()).collect();
        if !missing.is_empty() {
            let names: Vec<_> = missing.iter().map(|setting| setting.name.as_str()).collect();
            return Err(invalid(&names.join(", "), format!("not set; {remedy}")));
        }
        let plan = Plan {
            host: host.host()?,
            port: port.number(0, u16::MAX.into())? as u16,
            rank: rank.number(0, WORLD_SIZE_MAX)?,
            world_size: world_size.number(1, WORLD_SIZE_MAX)?,
            launcher_hosts: false,
        };
        let launcher_hosts = plan.is_launchers(variable);
        let plan = Plan { launcher_hosts, ..plan };
        if plan.rank >= plan.world_size {
            let problem = format!(
                "rank {} of a job of {}: ranks run from 0 to {}",
                plan.rank,
                plan.world_size,
                plan.world_size - 1
            );
            return Err(invalid(&rank.name, problem));
        }
        if plan.port == 0 && (plan.world_size > 1 || launcher_hosts) {
            let problem = "0: the others cannot know which port the system would choose".into();
            return Err(invalid(&port.name, problem));
        }
        Ok(plan)
    }

    /// Whether this process hosts the store.
    pub fn hosts_store(&self) -> bool {
        self.rank == 0 && !self.launcher_hosts
    }

    /// Opens what the plan asks for and waits for the others.
    ///
    /// # Errors
    ///
    /// [`Error::Store`], as [`rendezvous`].
    pub fn meet(&self, timeout: Duration) -> Result<Rendezvous> {
        let start = Instant::now();
        let tcp = if self.hosts_store() {
            TcpStore::host(&self.host, self.port)?
        } else {
            TcpStore::connect(&self.host, self.port, timeout)?
        };
        tcp.set_timeout(timeout);
        // A launcher's store may have seen this rank before, in an earlier attempt of the job.
        if !self.launcher_hosts {
            self.claim_rank(&tcp)?;
        }
        tcp.wait_for_workers(self.world_size, timeout.saturating_sub(start.elapsed()))
            .map_err(|error| self.name_the_missing(&tcp, error))?;
        let tcp = Arc::new(tcp);
        Ok(Rendezvous { store: tcp.clone(), rank: self.rank, world_size: self.world_size, tcp })
    }

    /// Two processes with one rank would overwrite each other's keys and hang much later.
    fn claim_rank(&self, tcp: &TcpStore) -> Result<()> {
        let key = rank_key(self.rank);
        if tcp.add(&key, 1)? == 1 {
            return Ok(());
        }
        Err(Error::Store {
            store: tcp.name().into(),
            operation: format!("join as rank {}", self.rank),
            problem: "another process has joined with this rank: give each its own RANK, and \
                      another MASTER_PORT to a job that runs beside this one"
                .into(),
        })
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

    /// As in torch, the launcher's store is meant only if it is at this place.
    fn is_launchers(&self, variable: &dyn Fn(&str) -> Option<String>) -> bool {
        let is = |name, value: &str| variable(name).as_deref().map(without_brackets) == Some(value);
        is("TORCHELASTIC_USE_AGENT_STORE", "True")
            && is("MASTER_ADDR", &self.host)
            && is("MASTER_PORT", &self.port.to_string())
    }
}

/// Far above any job: a slip of the finger is not to become a huge wait.
const WORLD_SIZE_MAX: usize = 1 << 20;

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
