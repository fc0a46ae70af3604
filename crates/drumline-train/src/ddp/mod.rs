//! Data-parallel training without a framework: the parts from which every adapter is built.
//!
//! Each rank holds the whole model and works on its own share of the data. After backward all ranks hold the
//! average of their gradients, so equal optimizers keep equal parameters equal. An adapter knows tensors and
//! autodiff. This module does the rest:
//!
//! | step | part |
//! |---|---|
//! | check that all ranks hold the same model | [`verify_model`]: an error that names parameter and rank, on every rank |
//! | copy rank 0's values to all ranks | [`Broadcast`]: tensors in chunks of bounded memory |
//! | average gradients during backward, in buckets | [`GradientReducer`]: hooks never wait for the network |
//! | check that the ranks still agree | [`StateDigest`]: one number to compare |
//!
//! With burn, use `drumline-burn`, where this takes ten lines. Without a framework it looks like this:
//!
//! ```
//! use drumline::ddp::{DdpOptions, GradientReducer, ParameterSpec};
//! use drumline::{DType, ProcessGroup};
//!
//! # fn main() -> drumline::Result<()> {
//! let train = |group: ProcessGroup| -> drumline::Result<Vec<f32>> {
//!     let weight = ParameterSpec::new("weight", [2], DType::F32);
//!     let reducer = GradientReducer::new(vec![weight], &DdpOptions::default(), &group)?;
//!     // What backward found on this rank; adapters call `submit` from a gradient hook.
//!     let gradient = [group.rank() as f32, 4.0];
//!     reducer.submit(0, gradient[..].into());
//!     let averaged = reducer.finish()?;
//!     Ok(averaged.get::<f32>(0).unwrap_or_default().to_vec())
//! };
//!
//! for averages in drumline::local(2, |group| Ok(train(group)?))? {
//!     assert_eq!(averages, [0.5, 4.0]);
//! }
//! # Ok(())
//! # }
//! ```

mod broadcast;
mod bucket;
mod digest;
mod fault;
mod gradient_reducer;
mod loss_scale;
mod norm;
mod options;
mod owners;
mod reducer;
mod shards;
mod spec;
mod verify;

pub use broadcast::Broadcast;
pub use digest::StateDigest;
#[doc(hidden)]
pub use drumline_schedule::Dealing;
pub use fault::{FaultKind, GradientFault};
pub use gradient_reducer::{
    Averaged, BucketTimes, GradientReducer, Place, ReducerStats, SharedGradient, StepsBefore,
    Timeline, Values, ValuesMut,
};
pub use loss_scale::LossScale;
pub use norm::GradientNorm;
pub use options::{DdpOptions, Divisor, UnusedParameters, Wire};
pub use owners::Owners;
#[doc(hidden)]
pub use shards::adds_in_order;
pub use spec::ParameterSpec;
pub use verify::verify_model;

pub(crate) use bucket::{Bucket, plan_buckets};
pub(crate) use fault::list_ranks;
use reducer::{Reducer, Unfinished};
