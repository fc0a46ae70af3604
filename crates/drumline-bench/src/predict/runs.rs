//! Short runs on this host: how long an operation takes between ranks on threads of this process.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use drumline::{
    Config, DType, ProcessGroup, ReduceOp, Result,
    backend::Collective,
    store::{HashStore, Store},
};
use drumline_inspect::replay::{Cluster, Workload};
use drumline_schedule::{
    Algorithm,
    price::{ElementKind, PriceList},
};

/// The memory or the transport of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    Staged,
    Registered,
    Unix,
    Tcp,
}

impl Way {
    pub(super) fn name(self) -> &'static str {
        match self {
            Way::Staged => "staged",
            Way::Registered => "registered",
            Way::Unix => "unix",
            Way::Tcp => "tcp",
        }
    }

    fn config(self) -> Config {
        let shares = matches!(self, Way::Staged | Way::Registered);
        Config::default().shared_memory(shares).unix_sockets(self != Way::Tcp)
    }
}

/// An operation on this host: an all-reduce of f32, or a barrier if there are no elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    pub(super) ranks: usize,
    pub(super) way: Way,
    pub(super) elements: usize,
    /// The algorithm; `None` lets the library choose, as for any call.
    pub(super) algorithm: Option<&'static str>,
}

/// The algorithm and the time of a run.
#[derive(Clone, Debug)]
pub(super) struct Found {
    pub(super) algorithm: String,
    pub(super) time: Duration,
}

/// The least number of rounds.
const ROUNDS_MIN: u64 = 3;

/// The least time of a round. Rounds are short, so that other programs do not disturb all of them.
const ROUND: Duration = Duration::from_millis(1);

/// The least number of calls in a round, unless they would take more than ten times [`ROUND`]. In a
/// round of few calls, a late rank finds the messages of the first call waiting, and the mean is too
/// small.
const CALLS: f64 = 16.0;

/// How often all runs are measured in turn.
const PASSES: u32 = 12;

/// Measures each run for about `budget`, and keeps its fastest time. The runs take turns, so that a
/// disturbance of the host does not hit one run alone.
pub(super) fn measure_all(runs: &[Run], budget: Duration) -> Result<Vec<Found>> {
    let pass = || runs.iter().map(|run| run.measure(budget / PASSES)).collect::<Result<Vec<_>>>();
    let mut best = pass()?;
    for _ in 1..PASSES {
        for (best, found) in best.iter_mut().zip(pass()?) {
            best.time = best.time.min(found.time);
        }
    }
    Ok(best)
}

impl Run {
    pub(super) fn collective(&self) -> Collective {
        if self.elements == 0 { Collective::Barrier } else { Collective::AllReduce }
    }

    /// The fastest of several rounds of many operations back to back.
    fn measure(&self, budget: Duration) -> Result<Found> {
        let store: Arc<dyn Store> = Arc::new(HashStore::new());
        thread::scope(|threads| {
            let ranks: Vec<_> = (0..self.ranks)
                .map(|rank| {
                    let store = store.clone();
                    threads.spawn(move || self.on_rank(store, rank, budget))
                })
                .collect();
            let found = ranks.into_iter().map(|rank| match rank.join() {
                Ok(found) => found,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            let mut found = found.collect::<Result<Vec<Found>>>()?;
            Ok(found.swap_remove(0))
        })
    }

    fn on_rank(&self, store: Arc<dyn Store>, rank: usize, budget: Duration) -> Result<Found> {
        let all_reduce = self.algorithm.map(str::to_owned);
        let mut config = self.way.config();
        config.all_reduce = all_reduce;
        let group = ProcessGroup::connect("predict", store, rank, self.ranks, &config)?;
        let registered = self.way == Way::Registered;
        let chosen =
            group.explain(self.collective(), self.elements, DType::F32, registered)?.algorithm;
        let time = match (self.elements, registered) {
            (0, _) => fastest(&group, budget, || group.barrier())?,
            (_, true) => {
                let mut data = group.alloc_registered::<f32>(self.elements)?;
                fastest(&group, budget, || group.all_reduce(&mut data, ReduceOp::Sum))?
            }
            (_, false) => {
                let mut data = vec![0_f32; self.elements];
                fastest(&group, budget, || group.all_reduce(&mut data, ReduceOp::Sum))?
            }
        };
        group.destroy()?;
        Ok(Found { algorithm: chosen, time })
    }

    /// The cluster on which a replay repeats this run.
    pub(super) fn cluster(&self, prices: &PriceList) -> Cluster {
        let cluster = match self.way {
            Way::Staged | Way::Registered => {
                let topology = drumline_schedule::Topology::hosts(&[self.ranks]);
                Cluster::new(topology, prices.clone())
            }
            Way::Unix => Cluster::one_host_apart(self.ranks, prices.clone()),
            // Loopback: the transport between hosts, without a network link.
            Way::Tcp => {
                let near = prices.far;
                Cluster::one_host_apart(self.ranks, PriceList { near, ..prices.clone() })
            }
        };
        Cluster { cores_per_host: cores(), ..cluster }
    }

    pub(super) fn operation(&self, algorithm: &'static Algorithm) -> Workload {
        let kind = ElementKind { bytes: 4, sum_bytes: 4 };
        Workload { algorithm, root: 0, elements: self.elements, kind }
    }
}

pub(super) fn cores() -> usize {
    thread::available_parallelism().map_or(1, usize::from)
}

/// The mean time of a call in the fastest round. Rank 0 decides for all ranks how many calls a round
/// has, and when to stop.
fn fastest(
    group: &ProcessGroup,
    budget: Duration,
    mut call: impl FnMut() -> Result<()>,
) -> Result<Duration> {
    call()?;
    let once = time(1, &mut call)?.min(time(1, &mut call)?);
    let in_round = ROUND.as_secs_f64() / once.as_secs_f64().max(1e-9);
    let mut per_round = [in_round.max(CALLS.min(10.0 * in_round)).clamp(1.0, 20_000.0)];
    group.broadcast(&mut per_round, 0)?;
    let (began, mut best) = (Instant::now(), Duration::MAX);
    for round in 0.. {
        let mut more = [u8::from(round < ROUNDS_MIN || began.elapsed() < budget)];
        group.broadcast(&mut more, 0)?;
        if more == [0] {
            break;
        }
        best = best.min(time(per_round[0] as u32, &mut call)?);
    }
    Ok(best)
}

/// The mean time of `calls` calls.
fn time(calls: u32, call: &mut impl FnMut() -> Result<()>) -> Result<Duration> {
    let began = Instant::now();
    for _ in 0..calls {
        call()?;
    }
    Ok(began.elapsed() / calls.max(1))
}
