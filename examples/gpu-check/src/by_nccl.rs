//! All-reduces by NCCL.

use std::sync::Arc;

use anyhow::{Context, ensure};
use drumline::{
    DType, ReduceOp,
    device::{Device, DeviceGroup, DeviceOptions, DeviceSlice, Wanted},
};

use crate::Options;
use crate::job::{Job, Role};
use crate::left_out::LeftOut;
use crate::part::Part;
use crate::sums::{bytes_of, value};
use crate::table::{gb_s, median, row, size};

pub(crate) fn headline() {
    println!(
        "\nall_reduce of f32 by NCCL, each rank on the next GPU; results beside those of the host"
    );
    row("ranks", ["bytes", "us", "GB/s", ""].map(str::to_owned));
}

/// Has a job of so many ranks run. It is no failure that NCCL cannot be used here.
pub(crate) fn measure(
    options: &Options,
    ranks: usize,
    left_out: &mut LeftOut,
) -> anyhow::Result<()> {
    let ended = Job::start(options, Part::ByNccl, ranks)?.end()?;
    for (rank, status) in ended.statuses.into_iter().enumerate() {
        ensure!(status.success(), "rank {rank} of {ranks}, by NCCL: {status}");
    }
    if let Some(why) = ended.left_out {
        left_out.add(&format!("all_reduces of {ranks} ranks by NCCL"), why);
    }
    Ok(())
}

/// What one rank does.
pub(crate) fn one(options: &Options, role: &Role) -> anyhow::Result<()> {
    let (rank, device) = (role.rank, role.device(options)?);
    let group = role.connect("world", &(0..role.ranks).collect::<Vec<_>>())?;
    let by_nccl = DeviceOptions::default().way(Wanted::Nccl);
    let on = match DeviceGroup::new(&group, Arc::new(device.clone()), &by_nccl) {
        Ok(on) => on,
        Err(error) => {
            role.leave_out(error)?;
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
