//! A step as shards: a closure computes the loss of each shard that this rank has.

use std::cell::Cell;

use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{Device, Distribution, Int, Tensor},
};

use crate::{
    Result,
    checkpoint::generator::step_seed,
    failure::{self, ProgramError},
    step::{Handle, Together},
};

/// What a step of shards gives: the same bits on all ranks, and on any number of ranks.
///
/// ```
/// # use burn::{module::Module, optim::ModuleOptimizer};
/// use drumline_burn::ShardedStep;
///
/// fn update<M: Module>(step: ShardedStep, optimizer: &mut ModuleOptimizer, model: M) -> M {
///     println!("loss {}", step.loss);
///     optimizer.step(0.1, model, step.gradients)
/// }
/// ```
#[derive(Debug)]
#[non_exhaustive]
pub struct ShardedStep<G = GradientsParams> {
    /// The averages over all shards.
    pub gradients: G,
    /// The average of the losses of all shards.
    pub loss: f64,
}

/// Runs step `number`. `loss` computes that of a shard.
pub(crate) fn run<M: Module, const D: usize>(
    handle: &Handle,
    number: u64,
    mut loss: impl FnMut(usize) -> Result<Tensor<D>, ProgramError>,
    model: &M,
) -> Result<ShardedStep> {
    let (running, reducer) = (&handle.running, &handle.reductions.own.reducer);
    let generators: Vec<(Device, u64)> =
        model.devices().into_iter().map(|device| (device.clone(), draw(&device))).collect();
    let (before, steps) = (running.read(model), reducer.steps_before());
    let stepped = handle.elastic.run(|group| {
        reducer.regroup(group, steps)?;
        let mut of_shard_zero = None;
        let (mut gradients, loss) = Together::one(handle, model).shards(number, |shard| {
            running.write(model, &before);
            let seed = step_seed(handle.options.seed, shard, number);
            generators.iter().for_each(|(device, _)| device.seed(seed));
            let loss = during_shard(|| loss(shard));
            if shard == 0 {
                of_shard_zero = Some(running.read(model));
            }
            loss.map_err(failure::program)
        })?;
        running.write(model, of_shard_zero.as_ref().unwrap_or(&before));
        running.copy_from_rank_0(model, group)?;
        Ok(ShardedStep { gradients: gradients.pop().unwrap_or_default(), loss })
    });
    generators.iter().for_each(|(device, seed)| device.seed(*seed));
    if stepped.is_err() {
        running.write(model, &before);
    }
    stepped
}

/// A seed for the generator of a device, so that it goes on from where it was. burn does not let programs read a
/// generator's state.
fn draw(device: &Device) -> u64 {
    const BITS: u32 = 16;
    let digits = Distribution::Uniform(0.0, f64::from(1 << BITS));
    let digits = Tensor::<1, Int>::random([4], digits, device).into_data();
    let digits = digits.try_into_vec_as::<i64>().unwrap_or_default();
    digits.into_iter().fold(0, |seed, digit| seed << BITS | digit as u64)
}

thread_local! {
    static IS_SHARD: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread computes a shard.
pub(crate) fn is_shard() -> bool {
    IS_SHARD.get()
}

fn during_shard<T>(work: impl FnOnce() -> T) -> T {
    /// Also when `work` panics.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            IS_SHARD.set(false);
        }
    }
    IS_SHARD.set(true);
    let _end = End;
    work()
}
