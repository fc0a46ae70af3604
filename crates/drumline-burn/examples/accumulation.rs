//! Two ranks with three micro-batches each make the same steps as one process with all of the samples.
//!
//! ```sh
//! cargo run --release -p drumline-burn --example accumulation
//! ```
//!
//! Micro-batches are for batches that do not fit into memory. Gradients travel once in a step, with the last of them.
//! With torch this is what `no_sync` is for.

use burn::{
    nn::{Initializer, Linear, LinearConfig},
    optim::{GradientsParams, SgdConfig},
    tensor::{Device, Tensor},
};
use drumline::ProcessGroup;
use drumline_burn::{DistributedDataParallel, Result};

const STEPS: usize = 20;
const RANKS: usize = 2;
const MICRO_BATCHES: usize = 3;
/// Samples of a micro-batch.
const SAMPLES: usize = 4;

fn main() -> Result<(), drumline::Error> {
    drumline::spawn(RANKS, |_| rank())?.join()
}

/// What each process does.
fn rank() -> Result<()> {
    let group = ProcessGroup::from_env()?;
    let device = Device::flex().autodiff();
    let new = || LinearConfig::new(1, 1).with_initializer(Initializer::Zeros).init(&device);
    let (ddp, mut model) = DistributedDataParallel::wrap(new(), &group)?;
    let mut optimizer = SgdConfig::new().init();
    for step in 0..STEPS {
        let own = samples(step, &device).chunk(RANKS, 0).swap_remove(group.rank());
        for (number, micro_batch) in own.chunk(MICRO_BATCHES, 0).into_iter().enumerate() {
            // Losses are added up. Each contributes its share of the mean.
            let loss = loss(&model, micro_batch) / MICRO_BATCHES as f32;
            if number + 1 < MICRO_BATCHES {
                ddp.accumulate(loss, &model)?; // sends nothing
            } else {
                let gradients = ddp.backward(loss, &model)?; // sends the sum of all three
                model = optimizer.step(0.1, model, gradients);
            }
        }
    }

    // The same steps in one process.
    let (mut alone, mut optimizer) = (new(), SgdConfig::new().init());
    for step in 0..STEPS {
        let gradients = loss(&alone, samples(step, &device)).backward();
        alone = optimizer.step(0.1, alone.clone(), GradientsParams::from_grads(gradients, &alone));
    }

    let weight = |model: &Linear| model.weight.val().into_scalar::<f32>();
    println!(
        "rank {}: {RANKS} ranks with {MICRO_BATCHES} micro-batches of {SAMPLES}: weight {:.6}; \
         one process with {}: weight {:.6}",
        group.rank(),
        weight(&model),
        RANKS * MICRO_BATCHES * SAMPLES,
        weight(&alone),
    );
    group.destroy()
}

/// The values x of all samples of a step.
fn samples(step: usize, device: &Device) -> Tensor<2> {
    const COUNT: usize = RANKS * MICRO_BATCHES * SAMPLES;
    let x: Vec<f32> =
        (0..COUNT).map(|number| ((step + number * 5) % COUNT) as f32 / 20.0).collect();
    Tensor::<1>::from_floats(&x[..], device).reshape([COUNT, 1])
}

/// How far the model is from y = 2x + 1.
fn loss(model: &Linear, x: Tensor<2>) -> Tensor<1> {
    (model.forward(x.clone()) - (x * 2.0 + 1.0)).square().mean()
}
