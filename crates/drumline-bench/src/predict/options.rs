//! The options of `drumline predict`.

use std::path::PathBuf;

use clap::Args;
use drumline_inspect::replay::Training;
use drumline_schedule::{Collective, price::ElementKind};

use crate::{Error, Result};

const HELP: &str = "\
Examples:
  drumline predict --hosts 16 --nproc-per-node 8 --bandwidth-gbps 25
  drumline predict --hosts 64 --nproc-per-node 8 --bandwidth-gbps 100 --latency-us 8 \\
      --gradients-mb 400 --backward-ms 300 --bucket-mb 1,5,25,100 --svg step.svg
  drumline predict --hosts 180 --nproc-per-node 8 --bandwidth-gbps 200 --device-gb-s 24 --sizes 184M
  drumline predict --measure prices.toml      # the prices of this host
  drumline predict --cluster prices.toml --hosts 16 --bandwidth-gbps 25
  drumline predict --check                    # replays beside measurements on this host

A cluster file has lines `name = number`: hosts, nproc_per_node, cores_per_host, and the prices that
--measure writes. An option takes precedence over the file.";

/// What to predict, and for which cluster.
#[derive(Clone, Debug, Args)]
#[command(after_help = HELP)]
pub struct Options {
    /// A file that describes the cluster
    #[arg(long, value_name = "FILE")]
    pub cluster: Option<PathBuf>,

    /// How many hosts [default: 2]
    #[arg(long, value_name = "N")]
    pub hosts: Option<usize>,

    /// Ranks on each host [default: 1]
    #[arg(long, alias = "nproc_per_node", value_name = "N")]
    pub nproc_per_node: Option<usize>,

    /// Cores that the ranks of a host may use [default: one for each rank]
    #[arg(long, value_name = "N")]
    pub cores_per_host: Option<usize>,

    /// Bandwidth of each host's network link, in each direction, in gigabits per second
    #[arg(long, value_name = "GBIT/S")]
    pub bandwidth_gbps: Option<f64>,

    /// Time from a send to the receiver's next step on another host, in microseconds
    #[arg(long, value_name = "US")]
    pub latency_us: Option<f64>,

    /// Memory bandwidth of a host, reads and writes together, in gigabytes per second
    #[arg(long, value_name = "GB/S")]
    pub memory_gb_s: Option<f64>,

    /// Speed of one core that adds buffers in memory, in gigabytes per second
    #[arg(long, value_name = "GB/S")]
    pub reduce_gb_s: Option<f64>,

    /// Bandwidth between each rank's device and its host, in each direction, in gigabytes per second: tells the
    /// times of an all-reduce of device memory, too
    #[arg(long, value_name = "GB/S")]
    pub device_gb_s: Option<f64>,

    /// What each copy between a device and its host takes in addition, in microseconds [default: 10]
    #[arg(long, value_name = "US")]
    pub device_latency_us: Option<f64>,

    /// Windows in which device memory passes through the host, in megabytes
    #[arg(long, value_name = "MB", default_value_t = 4.0)]
    pub device_window_mb: f64,

    /// Which collectives: their names with commas, or `all`
    #[arg(long, value_name = "NAMES", default_value = "all_reduce")]
    pub operations: String,

    /// Bytes that each rank brings: sizes with commas, such as 1K,64M
    #[arg(long, value_name = "SIZES", default_value = "1K,16K,256K,4M,64M")]
    pub sizes: String,

    /// Type of the elements: f64, f32, bf16 or f16
    #[arg(long, value_name = "TYPE", default_value = "f32")]
    pub dtype: String,

    /// Size of all gradients of a training step, in megabytes
    #[arg(long, value_name = "MB", requires = "backward_ms")]
    pub gradients_mb: Option<f64>,

    /// Time of the backward pass of a training step, in milliseconds
    #[arg(long, value_name = "MS", requires = "gradients_mb")]
    pub backward_ms: Option<f64>,

    /// Time of the forward pass and the optimizer, in milliseconds [default: half of backward]
    #[arg(long, value_name = "MS", requires = "backward_ms")]
    pub forward_ms: Option<f64>,

    /// Sizes of buckets to try, with commas, in megabytes
    #[arg(long, value_name = "MB", default_value = "1,5,25,100", value_delimiter = ',')]
    pub bucket_mb: Vec<f64>,

    /// Draw the times, too
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,

    /// Measure this host with short runs, and write its prices
    #[arg(long, value_name = "FILE", conflicts_with_all = ["check", "cluster", "hosts", "svg"])]
    pub measure: Option<PathBuf>,

    /// Measure all-reduces on this host, and print the time of a replay beside each
    #[arg(long, conflicts_with_all = ["hosts", "svg"])]
    pub check: bool,

    /// The time of each run of --measure and --check, in milliseconds
    #[arg(long, hide = true, default_value_t = 600)]
    pub measure_ms: u64,

    /// The most ranks of --check
    #[arg(long, hide = true, default_value_t = 8)]
    pub check_ranks_max: usize,
}

