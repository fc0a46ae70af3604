//! Process groups: the ranks that work together, and what they can do.

mod call;
mod init;

use std::{
    collections::HashMap,
    fmt,
    hash::{BuildHasher, RandomState},
    net::{IpAddr, Ipv4Addr},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use drumline_schedule::{Collective, Schedule, step::Rank};
use xxhash_rust::xxh3::xxh3_64;

use crate::{
    CollectiveError, Config, Element, Error, ReduceOp, Result,
    executor::{History, Operation, Pool},
    rendezvous::Rendezvous,
    store::{HashStore, PrefixStore, Store},
    transport::{
        Transport,
        tcp::{self, Membership, TcpTransport},
    },
};
use call::Call;

pub use init::init_process_group;

/// The ranks of a job and the operations they do together.
///
/// Every rank makes the same calls in the same order. A call blocks until this rank's part is
/// done; it runs on the caller's thread. The handle can be cloned and sent to other threads:
/// all clones are one group, and their calls run one after another.
///
/// When a call fails, the group is poisoned: its peers learn why, and every later call on any
/// rank fails with the first failure's text.
///
/// ```
/// use drumline::{ProcessGroup, ReduceOp};
///
/// // Three ranks in one process, each on a thread of its own.
/// std::thread::scope(|threads| {
///     for group in ProcessGroup::local_world(3)? {
///         threads.spawn(move || {
///             let mut gradient = [group.rank() as f32, 1.0];
///             group.all_reduce(&mut gradient, ReduceOp::Sum).unwrap();
///             assert_eq!(gradient, [3.0, 3.0]);
///         });
///     }
///     Ok::<_, drumline::Error>(())
/// })?;
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone)]
pub struct ProcessGroup {
    inner: Arc<Inner>,
}

struct Inner {
    name: String,
    rank: Rank,
    world_size: usize,
    digest: u64,
    config: Config,
    /// Kept for as long as the group lives: this process may host it for the others.
    _store: Option<Arc<dyn Store>>,
    state: Mutex<State>,
    /// Nanoseconds spent in collectives.
    busy_ns: AtomicU64,
}

struct State {
    /// Absent while a call runs, after [`ProcessGroup::destroy`], and after a call that panicked.
    transport: Option<Box<dyn Transport>>,
    /// Number of the next collective.
    sequence: u64,
    failure: Option<Arc<CollectiveError>>,
    /// Where the group's ranks met, if by a URL. Rank 0 may host the store for the others.
    rendezvous: Option<Rendezvous>,
    schedules: HashMap<(Collective, &'static str, Rank), Arc<Schedule>>,
    history: History,
    pool: Pool,
}

impl ProcessGroup {
    /// A world of one rank: every collective completes at once. The same program can so run
    /// with and without a launcher.
    ///
    /// ```
    /// let group = drumline::ProcessGroup::alone();
    /// assert_eq!((group.rank(), group.world_size()), (0, 1));
    /// ```
    pub fn alone() -> ProcessGroup {
        let member = Membership { name: "alone".to_owned(), rank: 0, world_size: 1, digest: 0 };
        ProcessGroup::new(member, Box::new(TcpTransport::alone()), None, &Config::default())
    }

    /// All ranks of a group in this process, connected over loopback: for tests and examples.
    /// Each must be used from a thread of its own.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a world of none; [`Error::Io`] or [`Error::Connect`] when
    /// sockets cannot be had.
    pub fn local_world(world_size: usize) -> Result<Vec<ProcessGroup>> {
        ProcessGroup::local_world_with(world_size, &Config::default())
    }

