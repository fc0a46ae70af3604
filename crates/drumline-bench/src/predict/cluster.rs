//! The cluster that a file and the options describe.

use std::{fmt::Write as _, path::Path};

use drumline::files::read_text;
use drumline_inspect::replay::Cluster;
use drumline_schedule::{
    Topology,
    price::{Entry, ParseError, PriceList, entries, unknown},
};

use super::options::{Options, positive, usage};
use crate::{Error, Result};

/// What a file may name beside prices.
const NAMES: &str = "hosts, nproc_per_node, cores_per_host, device_byte_fs, device_round_ps";

/// More ranks than this are a typing error, and a replay would take long.
const RANKS_MAX: usize = 65_536;

/// A cluster of equal hosts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Described {
    pub(super) hosts: usize,
    pub(super) nproc_per_node: usize,
    pub(super) cores_per_host: Option<usize>,
    pub(super) prices: PriceList,
    /// The links between devices and their hosts, if ranks have devices.
    pub(super) device: DeviceLinks,
}

/// The link between a device and its host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DeviceLinks {
    /// A byte, in each direction. `None`: ranks have no devices.
    pub(super) byte_fs: Option<u64>,
    /// What each copy takes in addition.
    pub(super) round_ps: u64,
}

impl Default for DeviceLinks {
    fn default() -> DeviceLinks {
        DeviceLinks { byte_fs: None, round_ps: 10_000_000 }
    }
}

impl Described {
    pub(super) fn ranks(&self) -> usize {
        self.hosts * self.nproc_per_node
    }

    /// The same cluster with another number of hosts.
    pub(super) fn with_hosts(&self, hosts: usize) -> Cluster {
        let topology = Topology::hosts(&vec![self.nproc_per_node; hosts]);
        let cluster = Cluster::new(topology, self.prices.clone());
        let cores_per_host = self.cores_per_host.unwrap_or(cluster.cores_per_host);
        Cluster { cores_per_host, ..cluster }
    }

    pub(super) fn cluster(&self) -> Cluster {
        self.with_hosts(self.hosts)
    }

    pub(super) fn headline(&self) -> String {
        let Described { hosts, nproc_per_node, prices, .. } = self;
        let mut text = format!("{hosts} hosts of {nproc_per_node} ranks: {} ranks", self.ranks());
        if *hosts > 1 {
            let gbps = 8e6 / prices.nic_byte_fs.max(1) as f64;
            let us = prices.far.round_ps as f64 / 1e6;
            let _ = write!(text, "; lines of {gbps:.4} Gb/s, {us:.1} us");
        }
        let gb_s = 1e6 / prices.memory_byte_fs.max(1) as f64;
        let reduce = 1e6 / prices.combine.memory_fs.max(1) as f64;
        let _ = writeln!(text, "; memory {gb_s:.1} GB/s a host, adding {reduce:.1} GB/s a core");
        text
    }
}

/// Reads the cluster file, if there is one, and then applies the options.
pub(super) fn describe(options: &Options) -> Result<Described> {
    let mut described = match &options.cluster {
        Some(path) => read(path)?,
        None => parse("").map_err(|error| problem(format!("{error}")))?,
    };
    let Described { hosts, nproc_per_node, cores_per_host, prices, device } = &mut described;
    *hosts = options.hosts.unwrap_or(*hosts);
    *nproc_per_node = options.nproc_per_node.unwrap_or(*nproc_per_node);
    *cores_per_host = options.cores_per_host.or(*cores_per_host);
    // Converts units per second to femtoseconds for a byte.
    let rate = |option, per_second: f64, bytes: f64| {
        positive(option, 1e15 / (per_second * bytes), 1.0, 1.0)
            .map_err(|_| usage(option, &per_second.to_string(), "a positive number"))
    };
    if let Some(gbps) = options.bandwidth_gbps {
        prices.nic_byte_fs = rate("--bandwidth-gbps", gbps, 1e9 / 8.0)?;
    }
    if let Some(us) = options.latency_us {
        prices.far.round_ps = positive("--latency-us", us, 1e6, 0.0)?;
    }
    if let Some(gb_s) = options.memory_gb_s {
        prices.memory_byte_fs = rate("--memory-gb-s", gb_s, 1e9)?;
    }
    if let Some(gb_s) = options.reduce_gb_s {
        prices.combine.memory_fs = rate("--reduce-gb-s", gb_s, 1e9)?;
        prices.combine.cached_fs = prices.combine.cached_fs.min(prices.combine.memory_fs);
    }
    if let Some(gb_s) = options.device_gb_s {
        device.byte_fs = Some(rate("--device-gb-s", gb_s, 1e9)?);
    }
    if let Some(us) = options.device_latency_us {
        device.round_ps = positive("--device-latency-us", us, 1e6, 0.0)?;
    }
    validate(&described)?;
    Ok(described)
}

