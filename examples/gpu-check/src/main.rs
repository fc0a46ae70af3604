//! Tries this machine's GPUs with Drumline: `make test-gpu`.
//!
//! It needs no toolkit and no compiler on the machine with the GPU: build it elsewhere, and copy the program there. It
//! says what it left out.

mod by_name;
mod by_nccl;
mod copies;
mod sums;
mod table;

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use drumline_cuda::Driver;
use drumline_device::Device;

/// Which driver, which device, and how much.
#[derive(Debug, Parser)]
struct Options {
    /// The library of the driver [default: the first that is found]
    #[arg(long, env = "DRUMLINE_CUDA_LIBRARY", value_name = "FILE")]
    library: Option<PathBuf>,

    /// The device, by the driver's number
    #[arg(long, default_value_t = 0, value_name = "N")]
    device: usize,

    /// The longest copy
    #[arg(long, default_value_t = 256 << 20, value_name = "BYTES")]
    bytes_max: usize,

    /// Repetitions of each measurement; the table has the median
    #[arg(long, default_value_t = 9, value_name = "N")]
    rounds: usize,

    /// How many processes share the GPU, with commas
    #[arg(long, default_value = "1,2,4", value_delimiter = ',', value_name = "N")]
    ranks: Vec<usize>,

    /// Of a process that is started here: how many there are.
    #[arg(long, hide = true)]
    sum_with: Option<usize>,

    /// The same, for gradients by name.
    #[arg(long, hide = true)]
    by_name_with: Option<usize>,

    /// The same, for NCCL.
    #[arg(long, hide = true)]
    by_nccl_with: Option<usize>,

    #[arg(long, hide = true, default_value_t = 0.0)]
    link_gb_s: f64,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    if let Some(ranks) = options.sum_with {
        return sums::run(ranks, |rank| sums::one(&options, rank));
    }
    if let Some(ranks) = options.by_name_with {
        return sums::run(ranks, |rank| by_name::one(&options, rank));
    }
    if let Some(ranks) = options.by_nccl_with {
        return sums::run(ranks, |rank| by_nccl::one(&options, rank));
    }
    let driver = Driver::load(options.library.as_deref()).context("there is nothing to try")?;
    println!("driver   {driver}, {} devices", driver.devices()?);
    let device = driver.device(options.device)?;
    println!("device   {}", device.identity());
    let sizes: Vec<usize> = std::iter::successors(Some(4 << 10), |bytes| Some(bytes * 4))
        .take_while(|bytes| *bytes < options.bytes_max)
        .chain([options.bytes_max])
        .collect();
    let link_gb_s = copies::report(&device, &sizes, options.rounds)?;
    drop(device);
    sums::headline();
    for &ranks in &options.ranks {
        sums::measure(&options, "sum-with", ranks, link_gb_s)?;
    }
    by_name::headline();
    for &ranks in &options.ranks {
        sums::measure(&options, "by-name-with", ranks, link_gb_s)?;
    }
    by_nccl::headline();
    for &ranks in &options.ranks {
        sums::measure(&options, "by-nccl-with", ranks, link_gb_s)?;
    }
    println!(
        "\nleft out: a rank that is killed; programs of torch and burn; copies between processes by CUDA IPC, which Drumline does not use"
    );
    Ok(())
}
