//! Data-parallel training of models built with [candle](https://github.com/huggingface/candle).
//!
//! Every rank runs the same program on its own share of the data. [`wrap`] makes the variables equal on all ranks,
//! [`average`] averages the gradients between `loss.backward()` and the optimizer's step, and candle's optimizers do
//! the rest:
//!
//! ```
//! use candle_core::{DType, Device, Tensor};
//! use candle_nn::{Module, Optimizer, SGD, VarBuilder, VarMap, linear};
//! use drumline::ProcessGroup;
//! use drumline_candle::{DataParallel, variables_digest};
//!
//! fn train(group: ProcessGroup) -> anyhow::Result<u64> {
//!     let varmap = VarMap::new();
//!     let vb = VarBuilder::from_varmap(&varmap, DType::F32, &Device::Cpu);
//!     let model = linear(2, 1, vb)?; // random: differs between ranks
//!     let mut ddp = DataParallel::wrap(&varmap, &group)?;
//!     let mut optimizer = SGD::new(varmap.all_vars(), 0.01)?;
//!     for step in 0..3 {
//!         // This rank's share of the data:
//!         let input = Tensor::full((step + group.rank()) as f32, (4, 2), &Device::Cpu)?;
//!         let loss = (model.forward(&input)? - 1.0)?.sqr()?.mean_all()?;
//!         let mut gradients = loss.backward()?;
//!         ddp.average(&mut gradients)?; // one line more
//!         optimizer.step(&gradients)?;
//!     }
//!     Ok(variables_digest(&varmap)?)
//! }
//!
//! // Here the ranks are threads; `drumline run` starts processes.
//! let digests = drumline::local(2, |group| Ok(train(group)?))?;
//! assert_eq!(digests[0], digests[1]); // the same bits
//! # Ok::<(), anyhow::Error>(())
//! ```
//!
//! # Good to know
//!
//! - The global batch is the sum of the ranks' batches. With a mean as the loss, N ranks with b samples each give the
//!   gradient of one rank with N·b samples.
//! - Variables are told apart by name. `VarMap::all_vars` has another order in every process; optimizers do not mind.
//! - The first step decides which variables are trained. The others are buffers, such as the running statistics of
//!   batch normalisation. Each rank updates its own; [`sync_buffers`] copies rank 0's to all ranks.
//! - Clip gradients after they are averaged: [`clip_grad_norm`](DataParallel::clip_grad_norm) does it as torch does.
//! - [`AdamW`] gives the bits of candle's, and can be saved: [`checkpoint()`] and [`resume()`] keep a whole training.
//!
//! # Coming from torch
//!
//! | torch | here |
//! |---|---|
//! | `DistributedDataParallel(model)` | [`wrap`] |
//! | `loss.backward(); optimizer.step()` | [`average`] between them, or [`backward_step`](DataParallel::backward_step) |
//! | `bucket_cap_mb`, `find_unused_parameters=True` | [`wrap_with`](DataParallel::wrap_with) and [`DdpOptions`] |
//! | `with model.no_sync()` | candle's `GradStore::extend`, before [`average`] |
//! | `broadcast_buffers=True` | [`sync_buffers`] before each forward |
//! | `clip_grad_norm_` | [`clip_grad_norm`](DataParallel::clip_grad_norm) |
//! | `Join` | [`shadow`](DataParallel::shadow), [`Divisor`] |
//! | `_ddp_params_and_buffers_to_ignore` | [`DdpOptions::ignore`] |
//! | `bf16_compress_hook` | [`DdpOptions::wire`] |
//! | `torch.save` of model and optimizer | [`checkpoint()`], [`resume()`] |
//! | `ZeroRedundancyOptimizer(...)` | [`ShardedOptimizer`] |
//! | `_get_ddp_logging_data()` | [`stats`](DataParallel::stats), [`timeline`](DataParallel::timeline) |
//!
//! # Limits
//!
//! Nothing is sent during backward. candle has no gradient hooks: `backward` returns all gradients at its end. An
//! operation of one's own around each variable would see its gradient earlier. But it would copy every variable in
//! each step, and layers would have to be built anew in each step to see it.
//!
//! Parameters are f64, f32, f16 and bf16, and a gradient travels in the type of its parameter. Those of 16 bits are
//! summed in f32, and their average is rounded once. Variables on any device of candle work, through the memory of the host. Only the
//! CPU has been tried.
//!
//! [`wrap`]: DataParallel::wrap
//! [`average`]: DataParallel::average
//! [`sync_buffers`]: DataParallel::sync_buffers

#![forbid(unsafe_code)]

mod adamw;
#[cfg(doctest)]
mod book;
mod checkpoint;
mod clip;
mod data_parallel;
mod failure;
mod host;
mod sharded;
mod shards;
mod variables;

pub use adamw::AdamW;
pub use checkpoint::{Resumable, checkpoint, load_variables, resume, save_variables};
pub use data_parallel::DataParallel;
pub use drumline::ddp::{
    BucketTimes, DdpOptions, Divisor, Owners, ReducerStats, Timeline, UnusedParameters, Wire,
};
pub use drumline::{Error, ErrorKind, Result};
pub use failure::RankProblem;
pub use sharded::{ShardedGradients, ShardedOptimizer};
pub use shards::ShardedStep;
pub use variables::variables_digest;
