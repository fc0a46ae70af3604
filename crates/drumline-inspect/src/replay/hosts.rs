//! The resources that the ranks of a host share: cores, memory, and the line in both directions.

use std::collections::HashMap;

use drumline_schedule::Topology;
use drumline_schedule::price::PriceList;
use drumline_schedule::step::Rank;

use super::cluster::Cluster;

/// The hosts of a cluster, and the times until which their resources are busy.
pub(super) struct Hosts<'a> {
    machines: &'a Topology,
    prices: &'a PriceList,
    hosts: Vec<HostLoad>,
}

#[derive(Default)]
struct HostLoad {
    /// Empty where every rank has a core of its own.
    cores: Vec<Core>,
    /// The core on which each rank ran last.
    core_of: HashMap<Rank, usize>,
    memory: Queue,
    line_out: Queue,
    line_in: Queue,
    bytes_out: u64,
}

#[derive(Clone, Copy, Default)]
struct Core {
    free_at: u64,
    last: Option<Rank>,
}

/// A resource that serves one rank after another.
#[derive(Clone, Copy, Default)]
struct Queue {
    free_at: u64,
}

impl Queue {
    /// The start and the end, in picoseconds, of a service of `ps` that a rank asks for at `now`.
    fn serve(&mut self, now: u64, ps: u64) -> (u64, u64) {
        let start = self.free_at.max(now);
        self.free_at = start.saturating_add(ps);
        (start, self.free_at)
    }
}

impl<'a> Hosts<'a> {
    pub(super) fn new(cluster: &'a Cluster) -> Hosts<'a> {
        let Cluster { machines, prices, cores_per_host, .. } = cluster;
        let host = |ranks: &Vec<Rank>| HostLoad {
            cores: match ranks.len() > *cores_per_host {
                true => vec![Core::default(); (*cores_per_host).max(1)],
                false => vec![],
            },
            ..HostLoad::default()
        };
        Hosts { machines, prices, hosts: machines.ranks_by_host().iter().map(host).collect() }
    }

    /// The start and the end of work of `rank` that could begin at `now`. A core that ran another rank
    /// changes first.
    pub(super) fn work(&mut self, rank: Rank, now: u64, ps: u64) -> (u64, u64) {
        let HostLoad { cores, core_of, .. } = &mut self.hosts[self.machines.host_of(rank)];
        // Ranks that have not run yet are spread over the cores.
        let own = core_of.get(&rank).copied().unwrap_or(core_of.len() % cores.len().max(1));
        let begins = |index: usize| {
            let patience_ps = if index == own { 0 } else { PATIENCE_PS };
            cores[index].free_at.max(now).saturating_add(patience_ps)
        };
        let Some(index) = (0..cores.len()).min_by_key(|index| begins(*index)) else {
            return (now, now.saturating_add(ps));
        };
        core_of.insert(rank, index);
        let core = &mut cores[index];
        let change_ps = match core.last {
            Some(last) if last != rank => self.prices.switch_ps,
            _ => 0,
        };
        let start = core.free_at.max(now).saturating_add(change_ps);
        *core = Core { free_at: start.saturating_add(ps), last: Some(rank) };
        (start, core.free_at)
    }

    /// The rank that ran last on the core of `rank`, if it was another one.
    pub(super) fn in_place_of(&self, rank: Rank) -> Option<Rank> {
        let HostLoad { cores, core_of, .. } = &self.hosts[self.machines.host_of(rank)];
        cores.get(*core_of.get(&rank)?)?.last.filter(|last| *last != rank)
    }

    /// The time at which `bytes` bytes have moved from or to the memory of `rank`'s host.
    pub(super) fn memory(&mut self, rank: Rank, now: u64, bytes: u64) -> u64 {
        let ps = of_bytes(bytes, self.prices.memory_byte_fs);
        self.hosts[self.machines.host_of(rank)].memory.serve(now, ps).1
    }

    /// The start and the end of `bytes` bytes on the line out of `rank`'s host.
    pub(super) fn line_out(&mut self, rank: Rank, now: u64, bytes: u64) -> (u64, u64) {
        let host = &mut self.hosts[self.machines.host_of(rank)];
        host.bytes_out += bytes;
        host.line_out.serve(now, of_bytes(bytes, self.prices.nic_byte_fs))
    }

    /// The start and the end of `bytes` bytes on the line into `rank`'s host.
    pub(super) fn line_in(&mut self, rank: Rank, now: u64, bytes: u64) -> (u64, u64) {
        let ps = of_bytes(bytes, self.prices.nic_byte_fs);
        self.hosts[self.machines.host_of(rank)].line_in.serve(now, ps)
    }

    /// The bytes that left the host with the most such bytes.
    pub(super) fn line_bytes(&self) -> u64 {
        self.hosts.iter().map(|host| host.bytes_out).max().unwrap_or(0)
    }
}

/// The extra time for which a rank prefers its own core, in picoseconds. Kernels move ranks to other cores
/// only after some milliseconds.
const PATIENCE_PS: u64 = 1_000_000_000;

/// The time for `bytes` bytes, in picoseconds.
pub(super) fn of_bytes(bytes: u64, byte_fs: u64) -> u64 {
    u64::try_from(u128::from(bytes) * u128::from(byte_fs) / 1_000).unwrap_or(u64::MAX)
}
