//! Trains a classifier of small images, in one process or in many that train together.
//!
//! ```sh
//! cargo run --release -p fashion-mnist                                # one process
//! drumline run --nproc-per-node 2 target/release/fashion-mnist        # two
//! ```
//!
//! Each rank has the whole network and trains on its share of the images. The gradients are averaged over all
//! ranks. So N ranks with a batch of b each train like one rank with a batch of N·b, except for batch
//! normalisation, which sees only the b images of its own rank. The learning rate grows in proportion to N·b
//! unless `--lr` sets it. With `--shards S` a step is S batches of b, and 1, 2, ... S ranks give the same bits.

mod curve;
mod images;
mod model;
mod progress;
mod state;
mod train;

use std::{
    fmt, fs,
    io::{self, IsTerminal, Write},
    num::{NonZeroU64, NonZeroUsize},
    path::{Path, PathBuf},
    process::ExitCode,
};

use anyhow::{Context, Result};
use burn::tensor::Device;
use clap::Parser;
use drumline::{
    Config, ProcessGroup, checkpoint::CheckpointDirectory, init_process_group,
    rendezvous::is_launched,
};
use drumline_burn::{DdpOptions, DistributedDataParallel, checkpoint::Checkpoints};
use fashion_mnist::{data::DataSet, history::Epoch, plot};
use indicatif::HumanCount;
use tracing::level_filters::LevelFilter;
use tracing_subscriber::{filter::Targets, layer::SubscriberExt, util::SubscriberInitExt};

use crate::{
    model::Classifier,
    progress::Progress,
    state::{Settings, State},
    train::Trainer,
};

/// Trains a convolutional network on Fashion-MNIST, or on handwritten digits where that is not to
/// be had, alone or as one rank of a job that `drumline run` started.
#[derive(Clone, Debug, Parser)]
#[command(name = "fashion-mnist", args_override_self = true)]
struct Options {
    /// Directory of the data set [default: where fetch-data.sh puts it, else built-in digits]
    #[arg(long)]
    data: Option<PathBuf>,

    /// How often to go through the training images
    #[arg(long, default_value = "3")]
    epochs: NonZeroUsize,

    /// Images per step on each rank, or of each shard
    #[arg(long, default_value = "64")]
    batch_size: NonZeroUsize,

    /// Makes a step so many shards, whatever the number of ranks: all numbers of ranks give the same bits
    #[arg(long)]
    shards: Option<NonZeroUsize>,

    /// Learning rate of the first step; it halves every epoch
    /// [default: 0.05 for 128 images per step over all ranks, and in proportion]
    #[arg(long, value_parser = positive)]
    lr: Option<f64>,

    /// Units of the network's hidden layer
    #[arg(long, default_value = "128")]
    hidden: NonZeroUsize,

    /// Decides the initial weights and the order of the images
    #[arg(long, default_value = "0")]
    seed: u64,

    /// Directory of the checkpoints and the picture
    #[arg(long, default_value = "runs/fashion-mnist")]
    out: PathBuf,

    /// Save a checkpoint not only after each epoch, but every so many steps
    #[arg(long, value_name = "STEPS")]
    checkpoint_every: Option<NonZeroU64>,

    /// How many checkpoints to keep
    #[arg(long, default_value = "2", value_name = "COUNT")]
    keep: NonZeroUsize,

    /// Go on from a checkpoint: this file, or the newest whole one in this directory
    /// [without a path: the directory of --out]
    #[arg(long, value_name = "PATH", num_args = 0..=1)]
    resume: Option<Option<PathBuf>>,

    /// Use only so many training images, for a quick try
    #[arg(long)]
    limit: Option<NonZeroUsize>,

    /// Gradients are averaged in buckets of this size, in MiB
    #[arg(long, default_value = "25")]
    bucket_mib: NonZeroUsize,

    /// How the ranks meet: env://, mpi:// or tcp://host:port?rank=R&world_size=W
    /// [default: env:// under a launcher, else this process is alone]
    #[arg(long)]
    init: Option<String>,

    /// How to average: direct, doubling, binomial [default: by size]. The result is the same
    #[arg(long)]
    algorithm: Option<String>,
}

impl Options {
    fn shards(&self) -> Option<usize> {
        self.shards.map(NonZeroUsize::get)
    }

    /// Images per step, on all ranks together.
    fn images_per_step(&self, world_size: usize) -> usize {
        self.batch_size.get() * self.shards().unwrap_or(world_size)
    }

    fn learning_rate(&self, world_size: usize) -> f64 {
        self.lr.unwrap_or(0.05 * self.images_per_step(world_size) as f64 / 128.0)
    }
}

fn main() -> ExitCode {
    let options = Options::parse();
    let is_plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    let wanted = std::env::var("RUST_LOG").ok().and_then(|wanted| wanted.parse().ok());
    let wanted = wanted.unwrap_or_else(|| Targets::new().with_default(LevelFilter::WARN));
    let to_stderr = tracing_subscriber::fmt::layer()
        .with_writer(drumline::log::stderr)
        .with_ansi(io::stderr().is_terminal() && !is_plain);
    tracing_subscriber::registry().with(to_stderr).with(wanted).init();
    match train_together(&options) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            let rank = std::env::var("RANK").map(|rank| format!("rank {rank}: "));
            let _ = writeln!(io::stderr(), "Error: {}{error:#}", rank.unwrap_or_default());
            ExitCode::FAILURE
        }
    }
}

fn train_together(options: &Options) -> Result<()> {
    run(options, &connect(options)?)
}

