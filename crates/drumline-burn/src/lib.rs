//! `DistributedDataParallel` for models built with [burn](https://burn.dev).
//!
//! Every rank runs the same program on its own share of the data. [`wrap`] makes the models equal,
//! [`backward`] averages the gradients while they are being computed, and burn's optimizers do the
//! rest:
//!
//! ```
//! use burn::nn::{Linear, LinearConfig};
//! use burn::optim::{ModuleOptimizer, SgdConfig};
//! use burn::tensor::{Device, Tensor};
//! use drumline::ProcessGroup;
//! use drumline_burn::{DistributedDataParallel, Result, parameters_digest};
//!
//! fn train(group: ProcessGroup) -> Result<u64> {
//!     let device = Device::flex().autodiff();
//!     let model: Linear = LinearConfig::new(2, 1).init(&device); // random: differs between ranks
//!     let (ddp, mut model) = DistributedDataParallel::wrap(model, &group)?;
//!     let mut optimizer = SgdConfig::new().init();
//!     for step in 0..3 {
//!         // This rank's share of the data:
//!         let input = Tensor::<2>::full([4, 2], (step + group.rank()) as f32, &device);
//!         let loss = (model.forward(input) - 1).square().mean();
//!         let gradients = ddp.backward(loss, &model)?; // instead of loss.backward()
//!         model = optimizer.step(0.01, model, gradients);
//!     }
//!     parameters_digest(&model)
//! }
//!
//! // Here the ranks are threads; `drumline run` starts processes.
//! let ranks = drumline::rendezvous::local_world(2)?;
//! let threads: Vec<_> =
//!     ranks.into_iter().map(|group| std::thread::spawn(move || train(group))).collect();
//! let digests: Vec<_> = threads.into_iter().map(|rank| rank.join().expect("no panic")).collect();
//! assert_eq!(digests[0].as_ref().ok(), digests[1].as_ref().ok()); // the same bits
//! # digests.into_iter().collect::<Result<Vec<_>>>()?;
//! # Ok::<(), drumline_burn::Error>(())
//! ```
//!
//! # Good to know
//!
//! - The global batch is the sum of the ranks' batches. With a mean as the loss, N ranks with b
//!   samples each give the gradient of one rank with N·b samples.
//! - Each rank updates running statistics (batch normalisation) from its own samples, unless the layer is a
//!   [`SyncBatchNorm`]. [`sync_buffers`] copies rank 0's statistics to all ranks; call it before evaluation,
//!   checkpoints and [`parameters_digest`].
//! - [`checkpoint`] saves and resumes a whole training in three lines. For the model alone, save [`named_tensors`]
//!   on rank 0. It is enough to call [`load_named_tensors`] on rank 0 before wrapping, because wrapping copies rank 0's
//!   values.
//! - The module `data` (feature `data`) has a `DataLoader` that shuffles the samples over all ranks.
//! - A module that is used twice in forward (tied weights) is fine. A parameter that a step does
//!   not use is an error that names it on every rank; freeze it before wrapping, or choose
//!   [`UnusedParameters::Ignore`].
//! - For a program that trains with burn's `Learner`, turn on the feature `train`, and write
//!   `distribute(training, &group).launch(learner)`.
//!
//! # Coming from torch
//!
//! | torch | here |
//! |---|---|
//! | `DistributedDataParallel(model)` | [`wrap`] |
//! | `bucket_cap_mb`, `find_unused_parameters=True` | [`wrap_with`] and [`DdpOptions`] |
//! | `with model.no_sync(): loss.backward()` | [`accumulate`] |
//! | `broadcast_buffers=True` | [`sync_buffers`] before each forward |
//! | `Join` | [`shadow`](DistributedDataParallel::shadow), [`Divisor`] |
//! | `SyncBatchNorm` | [`SyncBatchNorm`] |
//! | `torch.save` of model, optimizer, scheduler | [`checkpoint`] |
//! | `DataLoader` with a `DistributedSampler` | the module `data` |
//! | `torch.nn.utils.clip_grad_norm_` | [`clip_grad_norm`] |
//! | `torch.amp.GradScaler` | [`GradScaler`] |
//! | `ZeroRedundancyOptimizer(...)` | [`ShardedOptimizer`] |
//! | `_ddp_params_and_buffers_to_ignore` | [`DdpOptions::ignore`] |
//! | `fp16_compress_hook`, `bf16_compress_hook` | [`DdpOptions::wire`] |
//! | one backward through several wrapped models | [`backward_all`] |
//! | `_get_ddp_logging_data()` | [`stats`](DistributedDataParallel::stats), [`timeline`](DistributedDataParallel::timeline) |
//!
//! # Limits
//!
//! Parameters are f32, f64, f16 and bf16. Gradients on burn's flex backend (the CPU) travel during backward. With the feature
//! `cuda`, `rocm` or `wgpu` of this crate, so do those on such devices (with `gpu`, those on every device of burn's
//! cubecl backend). There [`SyncBatchNorm`] works too. Gradients on other devices travel afterwards. Averages go through the memory of the host.
//!
//! [`wrap`]: DistributedDataParallel::wrap
//! [`backward`]: DistributedDataParallel::backward
//! [`wrap_with`]: DistributedDataParallel::wrap_with
//! [`accumulate`]: DistributedDataParallel::accumulate
//! [`sync_buffers`]: DistributedDataParallel::sync_buffers

#![forbid(unsafe_code)]

mod agreement;
mod any_model;
mod averaged;
#[cfg(doctest)]
mod book;
mod burn_version;
mod check;
pub mod checkpoint;
mod clip;
#[cfg(feature = "data")]
pub mod data;
mod ddp;
mod debug;
mod failure;
mod gradients;
mod host;
mod inspect;
#[cfg(feature = "train")]
mod learner;
mod pack;
#[cfg(feature = "gpu")]
mod read_back;
mod running;
mod scaler;
mod sharded;
mod shards;
mod step;
mod sync_batch_norm;
mod tap;
mod tensors;
mod together;

pub use averaged::AveragedGradients;
pub use clip::{ClipGradNorm, clip_grad_norm};
pub use ddp::DistributedDataParallel;
pub use drumline::ddp::{
    BucketTimes, DdpOptions, Divisor, LossScale, Owners, ReducerStats, Timeline, UnusedParameters,
    Wire,
};
pub use drumline::{Error, ErrorKind, Result};
#[cfg(feature = "train")]
pub use learner::{DistributedTraining, distribute, newest_epoch};
pub use scaler::GradScaler;
pub use sharded::{ShardedGradients, ShardedOptimizer};
pub use shards::ShardedStep;
pub use sync_batch_norm::{SyncBatchNorm, SyncBatchNormConfig};
pub use tensors::{
    NamedTensor, TensorValues, load_named_tensors, named_tensors, parameters_digest,
};
pub use together::{Wrapped, accumulate_all, backward_all, shadow_all};
