//! A place in a job.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use drumline_engine::start_up::claim::{self, COMPLETE, rank_key};
use drumline_store::{
    auth::Secret,
    store::{Store, tcp::TcpStore},
};

use crate::{
    Config, Error, Result,
    start_up::{ask_store, run},
};

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
    /// When to say whom [`Rendezvous::leave`] waits for.
    warn_after: Duration,
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
    pub(super) fn in_store(
        store: Arc<dyn Store>,
        name: &str,
        (rank, world_size): (usize, usize),
        config: &Config,
    ) -> Result<Rendezvous> {
        let secret = match &config.secret {
            Some(secret) => secret.clone(),
            None => agree_on_secret(&*store, name)?,
        };
        let warn_after = config.warn_after;
        Ok(Rendezvous { store, rank, world_size, secret, tcp: None, claimed: false, warn_after })
    }

    /// The same in a store that this library's own code has opened.
    pub(super) fn in_own_store(
        tcp: TcpStore,
        (rank, world_size): (usize, usize),
        secret: Secret,
        claimed: bool,
        config: &Config,
    ) -> Rendezvous {
        let tcp = Arc::new(tcp);
        let (store, warn_after) = (tcp.clone(), config.warn_after);
        Rendezvous { store, rank, world_size, secret, tcp: Some(tcp), claimed, warn_after }
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
            let taken_back = take_back_claim(tcp, self.rank);
            if let Err(error) = taken_back {
                tracing::debug!(%error, "the store has gone before this rank has left it");
            }
        }
        tcp.wait_for_departure_telling(patience, self.warn_after)
    }
}

/// Takes back that rank `rank` is in the job: it may come back before the host has gone, to the
/// next job at this place.
fn take_back_claim(tcp: &TcpStore, rank: usize) -> Result<()> {
    tcp.delete_key(&rank_key(rank))?;
    match tcp.check(&[COMPLETE])? {
        true => Ok(()),
        false => Ok(tcp.leave_workers()?),
    }
}

/// The first rank's proposal is everybody's secret.
pub(super) fn agree_on_secret(store: &dyn Store, name: &str) -> Result<Secret> {
    let proposal = Secret::random()?;
    let code = async |desk| claim::agree_on_secret(&desk, proposal.expose()).await;
    let agreed = Secret::new(run(code, |question| ask_store(store, question))?)?;
    tracing::info!(
        store = name,
        "no DRUMLINE_SECRET is set: the ranks agree on one through this store, and the job is \
         only as safe as the store is"
    );
    Ok(agreed)
}
