//! `AsyncReduce`: tensors by name, in any order, reduced while the next ones are computed.
//!
//! [`GradientReducer`](crate::ddp::GradientReducer) sends buckets in one order that all ranks share. Here
//! ranks need no common order. Each rank hands its tensors in by name when they are ready, and tensors that
//! all ranks have handed in are reduced. The tensors lie side by side in one buffer that the ranks of a host
//! share. So on one host a reduction is one pass over memory, without a copy before or after it.
//!
//! ```
//! use drumline::{ProcessGroup, async_reduce::{AsyncReduceOptions, TensorRegistry}};
//!
//! # fn main() -> drumline::Result<()> {
//! let train = |group: ProcessGroup| -> drumline::Result<()> {
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
//! drumline::local(2, |group| Ok(train(group)?))?;
//! # Ok(())
//! # }
//! ```
//!
//! # A step
//!
//! Every rank brings every tensor once: [`async_reduce`](AsyncReduce::async_reduce) takes the values that lie
//! in the tensor's place, [`async_reduce_from`](AsyncReduce::async_reduce_from) copies values from elsewhere.
//! Until [`synchronize`](AsyncReduce::synchronize) has returned, the tensor cannot be read or changed: the
//! methods that lend it out return an error. [`sync_grad`](AsyncReduce::sync_grad) brings all tensors that
//! were not brought yet, and synchronizes.
//!
//! To use the gradients of several backward passes, the caller adds them in place before it brings the
//! tensor. Nothing travels until then.
//!
//! If a rank has not brought a tensor when it synchronizes, all ranks get an error that names the tensor and
//! the rank ([`NotBrought`](crate::ErrorKind::NotBrought)), and the next step begins as usual. A rank that
//! does not synchronize at all is named when the time is over
//! ([`Config::timeout`](drumline_group::Config::timeout)); then the engine has failed.

#[doc(hidden)]
pub mod background;
#[doc(hidden)]
pub mod bitmap;
mod engine;
#[doc(hidden)]
pub mod layout;
mod missing;
mod on_host;
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
#[doc(hidden)]
pub use missing::names;
