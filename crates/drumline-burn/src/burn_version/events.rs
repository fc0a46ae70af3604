//! How burn's training is told of its progress.

use burn::{data::dataloader::Progress, train::LearnerEvent};

/// Training or validation begins to go through its data in an epoch. It has so many items.
///
/// 0.23: `StartSplit { epoch_number, progress }`, with a progress of no items yet.
pub(crate) fn split_begins<T>(epoch: usize, items: usize) -> LearnerEvent<T> {
    LearnerEvent::StartSplit { epoch_number: epoch, total_items: items }
}

/// It has ended, or was stopped.
///
/// 0.23: `EndSplit { epoch, progress }`, with how far it came. Two calls in `learner/strategy.rs` have to say so.
pub(crate) fn split_ends<T>(epoch: usize) -> LearnerEvent<T> {
    LearnerEvent::EndSplit(epoch)
}

/// Training begins.
///
/// 0.23: the same.
pub(crate) fn begins<T>(
    starting_epoch: usize,
    epochs: usize,
    label: Option<String>,
) -> LearnerEvent<T> {
    LearnerEvent::Start { total_epochs: epochs, starting_epoch, label }
}

/// The progress of `all` equal parts, if each of them is as far as this rank's `own`.
///
/// 0.23: `total` in place of `items_total`, an `Option`, which is `None` as long as a loader does not know it.
pub(crate) fn progress_of_all(progress: Progress, own: usize, all: usize) -> Progress {
    Progress {
        items_processed: progress.items_processed * all / own,
        items_total: progress.items_total * all / own,
        ..progress
    }
}
