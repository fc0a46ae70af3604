//! What an operation would take on a cluster: the schedules of all ranks, replayed on its figures.
//!
//! Nothing is sent here and nothing is added. Every rank walks through its real schedule; steps take
//! the time that a [`PriceList`] says, and wait for what they share:
//!
//! | step | takes | waits for |
//! |---|---|---|
//! | send, receive | half of `message_ps` and of `byte` at each end, `round_ps` between | the line out of the sender's host and that into the receiver's, if these are two |
//! | reduce, copy | `touch_ps` for each place, `combine`, `copy` and `slot_byte_fs` or `shared_slot_byte_fs` for each byte | the memory of the host |
//! | post | `post_ps` until a neighbour sees it | |
//!
//! Whatever a rank does takes a core of its host while it does it, and so does to go on after a wait. A
//! rank keeps to its core unless another one would be free a millisecond sooner. A core takes `switch_ps` to change from
//! one rank to another, and goes on with the one that it has if both could. Where an algorithm is
//! [pipelined](crate::Pipeline), a message counts once for each window of 1 MiB. Each shared thing serves
//! in the order of asking. A message streams: its receiver begins when it begins to arrive, and is not
//! done before its last byte is there. The network between the hosts' lines is never the narrowest place.
//!
//! Of the buffers that the ranks of a core work on, as much as `cache_bytes` stays in the caches; each byte
//! beyond is moved from memory or to it, which is what `memory_fs` is more than `cached_fs`.
//!
//! Events are taken in the order of time, and all times are integers: the same question has the same
//! answer everywhere.
//!
//! ```
//! use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
//! use drumline_schedule::replay::{Cluster, Operation, replay};
//!
//! // 16 hosts of 8 ranks, lines of 25 Gb/s.
//! let prices = PriceList { nic_byte_fs: 320_000, ..PriceList::default() };
//! let cluster = Cluster { cores_per_host: 64, ..Cluster::new(Topology::hosts(&[8; 16]), prices) };
//! let time_of = |name| {
//!     let algorithm = Algorithm::find(Collective::AllReduce, name)?;
//!     let f32 = ElementKind { bytes: 4, sum_bytes: 4 };
//!     replay(&cluster, &Operation { algorithm, root: 0, elements: 1 << 24, kind: f32 })
//! };
//! // Hosts that add their own ranks first have less to send.
//! assert!(time_of("hierarchical-push")?.time_ps < time_of("halving")?.time_ps);
//! # Ok::<_, drumline_schedule::Error>(())
//! ```

mod engine;
mod hosts;
mod program;
mod training;

use crate::algorithm::{Algorithm, Collective, MemoryUse};
use crate::error::Error;
use crate::price::{ElementKind, PriceList};
use crate::schedule::Schedule;
use crate::step::Rank;
use crate::topology::Topology;

use engine::Engine;
use program::Program;

pub use training::{Step, Training};

/// Hosts of one kind.
///
/// ```
/// use drumline_schedule::{Topology, price::PriceList, replay::Cluster};
///
/// // Four ranks on each of two hosts that have two cores.
/// let hosts = Topology::hosts(&[4, 4]);
/// let cluster = Cluster { cores_per_host: 2, ..Cluster::new(hosts, PriceList::default()) };
/// assert_eq!((cluster.machines.world_size, cluster.slot_bytes), (8, 1 << 20));
/// ```
#[derive(Clone, Debug)]
pub struct Cluster {
    /// The hosts, as algorithms know them: ranks of one host share memory.
    pub topology: Topology,
    /// The same as far as cores, memory and lines go. It differs where ranks of one host share no
    /// memory, so that for algorithms each is on a host of its own.
    pub machines: Topology,
    /// Its figures.
    pub prices: PriceList,
    /// How many ranks of a host can run at once.
    pub cores_per_host: usize,
    /// Bytes of a staging slot: what is longer goes in pieces.
    pub slot_bytes: usize,
}

