//! Which part of the data each rank gets.

use std::sync::Arc;

use burn::data::dataloader::DataLoader;
use drumline::{ProcessGroup, sampler::shards_of_rank};

use crate::data::{Dealer, dealer_of};

/// How a rank gets its part of the training data.
pub(super) struct Shares<'a, I> {
    loader: &'a Arc<dyn DataLoader<I>>,
    /// Of a loader of ours.
    pub(super) dealer: Option<Dealer>,
    /// Whether the loader yields the share of this rank alone.
    pub(super) are_dealt: bool,
}

impl<'a, I> Shares<'a, I> {
    /// With `are_dealt` if the program says so.
    pub(super) fn new(loader: &'a Arc<dyn DataLoader<I>>, are_dealt: bool) -> Self {
        let dealer = dealer_of(&**loader);
        let are_dealt = are_dealt || dealer.is_some();
        Self { loader, dealer, are_dealt }
    }

    /// The number of items of the loader, or of a shard.
    pub(super) fn items(&self) -> usize {
        let of_shard = self.dealer.as_ref().and_then(Dealer::shards);
        of_shard.map_or_else(|| self.loader.num_items(), |data| data.items)
    }

    /// Why the ranks of `group` cannot train on this data, in steps of so many shards.
    pub(super) fn problem(&self, group: &ProcessGroup, shards: Option<usize>) -> Option<String> {
        let dealt = self.dealer.as_ref().and_then(Dealer::shards).map(|data| data.count);
        if let Some(count) = shards {
            if let Err(error) = shards_of_rank(count, group.world_size(), group.rank()) {
                return Some(error.to_string());
            }
            let how = format!("`drumline_burn::data::DataLoaderBuilder` and its `shards({count})`");
            match dealt {
                None => {
                    return Some(format!(
                        "the loader of the training data does not deal its samples to the {count} shards of a step; build it \
                         with {how}"
                    ));
                }
                Some(dealt) if dealt != count => {
                    return Some(format!(
                        "the loader of the training data deals its samples to {dealt} shards, but a step has {count}; build \
                         it with {how}"
                    ));
                }
                Some(_) => {}
            }
        }
        let (rank, ranks, items) = (group.rank(), group.world_size(), self.items());
        if let Some(share) = self.dealer.as_ref().map(Dealer::share) {
            return ((share.rank, share.world_size) != (rank, ranks)).then(|| {
                format!(
                    "the loader of the training data was built for rank {} of {}, but this is rank {rank} of \
                     {ranks}; give `DataLoaderBuilder::build` the group that `distribute` gets",
                    share.rank, share.world_size
                )
            });
        }
        (!self.are_dealt && items < ranks).then(|| {
            format!("the training data has {items} items for {ranks} ranks; start fewer ranks")
        })
    }

    /// The loader of this rank's share, for a training that begins with this epoch, counted from 1.
    pub(super) fn of_rank(&self, group: &ProcessGroup, epoch: usize) -> Arc<dyn DataLoader<I>> {
        if epoch > 1
            && let Some(dealer) = &self.dealer
        {
            dealer.set_epoch(epoch as u64 - 1);
        }
        if self.are_dealt {
            return self.loader.clone();
        }
        let (rank, items) = (group.rank(), self.items() / group.world_size());
        let (start, end) = (rank * items, (rank + 1) * items);
        tracing::info!(rank, "trains on items {start} to {end} of {}", self.items());
        self.loader.slice(start, end)
    }
}

/// Why rank 0 cannot validate on this data.
pub(super) fn problem_of_validation<I>(loader: &dyn DataLoader<I>) -> Option<String> {
    let share = dealer_of(loader)?.share();
    (share.world_size > 1).then(|| {
        format!(
            "the loader of the validation data yields one of {} shares, but rank 0 validates on all data; use burn's \
             own `DataLoaderBuilder` for it",
            share.world_size
        )
    })
}
