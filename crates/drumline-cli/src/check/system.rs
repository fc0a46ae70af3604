//! The properties of this host.

use std::{
    env, fs, thread,
    time::{Duration, Instant},
};

use drumline::{
    Config,
    backend::describe_mpi,
    cores::{MemoryNode, memory_nodes},
    rendezvous::describe_addresses,
    site,
};

#[derive(Debug)]
pub(super) struct System {
    pub(super) architecture: &'static str,
    /// The name and release of the kernel; `None` if the system does not tell.
    pub(super) kernel: Option<String>,
    /// The cores that the process may use.
    pub(super) cores: usize,
    /// The memory nodes with their GPUs and lines. Empty if the system does not tell.
    pub(super) nodes: Vec<MemoryNode>,
    pub(super) memory_bytes: Option<u64>,
    /// The instruction sets of this processor that make a difference.
    pub(super) instructions: Vec<&'static str>,
    /// `eth0 10.0.0.1`
    pub(super) interfaces: Vec<String>,
    /// The addresses at which ranks of other hosts would reach a rank on this host, and why; or why there are
    /// none.
    pub(super) reached_at: String,
    /// The MPI library of the backend `mpi`, or why there is none.
    pub(super) mpi: Result<String, String>,
}

impl System {
    /// `None` if the system does not tell.
    pub(super) fn numa_nodes(&self) -> Option<usize> {
        let count = self.nodes.iter().filter(|node| node.number.is_some()).count();
        (count > 0).then_some(count)
    }

    pub(super) fn look(config: &Config) -> System {
        let interfaces = if_addrs::get_if_addrs().unwrap_or_default();
        System {
            architecture: env::consts::ARCH,
            kernel: kernel(),
            cores: thread::available_parallelism().map_or(1, usize::from),
            nodes: memory_nodes(),
            memory_bytes: memory_bytes(),
            instructions: instructions(),
            interfaces: interfaces.iter().map(|it| format!("{} {}", it.name, it.ip())).collect(),
            reached_at: reached_at(config),
            mpi: describe_mpi(config).map_err(|error| error.to_string()),
        }
    }
}

/// How long the resolver may take.
const RESOLVE_MAX: Duration = Duration::from_secs(10);

fn reached_at(config: &Config) -> String {
    let master = env::var("MASTER_ADDR").ok().zip(env::var("MASTER_PORT").ok());
    let master = match master {
        None => None,
        Some((host, port)) => {
            match site::resolve(&host, port.parse().unwrap_or(1), Instant::now() + RESOLVE_MAX) {
                // A launcher offers torch's store on loopback, where no way to other hosts begins.
                Ok(addresses) => addresses.into_iter().find(|it| !it.ip().is_loopback()),
                Err(error) => return format!("nowhere: MASTER_ADDR {host:?}: {error}"),
            }
        }
    };
    describe_addresses(config, master).unwrap_or_else(|error| format!("nowhere: {error}"))
}

fn kernel() -> Option<String> {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").ok()?;
    Some(format!("Linux {}", release.trim()))
}

fn memory_bytes() -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}

#[cfg(target_arch = "x86_64")]
fn instructions() -> Vec<&'static str> {
    let all = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
    ];
    all.into_iter().filter_map(|(name, has)| has.then_some(name)).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn instructions() -> Vec<&'static str> {
    Vec::new()
}
