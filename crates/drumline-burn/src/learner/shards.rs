//! Epochs whose steps are shards.

use std::ops::Range;

use burn::{
    data::dataloader::{DataLoader, DataLoaderIterator, Progress},
    module::Module,
    train::LearnerModel,
};

use super::{
    epoch::{Flow, Run, TrainInput},
    stopping::Mark,
};
use crate::{
    Result,
    burn_version::events,
    data::{Dealer, OfShards},
    failure,
    running::Running,
};

/// What a training needs if its steps are shards.
pub(super) struct ByShards<'a, I> {
    loader: &'a dyn DataLoader<I>,
    dealer: Dealer,
    pub(super) data: OfShards,
    running: Running,
}

impl<'a, I> ByShards<'a, I> {
    /// `None` if the loader does not deal its samples to shards.
    pub(super) fn new<M: Module>(
        loader: &'a dyn DataLoader<I>,
        dealer: Option<Dealer>,
        model: &M,
    ) -> Option<Self> {
        let dealer = dealer?;
        let data = dealer.shards()?;
        Some(Self { loader, dealer, data, running: Running::find(model, &|_| false) })
    }
}

/// The batches of this rank's shards, in their order.
struct Batches<'a, I> {
    of: &'a ByShards<'a, I>,
    iterator: Box<dyn DataLoaderIterator<I> + 'a>,
    /// The shards for which it gives batches, and the step in which it does so next.
    next: (Range<usize>, usize),
}

impl<'a, I> Batches<'a, I> {
    fn deal(of: &'a ByShards<'a, I>, own: Range<usize>, epoch: usize, step: usize) -> Self {
        of.dealer.deal(own.clone(), epoch as u64 - 1, step); // burn counts epochs from 1
        Self { of, iterator: of.loader.iter(), next: (own, step) }
    }

    /// Goes to the begin of a step: on from the step before, or anew if a rank has died.
    fn begin(&mut self, own: Range<usize>, epoch: usize, step: usize) {
        if self.next != (own.clone(), step) {
            *self = Self::deal(self.of, own, epoch, step);
        }
        self.next.1 = step + 1;
    }

    /// A batch, and how far all ranks are in the epoch if they are as far as this one.
    fn take(&mut self) -> Result<(I, Progress)> {
        let problem = match self.iterator.next() {
            Some(Ok(batch)) => {
                let (own, all) = (self.next.0.len(), self.of.data.count);
                return Ok((batch, events::progress_of_all(self.iterator.progress(), own, all)));
            }
            Some(Err(error)) => format!("cannot read data: {error}"),
            None => format!(
                "the loader of the training data has ended within step {} of {} of an epoch",
                self.next.1, self.of.data.steps
            ),
        };
        Err(failure::learner(problem))
    }
}

impl<M: LearnerModel> Run<'_, M> {
    /// Trains for an epoch. Each step is a piece: if a rank dies, the others make it again.
    pub(super) fn train_shards(
        &mut self,
        of: &ByShards<'_, TrainInput<M>>,
        epoch: usize,
    ) -> Result<Flow> {
        let mut batches = Batches::deal(of, self.averager.shards(), epoch, 0);
        for step in 0..of.data.steps {
            let number = ((epoch - 1) * of.data.steps + step) as u64;
            let (model, averager, learner) = (self.learner.model(), self.averager, &self.learner);
            let interrupter = self.listener.interrupter;
            let mut told = Vec::new();
            let frame = averager.frame(self.elastic, &of.running);
            let (gradients, marks) = frame.run(number, &model, |group, shards| {
                let own = averager.shards();
                batches.begin(own.clone(), epoch, step);
                told.clear();
                let stops = interrupter.should_stop();
                let sent = Mark { stops, ..Mark::default() }.send(group);
                let compute = |shard| {
                    let (batch, progress) = batches.take()?;
                    let compute =
                        || averager.run(shard + 1 == own.end, || learner.train_step(batch));
                    let output = shards.compute(shard, compute)?;
                    if group.rank() == 0 {
                        told.push((output.item, progress, step * of.data.count + shard + 1));
                    }
                    Ok(output.grads)
                };
                let gradients = averager.average_shards(number, compute, &model)?;
                Ok((gradients, sent.wait()?))
            })?;
            self.update(Some(gradients))?;
            for (output, progress, iteration) in told {
                self.tell(output, progress, iteration);
            }
            if marks.stops > 0 {
                let flow = self.elastic.run(|group| self.listener.agree(group, false))?;
                if flow != Flow::GoOn {
                    return Ok(flow);
                }
            }
        }
        Ok(Flow::GoOn)
    }
}
