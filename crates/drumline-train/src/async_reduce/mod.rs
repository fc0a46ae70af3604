//! `AsyncReduce`: tensors by name, in any order, reduced while the next ones are computed.
//!
//! [`GradientReducer`](crate::ddp::GradientReducer) sends buckets in one order that all ranks share.
//! Here ranks need no common order: each hands its tensors in by name as they come, and what has
//! come on all ranks is reduced. The tensors lie side by side in one buffer that the ranks of a host
//! share, so on one host a reduction is one pass over memory, without a copy before or after it.
//!
//! ```
//! use drumline::{ProcessGroup, async_reduce::{AsyncReduceOptions, TensorRegistry}};
//!
//! # fn main() -> drumline::train::Result<()> {
//! let train = |group: ProcessGroup| -> drumline::train::Result<()> {
//!     // Once: the same names, lengths and types on all ranks.
//!     let mut tensors = TensorRegistry::new();
//!     tensors.register::<f32>("weight", 3)?;
//!     tensors.register::<f32>("bias", 1)?;
//!     let mut reduce = tensors.freeze(&group, &AsyncReduceOptions::default())?;
//!
//!     let rank = group.rank() as f32;
//!     for step in 0..3 {
//!         // As backward goes on, in whatever order it goes: what lies in place ...
//!         let order = if group.rank() == 0 { ["weight", "bias"] } else { ["bias", "weight"] };
//!         for name in order {
//!             reduce.gradient_mut::<f32>(name)?.fill(rank + step as f32);
//!             reduce.async_reduce(name)?;
//!         }
//!         // ... and at its end all averages, in the same place.
//!         reduce.synchronize()?;
//!         assert_eq!(reduce.gradient::<f32>("bias")?, [0.5 + step as f32]);
//!     }
//!     reduce.stop()
//! };
//! let ranks = ProcessGroup::local_world(2)?;
//! let threads: Vec<_> =
//!     ranks.into_iter().map(|group| std::thread::spawn(move || train(group))).collect();
//! for thread in threads {
//!     thread.join().expect("no panic")?;
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # A step
//!
//! Every rank brings every tensor once: [`async_reduce`](AsyncReduce::async_reduce) what lies in its
//! place, [`async_reduce_from`](AsyncReduce::async_reduce_from) what lies elsewhere. From then until
//! [`synchronize`](AsyncReduce::synchronize) has returned nobody can touch the tensor: the methods
//! that lend it out say so instead. [`sync_grad`](AsyncReduce::sync_grad) brings what was not brought
//! yet and synchronizes.
//!
//! Gradients of several backward passes are added by the caller, in place, before the tensor is
//! brought: nothing travels until then.
//!
//! A tensor that a rank has not brought when it synchronizes is named, with the rank, on all ranks
//! ([`Error::NotBrought`](crate::Error::NotBrought)), and the next step begins as if nothing had happened. A rank that does
//! not synchronize at all is named when the time is over
//! ([`Config::timeout`](drumline_group::Config::timeout)), and the engine has failed then.

mod background;
mod bitmap;
mod engine;
mod layout;
mod missing;
mod options;
mod pieces;
mod registry;
mod rounds;

pub use self::{
    background::Counts,
    engine::{AsyncReduce, Place},
    missing::MissingTensors,
    options::AsyncReduceOptions,
    registry::TensorRegistry,
};
