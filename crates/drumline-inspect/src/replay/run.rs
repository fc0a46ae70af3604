use drumline_schedule::price::{ElementKind, PriceList};
use drumline_schedule::{Collective, Error, MemoryUse, Schedule, Topology};

use super::cluster::{Cluster, Method, Outcome, Workload};
use super::engine::Engine;
use super::program::{Program, WINDOW_BYTES};

/// The most steps that are replayed: they take some seconds and 1 GB of memory. If there are more, fewer
/// hosts are replayed, or the time is that of the formula of prices.
const STEPS_MAX: usize = 20_000_000;

/// A call with more than 16 pieces is replayed twice, with 8 pieces and with 16. The difference of the two
/// times, by 8, is the time of each further piece.
const PIECES: [usize; 2] = [8, 16];

/// Replays one call of a collective.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
/// use drumline_inspect::replay::{Cluster, Workload, replay};
///
/// let cluster = Cluster::new(Topology::hosts(&[2, 2]), PriceList::default());
/// let algorithm = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let kind = ElementKind { bytes: 4, sum_bytes: 4 };
/// let workload = Workload { algorithm, root: 0, elements: 1_000, kind };
/// assert_eq!(replay(&cluster, &workload)?, replay(&cluster, &workload)?); // the same everywhere
/// let nowhere = Workload { root: 4, ..workload };
/// assert!(replay(&cluster, &nowhere).is_err());
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
///
/// # Errors
///
/// As [`Algorithm::schedule`](drumline_schedule::Algorithm::schedule): the root is not a rank, or the
/// algorithm does not serve the ranks.
pub fn replay(cluster: &Cluster, workload: &Workload) -> Result<Outcome, Error> {
    replay_calls(cluster, workload, ALONE)
}

/// Replays calls that follow each other, as in a benchmark, and returns the time of a call after others.
/// Ranks do not begin such a call together, and cores have run other ranks before. For long data, which goes
/// in many pieces, the time is that of [`replay`].
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
/// use drumline_inspect::replay::{Cluster, Workload, replay, replay_in_a_row};
///
/// // Four ranks that share two cores.
/// let hosts = Cluster::new(Topology::hosts(&[4]), PriceList::default());
/// let cluster = Cluster { cores_per_host: 2, ..hosts };
/// let algorithm = Algorithm::find(Collective::AllReduce, "shm-oneshot")?;
/// let kind = ElementKind { bytes: 4, sum_bytes: 4 };
/// let workload = Workload { algorithm, root: 0, elements: 2, kind };
/// // Each core changes ranks once a call. In a single call it also changes back.
/// let [once, again] = [replay(&cluster, &workload)?, replay_in_a_row(&cluster, &workload)?];
/// assert!(again.time_ps < once.time_ps);
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
///
/// # Errors
///
/// The errors of [`replay`].
pub fn replay_in_a_row(cluster: &Cluster, workload: &Workload) -> Result<Outcome, Error> {
    replay_calls(cluster, workload, IN_A_ROW)
}

/// The number of calls that are replayed, and the number of first calls that do not count.
#[derive(Clone, Copy)]
struct Calls {
    before: usize,
    all: usize,
}

const ALONE: Calls = Calls { before: 0, all: 1 };
const IN_A_ROW: Calls = Calls { before: 2, all: 8 };

fn replay_calls(cluster: &Cluster, workload: &Workload, calls: Calls) -> Result<Outcome, Error> {
    let Workload { algorithm, root, elements, kind } = *workload;
    let first = algorithm.schedule(&cluster.topology, 0, root)?;
    let piece = piece(cluster, &first, elements, kind);
    let pieces = elements.div_ceil(piece.max(1)).max(1);
    if all_steps(cluster, workload)? > STEPS_MAX {
        let of_fewer = by_fewer_hosts(cluster, workload, STEPS_MAX)?;
        return Ok(of_fewer.unwrap_or_else(|| formula(cluster, workload)));
    }
    if pieces <= PIECES[1] {
        return run(cluster, workload, elements, piece, calls);
    }
    let [short, long] = [
        run(cluster, workload, PIECES[0] * piece, piece, ALONE)?,
        run(cluster, workload, PIECES[1] * piece, piece, ALONE)?,
    ];
    let rest = elements - PIECES[1] * piece;
    let span = (PIECES[1] - PIECES[0]) * piece;
    Ok(Outcome { method: Method::Pieces, ..further(short, long, rest, span) })
}

