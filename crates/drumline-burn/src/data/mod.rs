//! A `DataLoader` of burn for many ranks: each epoch, all samples are shuffled over all ranks.
//!
//! [`DataLoaderBuilder`] has the methods of burn's builder of the same name. Only the last line differs: it takes
//! the group, and can fail.
//!
//! ```
//! use burn::{
//!     data::{dataloader::{DataLoader, batcher::Batcher}, dataset::InMemDataset},
//!     tensor::{Device, Tensor},
//! };
//! use drumline::ProcessGroup;
//! use drumline_burn::{Result, data::{DataLoaderBuilder, Totals}};
//!
//! struct Rows;
//!
//! impl Batcher<f32, Tensor<1>> for Rows {
//!     fn batch(&self, items: Vec<f32>, device: &Device) -> Tensor<1> {
//!         Tensor::from_floats(&items[..], device)
//!     }
//! }
//!
//! fn data() -> InMemDataset<f32> {
//!     InMemDataset::new((0..10).map(|i| i as f32).collect())
//! }
//!
//! fn rank(group: &ProcessGroup) -> Result<f64> {
//!     let training = DataLoaderBuilder::new(Rows)
//!         .batch_size(2) // on each rank
//!         .shuffle(7)
//!         .num_workers(2)
//!         .build(data(), group)?;
//!     for _epoch in 0..3 {
//!         for batch in training.iter() {
//!             let batch = batch.expect("memory can be read"); // ... one step ...
//!             assert!(batch.dims()[0] <= 2);
//!         }
//!     }
//!
//!     // Every sample once, on one of the ranks.
//!     let test = DataLoaderBuilder::new(Rows).batch_size(4).build_shard(data(), group)?;
//!     let mut totals = Totals::default();
//!     for batch in test.iter() {
//!         let batch = batch.expect("memory can be read");
//!         let count = batch.dims()[0] as u64;
//!         totals.add([f64::from(batch.sum().into_scalar::<f32>())], count);
//!     }
//!     let [mean] = totals.over(group)?.means(); // the same on all ranks
//!     Ok(mean)
//! }
//!
//! let ranks = drumline::rendezvous::local_world(2)?;
//! let threads: Vec<_> =
//!     ranks.into_iter().map(|group| std::thread::spawn(move || rank(&group))).collect();
//! for thread in threads {
//!     assert_eq!(thread.join().expect("no panic")?, 4.5);
//! }
//! # Ok::<_, drumline_burn::Error>(())
//! ```
//!
//! # The order
//!
//! It is that of a [`DistributedSampler`](drumline::sampler::DistributedSampler), and so that of torch's. The
//! workers change nothing: batch k is always the same, and comes after batch k - 1.
//!
//! Each [`iter`](burn::data::dataloader::DataLoader::iter) goes through one epoch. When it has ended, the next one
//! begins another epoch, in another order. If an iterator is dropped before its end, the next one goes on after the
//! last batch that was delivered. So does a program that [resumes](crate::checkpoint) from a checkpoint: give the
//! loader to [`TrainingState::sampler`](crate::checkpoint::TrainingState::sampler).
//!
//! A training with [`shards`](DataLoaderBuilder::shards) goes by [`steps`](DistributedDataLoader::steps) in place of `iter`:
//! they give the batch of any shard. A `Learner` takes the loader itself.
//!
//! # Failures
//!
//! If a sample cannot be read, or the batcher panics, the iterator delivers an error in place of the batch, and then
//! ends. The error names the rank and the samples. Return it from the program: the other ranks then notice that this
//! one has ended.

mod batches;
mod builder;
#[cfg_attr(not(feature = "train"), expect(dead_code, reason = "a `Learner` asks"))]
mod dealer;
mod loader;
mod order;
mod source;
mod steps;
mod totals;
mod workers;

pub use self::{
    builder::DataLoaderBuilder, loader::DistributedDataLoader, steps::Steps, totals::Totals,
};
#[cfg(feature = "train")]
pub(crate) use self::{
    dealer::{Dealer, dealer_of},
    order::OfShards,
    source::text_of,
};
