use drumline_schedule::price::{ElementKind, PriceList};
use drumline_schedule::step::Rank;
use drumline_schedule::{Algorithm, Topology};

/// Hosts of one kind.
///
/// ```
/// use drumline_inspect::replay::Cluster;
/// use drumline_schedule::{Topology, price::PriceList};
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
    /// The hosts, as owners of cores, memory and lines. It differs from `topology` where ranks of one host
    /// share no memory: for algorithms each such rank is on a host of its own.
    pub machines: Topology,
    /// The prices of the hosts and their links.
    pub prices: PriceList,
    /// Cores of a host.
    pub cores_per_host: usize,
    /// Bytes of a staging slot. Longer data goes in pieces.
    pub slot_bytes: usize,
}

impl Cluster {
    /// A cluster with a core for every rank.
    pub fn new(topology: Topology, prices: PriceList) -> Cluster {
        let most = topology.ranks_by_host().iter().map(Vec::len).max().unwrap_or(1);
        let machines = topology.clone();
        Cluster { topology, machines, prices, cores_per_host: most, slot_bytes: 1 << 20 }
    }

    /// A cluster of one host with `ranks` ranks, which share no memory.
    pub fn one_host_apart(ranks: usize, prices: PriceList) -> Cluster {
        let machines = Topology::hosts(&[ranks]);
        Cluster { topology: Topology::flat(ranks), ..Cluster::new(machines, prices) }
    }
}

/// A collective that all ranks carry out.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
/// use drumline_inspect::replay::{Cluster, Workload, replay};
///
/// let cluster = Cluster::new(Topology::hosts(&[2, 2]), PriceList::default());
/// let algorithm = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let kind = ElementKind { bytes: 4, sum_bytes: 4 };
/// let workload = Workload { algorithm, root: 0, elements: 1_000, kind };
/// let longer = Workload { elements: 2_000, ..workload };
/// assert!(replay(&cluster, &workload)?.time_ps < replay(&cluster, &longer)?.time_ps);
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Workload {
    /// The algorithm, and with it the collective.
    pub algorithm: &'static Algorithm,
    /// The root, where there is one.
    pub root: Rank,
    /// Elements of each block: of what a rank contributes, or gets.
    pub elements: usize,
    /// The width of elements and of their sums.
    pub kind: ElementKind,
}

/// The result of a replay.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
/// use drumline_inspect::replay::{Cluster, Workload, Outcome, replay};
///
/// let cluster = Cluster::new(Topology::hosts(&[2, 2]), PriceList::default());
/// let algorithm = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let kind = ElementKind { bytes: 4, sum_bytes: 4 };
/// let workload = Workload { algorithm, root: 0, elements: 1_000, kind };
/// let Outcome { rounds, line_bytes, .. } = replay(&cluster, &workload)?;
/// assert_eq!(rounds, 2);
/// assert_eq!(line_bytes, 2 * 4_000); // what the two ranks of a host send to the other
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The time from the call, by all ranks, to the end of the last rank.
    pub time_ps: u64,
    /// Bytes on the line out of the host that sends the most.
    pub line_bytes: u64,
    /// Messages and posts in the longest chain, as in [`Cost::rounds`](drumline_schedule::Cost::rounds), in
    /// one piece.
    pub rounds: usize,
    /// The number of events. 0 if nothing was replayed.
    pub events: u64,
    /// How the outcome was found.
    pub method: Method,
}

/// How an [`Outcome`] was found.
///
/// ```
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
/// use drumline_inspect::replay::{Cluster, Method, Workload, replay};
///
/// let cluster = Cluster::new(Topology::hosts(&[2, 2]), PriceList::default());
/// let algorithm = Algorithm::find(Collective::AllReduce, "doubling")?;
/// let kind = ElementKind { bytes: 4, sum_bytes: 4 };
/// let workload = Workload { algorithm, root: 0, elements: 1_000, kind };
/// assert_eq!(replay(&cluster, &workload)?.method, Method::Replay);
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Method {
    /// Every step of every rank was replayed.
    Replay,
    /// The first pieces were replayed. Each further piece was assumed to take as long as the last of them.
    Pieces,
    /// Fewer hosts were replayed. Each further host was assumed to take as long as the last of them.
    Hosts,
    /// There are too many steps for a replay. The time is the [`cost`](Algorithm::cost) of the busiest rank
    /// by [`PriceList::links`], and by the price of copies for the memory of neighbours.
    Formula,
}
