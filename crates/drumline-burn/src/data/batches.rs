use std::{num::NonZeroUsize, sync::Arc};

use burn::data::{
    dataloader::{DataLoaderIterator, Progress},
    dataset::DatasetError,
};

use super::{
    order::{Order, Pass},
    source::Source,
    workers::{Queue, Workers},
};

/// One pass over a loader's samples.
pub(super) struct Batches<'a, I, O> {
    order: &'a Order,
    source: &'a Source<I, O>,
    batch_size: usize,
    pass: Pass,
    /// `None` if this thread loads the batches.
    queue: Option<Queue<O>>,
    /// How many batches of the pass have been delivered, and how many samples.
    batches: usize,
    delivered: usize,
    has_ended: bool,
}

impl<'a, I, O> Batches<'a, I, O> {
    pub(super) fn new(
        order: &'a Order,
        source: &'a Source<I, O>,
        batch_size: NonZeroUsize,
        workers: Option<Arc<Workers<O>>>,
    ) -> Self {
        Self {
            order,
            source,
            batch_size: batch_size.get(),
            pass: order.begin(),
            queue: workers.map(Queue::new),
            batches: 0,
            delivered: 0,
            has_ended: false,
        }
    }

    /// The samples of the batch that comes next.
    fn next_samples(&self) -> &[usize] {
        self.pass.batch(self.batches, self.batch_size)
    }

    fn load(&mut self) -> Result<O, DatasetError> {
        let Some(mut queue) = self.queue.take() else {
            return self.source.load(self.next_samples());
        };
        while queue.has_room()
            && let samples = self.pass.batch(queue.ordered(), self.batch_size)
            && !samples.is_empty()
        {
            queue.order(samples.to_vec());
        }
        let loaded = queue.take();
        self.queue = Some(queue);
        loaded.unwrap_or_else(|| {
            Err(DatasetError::new(self.source.error(self.next_samples(), "its thread has ended")))
        })
    }
}

impl<I, O> Iterator for Batches<'_, I, O> {
    type Item = Result<O, DatasetError>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.has_ended {
            return None;
        }
        let samples = self.next_samples().len();
        if samples == 0 {
            self.has_ended = true;
            self.order.end(&self.pass);
            return None;
        }
        let loaded = self.load();
        if loaded.is_ok() {
            self.batches += 1;
            self.delivered += samples;
            // A step that is not complete has to be repeated.
            if self.batches.is_multiple_of(self.pass.parts) {
                self.order.delivered(&self.pass, self.delivered / self.pass.parts);
            }
        } else {
            self.has_ended = true;
        }
        Some(loaded)
    }
}

impl<I, O> DataLoaderIterator<O> for Batches<'_, I, O> {
    fn progress(&self) -> Progress {
        let Pass { indices, before, .. } = &self.pass;
        let (done, total) = (before + self.delivered, before + indices.len());
        Progress::new(done, total, Some("items".into()))
    }
}
