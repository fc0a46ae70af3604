//! All-reduces of device memory by processes that share a GPU: the bits of the host, and how much of the link is used.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, ensure};
use drumline::{
    DType, ProcessGroup, ReduceOp,
    device::{CudaDevice, Device, DeviceGroup, DeviceOptions, DeviceSlice, Driver, Wanted},
};

use crate::Options;
use crate::table::{gb_s, median, row, size};

pub(crate) fn headline() {
    println!("\nall_reduce of f32 by processes on one GPU; GB/s are bytes of a rank by time");
    row("ranks", ["bytes", "us", "GB/s", "of link"].map(str::to_owned));
}

/// What one rank does.
pub(crate) fn one(options: &Options) -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = Driver::load(options.library.as_deref())?.device(options.device)?;
    let through_host = DeviceOptions::default().way(Wanted::Host);
    let on = DeviceGroup::new(&group, Arc::new(device.clone()), &through_host)?;
    // The data of every rank crosses the link of the one GPU out and in.
    let share = |bytes, time: Duration| {
        let moved = 2.0 * (group.world_size() * bytes) as f64;
        let share = moved / 1e9 / options.link_gb_s.max(1e-9) / time.as_secs_f64().max(1e-12);
        format!("{:.0} %", 100.0 * share)
    };
    all_reduces(options, &group, &device, on, ReduceOp::Avg, share)?;
    Ok(group.destroy()?)
}

/// Reduces data of several lengths, and compares the results with those of the host. Tells the times; the last column is
/// `share` of bytes and time.
pub(crate) fn all_reduces(
    options: &Options,
    group: &ProcessGroup,
    device: &CudaDevice,
    on: DeviceGroup,
    op: ReduceOp,
    share: impl Fn(usize, Duration) -> String,
) -> anyhow::Result<()> {
    let (rank, stream) = (group.rank(), device.stream()?);
    if rank == 0 {
        println!("{:>10}  {}", group.world_size(), on.explain(DType::F32));
    }
    for bytes in [4 << 10, 4 << 20, options.bytes_max] {
        let bytes = bytes.min(options.bytes_max);
        let own: Vec<f32> = (0..bytes / 4).map(|at| value(rank, at)).collect();
        let mut expected = own.clone();
        group.all_reduce(&mut expected, op)?;
        let mut memory = device.allocate(bytes)?;
        let data = DeviceSlice::new(memory.place(), DType::F32);
        memory.write(&bytes_of(&own))?;
        on.all_reduce_on(&stream, data, op)?.wait()?;
        let mut found = vec![0; bytes];
        memory.read(&mut found)?;
        ensure!(found == bytes_of(&expected), "{} were reduced wrongly", size(bytes));
        memory.write(&bytes_of(&own))?;
        let time = median(options.rounds, || Ok(on.all_reduce_on(&stream, data, op)?.wait()?))?;
        if rank == 0 {
            let us = format!("{:.1}", time.as_secs_f64() * 1e6);
            row("", [size(bytes), us, gb_s(bytes, time), share(bytes, time)]);
        }
    }
    on.destroy().context("at the end")
}

/// Sums of these differ by their order.
pub(crate) fn value(rank: usize, at: usize) -> f32 {
    let mixed = (rank as u64 * 0x9e37_79b9 + at as u64 + 1).wrapping_mul(0x94d0_49bb_1331_11eb);
    (mixed >> 40) as f32 / 4096.0 - 2048.0
}

pub(crate) fn bytes_of(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_ne_bytes()).collect()
}
