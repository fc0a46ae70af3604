//! The time of an all-reduce of device memory, which goes through the memory of the hosts in windows.

use drumline_schedule::device::{Action, Pipeline};
use drumline_schedule::price::ElementKind;
use drumline_schedule::{Algorithm, Error};

use super::cluster::{Cluster, Workload};
use super::hosts::of_bytes;
use super::run::replay;

/// An all-reduce of device memory. Every rank has a device.
///
/// ```
/// use drumline_inspect::replay::{Cluster, DeviceWorkload, replay_devices};
/// use drumline_schedule::{Algorithm, Collective, Topology, price::{ElementKind, PriceList}};
///
/// // The memory of the host takes 320 GB/s.
/// let prices = PriceList { memory_byte_fs: 3_125, ..PriceList::default() };
/// let cluster = Cluster::new(Topology::hosts(&[4]), prices);
/// let workload = DeviceWorkload {
///     algorithm: Algorithm::find(Collective::AllReduce, "shm-push")?,
///     kind: ElementKind { bytes: 4, sum_bytes: 4 },
///     elements: 16 << 20,
///     window_elements: 1 << 20,
///     slots: 4,
///     lag: 2,
///     link_byte_fs: 40_000,
///     link_round_ps: 10_000_000,
/// };
/// let whole = replay_devices(&cluster, &workload)?;
/// // One window alone goes through all stages, and nothing runs beside it.
/// let window = replay_devices(&cluster, &DeviceWorkload { elements: 1 << 20, ..workload })?;
/// assert!(whole.time_ps < 16 * window.time_ps);
/// # Ok::<_, drumline_schedule::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct DeviceWorkload {
    /// What sums a window between the copies.
    pub algorithm: &'static Algorithm,
    /// The width of elements and of their sums.
    pub kind: ElementKind,
    /// Elements of the data of a rank.
    pub elements: usize,
    /// Elements of a window.
    pub window_elements: usize,
    /// Windows in the memory of a rank.
    pub slots: usize,
    /// See [`Pipeline::new`].
    pub lag: usize,
    /// A byte between a device and its host, in each direction, in femtoseconds.
    pub link_byte_fs: u64,
    /// What each copy takes in addition, in picoseconds.
    pub link_round_ps: u64,
}

/// The result of [`replay_devices`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceOutcome {
    /// The time from the call, by all ranks, to the end.
    pub time_ps: u64,
    /// For how long each actor of a rank works: the engine that copies out, the sums, the engine that copies in.
    pub busy_ps: [u64; 3],
    /// For how long the memory of a host is in use.
    pub memory_ps: u64,
}

/// The memory of a host, which serves the actors of its ranks in the order in which they ask.
struct Memory {
    free_at: u64,
    busy_ps: u64,
}

impl Memory {
    /// The time at which bytes have passed that are asked for at `now`.
    fn pass(&mut self, now: u64, takes: u64) -> u64 {
        self.busy_ps += takes;
        self.free_at = self.free_at.max(now).saturating_add(takes);
        self.free_at
    }
}

