//! The interface of a backend, and what the library passes to it.

use std::{any::Any, fmt, sync::Arc, time::Instant};

use drumline_engine::{Cause, CollectiveError};
use drumline_schedule::{Collective, step::Rank};
use drumline_store::store::Store;

use super::{
    guard::{Guard, Guards},
    message::{Arrived, Outgoing, Wanted},
    request::Request,
};
use crate::{Config, DType, Error, error::unconnected};

/// One rank's end of one group.
///
/// Collectives come one after another, in the order of the calls. Sends and receives come from other threads
/// beside them. Every call has a deadline and must return soon after it. After an error the group is
/// poisoned, and only [`Backend::abort`] is called.
///
/// If a method panics, its call fails with [`Cause::Panicked`], and no other group is harmed. When the last handle of a
/// group is dropped, the backend is dropped, too: if it was not shut down, it takes leave of its peers then.
pub trait Backend: fmt::Debug + Send + Sync {
    /// Carries out one collective. The table of [`Request`] says what the buffers hold.
    ///
    /// # Errors
    ///
    /// The cause with the rank at fault: [`Cause::PeerExited`], [`Cause::Mismatch`], [`Cause::Timeout`] and
    /// so on; [`Cause::Backend`] for anything else.
    fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause>;

    /// Whether this backend can carry out a collective on elements of this type, with this operator if it has
    /// one: `sum`, `premul_sum`, or the name of a custom operator. The answer must be the same on all ranks.
    /// Unless overridden, a backend supports everything.
    ///
    /// The library refuses an unsupported call before any rank hears of it, and the group goes on.
    fn supports(&self, collective: Collective, dtype: DType, operator: Option<&str>) -> bool {
        let _ = (collective, dtype, operator);
        true
    }

    /// Whether [`Backend::send`] and [`Backend::recv`] are implemented.
    fn has_messages(&self) -> bool {
        false
    }

    /// Sends a message. May return as soon as it no longer needs the bytes.
    ///
    /// # Errors
    ///
    /// As for [`Backend::collective`].
    fn send(&self, message: &Outgoing<'_>) -> Result<(), Cause> {
        let _ = message;
        Err(Cause::Backend { problem: NO_MESSAGES.to_owned() })
    }

    /// Waits for a message. Messages of one rank with one tag come in the order in which they were sent.
    /// Messages that no call has asked for yet must not hold up others.
    ///
    /// # Errors
    ///
    /// As for [`Backend::collective`].
    fn recv(&self, wanted: &Wanted) -> Result<Arrived, Cause> {
        let _ = wanted;
        Err(Cause::Backend { problem: NO_MESSAGES.to_owned() })
    }

    /// What carries calls on the memory of devices, if this backend has such a thing: an `Arc<dyn Fabric>` of
    /// `drumline-device`. Without it, the library copies the data of devices through pinned memory of the host, and calls
    /// [`Backend::collective`].
    fn on_device(&self) -> Option<Arc<dyn Any + Send + Sync>> {
        None
    }

    /// The group has failed on this rank. Tells the peers why, and makes calls that are under way return.
    /// Does not wait.
    fn abort(&self, failure: &CollectiveError);

    /// Waits until all ranks have called this. No other call follows.
    ///
    /// # Errors
    ///
    /// As for [`Backend::collective`].
    fn shutdown(&self, deadline: Instant) -> Result<(), Cause>;
}

const NO_MESSAGES: &str = "it carries no messages from rank to rank";

/// What a backend is made from. A factory gets it once for every group and rank.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Config, ProcessGroup, backend::{BackendOptions, register_backend}};
///
/// register_backend("meeting", |options: &BackendOptions| {
///     // Each rank says where it listens, and hears where its neighbour does.
///     let key = |rank| format!("address/{rank}");
///     options.store.set(&key(options.rank), format!("port {}", options.rank).as_bytes())?;
///     let neighbour = options.store.get(&key((options.rank + 1) % options.world_size))?;
///     let neighbour = String::from_utf8_lossy(&neighbour).into_owned();
///     Err(options.error(format!("it cannot connect to {neighbour}")))
/// })?;
/// let config = Config::default().backend("meeting");
/// let error = drumline::rendezvous::local_world_with(2, &config).unwrap_err().to_string();
/// assert!(error.contains("rank 0: it cannot connect to port 1"), "{error}");
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct BackendOptions {
    /// A part of the job's store that only the ranks of this group know, and that no earlier group has used.
    /// All ranks have met there.
    pub store: Arc<dyn Store>,
    /// Name of the group, for errors.
    pub name: String,
    /// This process's number in the group.
    pub rank: Rank,
    /// The number of ranks in the group.
    pub world_size: usize,
    /// The time by which all ranks must be connected.
    pub deadline: Instant,
    /// The settings of the group.
    pub config: Config,
    pub(super) guards: Arc<dyn Guards>,
}

impl BackendOptions {
    /// Why this rank could not be connected.
    pub fn error(&self, problem: String) -> Error {
        unconnected(&self.name, self.rank, &problem)
    }

    /// A guard for a backend that does not notice dead, late and failed ranks itself. If one rank's factory
    /// asks, those of all ranks must. Asked again, it gives the same guard.
    ///
    /// # Errors
    ///
    /// [`Connect`](crate::ErrorKind::Connect) when the ranks cannot be connected in time.
    pub fn guard(&self) -> Result<Guard, Error> {
        self.guards.guard()
    }
}
