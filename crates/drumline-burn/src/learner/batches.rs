//! The batches of an epoch, read ahead.

use std::collections::VecDeque;

use burn::data::{
    dataloader::{DataLoader, DataLoaderIterator, Progress},
    dataset::DatasetError,
};

/// The batches of an epoch.
///
/// They are read one ahead. So a rank knows *in* a step whether another one can follow, and its peers learn it with
/// the gradients of this step.
pub(super) struct Batches<'a, I> {
    iterator: Box<dyn DataLoaderIterator<I> + 'a>,
    ahead: VecDeque<Batch<I>>,
    end: Option<End>,
}

pub(super) struct Batch<I> {
    pub(super) input: I,
    /// How far the loader was when it had yielded this batch.
    pub(super) progress: Progress,
}

/// Why no batch follows.
enum End {
    Complete,
    Failed(DatasetError),
}

/// What comes after a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    Batch,
    End,
    /// The data cannot be read.
    Failure,
}

impl<'a, I> Batches<'a, I> {
    pub(super) fn new(loader: &'a dyn DataLoader<I>) -> Self {
        Self { iterator: loader.iter(), ahead: VecDeque::with_capacity(2), end: None }
    }

    /// The number of items in a full batch. `None` if there is no batch.
    ///
    /// It is that of the larger one of the first two: several threads may yield a last batch, which is smaller, first.
    pub(super) fn items_of_full(&mut self) -> Option<usize> {
        self.read_up_to(2);
        let ends = self.ahead.iter().map(|batch| batch.progress.items_processed);
        let sizes =
            ends.scan(0, |start, end| Some(end.saturating_sub(std::mem::replace(start, end))));
        sizes.max()
    }

    pub(super) fn take(&mut self) -> Option<Batch<I>> {
        self.read_up_to(1);
        self.ahead.pop_front()
    }

    /// What comes next. Reads the batch.
    pub(super) fn upcoming(&mut self) -> Next {
        self.read_up_to(1);
        match (self.ahead.is_empty(), &self.end) {
            (false, _) => Next::Batch,
            (true, Some(End::Failed(_))) => Next::Failure,
            (true, _) => Next::End,
        }
    }

    /// The error that has ended the batches.
    pub(super) fn take_failure(&mut self) -> Option<DatasetError> {
        match self.end.replace(End::Complete) {
            Some(End::Failed(error)) if self.ahead.is_empty() => Some(error),
            end => {
                self.end = end;
                None
            }
        }
    }

    fn read_up_to(&mut self, count: usize) {
        while self.ahead.len() < count && self.end.is_none() {
            match self.iterator.next() {
                Some(Ok(input)) => {
                    let progress = self.iterator.progress();
                    self.ahead.push_back(Batch { input, progress });
                }
                Some(Err(error)) => self.end = Some(End::Failed(error)),
                None => self.end = Some(End::Complete),
            }
        }
    }
}