/// Replays an all-reduce of device memory. All ranks take the same time, so one is replayed: its
/// [`Pipeline`], with the time of each sum from a [`replay`] of all ranks.
///
/// All ranks of a host copy at the same time. Their copies take the time of their links, or that of the memory of the
/// host where it is the longer. For a window, all ranks write and read that memory once; so do the sums, which
/// leave one window of results.
///
/// # Errors
///
/// The errors of [`replay`].
pub fn replay_devices(
    cluster: &Cluster,
    workload: &DeviceWorkload,
) -> Result<DeviceOutcome, Error> {
    let DeviceWorkload { algorithm, kind, elements, slots, lag, .. } = *workload;
    let window = workload.window_elements.max(1);
    let windows = elements.div_ceil(window);
    let ranks = cluster.topology.ranks_by_host().iter().map(Vec::len).max().unwrap_or(1);
    let sum =
        |elements| Ok(replay(cluster, &Workload { algorithm, root: 0, elements, kind })?.time_ps);
    let last = elements - window * windows.saturating_sub(1);
    let [sum_whole, sum_last] = [sum(window.min(elements))?, sum(last)?];
    // By action: the time of its actor, and the time of the memory of the host.
    let takes = |action: Action, index: u64| {
        let (elements, sum_ps) = match index + 1 == windows as u64 {
            true => (last, sum_last),
            false => (window, sum_whole),
        };
        let bytes = (elements * kind.bytes) as u64;
        let memory = |passes: usize| of_bytes(bytes * passes as u64, cluster.prices.memory_byte_fs);
        let copy = workload.link_round_ps + of_bytes(bytes, workload.link_byte_fs);
        match action {
            Action::CopyOut | Action::CopyIn => (copy, memory(ranks)),
            Action::Reduce => (sum_ps, memory(ranks + 1)),
        }
    };

    let mut pipeline = Pipeline::new(slots, lag);
    pipeline.add(windows as u64);
    let mut memory = Memory { free_at: 0, busy_ps: 0 };
    let (mut now, mut busy_ps) = (0, [0; 3]);
    let mut ends: [Option<u64>; 3] = [None; 3];
    while !pipeline.is_idle() {
        for action in Action::ALL {
            let at = action as usize;
            // An actor works on one window at a time.
            if ends[at].is_none()
                && let Some(index) = pipeline.begin(action)
            {
                let (own_ps, memory_ps) = takes(action, index);
                busy_ps[at] += own_ps;
                ends[at] = Some(memory.pass(now, memory_ps).max(now + own_ps));
            }
        }
        let next = Action::ALL.into_iter().filter_map(|it| Some((ends[it as usize]?, it)));
        let Some((end, action)) = next.min_by_key(|(end, _)| *end) else {
            unreachable!("a pipeline that is not idle has a window under way")
        };
        now = end;
        ends[action as usize] = None;
        pipeline.end(action);
    }
    Ok(DeviceOutcome { time_ps: now, busy_ps, memory_ps: memory.busy_ps })
}

#[cfg(test)]
mod tests {
    use drumline_schedule::price::PriceList;
    use drumline_schedule::{Collective, Topology};

    use super::*;

    const MIB: usize = 1 << 18; // in elements

    fn workload(elements: usize) -> DeviceWorkload {
        DeviceWorkload {
            algorithm: Algorithm::find(Collective::AllReduce, "shm-push").unwrap(),
            kind: ElementKind { bytes: 4, sum_bytes: 4 },
            elements,
            window_elements: 4 * MIB,
            slots: 4,
            lag: 2,
            link_byte_fs: 40_000,
            link_round_ps: 10_000_000,
        }
    }

    fn cluster(ranks: usize) -> Cluster {
        Cluster::new(Topology::hosts(&[ranks]), PriceList::default())
    }

    #[test]
    fn one_window_takes_the_sum_of_its_stages() {
        let outcome = replay_devices(&cluster(2), &workload(4 * MIB)).unwrap();
        assert!(outcome.time_ps >= outcome.busy_ps.iter().sum());
    }

    #[test]
    fn many_windows_take_the_time_of_the_slowest_stage() {
        let outcome = replay_devices(&cluster(2), &workload(256 * MIB)).unwrap();
        let slowest = outcome.busy_ps.into_iter().chain([outcome.memory_ps]).max().unwrap();
        assert!(outcome.time_ps >= slowest);
        assert!((outcome.time_ps as f64) < 1.25 * slowest as f64, "{outcome:?}");
    }

    /// `3 p + 1` passes over the memory of the host.
    #[test]
    fn the_memory_of_a_host_is_passed_over_by_every_actor() {
        let cluster = cluster(8);
        let outcome = replay_devices(&cluster, &workload(64 * MIB)).unwrap();
        let pass = of_bytes(64 * (1 << 20), cluster.prices.memory_byte_fs);
        assert_eq!(outcome.memory_ps / 1_000, 25 * pass / 1_000);
    }

    #[test]
    fn no_data_takes_no_time() {
        assert_eq!(replay_devices(&cluster(2), &workload(0)).unwrap().time_ps, 0);
    }
}
