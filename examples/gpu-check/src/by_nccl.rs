//! All-reduces by NCCL.

use std::sync::Arc;

use anyhow::ensure;
use drumline::{
    ReduceOp,
    device::{DeviceGroup, DeviceOptions, Wanted},
};

use crate::Options;
use crate::job::{Job, Role};
use crate::left_out::LeftOut;
use crate::part::Part;
use crate::sums::all_reduces;
use crate::table::row;

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
    let device = role.device(options)?;
    let group = role.connect("world", &(0..role.ranks).collect::<Vec<_>>())?;
    let by_nccl = DeviceOptions::default().way(Wanted::Nccl);
    let on = match DeviceGroup::new(&group, Arc::new(device.clone()), &by_nccl) {
        Ok(on) => on,
        Err(error) => {
            role.leave_out(error)?;
            return Ok(group.destroy()?);
        }
    };
    // The order of sums is NCCL's own, but a maximum has none.
    all_reduces(options, &group, &device, on, ReduceOp::Max, |_, _| String::new())?;
    Ok(group.destroy()?)
}
