//! Asks a loader behind burn's trait whether it deals out shares.
//!
//! The trait has no method for this. So the question stands beside a call of `num_items`, on the same thread, and a
//! loader of ours answers it there. A loader that wraps one of ours passes the call on, and the question with it.

use std::{cell::RefCell, ops::Range};

use burn::data::dataloader::DataLoader;

use super::order::{OfShards, Order};

/// One of the equal parts of all samples.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Share {
    /// The rank that gets it.
    pub(crate) rank: usize,
    /// The number of ranks, and so of shares.
    pub(crate) world_size: usize,
}

/// What deals out the samples of a loader.
#[derive(Clone, Debug)]
pub(crate) struct Dealer {
    pub(super) share: Share,
    pub(super) order: Order,
}

impl Dealer {
    /// Which share the loader yields.
    pub(crate) fn share(&self) -> Share {
        self.share
    }

    /// The epochs of the loader, if its samples are dealt to the shards of a step.
    pub(crate) fn shards(&self) -> Option<OfShards> {
        self.order.shards()
    }

    /// Lets the next iterator of the loader yield the batches of these shards, from a step of an epoch on. Both count from 0.
    pub(crate) fn deal(&self, own: Range<usize>, epoch: u64, step: usize) {
        self.order.deal(own, epoch, step);
    }

    /// Lets the next iterator of the loader begin an epoch, counted from 0.
    pub(crate) fn set_epoch(&self, epoch: u64) {
        self.order.set_epoch(epoch);
    }
}

#[derive(Default)]
enum Question {
    #[default]
    None,
    Asked,
    Answered(Dealer),
}

thread_local! {
    static QUESTION: RefCell<Question> = const { RefCell::new(Question::None) };
}

/// The dealer of a loader, if it is one of ours or hands `num_items` on to one.
pub(crate) fn dealer_of<O>(loader: &dyn DataLoader<O>) -> Option<Dealer> {
    QUESTION.set(Question::Asked);
    loader.num_items();
    match QUESTION.take() {
        Question::Answered(dealer) => Some(dealer),
        Question::Asked | Question::None => None,
    }
}

/// Answers the question of this thread, if there is one.
pub(super) fn answer(dealer: impl FnOnce() -> Dealer) {
    QUESTION.with_borrow_mut(|question| {
        if matches!(question, Question::Asked) {
            *question = Question::Answered(dealer());
        }
    });
}
