//! Training with burn: processes that share the GPU keep equal parameters, and those that one process finds on the CPU.

use std::process::Stdio;

use anyhow::{Context, bail, ensure};
use burn::module::{Module, Param};
use burn::optim::SgdConfig;
use burn::tensor::{Device, Tensor, TensorData, activation::tanh};
use drumline::ProcessGroup;
use drumline_burn::{DistributedDataParallel, named_tensors, parameters_digest};

use crate::Options;
use crate::left_out::LeftOut;
use crate::part::{Part, again};

const RANKS: usize = 2;
const STEPS: usize = 20;
/// Samples of a rank in a step.
const BATCH: usize = 8;
const WIDTH: usize = 32;
const LEARNING_RATE: f64 = 0.05;

/// What may lie between a parameter of the ranks and of one process, which adds in another order.
const FARTHEST: f32 = 1e-5;

/// How burn ends where it lacks a library that it loads at run time, such as the compiler of its kernels.
const LACKS_LIBRARY: &str = "Unable to dynamically load";

/// Has two ranks train.
pub(crate) fn measure(options: &Options, left_out: &mut LeftOut) -> anyhow::Result<()> {
    println!("\nDistributedDataParallel of burn, {RANKS} processes, beside one process on the CPU");
    if !cfg!(feature = "burn-cuda") {
        left_out.add(
            "a program of burn on CUDA",
            "this one trains on the CPU: cargo build --release -p gpu-check --features burn-cuda",
        );
    }
    let output = again(options, Part::OfBurn, RANKS)?.stdout(Stdio::inherit()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    match said.lines().find(|line| line.contains(LACKS_LIBRARY)) {
        Some(line) => left_out.add("a program of burn on CUDA", line),
        None => bail!("the program of burn failed: {}\n{said}", output.status),
    }
    Ok(())
}

/// Where the ranks train.
fn device(options: &Options) -> Device {
    #[cfg(feature = "burn-cuda")]
    let device = Device::cuda(options.device);
    #[cfg(not(feature = "burn-cuda"))]
    let device = {
        let _ = options;
        Device::flex()
    };
    device.autodiff()
}

/// Two layers. Products are taken one by one and then summed: matrix products of a GPU may round to fewer bits, and
/// would hide an error in the averages.
#[derive(Module, Debug)]
struct Network {
    hidden: Param<Tensor<2>>,
    head: Param<Tensor<2>>,
}

impl Network {
    fn new(seed: usize, device: &Device) -> Network {
        let layer = |outputs, seed| Param::from_data(data(outputs, WIDTH, seed), device);
        Network { hidden: layer(WIDTH, 7 * seed), head: layer(1, 7 * seed + 1) }
    }

    fn forward(&self, input: Tensor<2>) -> Tensor<2> {
        product(tanh(product(input, self.hidden.val())), self.head.val())
    }

    /// The error over samples of some ranks in a step.
    fn loss(&self, step: usize, ranks: std::ops::Range<usize>, device: &Device) -> Tensor<1> {
        let samples =
            ranks.map(|rank| Tensor::from_data(data(BATCH, WIDTH, sample(step, rank)), device));
        let input: Tensor<2> = Tensor::cat(samples.collect(), 0);
        let target = input.clone().sum_dim(1).cos();
        (self.forward(input) - target).square().mean()
    }
}

/// Rows of `input` times rows of `weight`.
fn product(input: Tensor<2>, weight: Tensor<2>) -> Tensor<2> {
    let ([rows, width], [outputs, _]) = (input.dims(), weight.dims());
    let products = input.reshape([rows, 1, width]) * weight.reshape([1, outputs, width]);
    products.sum_dim(2).reshape([rows, outputs])
}

/// Names the samples of a rank in a step.
fn sample(step: usize, rank: usize) -> usize {
    1_000 + step * RANKS + rank
}

/// Numbers between -1/4 and 1/4 that depend on `seed`.
fn data(rows: usize, columns: usize, seed: usize) -> TensorData {
    let value = |at: usize| ((seed * 7_919 + at) as f32 * 0.618 + 0.3).sin() / 4.0;
    TensorData::new((0..rows * columns).map(value).collect(), [rows, columns])
}

/// What one rank does.
pub(crate) fn one(options: &Options, rank: usize) -> anyhow::Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = device(options);
    // The ranks begin with different parameters, and get those of rank 0.
    let (ddp, mut model) = DistributedDataParallel::wrap(Network::new(rank, &device), &group)?;
    let mut optimizer = SgdConfig::new().init();
    for step in 0..STEPS {
        let loss = model.loss(step, rank..rank + 1, &device);
        let gradients = ddp.backward(loss, &model)?;
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    are_equal(&group, parameters_digest(&model)?)?;
    if rank == 0 {
        let distance = farthest(&model, &of_one_process()?)?;
        let start = farthest(&model, &Network::new(0, &Device::flex()))?;
        ensure!(start > 100.0 * FARTHEST, "the parameters have hardly moved: {start:e}");
        ensure!(distance <= FARTHEST, "the parameters are {distance:e} from those of one process");
        println!(
            "     {device:?}: after {STEPS} steps the bits of all ranks are equal, and at most {distance:.1e} from one process"
        );
    }
    Ok(group.destroy()?)
}

/// What one process comes to with the samples of all ranks, on the CPU.
fn of_one_process() -> anyhow::Result<Network> {
    let device = Device::flex().autodiff();
    let mut model = Network::new(0, &device);
    let (ddp, wrapped) = DistributedDataParallel::wrap(model, &ProcessGroup::alone())?;
    model = wrapped;
    let mut optimizer = SgdConfig::new().init();
    for step in 0..STEPS {
        let gradients = ddp.backward(model.loss(step, 0..RANKS, &device), &model)?;
        model = optimizer.step(LEARNING_RATE, model, gradients);
    }
    Ok(model)
}

fn are_equal(group: &ProcessGroup, digest: u64) -> anyhow::Result<()> {
    let mut all = vec![0; group.world_size()];
    group.all_gather(&[digest], &mut all)?;
    ensure!(all.iter().all(|other| *other == digest), "ranks have different parameters: {all:x?}");
    Ok(())
}

/// The largest difference of two parameters.
fn farthest(one: &Network, other: &Network) -> anyhow::Result<f32> {
    let numbers = |model: &Network| -> anyhow::Result<Vec<f32>> {
        let tensors = named_tensors(model)?;
        let bytes = tensors.iter().flat_map(|tensor| tensor.values.as_bytes().as_chunks::<4>().0);
        Ok(bytes.map(|bytes| f32::from_ne_bytes(*bytes)).collect())
    };
    let (one, other) = (numbers(one)?, numbers(other)?);
    ensure!(one.len() == other.len() && one.iter().all(|it| it.is_finite()), "no numbers");
    let differences = one.iter().zip(&other).map(|(one, other)| (one - other).abs());
    differences.max_by(f32::total_cmp).context("no parameters")
}