    /// Like [`ProcessGroup::local_world`], with settings.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::local_world`].
    pub fn local_world_with(world_size: usize, config: &Config) -> Result<Vec<ProcessGroup>> {
        if world_size == 0 {
            return Err(Error::InvalidArgument {
                operation: "local_world",
                problem: "a world needs at least one rank".to_owned(),
            });
        }
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        std::thread::scope(|threads| {
            let connecting: Vec<_> = (0..world_size)
                .map(|rank| {
                    let store = store.clone();
                    threads.spawn(move || {
                        ProcessGroup::connect("local", store, rank, world_size, config)
                    })
                })
                .collect();
            let connected = connecting.into_iter().map(|thread| match thread.join() {
                Ok(group) => group,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            connected.collect()
        })
    }

    /// Connects the ranks that share `store` to a group.
    ///
    /// Blocks until all `world_size` ranks have called it with the same `name`. Destroying a
    /// group and connecting again under the same name is fine as long as all ranks do so.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when `rank` is no rank of `world_size`; otherwise what the
    /// store or the sockets said. The time limit is [`Config::timeout`].
    pub fn connect(
        name: &str,
        store: Arc<dyn Store>,
        rank: Rank,
        world_size: usize,
        config: &Config,
    ) -> Result<ProcessGroup> {
        if rank >= world_size {
            return Err(Error::InvalidArgument {
                operation: "connect",
                problem: format!(
                    "rank {rank} does not exist in a world of {world_size}; ranks count from 0"
                ),
            });
        }
        call::for_all_reduce(0, world_size, config)?; // an unknown name is refused before anything starts
        let deadline = Instant::now() + config.timeout;
        // The n-th time that this rank joins is the n-th life of the group, on all ranks alike.
        let joins = store.add(&format!("drumline/{name}/joins/{rank}"), 1)?;
        let life = PrefixStore::new(format!("drumline/{name}/{joins}"), store.clone());
        life.set_timeout(config.timeout);

        let token = if rank == 0 {
            let token = RandomState::new().hash_one((name, std::process::id())).to_string();
            life.set("token", token.as_bytes())?;
            token.into_bytes()
        } else {
            life.get("token")?
        };
        let identity = [name.as_bytes(), &world_size.to_le_bytes(), &token].concat();
        let member =
            Membership { name: name.to_owned(), rank, world_size, digest: xxh3_64(&identity) };
        let bind = config.bind_address.unwrap_or(IpAddr::V4(Ipv4Addr::LOCALHOST));
        let transport = tcp::connect(&member, &life, bind, deadline)?;
        tracing::info!(group = name, rank, world_size, "group is connected");
        Ok(ProcessGroup::new(member, Box::new(transport), Some(store), config))
    }

    /// A handle that does not keep the group alive.
    pub(crate) fn downgrade(&self) -> WeakProcessGroup {
        WeakProcessGroup(Arc::downgrade(&self.inner))
    }

    fn new(
        member: Membership,
        transport: Box<dyn Transport>,
        store: Option<Arc<dyn Store>>,
        config: &Config,
    ) -> ProcessGroup {
        let state = State {
            transport: Some(transport),
            sequence: 0,
            failure: None,
            rendezvous: None,
            schedules: HashMap::new(),
            history: History::default(),
            pool: Pool::default(),
        };
        let inner = Inner {
            name: member.name,
            rank: member.rank,
            world_size: member.world_size,
            digest: member.digest,
            config: config.clone(),
            _store: store,
            state: Mutex::new(state),
            busy_ns: AtomicU64::new(0),
        };
        ProcessGroup { inner: Arc::new(inner) }
    }

    /// The name of the group: `world` for the whole job.
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// This process's number in the group: `0..world_size`.
    pub fn rank(&self) -> Rank {
        self.inner.rank
    }

    /// How many ranks the group has.
    pub fn world_size(&self) -> usize {
        self.inner.world_size
    }

    /// Time that this rank has spent in collectives of the group, waiting for others included.
    pub fn communication_time(&self) -> Duration {
        Duration::from_nanos(self.inner.busy_ns.load(Ordering::Relaxed))
    }

    /// Reduces `data` over all ranks, in place: afterwards it is the same on every rank.
    ///
    /// All ranks pass the same number of elements. The result has the same bits whatever the
    /// algorithm, because every algorithm adds in one order (payloads of NaN apart).
    ///
    /// # Errors
    ///
    /// [`Error::Collective`] says which rank did what; [`Error::Poisoned`] after a failure.
    pub fn all_reduce<T: Element>(&self, data: &mut [T], op: ReduceOp) -> Result<()> {
        let inner = &*self.inner;
        let algorithm = call::for_all_reduce(size_of_val(data), inner.world_size, &inner.config)?;
        let call = Call {
            operation: Operation::AllReduce,
            algorithm,
            reduce_op: Some(op),
            root: None,
            count: data.len(),
        };
        self.run(call, data, &[])
    }

    /// Gives every rank the `data` of rank `root`.
    ///
    /// All ranks pass the same number of elements. On the root, success means that the data has
    /// been sent, not that it has arrived.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] for a root that is no rank; otherwise as
    /// [`ProcessGroup::all_reduce`].
    pub fn broadcast<T: Element>(&self, data: &mut [T], root: Rank) -> Result<()> {
        if root >= self.world_size() {
            return Err(Error::InvalidArgument {
                operation: "broadcast",
                problem: format!(
                    "the root is rank {root}, but the ranks of group {:?} are 0 to {}",
                    self.name(),
                    self.world_size() - 1
                ),
            });
        }
        let algorithm = call::find(Collective::Broadcast, "binomial")?;
        let call = Call {
            operation: Operation::Broadcast,
            algorithm,
            reduce_op: None,
            root: Some(root),
            count: data.len(),
        };
        self.run(call, data, &[])
    }

    /// Collects the `input` of every rank in `output`, in order of rank.
    ///
    /// All ranks pass the same number of elements; `output` holds `world_size` times as many.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidArgument`] when the lengths do not fit; otherwise as
    /// [`ProcessGroup::all_reduce`].
    pub fn all_gather<T: Element>(&self, input: &[T], output: &mut [T]) -> Result<()> {
        if input.len().checked_mul(self.world_size()) != Some(output.len()) {
            return Err(Error::InvalidArgument {
                operation: "all_gather",
                problem: format!(
                    "{} elements from each of {} ranks do not fit an output of {} elements",
                    input.len(),
                    self.world_size(),
                    output.len()
                ),
            });
        }
        let algorithm = call::find(Collective::AllGather, "bruck")?;
        let call = Call {
            operation: Operation::AllGather,
            algorithm,
            reduce_op: None,
            root: None,
            count: input.len(),
        };
        self.run(call, output, input)
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    ///
    /// As [`ProcessGroup::all_reduce`].
    pub fn barrier(&self) -> Result<()> {
        let algorithm = call::find(Collective::Barrier, "dissemination")?;
        let call = Call {
            operation: Operation::Barrier,
            algorithm,
            reduce_op: None,
            root: None,
            count: 0,
        };
        self.run::<u8>(call, &mut [], &[])
    }

    /// Closes the group after all ranks have called this, so that no rank is left waiting for
    /// one that has gone. Dropping the last handle leaves without waiting.
    ///
    /// # Errors
    ///
    /// [`Error::Collective`] when a peer fails or never comes, or when it made a call that no
    /// other rank took part in.
    pub fn destroy(self) -> Result<()> {
        self.inner.destroy()
    }
}

/// See [`ProcessGroup::downgrade`].
#[derive(Clone)]
pub(crate) struct WeakProcessGroup(Weak<Inner>);

impl WeakProcessGroup {
    /// The group, if a handle of it is left.
    pub(crate) fn upgrade(&self) -> Option<ProcessGroup> {
        self.0.upgrade().map(|inner| ProcessGroup { inner })
    }
}

impl fmt::Debug for ProcessGroup {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ProcessGroup")
            .field("name", &self.name())
            .field("rank", &self.rank())
            .field("world_size", &self.world_size())
            .finish_non_exhaustive()
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        // A call that panics has taken the transport with it, so what it leaves is consistent.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        // A rank that panics does not leave in good order: its peers shall see it as dead.
        if state.failure.is_none()
            && !std::thread::panicking()
            && let Some(transport) = &mut state.transport
        {
            transport.take_leave();
        }
    }
}
