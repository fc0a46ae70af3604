//! Trains a small GPT on a text, on one process or on many that train together, to be stopped and resumed.
//!
//! ```sh
//! cargo build --release -p drumline-cli -p gpt-burn
//! drumline run --nproc-per-node 2 target/release/gpt-burn TEXT --export model.safetensors
//! ```
//!
//! A run that was stopped and resumed gives the same bits as one that was not. torch loads the exported model into
//! `Gpt` of `examples/python/gpt/model.py`.

mod export;
mod history;
mod model;
mod pace;
mod text;
mod train;

use std::{
    fmt,
    io::{self, Write},
    num::{NonZeroU64, NonZeroUsize},
    path::PathBuf,
    process::ExitCode,
};

use anyhow::Result;
use clap::Parser;
use drumline::{Config, ProcessGroup, init_process_group, rendezvous::is_launched};

/// The heads of attention in each block.
const HEADS: usize = 4;

/// Trains a small GPT on a text, alone or as one rank of a job that `drumline run` started.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpt-burn", args_override_self = true)]
struct Options {
    /// A file in UTF-8
    text: PathBuf,

    /// Directory of the checkpoints and the picture
    #[arg(long, default_value = "runs/gpt-burn")]
    out: PathBuf,

    /// Go on from the newest checkpoint in the directory of --out
    #[arg(long)]
    resume: bool,

    /// Stop after so many
    #[arg(long, default_value = "400")]
    steps: u64,

    /// Steps that the learning rate is planned for [default: --steps]
    #[arg(long)]
    steps_planned: Option<NonZeroU64>,

    /// Validate and save every so many steps
    #[arg(long, default_value = "50")]
    every: NonZeroU64,

    /// Windows per step on each rank
    #[arg(long, default_value = "16")]
    batch_size: NonZeroUsize,

    /// Characters of a window
    #[arg(long, default_value = "64", value_parser = at_least_1)]
    places: usize,

    /// Blocks of attention
    #[arg(long, default_value = "3", value_parser = at_least_1)]
    layers: usize,

    /// Numbers for each character in the model, a multiple of 4
    #[arg(long, default_value = "96", value_parser = for_heads)]
    width: usize,

    /// Highest learning rate
    #[arg(long, default_value = "0.003", value_parser = learning_rate)]
    lr: f64,

    /// Decides the initial weights and the order of the windows
    #[arg(long, default_value = "0")]
    seed: u64,

    /// Characters to write at the end
    #[arg(long, default_value = "200")]
    sample: usize,

    /// Save the model at the end for torch, as safetensors
    #[arg(long, value_name = "FILE")]
    export: Option<PathBuf>,

    /// Save the scores of the text's first window at the end, as safetensors
    #[arg(long, value_name = "FILE")]
    logits: Option<PathBuf>,

    /// How the ranks meet: env://, mpi:// or tcp://host:port?rank=R&world_size=W
    /// [default: env:// under a launcher, else this process is alone]
    #[arg(long)]
    init: Option<String>,
}

impl Options {
    fn steps_planned(&self) -> u64 {
        self.steps_planned.map_or(self.steps.max(1), NonZeroU64::get)
    }
}

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let rank = std::env::var("RANK").map(|rank| format!("rank {rank}: "));
            let _ = writeln!(io::stderr(), "Error: {}{error:#}", rank.unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

fn run(options: &Options) -> Result<()> {
    let launched = is_launched().then_some("env://");
    let group = match options.init.as_deref().or(launched) {
        Some(url) => init_process_group(url, &Config::from_env()?)?,
        None => ProcessGroup::alone(),
    };
    train::train(options, &group)?;
    Ok(group.destroy()?)
}

/// Prints a line. (`println!` panics when the reader has closed the pipe.)
fn say(line: fmt::Arguments<'_>) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

fn at_least_1(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number > 0);
    number.ok_or_else(|| "expected a whole number of at least 1".into())
}

fn for_heads(text: &str) -> Result<usize, String> {
    let number = text.parse().ok().filter(|number| *number > 0 && number % HEADS == 0);
    number.ok_or_else(|| format!("expected a multiple of {HEADS}, the number of heads"))
}

fn learning_rate(text: &str) -> Result<f64, String> {
    let rate = text.parse().ok().filter(|rate: &f64| *rate > 0.0 && rate.is_finite());
    rate.ok_or_else(|| "expected a number greater than 0".into())
}