impl Cluster {
    /// With a core for every rank.
    ///
    /// ```
    /// use drumline_schedule::{Topology, price::PriceList, replay::Cluster};
    ///
    /// let cluster = Cluster::new(Topology::hosts(&[4, 2]), PriceList::default());
    /// assert_eq!(cluster.cores_per_host, 4);
    /// ```
    pub fn new(topology: Topology, prices: PriceList) -> Cluster {
        let most = topology.ranks_by_host().iter().map(Vec::len).max().unwrap_or(1);
        let machines = topology.clone();
        Cluster { topology, machines, prices, cores_per_host: most, slot_bytes: 1 << 20 }
    }

    /// All of `ranks` on one host, without shared memory.
    ///
    /// ```
    /// use drumline_schedule::{price::PriceList, replay::Cluster};
    ///
    /// let cluster = Cluster::one_host_apart(3, PriceList::default());
    /// assert!(cluster.machines.is_one_host() && !cluster.topology.is_one_host());
    /// ```
    pub fn one_host_apart(ranks: usize, prices: PriceList) -> Cluster {
        let machines = Topology::hosts(&[ranks]);
        Cluster { topology: Topology::flat(ranks), ..Cluster::new(machines, prices) }
    }
}

/// What all ranks do together.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
/// use drumline_schedule::replay::{Cluster, Operation, replay};
///
/// let cluster = Cluster::new(Topology::hosts(&[2, 2]), PriceList::default());
/// let algorithm = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let kind = ElementKind { bytes: 4, sum_bytes: 4 };
/// let operation = Operation { algorithm, root: 0, elements: 1_000, kind };
/// let longer = Operation { elements: 2_000, ..operation };
/// assert!(replay(&cluster, &operation)?.time_ps < replay(&cluster, &longer)?.time_ps);
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Operation {
    /// How.
    pub algorithm: &'static Algorithm,
    /// The root, where there is one.
    pub root: Rank,
    /// Elements of each block: of what a rank contributes, or gets.
    pub elements: usize,
    /// What an element weighs.
    pub kind: ElementKind,
}

/// How an operation went.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
/// use drumline_schedule::replay::{Cluster, Operation, Outcome, replay};
///
/// let cluster = Cluster::new(Topology::hosts(&[2, 2]), PriceList::default());
/// let algorithm = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let kind = ElementKind { bytes: 4, sum_bytes: 4 };
/// let operation = Operation { algorithm, root: 0, elements: 1_000, kind };
/// let Outcome { rounds, line_bytes, .. } = replay(&cluster, &operation)?;
/// assert_eq!(rounds, 2);
/// assert_eq!(line_bytes, 2 * 4_000); // what the two ranks of a host send to the other
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// From the call of all ranks to the end of the last one.
    pub time_ps: u64,
    /// Bytes on the line out of a host, of the one with the most.
    pub line_bytes: u64,
    /// Messages and posts in the longest chain, as in [`Cost::rounds`](crate::Cost::rounds): of one
    /// piece, where it goes in pieces.
    pub rounds: usize,
    /// How many things happened. 0 if nothing was replayed.
    pub events: u64,
    /// How it was found.
    pub method: Method,
}

/// How an [`Outcome`] was found.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
/// use drumline_schedule::replay::{Cluster, Method, Operation, replay};
///
/// let cluster = Cluster::new(Topology::hosts(&[2, 2]), PriceList::default());
/// let algorithm = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let kind = ElementKind { bytes: 4, sum_bytes: 4 };
/// let operation = Operation { algorithm, root: 0, elements: 1_000, kind };
/// assert_eq!(replay(&cluster, &operation)?.method, Method::Replay);
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Every step of every rank was replayed.
    Replay,
    /// The first pieces were, and each piece that follows takes as long as the last of these.
    Pieces,
    /// There are too many steps: it is the [`cost`](Algorithm::cost) of the busiest rank by
    /// [`PriceList::links`], and by that of copies for memory of peers.
    Formula,
}