/// The collectives that `all` stands for.
const OPERATIONS: [Collective; 8] = [
    Collective::AllReduce,
    Collective::AllGather,
    Collective::ReduceScatter,
    Collective::Broadcast,
    Collective::Reduce,
    Collective::AllToAll,
    Collective::Gather,
    Collective::Scatter,
];

impl Options {
    pub(super) fn operations(&self) -> Result<Vec<Collective>> {
        if self.operations == "all" {
            return Ok(OPERATIONS.into());
        }
        let named = |name: &str| {
            let found = OPERATIONS.into_iter().find(|it| it.to_string() == name.trim());
            let known = OPERATIONS.map(|it| it.to_string()).join(", ");
            found.ok_or_else(|| usage("--operations", name, &format!("one of {known}, or all")))
        };
        self.operations.split(',').map(named).collect()
    }

    /// Sizes in bytes, each a whole number of elements.
    pub(super) fn sizes(&self) -> Result<Vec<usize>> {
        let kind = self.kind()?;
        self.sizes.split(',').map(|text| size(text.trim(), kind.bytes)).collect()
    }

    pub(super) fn kind(&self) -> Result<ElementKind> {
        match &*self.dtype {
            "f64" => Ok(ElementKind { bytes: 8, sum_bytes: 8 }),
            "f32" => Ok(ElementKind { bytes: 4, sum_bytes: 4 }),
            "bf16" | "f16" => Ok(ElementKind { bytes: 2, sum_bytes: 4 }),
            other => Err(usage("--dtype", other, "f64, f32, bf16 or f16")),
        }
    }

    /// The training step; `None` if the options describe none.
    pub(super) fn training(&self) -> Result<Option<Training>> {
        let (Some(gradients_mb), Some(backward_ms)) = (self.gradients_mb, self.backward_ms) else {
            return Ok(None);
        };
        let forward_ms = self.forward_ms.unwrap_or(backward_ms / 2.0);
        let ps = |option, ms: f64| positive(option, ms, 1e9, 0.0);
        Ok(Some(Training {
            gradient_bytes: positive("--gradients-mb", gradients_mb, 1e6, 1.0)?,
            backward_ps: ps("--backward-ms", backward_ms)?,
            forward_ps: ps("--forward-ms", forward_ms)?,
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 1 << 20,
        }))
    }

    pub(super) fn bucket_bytes(&self) -> Result<Vec<u64>> {
        let bytes = |mb: &f64| positive("--bucket-mb", *mb, 1e6, 1.0);
        self.bucket_mb.iter().map(bytes).collect()
    }
}

/// `value` times `unit`, at least `least`.
pub(super) fn positive(option: &str, value: f64, unit: f64, least: f64) -> Result<u64> {
    let scaled = value * unit;
    match scaled >= least && scaled <= 1e17 {
        true => Ok(scaled.round() as u64),
        false => Err(usage(option, &value.to_string(), "a positive number")),
    }
}

pub(super) fn usage(option: &str, value: &str, wanted: &str) -> Error {
    Error::Usage(format!("{option} {value:?} should be {wanted}"))
}

/// More bytes than this on a rank are a typing error.
const BYTES_MAX: usize = 1 << 40;

/// `1K` is 1,024 bytes.
fn size(text: &str, element_bytes: usize) -> Result<usize> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic());
    let shift = match &text[digits.len()..] {
        "" | "B" => Some(0),
        "K" | "KiB" => Some(10),
        "M" | "MiB" => Some(20),
        "G" | "GiB" => Some(30),
        _ => None,
    };
    let number = digits.parse::<usize>().ok();
    let bytes = number.zip(shift).and_then(|(number, shift)| number.checked_mul(1 << shift));
    match bytes {
        Some(bytes) if bytes <= BYTES_MAX && bytes.is_multiple_of(element_bytes) => Ok(bytes),
        _ => {
            let wanted = format!("bytes such as 64K, a multiple of {element_bytes}, at most 1024G");
            Err(usage("--sizes", text, &wanted))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_units() {
        assert_eq!(size("8", 4).unwrap(), 8);
        assert_eq!(size("64K", 4).unwrap(), 65_536);
        assert_eq!(size("2MiB", 4).unwrap(), 2 << 20);
        for bad in ["", "K", "7", "1T", "-4", "1.5K", "99999999G"] {
            let error = size(bad, 4).unwrap_err().to_string();
            assert!(error.contains("--sizes") && error.contains(&format!("{bad:?}")), "{error}");
        }
    }

    #[test]
    fn numbers_that_are_none_are_refused() {
        for bad in [f64::NAN, f64::INFINITY, -1.0, 1e30] {
            assert!(positive("--backward-ms", bad, 1e9, 0.0).is_err(), "{bad}");
        }
        assert_eq!(positive("--gradients-mb", 2.5, 1e6, 1.0).unwrap(), 2_500_000);
    }
}
