//! Epochs of training and of validation.

use burn::{
    data::dataloader::{DataLoader, Progress},
    optim::GradientsParams,
    train::{
        EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
        SupervisedTrainingEventProcessor, TrainStep, TrainingError, TrainingItem,
        train::WorkerFailure,
    },
};
use drumline::{ElasticGroup, ProcessGroup, Rank};

use super::{
    averaging::Averager,
    batches::{Batch, Batches, Next},
    stopping::{self, Mark, Marks, Wish},
};
use crate::{Result, agreement, burn_version::events, failure, tensors};

/// A training between the start of its first epoch and the end of its last.
pub(super) struct Run<'a, M: LearnerModel> {
    pub(super) elastic: &'a ElasticGroup,
    pub(super) averager: &'a Averager,
    pub(super) accumulation: usize,
    pub(super) learner: &'a mut Learner<M>,
    pub(super) listener: Listener<'a, M>,
    /// Whether parameters were compared after a step.
    pub(super) is_compared: bool,
}

/// Hears of what happens: on rank 0 alone.
pub(super) struct Listener<'a, M: LearnerModel> {
    pub(super) events: &'a mut SupervisedTrainingEventProcessor<M>,
    pub(super) interrupter: &'a Interrupter,
    pub(super) elastic: &'a ElasticGroup,
    /// That training has begun, if burn has not heard of it because this rank was not rank 0.
    pub(super) begins: Option<TrainEvent<M>>,
    /// The present epoch, and the number of its items.
    pub(super) epoch: (usize, usize),
}

/// Whether training goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Flow {
    GoOn,
    /// Training does not improve.
    StopEarly,
    /// Some rank was asked to stop, or has failed. All ranks know it.
    Stop,
}

pub(super) type TrainInput<M> = <M as TrainStep>::Input;
pub(super) type TrainEvent<M> = LearnerEvent<<M as TrainStep>::Output>;
type ValidEvent<M> = LearnerEvent<<M as InferenceStep>::Output>;

impl<M: LearnerModel> Listener<'_, M> {
    /// An epoch of training begins.
    pub(super) fn begin(&mut self, epoch: usize, items: usize) {
        self.epoch = (epoch, items);
        self.train(events::split_begins(epoch, items));
    }

    pub(super) fn train(&mut self, event: TrainEvent<M>) {
        if self.hears() {
            self.interrupter.fail_on_error(self.events.process_train(event));
        }
    }

    pub(super) fn valid(&mut self, event: ValidEvent<M>) {
        if self.hears() {
            self.interrupter.fail_on_error(self.events.process_valid(event));
        }
    }

    /// Waits until all events are processed.
    pub(super) fn flush(&mut self) {
        if self.hears() {
            self.interrupter.fail_on_error(self.events.flush());
        }
    }

    /// Whether this is rank 0. If it was not before, burn hears first how far training is.
    fn hears(&mut self) -> bool {
        let is_root = self.elastic.group().rank() == 0;
        if is_root && let Some(begins) = self.begins.take() {
            let (epoch, items) = self.epoch;
            for event in [begins, events::split_begins(epoch, items)] {
                self.interrupter.fail_on_error(self.events.process_train(event));
            }
        }
        is_root
    }

    /// Why this rank wants to stop, if it does.
    fn wish(&self) -> Option<Wish> {
        if let Some(error) = self.interrupter.error() {
            return Some(Wish::Fail(error.to_string()));
        }
        self.interrupter.should_stop().then(|| Wish::Stop(self.interrupter.get_message()))
    }

    /// All ranks tell each other why they want to stop, if they do. If some do, all ranks stop. With `stops_early` it
    /// is because training does not improve, which is neither an interruption nor an error.
    pub(super) fn agree(&mut self, group: &ProcessGroup, stops_early: bool) -> Result<Flow> {
        let mut flow = Flow::GoOn;
        let wish = self.wish().or(stops_early.then_some(Wish::StopEarly));
        for (rank, wish) in stopping::exchange(wish, group)?.into_iter().enumerate() {
            match wish {
                None => {}
                Some(Wish::StopEarly) if flow == Flow::GoOn => flow = Flow::StopEarly,
                Some(Wish::StopEarly) => {}
                Some(wish) => {
                    flow = Flow::Stop;
                    if rank != group.rank() {
                        self.heed(rank, wish);
                    }
                }
            }
        }
        Ok(flow)
    }

    /// Lets this rank's interrupter say what another rank has said.
    fn heed(&self, rank: Rank, wish: Wish) {
        match wish {
            Wish::StopEarly => {}
            Wish::Fail(problem) => self.interrupter.fail(failure(rank, problem)),
            Wish::Stop(reason) => {
                let reason = reason.unwrap_or_else(|| "no reason given".to_owned());
                self.interrupter.stop(Some(&format!("rank {rank} asked to stop: {reason}")));
            }
        }
    }
}