/// More steps are priced by the formula: some seconds of work, and 1 GB of memory.
const STEPS_MAX: usize = 20_000_000;

/// Of more pieces than the second number so many are replayed; what lies between the two is what a
/// piece takes.
const PIECES: [usize; 2] = [8, 16];

/// Replays an operation.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
/// use drumline_schedule::replay::{Cluster, Operation, replay};
///
/// let cluster = Cluster::new(Topology::hosts(&[2, 2]), PriceList::default());
/// let algorithm = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let kind = ElementKind { bytes: 4, sum_bytes: 4 };
/// let operation = Operation { algorithm, root: 0, elements: 1_000, kind };
/// assert_eq!(replay(&cluster, &operation)?, replay(&cluster, &operation)?); // the same everywhere
/// let nowhere = Operation { root: 4, ..operation };
/// assert!(replay(&cluster, &nowhere).is_err());
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
///
/// # Errors
///
/// As [`Algorithm::schedule`]; the root is no rank, or the algorithm does not serve the ranks.
pub fn replay(cluster: &Cluster, operation: &Operation) -> Result<Outcome, Error> {
    replay_calls(cluster, operation, ALONE)
}

/// Replays an operation that is called again and again, as in a benchmark: its time is that of a call
/// behind others. Ranks do not begin such a call together, and cores have run other ranks before. Of
/// long operations, which go in many pieces, it is what [`replay`] says.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
/// use drumline_schedule::replay::{Cluster, Operation, replay, replay_in_a_row};
///
/// // Four ranks that share two cores.
/// let hosts = Cluster::new(Topology::hosts(&[4]), PriceList::default());
/// let cluster = Cluster { cores_per_host: 2, ..hosts };
/// let algorithm = Algorithm::find(Collective::AllReduce, "shm-oneshot")?;
/// let kind = ElementKind { bytes: 4, sum_bytes: 4 };
/// let operation = Operation { algorithm, root: 0, elements: 2, kind };
/// // Each core changes once a call; a call alone has it change back, too.
/// let [once, again] = [replay(&cluster, &operation)?, replay_in_a_row(&cluster, &operation)?];
/// assert!(again.time_ps < once.time_ps);
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
///
/// # Errors
///
/// Those of [`replay`].
pub fn replay_in_a_row(cluster: &Cluster, operation: &Operation) -> Result<Outcome, Error> {
    replay_calls(cluster, operation, IN_A_ROW)
}

/// How many calls are replayed, and how many of the first do not count.
#[derive(Clone, Copy)]
struct Calls {
    before: usize,
    all: usize,
}

const ALONE: Calls = Calls { before: 0, all: 1 };
const IN_A_ROW: Calls = Calls { before: 2, all: 8 };

fn replay_calls(cluster: &Cluster, operation: &Operation, calls: Calls) -> Result<Outcome, Error> {
    let Operation { algorithm, root, elements, kind } = *operation;
    let first = algorithm.schedule(&cluster.topology, 0, root)?;
    let piece = piece(cluster, &first, elements, kind);
    let pieces = elements.div_ceil(piece.max(1)).max(1);
    let replayed = pieces.min(PIECES[1]);
    if steps(&first).saturating_mul(cluster.topology.world_size * replayed) > STEPS_MAX {
        return Ok(formula(cluster, operation));
    }
    if pieces <= PIECES[1] {
        return run(cluster, operation, elements, piece, calls);
    }
    let [short, long] = [
        run(cluster, operation, PIECES[0] * piece, piece, ALONE)?,
        run(cluster, operation, PIECES[1] * piece, piece, ALONE)?,
    ];
    let rest = (elements - PIECES[1] * piece) as u128;
    let span = ((PIECES[1] - PIECES[0]) * piece) as u128;
    let more = |short: u64, long: u64| {
        long.saturating_add((u128::from(long.saturating_sub(short)) * rest / span) as u64)
    };
    Ok(Outcome {
        time_ps: more(short.time_ps, long.time_ps),
        line_bytes: more(short.line_bytes, long.line_bytes),
        method: Method::Pieces,
        ..long
    })
}