/// The longest cluster file. One has some hundred bytes.
const BYTES_MAX: usize = 1024 * 1024;

/// Reads a cluster file. An error names the file, and the line that cannot be understood.
pub(super) fn read(path: &Path) -> Result<Described> {
    let wrong = |what: String| problem(format!("{}: {what}", path.display()));
    let text = read_text(path, BYTES_MAX).map_err(|error| {
        wrong(format!("{error}; `drumline predict --measure {}` makes one", path.display()))
    })?;
    let described = parse(&text).map_err(|error| wrong(error.to_string()))?;
    validate(&described).map_err(|error| wrong(error.to_string()))?;
    Ok(described)
}

fn parse(text: &str) -> Result<Described, ParseError> {
    let mut described = Described {
        hosts: 2,
        nproc_per_node: 1,
        cores_per_host: None,
        prices: PriceList::default(),
        device: DeviceLinks::default(),
    };
    for Entry { line, name, value } in entries(text)? {
        let count = usize::try_from(value).unwrap_or(usize::MAX);
        match name {
            "hosts" => described.hosts = count,
            "nproc_per_node" => described.nproc_per_node = count,
            "cores_per_host" => described.cores_per_host = Some(count),
            "device_byte_fs" => described.device.byte_fs = Some(value),
            "device_round_ps" => described.device.round_ps = value,
            _ if described.prices.set(name, value) => {}
            _ => {
                let ParseError { line, problem } = unknown(line, name);
                let problem = format!("{problem}; {NAMES}");
                return Err(ParseError { line, problem });
            }
        }
    }
    Ok(described)
}

fn validate(described: &Described) -> Result<()> {
    let Described { hosts, nproc_per_node, cores_per_host, .. } = described;
    let ranks = hosts.saturating_mul(*nproc_per_node);
    if ranks == 0 || ranks > RANKS_MAX || *cores_per_host == Some(0) {
        return Err(problem(format!(
            "{hosts} hosts of {nproc_per_node} ranks should be 1 to {RANKS_MAX} ranks, with at least \
             a core for each host"
        )));
    }
    Ok(())
}

fn problem(problem: String) -> Error {
    Error::Usage(problem)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_file_describes_hosts_and_prices() {
        let described = parse("hosts = 16 # all\nnproc_per_node = 8\nnic_byte_fs = 7").unwrap();
        assert_eq!((described.hosts, described.ranks()), (16, 128));
        assert_eq!(described.prices.nic_byte_fs, 7);
        assert_eq!(described.cluster().cores_per_host, 8);
        assert!(described.headline().starts_with("16 hosts of 8 ranks: 128 ranks; lines of"));
        let error = parse("hosts = 2\nlatency = 7").unwrap_err().to_string();
        assert!(error.starts_with("line 2: \"latency\" is no price"), "{error}");
        assert!(error.contains("nproc_per_node"), "{error}");
    }

    #[test]
    fn a_wrong_file_is_named() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("cluster.toml");
        for (text, part) in [
            ("hosts = many", "cluster.toml: line 1: hosts"),
            ("hosts = 0", "0 hosts of 1 ranks should be"),
            ("hosts = 40_000\nnproc_per_node = 8", "1 to 65536"),
            ("cores_per_host = 0", "at least a core"),
        ] {
            fs::write(&path, text).unwrap();
            let error = read(&path).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
        assert!(read(&dir.path().join("none")).unwrap_err().to_string().contains("none"));
    }
}
