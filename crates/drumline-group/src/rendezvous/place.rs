//! A place in a job: a rank, and the store.

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
#[derive(Debug)]
pub struct Rendezvous {
    /// The shared store. On the rank that hosts it, the server lives as long as this field, its clones and
    /// the `Rendezvous`: see [`Rendezvous::leave`].
    pub store: Arc<dyn Store>,
    /// This process's number, in `0..world_size`.
    pub rank: usize,
    /// The number of processes in the job.
    pub world_size: usize,
    /// The secret of the job. Either all processes were given it, or they have agreed on it through the store.
    pub secret: Secret,
    /// The store, if this library has opened it.
    tcp: Option<Arc<TcpStore>>,
    /// Whether the rank has claimed its number in a store that lives as long as the job.
    claimed: bool,
    /// When [`Rendezvous::leave`] logs for which ranks it waits.
    warn_after: Duration,
}

impl Rendezvous {
    /// A place in a job whose processes already share `store`. If `config` has no secret, they agree on one
    /// through the store, and are as safe as the store is.
    ///
    /// # Errors
    ///
    /// [`Argument`](crate::ErrorKind::Argument) when `rank` is not below `world_size`; otherwise the error of the
    /// store.
    pub fn with_store(
        store: Arc<dyn Store>,
        rank: usize,
        world_size: usize,
        config: &Config,
    ) -> Result<Rendezvous> {
        if rank >= world_size {
            let problem =
                format!("rank {rank} does not exist in a job of {world_size}; ranks count from 0");
            return Err(Error::argument("rendezvous", problem));
        }
        let name = "the store that the program has opened";
        Rendezvous::in_store(store, name, (rank, world_size), config)
    }

    /// The same for a store with the name `name`.
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

    /// The same in a store that this library has opened.
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

    /// Whether a launcher hosts the store. It starts one process of each rank.
    pub(crate) fn is_launchers(&self) -> bool {
        self.tcp.is_some() && !self.claimed
    }

    /// The address of the store, if other hosts reach it. The way to it is the way to the other hosts.
    pub(crate) fn master(&self) -> Option<SocketAddr> {
        self.tcp.as_ref()?.address()
    }

    /// Ends this rank's use of the store without cutting off another rank. The rank that hosts the store
    /// waits until all other ranks have closed their connections, by leaving or by dying, but at most for
    /// `patience`. Returns whether they have; on other ranks returns `true` at once.
    ///
    /// Dropping a `Rendezvous` does not wait, which is right after an error that the other ranks should notice.
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

/// Takes back the claim of rank `rank`. The rank may join the next job at this address before the host of
/// this one has gone.
fn take_back_claim(tcp: &TcpStore, rank: usize) -> Result<()> {
    tcp.delete_key(&rank_key(rank))?;
    match tcp.check(&[COMPLETE])? {
        true => Ok(()),
        false => Ok(tcp.leave_workers()?),
    }
}

/// All ranks use the secret that the first rank has proposed.
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
