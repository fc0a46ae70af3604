//! Trains a classifier of small images with burn's `Learner`, in one process or in many that train together.
//!
//! ```sh
//! cargo run --release -p fashion-mnist-learner                                    # one process
//! drumline run --nproc-per-node 2 target/release/fashion-mnist-learner            # two
//! drumline run --nproc-per-node 4 target/release/fashion-mnist-learner --shards 8 # any number: the same parameters
//! ```
//!
//! What is there for many processes: the group, `distribute`, and that the last lines are for rank 0.

use std::{num::NonZeroUsize, path::PathBuf, sync::Arc};

use anyhow::{Result, bail};
use burn::{
    lr_scheduler::constant::ConstantLr,
    optim::AdamConfig,
    tensor::Device,
    train::{
        Learner, SupervisedTraining,
        metric::{AccuracyMetric, LossMetric},
    },
};
use clap::Parser;
use drumline::ProcessGroup;
use drumline_burn::{
    DdpOptions, DistributedDataParallel, data::DataLoaderBuilder, distribute, parameters_digest,
};
use fashion_mnist::data::DataSet;
use fashion_mnist_learner::{
    data::{Numbers, Stack, loader},
    model::Classifier,
};

/// Trains a network on Fashion-MNIST, or on handwritten digits where that is not to be had, alone or as one rank of a
/// job that `drumline run` started.
#[derive(Debug, Parser)]
#[command(name = "fashion-mnist-learner")]
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

    /// Makes a step so many shards, whatever the number of ranks: all numbers of ranks give the same bits, and the others go on
    /// when a rank dies
    #[arg(long)]
    shards: Option<NonZeroUsize>,

    /// Go on after the checkpoint of this epoch
    #[arg(long)]
    resume: Option<usize>,

    /// Directory for checkpoints, metrics and the log
    #[arg(long, default_value = "runs/fashion-mnist-learner")]
    out: PathBuf,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let group = ProcessGroup::init_or_alone()?;
    let device = Device::flex().autodiff();
    device.seed(42);
    let data = DataSet::load(options.data.as_deref())?;
    let description = data.describe();

    let batch_size = options.batch_size.get();
    let shards = options.shards.map(NonZeroUsize::get);
    let train = match shards {
        None => loader(data.train, batch_size, Some(42)),
        Some(count) => {
            let images = Numbers(data.train.count());
            let builder = DataLoaderBuilder::new(Stack(Arc::new(data.train)));
            builder.batch_size(batch_size).shuffle(42).shards(count).build(images, &group)?
        }
    };
    let mut training = SupervisedTraining::new(&options.out, train, loader(data.test, 500, None))
        .metrics((AccuracyMetric::new(), LossMetric::new()))
        .with_default_checkpointers()
        .num_epochs(options.epochs.get())
        .summary();
    if let Some(epoch) = options.resume {
        training = training.checkpoint(epoch);
    }

    let model = Classifier::new(&device);
    // Without shards, wrapping is for speed alone: gradients travel while backward still computes others.
    let of_ddp = shards.into_iter().fold(DdpOptions::default(), DdpOptions::shards);
    let (ddp, model) = DistributedDataParallel::wrap_with(model, &group, &of_ddp)?;
    let learner = Learner::new(model, AdamConfig::new().init(), ConstantLr::new(0.001));
    let result = distribute(training, &group).wrapped(&ddp).launch(learner);

    if let Some(error) = result.error {
        bail!("{error}");
    }
    // With shards, it is what is left of the group.
    if ddp.group().rank() == 0 {
        println!("{description}");
        println!("parameters: {:016x}", parameters_digest(&result.model)?);
    }
    Ok(ddp.elastic().close()?)
}