/// Replays the operation on its first `elements`, in pieces of so many.
fn run(
    cluster: &Cluster,
    operation: &Operation,
    elements: usize,
    piece: usize,
    calls: Calls,
) -> Result<Outcome, Error> {
    let Operation { algorithm, root, kind, .. } = *operation;
    let bytes = kind.travelling(algorithm);
    let programs = (0..cluster.topology.world_size).map(|rank| {
        let schedule = algorithm.schedule(&cluster.topology, rank, root)?;
        Ok(Program::of(cluster, &schedule, operation.elements, elements, piece, bytes))
    });
    let engine = Engine::new(cluster, programs.collect::<Result<_, Error>>()?, calls.all);
    Ok(engine.run(calls.before))
}

/// The elements of a block that are worked on at once.
fn piece(cluster: &Cluster, schedule: &Schedule, elements: usize, kind: ElementKind) -> usize {
    if schedule.memory != MemoryUse::Staged {
        return elements;
    }
    elements.min(schedule.piece(cluster.slot_bytes / kind.bytes.max(1)))
}

/// Steps, with the places that they name: what a schedule takes to be made.
fn steps(schedule: &Schedule) -> usize {
    schedule.steps.iter().map(|step| 1 + step.reads().count() + step.writes().count()).sum()
}

fn formula(cluster: &Cluster, operation: &Operation) -> Outcome {
    let Operation { algorithm, root, elements, kind } = *operation;
    let Cluster { topology, machines, prices, .. } = cluster;
    let cost = (algorithm.cost)(topology, root, elements);
    let bytes = kind.travelling(algorithm);
    let of_links = prices.links(machines).of(cost, bytes);
    let shared = cost.shared_elements as u128 * bytes as u128;
    let of_memory = shared * u128::from(prices.copy.memory_fs) / 1_000;
    let time_ps = of_links + of_memory + u128::from(prices.call_ps);
    let largest = machines.ranks_by_host().iter().map(Vec::len).max().unwrap_or(1);
    let on_line = if machines.is_one_host() { 0 } else { cost.elements * bytes * largest };
    Outcome {
        time_ps: u64::try_from(time_ps).unwrap_or(u64::MAX),
        line_bytes: on_line as u64,
        rounds: cost.rounds,
        events: 0,
        method: Method::Formula,
    }
}

/// The bytes that must cross the busiest line in one direction, whatever the algorithm, when blocks
/// have so many bytes: hosts add and share out among their own ranks for nothing.
///
/// ```
/// use drumline_schedule::{Collective, Topology, replay::line_bound};
///
/// // Each of two hosts must get half of the other's sum, and send half of the total.
/// assert_eq!(line_bound(Collective::AllReduce, &Topology::hosts(&[8, 8]), 1_000), 1_000);
/// ```
pub fn line_bound(collective: Collective, topology: &Topology, block_bytes: u64) -> u64 {
    let hosts = topology.ranks_by_host().len() as u64;
    if hosts <= 1 {
        return 0;
    }
    let sizes = || topology.ranks_by_host().iter().map(|ranks| ranks.len() as u64);
    let world_size = topology.world_size as u64;
    let elsewhere = |size: u64| world_size - size;
    let most = |of: &dyn Fn(u64) -> u64| sizes().map(of).max().unwrap_or(0) * block_bytes;
    match collective {
        Collective::AllReduce => 2 * block_bytes * (hosts - 1) / hosts,
        Collective::Reduce | Collective::Broadcast => block_bytes,
        Collective::Scan | Collective::ExclusiveScan => block_bytes,
        // A host gets what it does not have, or sends what it has for others.
        Collective::AllGather | Collective::Gather => most(&elsewhere),
        Collective::ReduceScatter | Collective::Scatter => most(&elsewhere),
        Collective::AllToAll => most(&|size| size * elsewhere(size)),
        Collective::Barrier => 0,
    }
}
