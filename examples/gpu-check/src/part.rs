//! Parts of the check that other processes of this program do.

use std::env;
use std::process::Command;

use anyhow::{anyhow, ensure};
use clap::ValueEnum;
use drumline::spawn;

use crate::Options;

/// What a process does that is started here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Part {
    /// All-reduces through the host.
    Sums,
    /// Gradients by name.
    ByName,
    /// All-reduces by NCCL.
    ByNccl,
    /// All-reduces through the host, in which a rank is killed.
    Killed,
    /// The same by NCCL.
    KilledByNccl,
    /// Lends memory of the device to the process that has started it.
    Lend,
    /// Training with burn.
    #[cfg(feature = "burn")]
    OfBurn,
}

/// This program again, with the same options, for a part.
pub(crate) fn again(options: &Options, part: Part, ranks: usize) -> anyhow::Result<Command> {
    let mut program = Command::new(env::current_exe()?);
    let name = part.to_possible_value().ok_or_else(|| anyhow!("{part:?} has no name"))?;
    program.args([
        format!("--device={}", options.device),
        format!("--bytes-max={}", options.bytes_max),
        format!("--rounds={}", options.rounds),
        format!("--part={}", name.get_name()),
        format!("--part-ranks={ranks}"),
    ]);
    if let Some(library) = &options.library {
        program.arg("--library").arg(library);
    }
    Ok(program)
}

/// Has a process of its own start so many ranks. `link_gb_s`: what copies both ways at once bring together.
pub(crate) fn measure(
    options: &Options,
    part: Part,
    ranks: usize,
    link_gb_s: f64,
) -> anyhow::Result<()> {
    let mut program = again(options, part, ranks)?;
    let status = program.arg(format!("--link-gb-s={link_gb_s}")).status()?;
    ensure!(status.success(), "{ranks} ranks failed ({part:?}): {status}");
    Ok(())
}

/// Starts the ranks, and waits for them. In each of them, this is where they begin.
pub(crate) fn run(
    options: &Options,
    one: impl Fn(&Options, usize) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let ranks = spawn(options.part_ranks, |rank| {
        one(options, rank).map_err(|error| anyhow!("rank {rank}: {error:#}"))
    })?;
    Ok(ranks.join()?)
}
