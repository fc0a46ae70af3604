//! How the processes of a job find each other: a URL and the environment lead to a shared store.
//!
//! | URL | what it needs |
//! |---|---|
//! | `env://` | `RANK`, `WORLD_SIZE`, `MASTER_ADDR`, `MASTER_PORT`: what `drumline run`, `torchrun` and Kubernetes operators set |
//! | `env://?rank=R&world_size=W` | `MASTER_ADDR`, `MASTER_PORT`; the URL wins over `RANK` and `WORLD_SIZE` |
//! | `tcp://host:port?rank=R&world_size=W` | no variables |
//! | `file:///path?rank=R&world_size=W` | a file that all ranks see, on this host or on a shared file system |
//! | `mpi://` | an MPI library, and its `mpiexec` or `srun` as the launcher |
//! | any other scheme | [`register_rendezvous_handler`] |
//!
//! A program that already has a store needs no URL: [`Rendezvous::with_store`]. Once all groups of a job are
//! destroyed, ranks may meet at the same place again.
//!
//! `drumline run` sets everything that `env://` needs. `DRUMLINE_STORE` (`unix:@name` or `tcp://host:port`)
//! is the address of the launcher's store, which asks for the job's secret. `MASTER_ADDR` and `MASTER_PORT`
//! are then for programs that use torch.
//!
//! Otherwise rank 0 hosts the [`TcpStore`](drumline_store::store::tcp::TcpStore), on exactly the address to
//! which the host name resolves, and the other ranks connect. Debian and others let a host's own name resolve to
//! loopback; then rank 0 listens on all addresses of its host if there is a secret. If another launcher hosts the store
//! (`TORCHELASTIC_USE_AGENT_STORE=True`), every rank is a client, and each start of the ranks has a part of the store
//! (`start/TORCHELASTIC_RESTART_COUNT/`).
//!
//! With `file://` no process hosts a store. The file is a [`FileStore`](drumline_store::store::FileStore).
//! The first rank makes it, readable for its user only, and the last rank that leaves deletes it. A job that
//! was killed leaves the file behind. Delete it then, or use another path.
//!
//! # Who may join
//!
//! | store | with a secret ([`Config::secret`]) | without a secret |
//! |---|---|---|
//! | of `drumline run` | processes that prove that they know it | an error |
//! | of rank 0 | processes that prove that they know it | on loopback: any process on this host |
//! | of another launcher | any process that reaches it | on loopback: any process on this host |
//! | in a file | any process that can write to it | its owner, if no other user can read it |
//!
//! Without a secret the ranks agree on one through the store, so they are as safe as the store is. On addresses other
//! than loopback, and in a file that other users can read, this must be allowed by [`Config::trust_store`]. With a
//! secret, a stranger who reaches another launcher's store, or the file, can disturb the job but cannot join it.
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
#[cfg(feature = "mpi")]
mod mpi;
mod place;
mod plan;
mod schemes;
mod settings;

use std::{env, sync::Arc};

use drumline_store::{auth::Secret, store::PrefixStore};

use crate::{Config, Result};

pub(crate) use self::plan::DRUMLINE_STORE;
pub use self::{
    place::Rendezvous,
    plan::{Plan, StoreHost},
    schemes::register_rendezvous_handler,
};
pub use crate::{
    addresses::{describe_addresses, own_addresses},
    available::is_torchelastic_launched,
    group::{connect, local_world, local_world_with},
};
pub use drumline_store::net::Endpoint;

/// Meets the other processes of the job, at most for [`Config::timeout`].
///
/// A rank that hosts the store returns when all ranks have joined. Other ranks return when they are
/// connected, and ranks that meet in a file return at once. The timeout also becomes the store's
/// [`Store::timeout`](drumline_store::store::Store::timeout). If `config` has no secret, the environment's is
/// used, as [`Secret::from_env`] reads it.
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
/// [`Setting`](crate::ErrorKind::Setting) if the URL or the environment is wrong; nothing
/// has been opened. [`Store`](crate::ErrorKind::Store) if the store cannot be hosted or reached, if ranks
/// are missing when the time is over, or if two processes claim one rank.
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
        (None, Some(plan)) => {
            plan.check_reach(&config, &variable)?;
            let mut place = plan.meet(&config)?;
            // The store of another launcher has what killed ranks of earlier starts have left.
            let start = variable("TORCHELASTIC_RESTART_COUNT");
            if let (StoreHost::Launcher, Some(start)) = (plan.host, start) {
                place.store = Arc::new(PrefixStore::new(format!("start/{start}"), place.store));
            }
            Ok(place)
        }
        (None, None) => unreachable!("without a handler there is a plan"),
    }
}

/// Whether a launcher started this process: `RANK` and `WORLD_SIZE` are set.
///
/// [`ProcessGroup::init_or_alone`](crate::ProcessGroup::init_or_alone) asks this, so that one program runs with and
/// without a launcher.
pub fn is_launched() -> bool {
    env::var_os("RANK").is_some() && env::var_os("WORLD_SIZE").is_some()
}