/// Meets the other ranks, if there are any.
fn connect(options: &Options) -> Result<ProcessGroup> {
    let launched = is_launched().then_some("env://");
    let Some(url) = options.init.as_deref().or(launched) else {
        return Ok(ProcessGroup::alone());
    };
    let mut config = Config::from_env()?;
    if options.algorithm.is_some() {
        config.all_reduce.clone_from(&options.algorithm);
    }
    Ok(init_process_group(url, &config)?)
}

fn run(options: &Options, group: &ProcessGroup) -> Result<()> {
    let data = load_data(options)?;
    let name = data.name;
    let settings = Settings {
        data: format!("{}, {} images", data.name, data.train.count()),
        images_per_step: options.images_per_step(group.world_size()),
        shards: options.shards(),
        learning_rate: options.learning_rate(group.world_size()),
        seed: options.seed,
    };
    if group.rank() == 0 {
        say(format_args!("{}", data.describe()))?;
        say(format_args!(
            "{}{} x {} images per step, learning rate {}",
            count(group.world_size(), "rank"),
            options
                .shards()
                .map_or(String::new(), |shards| format!(", {}", count(shards, "shard"))),
            options.batch_size,
            settings.learning_rate,
        ))?;
    }

    let device = Device::flex().autodiff();
    let batch_size = options.batch_size.get();
    let shards = options.shards();
    let train = images::shuffled(data.train, batch_size, options.seed, shards, &device, group)?;
    let model = Classifier::new(options.hidden.get(), options.seed, &device);
    let mut state = State::new(model, train, &settings);
    let directory = CheckpointDirectory::new(&options.out).keep(options.keep);
    let checkpoints = Checkpoints::open_with(directory, group)?;
    let mut last_checkpoint = PathBuf::new();
    if let Some(path) = &options.resume {
        state = state.resume(&checkpoints, path.as_ref().unwrap_or(&options.out), group)?;
        last_checkpoint = state.training.resumed_from().unwrap_or(&options.out).to_owned();
        if group.rank() == 0 {
            let path = last_checkpoint.display();
            let steps = count(state.training.steps as usize, "step");
            let epochs = count(state.epochs.len(), "whole epoch");
            say(format_args!("resuming from {path}: after {steps}, {epochs}"))?;
        }
    }
    let later = |steps: &Vec<u64>| steps.last().is_some_and(|last| *last > state.training.steps);
    if group.rank() == 0 && later(&checkpoints.directory().steps()?) {
        say(format_args!(
            "the next checkpoint replaces those of another run in {}; --resume would go on from \
             them",
            options.out.display()
        ))?;
    }

    let buckets = DdpOptions::default().bucket_bytes(options.bucket_mib.get() << 20);
    let of_ddp = shards.into_iter().fold(buckets.seed(options.seed), DdpOptions::shards);
    let ddp;
    (ddp, state.training.model) =
        DistributedDataParallel::wrap_with(state.training.model, group, &of_ddp)?;
    let save_every = options.checkpoint_every;
    let trainer = Trainer::new(&ddp, batch_size, &settings, &device, &checkpoints, save_every);
    // With shards, training goes on when a rank has died. So what ranks do together are pieces of this.
    let elastic = ddp.elastic();
    while state.epochs.len() < options.epochs.get() {
        let trained;
        (state, trained) = trainer.epoch(state, &mut Progress::new(elastic.group().rank()))?;
        let model = &state.training.model;
        let (accuracy, digest) = elastic.run(|group| -> Result<_> {
            let test = images::shard(data.test.clone(), group)?;
            Ok((train::evaluate(model, &test, group)?, train::common_digest(model, group)?))
        })?;
        let exposed = trained.exposed_percent();
        state.epochs.push(Epoch { losses: trained.losses, accuracy });
        last_checkpoint = elastic.run(|group| state.save(&checkpoints.over(group), None))?;
        if elastic.group().rank() == 0 {
            say(format_args!(
                "epoch {}/{}  loss {:.4}  test accuracy {:.2} %  {} images/s  \
                 communication {:.2} s, {exposed:.0} % exposed  parameters {digest:016x}",
                state.epochs.len(),
                options.epochs,
                state.epochs[state.epochs.len() - 1].loss(),
                accuracy * 100.0,
                HumanCount(trained.images_per_s as u64),
                trained.communication.as_secs_f64(),
            ))?;
        }
    }

    if elastic.group().rank() == 0 {
        let picture = options.out.join("training.svg");
        let title = format!("{} on {}", name, count(group.world_size(), "rank"));
        write_whole(&picture, &plot::svg(&title, &state.epochs)?)
            .with_context(|| format!("cannot write {}", picture.display()))?;
        say(format_args!(
            "checkpoint {}, picture {}",
            last_checkpoint.display(),
            picture.display()
        ))?;
    }
    Ok(elastic.close()?)
}

fn load_data(options: &Options) -> Result<DataSet> {
    let mut data = DataSet::load(options.data.as_deref())?;
    if let Some(limit) = options.limit {
        data.truncate(limit.get());
    }
    Ok(data)
}

/// Prints a line. (`println!` panics when the reader has closed the pipe.)
fn say(line: fmt::Arguments<'_>) -> io::Result<()> {
    writeln!(io::stdout(), "{line}")
}

fn count(n: usize, what: &str) -> String {
    format!("{} {what}{}", HumanCount(n as u64), if n == 1 { "" } else { "s" })
}

/// Writes a file atomically: the path has the whole text or its old content.
fn write_whole(path: &Path, text: &str) -> io::Result<()> {
    let partial = path.with_extension("partial");
    let written = fs::write(&partial, text).and_then(|()| fs::rename(&partial, path));
    if written.is_err() {
        let _ = fs::remove_file(&partial); // The error that is returned says more.
    }
    written
}

fn positive(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(number) if number > 0.0 && number.is_finite() => Ok(number),
        _ => Err("expected a number greater than 0".into()),
    }
}
