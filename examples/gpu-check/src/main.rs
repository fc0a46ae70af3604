//! Tries this machine's GPUs with Drumline: `make test-gpu`.
//!
//! It needs no toolkit and no compiler on the machine with the GPU: build it elsewhere, and copy the program there. It
//! says what it left out.

mod copies;
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
}

fn main() -> anyhow::Result<()> {
    let options = Options::parse();
    let driver = Driver::load(options.library.as_deref()).context("there is nothing to try")?;
    println!("driver   {driver}, {} devices", driver.devices()?);
    let device = driver.device(options.device)?;
    println!("device   {}", device.identity());
    let sizes: Vec<usize> = std::iter::successors(Some(4 << 10), |bytes| Some(bytes * 4))
        .take_while(|bytes| *bytes < options.bytes_max)
        .chain([options.bytes_max])
        .collect();
    copies::report(&device, &sizes, options.rounds)?;
    println!("\nleft out: copies between processes by CUDA IPC, which Drumline does not use");
    Ok(())
}
