//! An all-reduce of device memory, on more and more hosts.

use std::fmt::Write as _;

use drumline_inspect::replay::{DeviceOutcome, DeviceWorkload, line_bound, replay_devices};
use drumline_schedule::{ALGORITHMS, Collective};

use super::{
    cluster::Described,
    collectives::size,
    options::{Options, positive},
    training::{host_counts, mb},
};
use crate::{Error, Result};

/// As a job has them unless told otherwise.
const SLOTS: usize = 4;
const LAG: usize = 2;

/// The times by the number of hosts, for each size.
#[derive(Clone, Debug)]
pub(super) struct Devices {
    bytes: Vec<usize>,
    window_bytes: usize,
    gb_s: f64,
    rows: Vec<Row>,
}

#[derive(Clone, Debug)]
struct Row {
    hosts: usize,
    devices: usize,
    /// By size: the algorithm that sums windows, and the outcome.
    times: Vec<(&'static str, DeviceOutcome)>,
    /// Of the last size: the time of the line as a share of the whole time, between several hosts.
    line_share: Option<f64>,
}

/// `None`: ranks have no devices.
pub(super) fn table(described: &Described, options: &Options) -> Result<Option<Devices>> {
    let Some(byte_fs) = described.device.byte_fs else { return Ok(None) };
    let window_bytes = positive("--device-window-mb", options.device_window_mb, 1e6, 1.0)? as usize;
    let bytes = options.sizes()?;
    let row = |hosts| row(described, options, hosts, &bytes, window_bytes, byte_fs);
    let rows = host_counts(described.hosts).into_iter().map(row).collect::<Result<_>>()?;
    Ok(Some(Devices { bytes, window_bytes, gb_s: 1e6 / byte_fs.max(1) as f64, rows }))
}

fn row(
    described: &Described,
    options: &Options,
    hosts: usize,
    sizes: &[usize],
    window_bytes: usize,
    link_byte_fs: u64,
) -> Result<Row> {
    let (cluster, kind) = (described.with_hosts(hosts), options.kind()?);
    let rows = || ALGORITHMS.iter().filter(|row| row.collective == Collective::ReduceSlices);
    let time = |bytes: &usize| -> Result<(&'static str, DeviceOutcome)> {
        let mut best: Option<(&'static str, DeviceOutcome)> = None;
        for algorithm in rows().filter(|row| (row.applies)(&cluster.topology)) {
            let workload = DeviceWorkload {
                algorithm,
                kind,
                elements: bytes / kind.bytes,
                window_elements: window_bytes / kind.bytes,
                slots: SLOTS,
                lag: LAG,
                link_byte_fs,
                link_round_ps: described.device.round_ps,
            };
            let outcome = replay_devices(&cluster, &workload)
                .map_err(|error| Error::Usage(error.to_string()))?;
            if best.is_none_or(|(_, best)| outcome.time_ps < best.time_ps) {
                best = Some((algorithm.name, outcome));
            }
        }
        best.ok_or_else(|| Error::Usage("no algorithm leaves slices on such hosts".to_owned()))
    };
    let times: Vec<_> = sizes.iter().map(time).collect::<Result<_>>()?;
    let line_share = sizes.last().zip(times.last()).and_then(|(bytes, (_, outcome))| {
        let bound = line_bound(Collective::AllReduce, &cluster.topology, *bytes as u64);
        let bound_ps = bound as f64 * cluster.prices.nic_byte_fs as f64 / 1e3;
        (bound > 0).then(|| bound_ps / outcome.time_ps.max(1) as f64)
    });
    Ok(Row { hosts, devices: cluster.topology.world_size, times, line_share })
}

impl Devices {
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "\nall_reduce of device memory: GB/s (bytes of a rank by time); links of {:.1} GB/s each way, \
             windows of {}\n{:>6}{:>9}",
            self.gb_s,
            mb(self.window_bytes as u64),
            "hosts",
            "devices"
        );
        for bytes in &self.bytes {
            let _ = write!(text, "{:>11}", size(*bytes));
        }
        let _ = writeln!(text, "{:>9}  {:<15}windows are summed by", "of line", "the limit");
        for Row { hosts, devices, times, line_share } in &self.rows {
            let _ = write!(text, "{hosts:>6}{devices:>9}");
            for (bytes, (_, outcome)) in self.bytes.iter().zip(times) {
                let gb_s = *bytes as f64 / (outcome.time_ps.max(1) as f64 / 1e3);
                let _ = write!(text, "{gb_s:>11.2}");
            }
            let share =
                line_share.map_or("-".to_owned(), |share| format!("{:.0} %", 100.0 * share));
            let _ = write!(text, "{share:>9}");
            if let Some((algorithm, outcome)) = times.last() {
                let _ = write!(text, "  {:<15}{algorithm}", limit(outcome));
            }
            text.push('\n');
        }
        text
    }
}

/// What is busy for the longest time.
fn limit(outcome: &DeviceOutcome) -> &'static str {
    let [out, sum, back] = outcome.busy_ps;
    let all =
        [(out, "copies out"), (sum, "sums"), (back, "copies in"), (outcome.memory_ps, "memory")];
    all.into_iter().max_by_key(|(busy_ps, _)| *busy_ps).map_or("", |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::{super::cluster::describe, *};

    #[derive(Parser)]
    struct Command {
        #[command(flatten)]
        options: Options,
    }

    fn predicted(arguments: &str) -> Option<Devices> {
        let arguments = ["predict"].into_iter().chain(arguments.split_whitespace());
        let options = Command::try_parse_from(arguments).unwrap().options;
        table(&describe(&options).unwrap(), &options).unwrap()
    }

    #[test]
    fn ranks_have_devices_only_if_asked() {
        assert!(predicted("--hosts 2 --nproc-per-node 2").is_none());
    }

    /// Eight devices on PCIe 4.0 x16 and a line of 200 Gb/s for each host.
    #[test]
    fn a_host_of_eight_devices_is_limited_by_its_line_or_memory() {
        let devices = predicted(
            "--hosts 16 --nproc-per-node 8 --bandwidth-gbps 200 --memory-gb-s 320 --device-gb-s 24 --sizes 4M,184M",
        )
        .unwrap();
        let counts: Vec<_> = devices.rows.iter().map(|row| (row.hosts, row.devices)).collect();
        assert_eq!(counts, [(1, 8), (2, 16), (4, 32), (8, 64), (16, 128)]);
        let gb_s = |row: &Row| (184 << 20) as f64 / (row.times[1].1.time_ps as f64 / 1e3);
        // 25 passes over 320 GB/s of memory are the least that any number of hosts takes.
        assert!(devices.rows.iter().all(|row| gb_s(row) < 320.0 / 25.0));
        assert!(gb_s(&devices.rows[4]) > 1.0);
        let text = devices.text();
        assert!(text.contains("184 MiB") && text.contains("hierarchical"), "{text}");
    }
}
