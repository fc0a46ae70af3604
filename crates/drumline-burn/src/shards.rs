//! A step as shards: a closure computes the loss of each shard that this rank has.

use std::cell::Cell;

use burn::{
    module::Module,
    optim::GradientsParams,
    tensor::{Device, Distribution, Int, Tensor},
};

use drumline::{ElasticGroup, ProcessGroup, ddp::GradientReducer};

use crate::{
    Result,
    checkpoint::generator::step_seed,
    failure::{self, ProgramError},
    running::{Running, Tensors},
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
    let frame = Frame {
        elastic: &handle.elastic,
        reducer: &handle.reductions.own.reducer,
        running: &handle.running,
        seed: handle.options.seed,
    };
    frame.run(number, model, |_, shards| {
        let of_shard = |shard| shards.compute(shard, || loss(shard)).map_err(failure::program);
        let (mut gradients, loss) = Together::one(handle, model).shards(number, of_shard)?;
        Ok(ShardedStep { gradients: gradients.pop().unwrap_or_default(), loss })
    })
}

/// What surrounds a step of shards, so that it is the same on any number of ranks, and again after a death.
pub(crate) struct Frame<'a> {
    pub(crate) elastic: &'a ElasticGroup,
    pub(crate) reducer: &'a GradientReducer,
    pub(crate) running: &'a Running,
    pub(crate) seed: u64,
}

/// A run of a step: what its shards begin from.
pub(crate) struct Shards<'a, M> {
    frame: &'a Frame<'a>,
    number: u64,
    model: &'a M,
    before: &'a Tensors,
    generators: &'a [(Device, u64)],
    of_shard_zero: Option<Tensors>,
}

impl Frame<'_> {
    /// Runs step `number`. `step` [computes](Shards::compute) this rank's shards and averages them with those of the group
    /// that it gets. It runs again if a rank dies.
    pub(crate) fn run<M: Module, T>(
        &self,
        number: u64,
        model: &M,
        mut step: impl FnMut(&ProcessGroup, &mut Shards<'_, M>) -> Result<T>,
    ) -> Result<T> {
        let draw = |device: Device| (device.clone(), draw(&device));
        let generators: Vec<(Device, u64)> = model.devices().into_iter().map(draw).collect();
        let (before, steps) = (self.running.read(model), self.reducer.steps_before());
        let stepped = self.elastic.run(|group| {
            self.reducer.regroup(group, steps)?;
            let (before, generators, of_shard_zero) = (&before, &generators[..], None);
            let mut shards =
                Shards { frame: self, number, model, before, generators, of_shard_zero };
            let result = step(group, &mut shards)?;
            self.running.write(model, shards.of_shard_zero.as_ref().unwrap_or(before));
            self.running.copy_from_rank_0(model, group)?;
            Ok(result)
        });
        generators.iter().for_each(|(device, seed)| device.seed(*seed));
        if stepped.is_err() {
            self.running.write(model, &before);
        }
        stepped
    }
}

impl<M: Module> Shards<'_, M> {
    /// Lets `work` compute a shard, with the random numbers of this shard and the running statistics of before the step.
    pub(crate) fn compute<T>(&mut self, shard: usize, work: impl FnOnce() -> T) -> T {
        let running = self.frame.running;
        running.write(self.model, self.before);
        let seed = step_seed(self.frame.seed, shard, self.number);
        self.generators.iter().for_each(|(device, _)| device.seed(seed));
        let result = during_shard(work);
        if shard == 0 {
            self.of_shard_zero = Some(running.read(self.model));
        }
        result
    }
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