/// What is `rest` longer than `long`, which is `span` longer than `short`.
fn further(short: Outcome, long: Outcome, rest: usize, span: usize) -> Outcome {
    let (rest, span) = (rest as u128, span as u128);
    let more = |short: u64, long: u64| {
        long.saturating_add((u128::from(long.saturating_sub(short)) * rest / span) as u64)
    };
    Outcome {
        time_ps: more(short.time_ps, long.time_ps),
        line_bytes: more(short.line_bytes, long.line_bytes),
        ..long
    }
}

/// Where every rank has a block for each rank, the time grows with the hosts. So half of the hosts are replayed, or half
/// of that, and so on, and then half as many as these. `None`: hosts differ, or too few would be replayed.
fn by_fewer_hosts(
    cluster: &Cluster,
    workload: &Workload,
    steps_max: usize,
) -> Result<Option<Outcome>, Error> {
    let Workload { algorithm, root, .. } = *workload;
    let hosts = cluster.topology.ranks_by_host();
    let alike = Topology::hosts(&vec![hosts[0].len(); hosts.len()]);
    let stand = cluster.topology == alike && cluster.machines == alike;
    if !stand || !algorithm.collective.has_input() || root != 0 {
        return Ok(None);
    }
    let with_hosts = |count: usize| {
        let topology = Topology::hosts(&vec![hosts[0].len(); count]);
        // Buffers are shorter by as much, and the same part of them is to stay in the caches.
        let cache_bytes = cluster.prices.cache_bytes / hosts.len() as u64 * count as u64;
        let prices = PriceList { cache_bytes, ..cluster.prices.clone() };
        Cluster { machines: topology.clone(), topology, prices, ..cluster.clone() }
    };
    let (mut short, mut long) = (hosts.len() / 4, hosts.len() / 2);
    while short >= FEW_HOSTS && all_steps(&with_hosts(long), workload)? > steps_max {
        (short, long) = (short / 2, short);
    }
    if short < FEW_HOSTS || !(algorithm.applies)(&with_hosts(short).topology) {
        return Ok(None);
    }
    let [of_short, of_long] =
        [short, long].map(|count| replay_calls(&with_hosts(count), workload, ALONE));
    let found = further(of_short?, of_long?, hosts.len() - long, long - short);
    Ok(Some(Outcome { method: Method::Hosts, ..found }))
}

/// The fewest hosts that stand for many.
const FEW_HOSTS: usize = 8;

/// The steps of all ranks, in all pieces that are replayed.
fn all_steps(cluster: &Cluster, workload: &Workload) -> Result<usize, Error> {
    let Workload { algorithm, root, elements, kind } = *workload;
    let first = algorithm.schedule(&cluster.topology, 0, root)?;
    let piece = piece(cluster, &first, elements, kind).max(1);
    let replayed = elements.div_ceil(piece).clamp(1, PIECES[1]);
    Ok(steps(&first).saturating_mul(cluster.topology.world_size * replayed))
}

/// Replays the first `elements` of the workload, in pieces of `piece` elements.
fn run(
    cluster: &Cluster,
    workload: &Workload,
    elements: usize,
    piece: usize,
    calls: Calls,
) -> Result<Outcome, Error> {
    let Workload { algorithm, root, kind, .. } = *workload;
    let is_narrow = kind.sum_bytes > kind.bytes;
    // Without places for sums, a call in which sums travel is widened.
    let width = match algorithm.partial_sums_travel && !algorithm.sums_apart {
        true => ElementKind { bytes: kind.sum_bytes, ..kind },
        false => kind,
    };
    let programs = (0..cluster.topology.world_size).map(|rank| {
        let schedule = match is_narrow {
            true => algorithm.narrow_schedule(&cluster.topology, rank, root)?,
            false => algorithm.schedule(&cluster.topology, rank, root)?,
        };
        Ok(Program::of(cluster, &schedule, workload.elements, elements, piece, width))
    });
    let engine = Engine::new(cluster, programs.collect::<Result<_, Error>>()?, calls.all);
    Ok(engine.run(calls.before))
}

