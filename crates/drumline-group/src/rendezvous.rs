//! How the processes of a job find each other: from a URL and the environment to a shared store.
//!
//! | URL | what it needs |
//! |---|---|
//! | `env://` | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`: what `drumline run`, `torchrun` and Kubernetes operators set |
//! | `env://?rank=R&world_size=W` | `MASTER_ADDR`, `MASTER_PORT`; the URL wins over `RANK` and `WORLD_SIZE` |
//! | `tcp://host:port?rank=R&world_size=W` | nothing else |
//! | `file:///path?rank=R&world_size=W` | a file that all ranks see, on this host or on a shared file system |
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
//! With `file://` nobody hosts anything: the file is a [`FileStore`](drumline_store::store::FileStore), made by
//! the first rank, for its user alone, and deleted by the last one that leaves. A job that was
//! killed leaves it behind; delete it then, or take another path.
//!
//! # Who may join
//!
//! | store | with a secret ([`Config::secret`]) | without |
//! |---|---|---|
//! | of `drumline run` | both ends prove that they know it | an error |
//! | of rank 0 | both ends prove that they know it | on loopback: anybody on this host |
//! | of another launcher | anybody who reaches it | on loopback: anybody on this host |
//! | in a file | anybody who can write to it | its owner, if nobody else can read it |
//!
//! Without a secret the ranks agree on one through the store, and are as safe as that store is. On
//! other addresses than loopback, and in a file that others can read, this must be asked for
//! ([`Config::trust_store`]). With a secret, whoever gets at another launcher's store, or at the
//! file, can disturb the job but not join it.
//!
//! ```
//! # use drumline_group as drumline;
//! use drumline::{Config, rendezvous::rendezvous, store::Store};
//!
//! let job = rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1", &Config::default())?;
//! job.store.set("ready", b"yes")?;
//! assert_eq!((job.rank, job.world_size), (0, 1));
//! job.leave(std::time::Duration::from_secs(30));
//! # Ok::<(), drumline::Error>(())
//! ```

pub(crate) mod file;
mod meeting;
mod plan;
mod schemes;
mod settings;

use std::{env, net::SocketAddr, sync::Arc, time::Duration};

use drumline_store::{
    auth::Secret,
    store::{Store, tcp::TcpStore},
};

use crate::{Config, Error, Result};

pub use self::{
    plan::{Plan, StoreHost},
    schemes::register_rendezvous_handler,
};

/// Meets the other processes of the job, at most for [`Config::timeout`].
///
/// A rank that hosts the store returns when all ranks have joined, the others when they are
/// connected, and ranks that meet in a file at once. The timeout also becomes the store's [`Store::timeout`]. Where `config` has no
/// secret, that of the environment is taken, as [`Secret::from_env`] reads it.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Config, rendezvous::rendezvous};
///
/// let job = rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1", &Config::default())?;
/// assert_eq!((job.rank, job.world_size), (0, 1));
/// let error = rendezvous("tcp://127.0.0.1", &Config::default()).unwrap_err().to_string();
/// assert!(error.contains("rank") && error.contains("world_size"), "{error}"); // what is missing
/// # Ok::<_, drumline::Error>(())
/// ```
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
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Config, ProcessGroup, init_process_group, is_launched};
///
/// let group = match is_launched() {
///     true => init_process_group("env://", &Config::from_env()?)?,
///     false => ProcessGroup::alone(),
/// };
/// assert!(is_launched() || group.world_size() == 1);
/// # Ok::<_, drumline::Error>(())
/// ```
pub fn is_launched() -> bool {
    env::var_os("RANK").is_some() && env::var_os("WORLD_SIZE").is_some()
}

/// A place in a job, and the store that its processes share.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Config, rendezvous::{Rendezvous, rendezvous}};
///
/// let url = "tcp://127.0.0.1:0?rank=0&world_size=1";
/// let Rendezvous { store, rank, .. } = rendezvous(url, &Config::default())?;
/// store.set(&format!("ready/{rank}"), b"")?;
/// assert!(store.check(&["ready/0"])?);
/// # Ok::<_, drumline::Error>(())
/// ```
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
    /// # use drumline_group as drumline;
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
        let name = "the store that the program has opened";
        Rendezvous::in_store(store, name, (rank, world_size), config)
    }

    /// The same for a store that is called `name`.
    fn in_store(
        store: Arc<dyn Store>,
        name: &str,
        (rank, world_size): (usize, usize),
        config: &Config,
    ) -> Result<Rendezvous> {
        let secret = match &config.secret {
            Some(secret) => secret.clone(),
            None => agree_on_secret(&*store, name)?,
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
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use std::time::Duration;
    ///
    /// use drumline::{Config, rendezvous::rendezvous};
    ///
    /// let job = rendezvous("tcp://127.0.0.1:0?rank=0&world_size=1", &Config::default())?;
    /// assert!(job.leave(Duration::from_secs(30))); // here, there are no others
    /// # Ok::<_, drumline::Error>(())
    /// ```
    pub fn leave(self, patience: Duration) -> bool {
        let Some(tcp) = &self.tcp else { return true };
        if self.claimed && self.rank > 0 {
            let taken_back = meeting::take_back_claim(tcp, self.rank);
            if let Err(error) = taken_back {
                tracing::debug!(%error, "the store has gone before this rank has left it");
            }
        }
        tcp.wait_for_departure(patience)
    }
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

/// Where the ranks leave the secret that they have agreed on, if nobody gave them one.
const SECRET_KEY: &str = "drumline/secret";
