//! Checkpoints of a whole training, in three lines: training that is resumed ends with the same bits as
//! training that was never interrupted.
//!
//! ```
//! use burn::{nn::LinearConfig, optim::AdamWConfig, tensor::{Device, Tensor}};
//! use drumline::{ProcessGroup, sampler::DistributedSampler};
//! use drumline_burn::{
//!     DistributedDataParallel, Result,
//!     checkpoint::{Checkpoints, TrainingState},
//!     parameters_digest,
//! };
//!
//! /// Trains up to `steps` steps, and returns the digest of the parameters.
//! fn train(group: &ProcessGroup, out: &std::path::Path, steps: u64) -> Result<u64> {
//!     let device = Device::flex().autodiff();
//!     device.seed(7);
//!     let model = LinearConfig::new(2, 1).init(&device);
//!     let sampler = DistributedSampler::builder(64, group.world_size(), group.rank()).build()?;
//!     let state = TrainingState::new(model, AdamWConfig::new()).sampler(sampler);
//!
//!     let checkpoints = Checkpoints::open(out, group)?; // 1: a directory
//!     let mut training = checkpoints.resume(state)?; // 2: from the newest file, if there is one
//!     let ddp;
//!     (ddp, training.model) = DistributedDataParallel::wrap(training.model, group)?;
//!     let indices: Vec<usize> = training.sampler.iter().collect();
//!     for batch in indices.chunks(8) {
//!         if training.steps == steps {
//!             break; // as if the power failed
//!         }
//!         let input = Tensor::<2>::full([batch.len(), 2], batch[0] as f32, &device);
//!         let loss = training.model.forward(input).square().mean();
//!         let gradients = ddp.backward(loss, &training.model)?;
//!         training.model = training.optimizer.step(0.01, training.model, gradients);
//!         training.sampler.advance(batch.len());
//!         training.steps += 1;
//!         checkpoints.save(&training)?; // 3: a new file
//!     }
//!     parameters_digest(&training.model)
//! }
//!
//! # let temporary = tempfile::tempdir().unwrap();
//! # let path = |name: &str| temporary.path().join(name);
//! let group = ProcessGroup::alone();
//! let whole = train(&group, &path("whole"), 8)?;
//! train(&group, &path("parts"), 3)?; // stopped
//! assert_eq!(train(&group, &path("parts"), 8)?, whole); // resumed
//! # Ok::<_, drumline_burn::Error>(())
//! ```
//!
//! # What a checkpoint holds
//!
//! It is a [safetensors] file, which torch and other tools can open.
//!
//! | what | its name |
//! |---|---|
//! | parameters and buffers | tensors: `model.fc.bias` |
//! | the optimizer, by name of the parameter | tensors; a number is one without dimensions: `optimizer.fc.bias.momentum.velocity` |
//! | the learning-rate scheduler | tensors without dimensions: `scheduler.0.current_iter` |
//! | the place in the data, the number of steps | metadata: `sampler`, `steps` |
//! | [settings](TrainingState::setting), the optimizer's configuration | metadata |
//! | [values](TrainingState::values) of your own | as you name them |
//!
//! The state of burn's random generators cannot be read, so it is not there;
//! [`seed_step`](TrainingState::seed_step) replaces it.
//!
//! # Which optimizers
//!
//! All of burn's: SGD, Adam, AdamW, AdaGrad, Adafactor, Adan, LAMB, Lion, Muon, RMSProp, each with its momenta, and
//! [`LBFGS`](burn::optim::LBFGS). A [`ShardedOptimizer`](crate::ShardedOptimizer) over one of them (but `LBFGS`), whose
//! files are those of that optimizer. Groups of parameters with optimizers of their own, too. Those of other crates if
//! their state derives burn's `RecordState`.
//!
//! burn loads the state of an optimizer in the type of floats of [`Device::default`](burn::tensor::Device), which is
//! f32 unless configured. To resume a model in another type, configure that device first, else resuming fails with an
//! error that says so.
//!
//! [safetensors]: https://huggingface.co/docs/safetensors

mod checkpoints;
pub(crate) mod generator;
mod optimizer;
mod position;
mod record;
mod scheduler;
mod sharded;
mod state;

pub(crate) use self::optimizer::names_with_state;
pub use self::{
    checkpoints::Checkpoints,
    optimizer::{IntoOptimizer, OptimizerState},
    position::DataPosition,
    scheduler::SchedulerState,
    state::TrainingState,
};