impl<M: LearnerModel> Run<'_, M> {
    /// Trains for an epoch.
    pub(super) fn train(&mut self, loader: &dyn DataLoader<TrainInput<M>>) -> Result<Flow> {
        let (mut batches, group) = (Batches::new(loader), self.elastic.group());
        agree_on_batches(&mut batches, loader.num_items(), &group)?;
        let mut iteration = 0;
        let mut gathered = 0;
        while let Some(batch) = batches.take() {
            iteration += 1;
            gathered += 1;
            let next = batches.upcoming();
            if let Some(error) = batches.take_failure() {
                self.listener.interrupter.fail(error);
            }
            if gathered < self.accumulation && next == Next::Batch {
                let (output, progress) = self.accumulate(batch)?;
                self.tell_of_rank(output, progress, iteration);
                continue;
            }
            let mark = Mark {
                ends: next == Next::End,
                stops: next == Next::Failure || self.listener.interrupter.should_stop(),
                is_incomplete: next == Next::Failure && gathered < self.accumulation,
            };
            gathered = 0;
            let (output, progress, marks) = self.step(batch, mark)?;
            self.tell_of_rank(output, progress, iteration);
            if marks.stops > 0 {
                let flow = self.listener.agree(&group, false)?;
                if flow != Flow::GoOn {
                    return Ok(flow);
                }
            }
            if marks.ends > 0 {
                return self.end(mark.ends, marks, iteration).map(|()| Flow::GoOn);
            }
        }
        // `agree_on_batches` has seen a batch, and the step of the last batch returns.
        Ok(Flow::GoOn)
    }

    /// Runs a step that is not the last one before gradients are averaged.
    fn accumulate(
        &mut self,
        batch: Batch<TrainInput<M>>,
    ) -> Result<(<M as TrainStep>::Output, Progress)> {
        let output = self.averager.run(false, || self.learner.train_step(batch.input))?;
        self.averager.accumulate(output.grads, &self.learner.model())?;
        Ok((output.item, batch.progress))
    }

    /// Runs a step, and updates the model with the averages of all ranks.
    fn step(
        &mut self,
        batch: Batch<TrainInput<M>>,
        mark: Mark,
    ) -> Result<(<M as TrainStep>::Output, Progress, Marks)> {
        let sent = mark.send(&self.elastic.group());
        let output = self.averager.run(true, || self.learner.train_step(batch.input))?;
        let gradients = self.averager.average(output.grads, &self.learner.model())?;
        let marks = sent.wait()?;
        self.update((marks.incomplete == 0).then_some(gradients))?;
        Ok((output.item, batch.progress, marks))
    }

    /// Ends a step: updates the model, and compares it between the ranks if it is time to.
    pub(super) fn update(&mut self, gradients: Option<GradientsParams>) -> Result<()> {
        if let Some(gradients) = gradients {
            self.learner.lr_step();
            self.learner.optimizer_step(gradients);
        }
        if !self.is_compared || self.averager.is_check_due() {
            self.is_compared = true;
            self.compare()?;
        }
        Ok(())
    }

    /// Compares the parameters of all ranks.
    pub(super) fn compare(&self) -> Result<()> {
        let model = self.learner.model();
        self.elastic.run(|group| self.averager.compare(&model, group))
    }

    /// The epoch has ended on some rank. It must have ended on all.
    fn end(&self, ends: bool, marks: Marks, iteration: usize) -> Result<()> {
        let group = self.elastic.group();
        if marks.ends == group.world_size() {
            return Ok(());
        }
        let mut all = vec![0_u8; group.world_size()];
        group.all_gather(&[u8::from(ends)], &mut all)?;
        let rank = all.iter().position(|&ends| ends != 0).unwrap_or_default();
        Err(failure::learner(format!(
            "rank {rank} has no batch after batch {iteration} of the epoch, other ranks have; give all \
                 ranks the same number of batches"
        )))
    }

    /// Tells of a batch of this rank. Counts the items of all ranks.
    fn tell_of_rank(
        &mut self,
        output: <M as TrainStep>::Output,
        progress: Progress,
        iteration: usize,
    ) {
        let ranks = self.elastic.group().world_size();
        self.tell(output, events::progress_of_all(progress, 1, ranks), iteration);
    }

    /// Tells of a batch.
    pub(super) fn tell(
        &mut self,
        output: <M as TrainStep>::Output,
        progress: Progress,
        iteration: usize,
    ) {
        let lr = Some(self.learner.lr_current());
        let item = TrainingItem::new(output, progress, Some(iteration), lr);
        self.listener.train(LearnerEvent::ProcessedItem(item));
    }

    /// Validates on rank 0, with all data.
    pub(super) fn validate(&mut self, loader: &dyn DataLoader<<M as InferenceStep>::Input>) {
        let model = self.learner.model().valid();
        let mut batches = loader.iter();
        let mut iteration = 0;
        while let Some(batch) = batches.next() {
            let batch = match batch {
                Ok(batch) => batch,
                Err(error) => {
                    self.listener.interrupter.fail(error);
                    break;
                }
            };
            let progress = batches.progress();
            iteration += 1;
            let output = InferenceStep::step(&model, batch);
            let item = TrainingItem::new(output, progress, Some(iteration), None);
            self.listener.valid(LearnerEvent::ProcessedItem(item));
            if self.listener.interrupter.should_stop() {
                break;
            }
        }
    }

    /// Gives all ranks the running statistics of rank 0, and whatever else is not trained.
    pub(super) fn sync_buffers(&mut self) -> Result<()> {
        let model = self.learner.model();
        if !tensors::has_buffers(&model)? {
            return Ok(());
        }
        let Self { elastic, learner, .. } = self;
        elastic.run(|group| {
            let which = tensors::Which::Buffers;
            let model = tensors::broadcast(model.clone(), which, &|_| false, 0, group)?;
            load(learner, model, group);
            Ok(())
        })
    }
}

/// Gives a learner the values of `model`, which it has already on rank 0.
pub(super) fn load<M: LearnerModel>(learner: &mut Learner<M>, model: M, group: &ProcessGroup) {
    if group.rank() != 0 {
        learner.load_model(model.into_record());
    }
}

/// Returns an error on all ranks if one of them cannot begin an epoch like the others.
fn agree_on_batches<I>(
    batches: &mut Batches<'_, I>,
    items: usize,
    group: &ProcessGroup,
) -> Result<()> {
    let size = batches.items_of_full();
    let problem = match size {
        Some(_) => None,
        None => Some(match batches.take_failure() {
            Some(error) => format!("cannot read data: {error}"),
            None => "has no batch to train on".to_owned(),
        }),
    };
    let settings = [
        ("batch_size", size.unwrap_or(0).to_string()),
        ("items of a rank in an epoch", items.to_string()),
    ];
    agreement::begin_alike(group, problem, &settings)?.map_err(failure::learner)
}

/// burn's error for a failure of `rank`. burn has a variant for the workers of its own parallel training.
pub(super) fn failure(rank: Rank, message: String) -> TrainingError {
    TrainingError::Workers(vec![WorkerFailure { device_id: rank, message }])
}
