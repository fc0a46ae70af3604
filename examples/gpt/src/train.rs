//! The training, on one rank.

use std::{f64::consts::PI, fs};

use anyhow::{Context, Result, ensure};
use burn::{
    data::dataloader::DataLoader,
    module::Module,
    nn::loss::CrossEntropyLossConfig,
    optim::AdamWConfig,
    tensor::{Device, Tensor},
};
use drumline::{ProcessGroup, ReduceOp, checkpoint::Checkpoint};
use drumline_burn::{
    DistributedDataParallel,
    checkpoint::{Checkpoints, TrainingState},
    clip_grad_norm,
    data::{DataLoaderBuilder, Totals},
    parameters_digest,
};

use crate::{
    Options, export,
    history::History,
    model::{Gpt, GptConfig},
    pace::Pace,
    say,
    text::{Batch, Loader, Stack, Text},
};

/// Trains up to `--steps`, from the start or from a checkpoint. All ranks make this call.
pub(crate) fn train(options: &Options, group: &ProcessGroup) -> Result<()> {
    let text = Text::read(&options.text)?;
    let (windows, held_out) = text.windows(options.places)?;
    let device = Device::flex().autodiff();
    let batches = |size| DataLoaderBuilder::new(Stack).batch_size(size).num_workers(1);
    let loader = batches(options.batch_size.get())
        .set_device(device.clone())
        .shuffle(options.seed)
        .build(windows, group)?;
    let validation = batches(2 * options.batch_size.get()).build_shard(held_out, group)?;

    let config = GptConfig {
        characters: text.alphabet.len(),
        places: options.places,
        layers: options.layers,
        width: options.width,
        heads: crate::HEADS,
    };
    let model = Gpt::new(&config, options.seed, &device);
    if group.rank() == 0 {
        let (parameters, ranks) = (model.num_params(), group.world_size());
        let (size, places) = (options.batch_size, options.places);
        say(format_args!(
            "{parameters} parameters; {ranks} x {size} windows of {places} per step"
        ))?;
    }

    let optimizer = AdamWConfig::new().with_epsilon(1e-8).with_weight_decay(0.01);
    let state = TrainingState::new(model, optimizer)
        .sampler(loader)
        .setting("characters of the text", text.characters.len())
        .setting("windows per step", options.batch_size.get() * group.world_size())
        .setting("learning rate", options.lr)
        .setting("planned steps", options.steps_planned())
        .setting("seed", options.seed);
    let checkpoints = Checkpoints::open(&options.out, group)?;
    let mut training = if options.resume { checkpoints.resume(state)? } else { state };
    let mut history = History::load(&training.values)?;

    let ddp;
    (ddp, training.model) = DistributedDataParallel::wrap(training.model, group)?;
    let mut pace = Pace::new(training.steps, &ddp);
    while training.steps < options.steps {
        // The rest of the epoch.
        for batch in training.sampler.clone().iter() {
            let loss = loss_of(&training.model, batch?);
            let mut mean = [loss.clone().into_scalar::<f32>()];
            let mut gradients = ddp.backward(loss, &training.model)?;
            clip_grad_norm(&mut gradients, &training.model, 1.0)?;
            let rate = learning_rate(training.steps, options.steps_planned(), options.lr);
            training.model = training.optimizer.step(rate, training.model, gradients);
            training.steps += 1;

            group.all_reduce(&mut mean, ReduceOp::Avg)?;
            let (step, mean) = (training.steps, f64::from(mean[0]));
            ensure!(mean.is_finite(), "the loss became {mean} in step {step}; try a smaller --lr");
            history.training.push((step as f64, mean));
            if step.is_multiple_of(options.every.get()) || step == options.steps {
                let told = pace.tell(step, options.places * options.batch_size.get(), &ddp);
                let validated = validate(&training.model, &validation, group)?;
                history.validation.push((step as f64, validated));
                training.values = Checkpoint::default();
                history.save(&mut training.values)?;
                checkpoints.save(&training)?;
                if group.rank() == 0 {
                    say(format_args!(
                        "step {step}: loss {mean:.4}, validation {validated:.4}, {told}"
                    ))?;
                }
                pace = Pace::new(step, &ddp);
            }
            if step == options.steps {
                break;
            }
        }
    }

    finish(options, group, &text, &history, &training.model, training.steps)
}

/// Writes what is asked for, a continuation of the text, and the picture.
fn finish(
    options: &Options,
    group: &ProcessGroup,
    text: &Text,
    history: &History,
    model: &Gpt,
    steps: u64,
) -> Result<()> {
    let digest = parameters_digest(model)?;
    say(format_args!("parameters {digest:016x} after {steps} steps"))?;
    let first = &text.characters[..options.places.min(text.characters.len())];
    if let Some(file) = &options.export {
        Checkpoint::write_on_root(group, file, || export::to_torch(model, &text.alphabet))?;
    }
    if let Some(file) = &options.logits {
        Checkpoint::write_on_root(group, file, || export::scores_of(model, first))?;
    }
    if group.rank() == 0 {
        let start = first[..first.len().min(20)].to_vec();
        let continued = model.continued(start, options.sample, options.seed);
        say(format_args!("{}", text.text(&continued)))?;
        let picture = options.out.join("loss.svg");
        let (parameters, ranks) = (model.num_params(), group.world_size());
        let title = format!("{parameters} parameters, world size {ranks}");
        fs::write(&picture, history.picture(&title)?)
            .with_context(|| format!("cannot write {}", picture.display()))?;
        say(format_args!("the loss is drawn in {}", picture.display()))?;
    }
    Ok(())
}

/// In nats per character.
fn loss_of(model: &Gpt, Batch { inputs, targets }: Batch) -> Tensor<1> {
    let scores: Tensor<2> = model.forward(inputs).flatten(0, 1);
    CrossEntropyLossConfig::new().init(&scores.device()).forward(scores, targets)
}

/// The loss over all windows for validation. Each rank computes a part.
fn validate(model: &Gpt, windows: &Loader, group: &ProcessGroup) -> Result<f64> {
    let model = model.valid();
    let mut totals = Totals::default();
    for batch in windows.iter() {
        let batch = batch?;
        let [count, _] = batch.inputs.dims();
        let loss = f64::from(loss_of(&model, batch).into_scalar::<f32>());
        totals.add([loss * count as f64], count as u64);
    }
    let [mean] = totals.over(group)?.means();
    Ok(mean)
}

/// Up for a twentieth of the steps, then down along a cosine to a tenth.
fn learning_rate(step: u64, steps: u64, peak: f64) -> f64 {
    let warm_up = (steps / 20).max(1);
    if step < warm_up {
        return peak * (step + 1) as f64 / warm_up as f64;
    }
    let done = (step - warm_up) as f64 / (steps - warm_up).max(1) as f64;
    peak * (0.1 + 0.9 * (1.0 + (PI * done.min(1.0)).cos()) / 2.0)
}