/// The elements of a block in one piece.
fn piece(cluster: &Cluster, schedule: &Schedule, elements: usize, kind: ElementKind) -> usize {
    let slot = cluster.slot_bytes / kind.bytes.max(1);
    let fits = |windows: usize| match schedule.memory {
        MemoryUse::Staged => schedule.window(slot / windows),
        MemoryUse::Private | MemoryUse::Registered => usize::MAX,
    };
    // Over links alone, a message is priced once for each window.
    let pipelined = schedule.is_pipelined() && schedule.memory != MemoryUse::Private;
    let window = match pipelined {
        true => schedule.window_of_bytes(WINDOW_BYTES, kind.bytes),
        false => usize::MAX,
    };
    match elements <= window.min(fits(1)) {
        true => elements,
        false => window.min(fits(schedule.lags.slot_windows)),
    }
}

/// The number of steps and of places that they name: the work to make a schedule.
fn steps(schedule: &Schedule) -> usize {
    schedule.steps.iter().map(|step| 1 + step.reads().count() + step.writes().count()).sum()
}

fn formula(cluster: &Cluster, workload: &Workload) -> Outcome {
    let Workload { algorithm, root, elements, kind } = *workload;
    let Cluster { topology, machines, prices, .. } = cluster;
    let cost = (algorithm.cost)(topology, root, elements);
    let bytes = algorithm.travelling(kind.bytes, kind.sum_bytes);
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

/// The bytes that any algorithm must send over the busiest line in one direction, for blocks of `block_bytes`
/// bytes. Inside a host, data moves and adds for free.
///
/// ```
/// use drumline_inspect::replay::line_bound;
/// use drumline_schedule::{Collective, Topology};
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
        Collective::AllReduce | Collective::ReduceSlices => 2 * block_bytes * (hosts - 1) / hosts,
        Collective::Reduce | Collective::Broadcast => block_bytes,
        // A host receives the blocks of other hosts, or sends blocks for them.
        Collective::AllGather | Collective::Gather => most(&elsewhere),
        Collective::ReduceScatter | Collective::Scatter => most(&elsewhere),
        Collective::AllToAll => most(&|size| size * elsewhere(size)),
        Collective::Barrier | Collective::MonitoredBarrier => 0,
    }
}

#[cfg(test)]
mod tests {
    use drumline_schedule::Algorithm;

    use super::*;

    #[test]
    fn fewer_hosts_tell_of_many() {
        let with_hosts =
            |count: usize| Cluster::new(Topology::hosts(&vec![2; count]), PriceList::default());
        let kind = ElementKind { bytes: 4, sum_bytes: 4 };
        for (collective, name) in [
            (Collective::AllGather, "hierarchical-ring"),
            (Collective::ReduceScatter, "hierarchical-halving-pull"),
        ] {
            let algorithm = Algorithm::find(collective, name).unwrap();
            let workload = Workload { algorithm, root: 0, elements: 1 << 16, kind };
            let by = |workload, steps| by_fewer_hosts(&with_hosts(64), workload, steps).unwrap();
            let whole = replay(&with_hosts(64), &workload).unwrap();
            let by_16 = by(&workload, all_steps(&with_hosts(16), &workload).unwrap()).unwrap();
            assert_eq!((whole.method, by_16.method), (Method::Replay, Method::Hosts));
            let off = by_16.time_ps.abs_diff(whole.time_ps) as f64 / whole.time_ps as f64;
            assert!(off < 0.05, "{name}: {off}");
            assert_eq!(by_16.line_bytes, whole.line_bytes);
            assert_eq!(by(&workload, 10), None);
            assert_eq!(by(&Workload { root: 1, ..workload }, usize::MAX), None);
        }
        let algorithm = Algorithm::find(Collective::AllReduce, "hierarchical-halving").unwrap();
        let all_reduce = Workload { algorithm, root: 0, elements: 1 << 10, kind };
        assert_eq!(by_fewer_hosts(&with_hosts(64), &all_reduce, usize::MAX), Ok(None));
    }
}
