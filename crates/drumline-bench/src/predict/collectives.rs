//! The time of every collective, by size and algorithm.

use std::fmt::Write as _;

use drumline_inspect::replay::{Cluster, Method, Outcome, Workload, line_bound, replay};
use drumline_schedule::{ALGORITHMS, Algorithm, Collective, Topology, price::ElementKind};

use super::{cluster::Described, options::Options};
use crate::{Error, Result};

/// The times of one collective.
#[derive(Clone, Debug)]
pub(super) struct Table {
    pub(super) collective: Collective,
    pub(super) rows: Vec<SizeTimes>,
}

/// The times of one size.
#[derive(Clone, Debug)]
pub(super) struct SizeTimes {
    /// The bytes that each rank brings or gets.
    pub(super) bytes: usize,
    /// The time of every algorithm that serves the ranks, in the order of the table of algorithms.
    pub(super) times: Vec<(&'static str, Outcome)>,
}

impl SizeTimes {
    /// The fastest algorithm.
    pub(super) fn best(&self) -> Option<(&'static str, Outcome)> {
        self.times.iter().min_by_key(|(_, outcome)| outcome.time_ps).copied()
    }
}

pub(super) fn tables(described: &Described, options: &Options) -> Result<Vec<Table>> {
    let (cluster, kind, sizes) = (described.cluster(), options.kind()?, options.sizes()?);
    let table = |collective| {
        let row = |bytes: &usize| row(&cluster, collective, *bytes, kind);
        Ok(Table { collective, rows: sizes.iter().map(row).collect::<Result<_>>()? })
    };
    options.operations()?.into_iter().map(table).collect()
}

/// The times of all algorithms of a collective.
pub(super) fn row(
    cluster: &Cluster,
    collective: Collective,
    bytes: usize,
    kind: ElementKind,
) -> Result<SizeTimes> {
    let serves =
        |row: &&Algorithm| row.collective == collective && (row.applies)(&cluster.topology);
    let time = |algorithm: &'static Algorithm| {
        let elements = bytes / kind.bytes;
        let outcome = replay(cluster, &Workload { algorithm, root: 0, elements, kind })
            .map_err(|error| Error::Usage(error.to_string()))?;
        Ok((algorithm.name, outcome))
    };
    let times = ALGORITHMS.iter().filter(serves).map(time).collect::<Result<_>>()?;
    Ok(SizeTimes { bytes, times })
}

impl Table {
    pub(super) fn text(&self, described: &Described) -> String {
        let cluster = described.cluster();
        let Some(first) = self.rows.first() else { return String::new() };
        let mut text = format!("\n{}, microseconds\n{:>10}", self.collective, "bytes");
        let width = |name: &str| name.len().max(11) + 1;
        for (name, _) in &first.times {
            let width = width(name);
            let _ = write!(text, "{name:>width$}");
        }
        let _ = writeln!(text, "  {:<18}{:>12}{:>10}", "fastest", "busbw GB/s", "of line");
        for row in &self.rows {
            let _ = write!(text, "{:>10}", size(row.bytes));
            for (name, outcome) in &row.times {
                let mark = match outcome.method {
                    Method::Formula => "~",
                    Method::Hosts => "*",
                    Method::Replay | Method::Pieces => "",
                };
                let (cell, width) = (format!("{mark}{}", us(outcome.time_ps)), width(name));
                let _ = write!(text, "{cell:>width$}");
            }
            if let Some((name, outcome)) = row.best() {
                let bus = bus_gb_s(self.collective, &cluster.topology, row.bytes, outcome);
                let _ = write!(text, "  {name:<18}{bus:>12.3}");
                let share = line_share(self.collective, &cluster, row.bytes, outcome);
                let share = share.map_or("-".to_owned(), |share| format!("{:.0} %", 100.0 * share));
                let _ = write!(text, "{share:>10}");
            }
            text.push('\n');
        }
        let found_by = |method| {
            let mut times = self.rows.iter().flat_map(|row| &row.times);
            times.any(|(_, outcome)| outcome.method == method)
        };
        if found_by(Method::Formula) {
            text.push_str("~ has too many messages for a replay: its time is that of a formula\n");
        }
        if found_by(Method::Hosts) {
            text.push_str("* has too many messages for a replay: fewer hosts were replayed\n");
        }
        text
    }
}

