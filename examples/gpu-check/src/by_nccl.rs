//! All-reduces by NCCL.

use std::sync::Arc;

use anyhow::{Context, ensure};
use drumline::{
    Config, DType, ReduceOp,
    device::{Device, DeviceGroup, DeviceOptions, DeviceSlice, Driver, Wanted},
    init_process_group,
};

use crate::Options;
use crate::sums::{bytes_of, value};
use crate::table::{gb_s, median, row, size};

pub(crate) fn headline() {
    println!(
        "\nall_reduce of f32 by NCCL, each rank on the next GPU; results beside those of the host"
    );
    row("ranks", ["bytes", "us", "GB/s", ""].map(str::to_owned));
}

/// What one rank does. It is no failure that NCCL cannot be used here: the table says why.
pub(crate) fn one(options: &Options, rank: usize) -> anyhow::Result<()> {
    let group = init_process_group("env://", &Config::from_env()?)?;
    let driver = Driver::load(options.library.as_deref())?;
    let device = driver.device((options.device + rank) % driver.devices()?)?;
    let by_nccl = DeviceOptions::default().way(Wanted::Nccl);
    let on = match DeviceGroup::new(&group, Arc::new(device.clone()), &by_nccl) {
        Ok(on) => on,
        Err(error) => {
            if rank == 0 {
                println!("{:>10}  not by NCCL: {error}", group.world_size());
            }
            return Ok(group.destroy()?);
        }
    };
    let stream = device.stream()?;
    if rank == 0 {
        println!("{:>10}  {}", group.world_size(), on.explain(DType::F32));
    }
    for bytes in [4 << 10, 4 << 20, options.bytes_max] {
        let bytes = bytes.min(options.bytes_max);
        let own: Vec<f32> = (0..bytes / 4).map(|at| value(rank, at)).collect();
        let mut expected = own.clone();
        group.all_reduce(&mut expected, ReduceOp::Max)?;
        let mut memory = device.allocate(bytes)?;
        let data = DeviceSlice::new(memory.place(), DType::F32);
        memory.write(&bytes_of(&own))?;
        // The order of sums is NCCL's own, but a maximum has none.
        on.all_reduce_on(&stream, data, ReduceOp::Max)?.wait()?;
        let mut found = vec![0; bytes];
        memory.read(&mut found)?;
        ensure!(found == bytes_of(&expected), "{} were reduced wrongly", size(bytes));
        let time = median(options.rounds, || {
            Ok(on.all_reduce_on(&stream, data, ReduceOp::Max)?.wait()?)
        })?;
        if rank == 0 {
            let us = format!("{:.1}", time.as_secs_f64() * 1e6);
            row("", [size(bytes), us, gb_s(bytes, time), String::new()]);
        }
    }
    on.destroy().context("at the end")?;
    group.destroy()?;
    Ok(())
}
