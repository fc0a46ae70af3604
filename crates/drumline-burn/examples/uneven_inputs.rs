//! Four ranks with 10, 7, 3 and 0 batches train together. A rank without data shadows the steps of the others.
//!
//! ```sh
//! cargo run --release -p drumline-burn --example uneven_inputs
//! ```
//!
//! The guide is `docs/guides/uneven-inputs.md`. With torch this is what `Join` is for.

use burn::{
    nn::{Initializer, Linear, LinearConfig},
    optim::SgdConfig,
    tensor::{Device, Tensor},
};
use drumline::ProcessGroup;
use drumline_burn::{DdpOptions, DistributedDataParallel, Divisor, Result, parameters_digest};

/// How many batches each rank has.
const BATCHES: [usize; 4] = [10, 7, 3, 0];

fn main() -> Result<(), drumline::Error> {
    drumline::spawn(BATCHES.len(), |_| rank())?.join()
}

/// What each process does.
fn rank() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    for divisor in [Divisor::InitialWorld, Divisor::ActiveRanks] {
        train(&group, divisor)?;
    }
    group.destroy()
}

fn train(group: &ProcessGroup, divisor: Divisor) -> Result<()> {
    let device = Device::flex().autodiff();
    let model = LinearConfig::new(1, 1).with_initializer(Initializer::Zeros).init(&device);
    let options = DdpOptions::default().divisor(divisor);
    let (ddp, mut model) = DistributedDataParallel::wrap_with(model, group, &options)?;
    let mut optimizer = SgdConfig::new().init();

    for batch in 0..BATCHES[group.rank()] {
        let gradients = ddp.backward(loss(&model, group.rank(), batch, &device), &model)?;
        model = optimizer.step(0.1, model, gradients);
    }
    // Every rank does this, also the one with the most batches.
    let mut shadowed = 0;
    while let Some(gradients) = ddp.shadow(&model)? {
        model = optimizer.step(0.1, model, gradients);
        shadowed += 1;
    }

    let weight: f32 = model.weight.val().into_scalar();
    println!(
        "{divisor:?}: rank {} trained {} steps and shadowed {shadowed}: weight {weight:.6}, digest {:016x}",
        group.rank(),
        BATCHES[group.rank()],
        parameters_digest(&model)?,
    );
    Ok(())
}

/// How far the model is from y = 2x + 1, on four samples that only this rank has.
fn loss(model: &Linear, rank: usize, batch: usize, device: &Device) -> Tensor<1> {
    let first = (rank + 4 * batch) as f32 / 20.0;
    let x =
        Tensor::<2>::from_floats([[first], [first + 0.1], [first + 0.2], [first + 0.3]], device);
    (model.forward(x.clone()) - (x * 2.0 + 1.0)).square().mean()
}
