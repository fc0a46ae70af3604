//! Epochs of training and of validation.

use burn::{
    data::dataloader::{DataLoader, Progress},
    train::{
        EventProcessorTraining, InferenceStep, Interrupter, Learner, LearnerEvent, LearnerModel,
        SupervisedTrainingEventProcessor, TrainStep, TrainingError, TrainingItem,
        train::WorkerFailure,
    },
};
use drumline::{ProcessGroup, Rank};

use super::{
    averaging::Averager,
    batches::{Batch, Batches, Next},
    stopping::{self, Mark, Marks, Wish},
};
use crate::{Result, agreement, burn_version::events, failure, tensors};

/// A training between the start of its first epoch and the end of its last.
pub(super) struct Run<'a, M: LearnerModel> {
    pub(super) group: &'a ProcessGroup,
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
    pub(super) is_root: bool,
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

type TrainInput<M> = <M as TrainStep>::Input;
type TrainEvent<M> = LearnerEvent<<M as TrainStep>::Output>;
type ValidEvent<M> = LearnerEvent<<M as InferenceStep>::Output>;

impl<M: LearnerModel> Listener<'_, M> {
    pub(super) fn train(&mut self, event: TrainEvent<M>) {
        if self.is_root {
            self.interrupter.fail_on_error(self.events.process_train(event));
        }
    }

    pub(super) fn valid(&mut self, event: ValidEvent<M>) {
        if self.is_root {
            self.interrupter.fail_on_error(self.events.process_valid(event));
        }
    }

    /// Waits until all events are processed.
    pub(super) fn flush(&mut self) {
        if self.is_root {
            self.interrupter.fail_on_error(self.events.flush());
        }
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
        let mut batches = Batches::new(loader);
        agree_on_batches(&mut batches, loader.num_items(), self.group)?;
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
                self.tell(output, progress, iteration);
                continue;
            }
            let mark = Mark {
                ends: next == Next::End,
                stops: next == Next::Failure || self.listener.interrupter.should_stop(),
                is_incomplete: next == Next::Failure && gathered < self.accumulation,
            };
            gathered = 0;
            let (output, progress, marks) = self.step(batch, mark)?;
            self.tell(output, progress, iteration);
            if marks.stops > 0 {
                let flow = self.listener.agree(self.group, false)?;
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
        let sent = mark.send(self.group);
        let output = self.averager.run(true, || self.learner.train_step(batch.input))?;
        let gradients = self.averager.average(output.grads, &self.learner.model())?;
        let marks = sent.wait()?;
        if marks.incomplete == 0 {
            self.learner.lr_step();
            self.learner.optimizer_step(gradients);
        }
        if !self.is_compared || self.averager.is_check_due() {
            self.is_compared = true;
            self.compare()?;
        }
        Ok((output.item, batch.progress, marks))
    }

    /// Compares the parameters of all ranks.
    pub(super) fn compare(&self) -> Result<()> {
        self.averager.compare(&self.learner.model(), self.group)
    }

    /// The epoch has ended on some rank. It must have ended on all.
    fn end(&self, ends: bool, marks: Marks, iteration: usize) -> Result<()> {
        if marks.ends == self.group.world_size() {
            return Ok(());
        }
        let mut all = vec![0_u8; self.group.world_size()];
        self.group.all_gather(&[u8::from(ends)], &mut all)?;
        let rank = all.iter().position(|&ends| ends != 0).unwrap_or_default();
        Err(failure::learner(format!(
            "rank {rank} has no batch after batch {iteration} of the epoch, other ranks have; give all \
                 ranks the same number of batches"
        )))
    }

    /// Tells of a batch. Counts the items of all ranks.
    fn tell(&mut self, output: <M as TrainStep>::Output, progress: Progress, iteration: usize) {
        let ranks = self.group.world_size();
        let progress = events::progress_of_all(progress, ranks);
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
        let model = tensors::broadcast(model, tensors::Which::Buffers, &|_| false, 0, self.group)?;
        load(self.learner, model, self.group);
        Ok(())
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
