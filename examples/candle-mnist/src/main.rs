//! Trains a small classifier of images with candle, in one process or in many that train together.
//!
//! ```sh
//! cargo run --release -p candle-mnist                                # one process
//! drumline run --nproc-per-node 2 target/release/candle-mnist        # two
//! ```
//!
//! The loop is that of candle's own example `mnist-training`. The page `docs/start/candle.md` shows what differs.

mod model;

use std::{
    io::Write,
    num::{NonZeroU64, NonZeroUsize},
    path::PathBuf,
};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_nn::{Module, Optimizer, ParamsAdamW, VarBuilder, VarMap, loss};
use clap::Parser;
use drumline::{
    ProcessGroup, ReduceOp,
    checkpoint::CheckpointDirectory,
    sampler::{DistributedSampler, evaluation_shard},
};
use drumline_candle::{AdamW, DataParallel, checkpoint, resume, variables_digest};
use fashion_mnist::data::{DataSet, PIXELS, Split};

use crate::model::Mlp;

/// Trains on Fashion-MNIST, or on handwritten digits where that is not to be had, alone or as one rank of a job that
/// `drumline run` started.
#[derive(Clone, Debug, Parser)]
#[command(name = "candle-mnist")]
struct Options {
    /// Directory of the data set [default: where fetch-data.sh of the example fashion-mnist puts it, else built-in
    /// digits]
    #[arg(long)]
    data: Option<PathBuf>,

    /// How often to go through the training images
    #[arg(long, default_value = "3")]
    epochs: u64,

    /// Images per step on each rank
    #[arg(long, default_value = "32")]
    batch_size: NonZeroUsize,

    /// Learning rate of AdamW
    #[arg(long, default_value = "0.001")]
    lr: f64,

    /// Directory of the checkpoints. If it has some, the newest one is resumed
    #[arg(long, default_value = "runs/candle-mnist")]
    out: PathBuf,

    /// Save a checkpoint not only after each epoch, but every so many steps
    #[arg(long, value_name = "STEPS")]
    checkpoint_every: Option<NonZeroU64>,

    /// How many checkpoints to keep
    #[arg(long, default_value = "2", value_name = "COUNT")]
    keep: NonZeroUsize,

    /// Use only so many training images, for a quick try
    #[arg(long)]
    limit: Option<NonZeroUsize>,
}

fn main() -> Result<()> {
    let options = Options::parse();
    let group = ProcessGroup::init_or_alone()?;
    train(&options, &group).with_context(|| format!("rank {} fails", group.rank()))?;
    Ok(group.destroy()?)
}

fn train(options: &Options, group: &ProcessGroup) -> Result<()> {
    let mut data = DataSet::load(options.data.as_deref())?;
    if let Some(limit) = options.limit {
        data.truncate(limit.get());
    }
    say(group, format_args!("{}", data.describe()))?;

    let device = Device::Cpu;
    let varmap = VarMap::new();
    let vb = VarBuilder::from_varmap(&varmap, DType::F32, &device);
    let model = Mlp::new(vb)?;
    let mut ddp = DataParallel::wrap(&varmap, group)?;
    let params = ParamsAdamW { lr: options.lr, ..ParamsAdamW::default() };
    let mut optimizer = AdamW::new(varmap.all_vars(), params)?;

    let batch_size = options.batch_size.get();
    let batches = data.train.count() / batch_size;
    ensure!(batches > 0, "{} images are less than a batch", data.train.count());
    let mut sampler =
        DistributedSampler::builder(batches, group.world_size(), group.rank()).build()?;

    let out = CheckpointDirectory::new(&options.out).keep(options.keep);
    out.prepare_on_root(group)?;
    let mut step = 0;
    if let Some(found) = out.newest_on_root(group)? {
        resume(&found.checkpoint, &varmap, &mut optimizer, &mut sampler)?;
        step = found.step;
        say(group, format_args!("resumed after {step} steps from {}", found.path.display()))?;
    }

    let first = sampler.state().epoch + u64::from(sampler.len() == 0);
    for epoch in first..options.epochs {
        if epoch > sampler.state().epoch {
            sampler.set_epoch(epoch);
        }
        let order: Vec<usize> = sampler.iter().collect();
        let mut losses = 0.0;
        for &batch in &order {
            let (images, labels) =
                tensors(&data.train, batch * batch_size..(batch + 1) * batch_size, &device)?;
            let loss = loss::cross_entropy(&model.forward(&images)?, &labels)?;
            ddp.backward_step(&mut optimizer, &loss)?;
            losses += f64::from(loss.to_scalar::<f32>()?);
            sampler.advance(1);
            step += 1;
            let is_due = options.checkpoint_every.is_some_and(|every| step % every == 0);
            if is_due || sampler.len() == 0 {
                out.save_on_root(group, step, || checkpoint(&varmap, &optimizer, &sampler))?;
            }
        }
        let mut loss = [losses / order.len().max(1) as f64];
        group.all_reduce(&mut loss, ReduceOp::Avg)?;
        let accuracy = 100.0 * evaluate(&model, &data.test, group, &device)?;
        let [loss] = loss;
        say(
            group,
            format_args!("epoch {}  loss {loss:.4}  test accuracy {accuracy:.2} %", epoch + 1),
        )?;
    }
    // Every rank says it: they are equal.
    writeln!(std::io::stdout(), "variables {:016x}", variables_digest(&varmap)?)?;
    Ok(())
}

/// The fraction of the images that `model` recognises. Each image is evaluated by one rank.
fn evaluate(model: &Mlp, images: &Split, group: &ProcessGroup, device: &Device) -> Result<f64> {
    const BATCH_SIZE: usize = 250;
    let shard: Vec<usize> =
        evaluation_shard(images.count(), group.world_size(), group.rank())?.collect();
    let mut counts = [0_i64, shard.len() as i64];
    for batch in shard.chunks(BATCH_SIZE) {
        let (pixels, labels) = tensors(images, batch.iter().copied(), device)?;
        let guesses = model.forward(&pixels)?.argmax(1)?;
        let hits = guesses.eq(&labels)?.to_dtype(DType::U32)?.sum_all()?;
        counts[0] += i64::from(hits.to_scalar::<u32>()?);
    }
    group.all_reduce(&mut counts, ReduceOp::Sum)?;
    Ok(counts[0] as f64 / counts[1] as f64)
}

/// Pixels `[len, PIXELS]` and labels `[len]`.
fn tensors(
    images: &Split,
    indices: impl IntoIterator<Item = usize>,
    device: &Device,
) -> Result<(Tensor, Tensor)> {
    let (pixels, labels) = images.batch(indices);
    let labels: Vec<u32> = labels.into_iter().map(i32::unsigned_abs).collect();
    let count = labels.len();
    let pixels = Tensor::from_vec(pixels, (count, PIXELS), device)?;
    Ok((pixels, Tensor::from_vec(labels, count, device)?))
}

/// Prints a line on rank 0.
fn say(group: &ProcessGroup, line: std::fmt::Arguments<'_>) -> Result<()> {
    if group.rank() == 0 {
        writeln!(std::io::stdout(), "{line}")?;
    }
    Ok(())
}
