//! Tries this machine's GPUs with Drumline: `make test-gpu`.
//!
//! It needs no toolkit and no compiler on the machine with the GPU: build it elsewhere, and copy the program there. It
//! says what it left out.

mod by_name;
mod by_nccl;
mod copies;
mod job;
mod killed;
mod left_out;
mod lent;
#[cfg(feature = "burn")]
mod of_burn;
mod of_torch;
mod part;
mod sums;
mod table;

use std::path::PathBuf;

use anyhow::Context;
use clap::Parser;
use drumline::device::Wanted;
use drumline_cuda::Driver;
use drumline_device::Device;

use crate::left_out::LeftOut;
use crate::part::Part;

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

    /// A Python that has torch and drumline
    #[arg(long, default_value = "python3", value_name = "FILE")]
    python: PathBuf,

    /// Where the program of torch trains: cuda, or cpu to try the program itself
    #[arg(long, default_value = "cuda", value_parser = ["cuda", "cpu"])]
    torch_device: String,

    /// Of a process that is started here: what it does.
    #[arg(long, hide = true)]
    part: Option<Part>,

    /// Of a process that is started here: how many ranks there are.
    #[arg(long, hide = true, default_value_t = 1)]
    part_ranks: usize,

    #[arg(long, hide = true, default_value_t = 0.0)]
    link_gb_s: f64,
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    match options.part {
        None => check(&options),
        Some(Part::Sums) => part::run(&options, |options, _| sums::one(options)),
        Some(Part::ByName) => part::run(&options, by_name::one),
        Some(Part::ByNccl) => job::run(&options, by_nccl::one),
        Some(Part::Killed) => {
            job::run(&options, |options, role| killed::one(options, role, Wanted::Host))
        }
        Some(Part::KilledByNccl) => {
            job::run(&options, |options, role| killed::one(options, role, Wanted::Nccl))
        }
        Some(Part::Lend) => lent::lend(&options),
        #[cfg(feature = "burn")]
        Some(Part::OfBurn) => part::run(&options, of_burn::one),
    }
}

/// Tries all, and prints what it finds.
fn check(options: &Options) -> anyhow::Result<()> {
    let mut left_out = LeftOut::default();
    let driver = Driver::load(options.library.as_deref()).context("there is nothing to try")?;
    println!("driver   {driver}, {} devices", driver.devices()?);
    let device = driver.device(options.device)?;
    println!("device   {}", device.identity());
    let sizes: Vec<usize> = std::iter::successors(Some(4 << 10), |bytes| Some(bytes * 4))
        .take_while(|bytes| *bytes < options.bytes_max)
        .chain([options.bytes_max])
        .collect();
    let link_gb_s = copies::report(options, &device, &sizes, &mut left_out)?;
    drop(device);
    sums::headline();
    for &ranks in &options.ranks {
        part::measure(options, Part::Sums, ranks, link_gb_s)?;
    }
    by_name::headline();
    for &ranks in &options.ranks {
        part::measure(options, Part::ByName, ranks, link_gb_s)?;
    }
    by_nccl::headline();
    for &ranks in &options.ranks {
        by_nccl::measure(options, ranks, &mut left_out)?;
    }
    killed::headline();
    for way in [Part::Killed, Part::KilledByNccl] {
        for ranks in [2, 3] {
            killed::measure(options, way, ranks, &mut left_out)?;
        }
    }
    of_torch::measure(options, &mut left_out)?;
    #[cfg(feature = "burn")]
    of_burn::measure(options, &mut left_out)?;
    #[cfg(not(feature = "burn"))]
    left_out.add(
        "a program of burn",
        "this one was built without it: cargo build --release -p gpu-check --features burn-cuda",
    );
    println!("\n{left_out}");
    Ok(())
}