/// The bus bandwidth of nccl-tests: the fewest bytes that a rank must send, divided by the time.
fn bus_gb_s(collective: Collective, topology: &Topology, bytes: usize, outcome: Outcome) -> f64 {
    let ranks = topology.world_size as f64;
    let share = (ranks - 1.0) / ranks;
    let factor = match collective {
        Collective::AllReduce => 2.0 * share,
        // `bytes` is the size of one block here.
        Collective::AllGather
        | Collective::ReduceScatter
        | Collective::AllToAll
        | Collective::Gather
        | Collective::Scatter => ranks * share,
        _ => 1.0,
    };
    bytes as f64 * factor / (outcome.time_ps.max(1) as f64 / 1e12) / 1e9
}

/// The time that the busiest network link needs for the bytes that must cross it, as a share of the
/// whole time.
fn line_share(
    collective: Collective,
    cluster: &Cluster,
    bytes: usize,
    outcome: Outcome,
) -> Option<f64> {
    let bound = line_bound(collective, &cluster.topology, bytes as u64);
    let bound_ps = bound as f64 * cluster.prices.nic_byte_fs as f64 / 1e3;
    (bound > 0).then(|| bound_ps / outcome.time_ps.max(1) as f64)
}

pub(super) fn us(ps: u64) -> String {
    match ps as f64 / 1e6 {
        us if us < 100.0 => format!("{us:.1}"),
        us => format!("{us:.0}"),
    }
}

pub(super) fn size(bytes: usize) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let unit = units.iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    match unit {
        Some((shift, name)) => format!("{} {name}", bytes >> shift),
        None => format!("{bytes} B"),
    }
}

#[cfg(test)]
mod tests {
    use drumline_schedule::price::PriceList;

    use super::{super::cluster::DeviceLinks, *};

    const F32: ElementKind = ElementKind { bytes: 4, sum_bytes: 4 };

    fn described(hosts: usize, nproc_per_node: usize) -> Described {
        let prices = PriceList { nic_byte_fs: 8_000_000, ..PriceList::default() };
        let device = DeviceLinks::default();
        Described { hosts, nproc_per_node, cores_per_host: None, prices, device }
    }

    #[test]
    fn the_fastest_is_named_with_its_bandwidth() {
        // 1 Gb/s: nothing but the line counts.
        let described = described(2, 4);
        let rows = vec![row(&described.cluster(), Collective::AllReduce, 64 << 20, F32).unwrap()];
        let table = Table { collective: Collective::AllReduce, rows };
        let (name, outcome) = table.rows[0].best().unwrap();
        assert!(name.starts_with("hierarchical"), "{name}");
        let share =
            line_share(Collective::AllReduce, &described.cluster(), 64 << 20, outcome).unwrap();
        assert!((0.9..=1.0).contains(&share), "{share}");
        let text = table.text(&described);
        assert!(text.contains("64 MiB") && text.contains(name) && text.contains(" %"), "{text}");
    }

    /// 1 GB/s in each direction is the bus bandwidth of two ranks that do nothing but send.
    #[test]
    fn bus_bandwidth_is_what_a_rank_sends() {
        let topology = Topology::flat(2);
        let outcome = Outcome {
            time_ps: 1_000_000,
            line_bytes: 0,
            rounds: 1,
            events: 1,
            method: Method::Replay,
        };
        for collective in [Collective::AllReduce, Collective::AllGather, Collective::Broadcast] {
            let bus = bus_gb_s(collective, &topology, 1_000, outcome);
            assert!((bus - 1.0).abs() < 1e-9, "{collective}: {bus}");
        }
    }

    #[test]
    fn sizes_read_well() {
        assert_eq!(
            [8, 1024, 1536, 64 << 20, 3 << 30].map(size),
            ["8 B", "1 KiB", "1536 B", "64 MiB", "3 GiB"]
        );
    }
}
