//! The strategy that burn's training runs on each rank.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use burn::{
    data::dataloader::DataLoader,
    module::Module,
    tensor::Device,
    train::{
        EventProcessorTraining, InferenceStep, Learner, LearnerEvent, LearnerModel, LearningResult,
        SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
        TrainingComponents, ValidLoader,
    },
};
use drumline::{ElasticGroup, ProcessGroup};

use super::{
    averaging::{Averager, Wrapped},
    epoch::{Flow, Listener, Run, failure, load},
    shards::ByShards,
    shares::{Shares, problem_of_validation},
    state,
};
use crate::{Error, ErrorKind, Result, agreement, burn_version::events, failure};

pub(super) struct Strategy {
    /// The group at the begin.
    pub(super) group: ProcessGroup,
    pub(super) elastic: ElasticGroup,
    /// How many shards a step is, if it is shards.
    pub(super) shards: Option<usize>,
    pub(super) device: Option<Device>,
    pub(super) wrapped: Option<Wrapped>,
    /// Whether the program says that its loader deals shares.
    pub(super) deals_shares: bool,
    /// Whether burn has come as far as calling this.
    pub(super) has_begun: Arc<AtomicBool>,
}

/// Rank 0: burn tells loggers and renderers of its progress.
pub(super) struct OnRoot(pub(super) Strategy);

/// The other ranks: burn's loggers and renderers hear nothing.
pub(super) struct OnOtherRanks(pub(super) Strategy);

/// What a training hands back.
type Trained<M> = (M, SupervisedTrainingEventProcessor<M>);

impl<M: LearnerModel> SupervisedLearningStrategy<M> for OnRoot {
    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> Trained<M> {
        self.0.fit(components, learner, &train, &valid, starting_epoch)
    }
}

impl<M: LearnerModel> SupervisedLearningStrategy<M> for OnOtherRanks {
    fn train(
        &self,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        components: TrainingComponents<M>,
    ) -> LearningResult<M> {
        let interrupter = components.interrupter.clone();
        let starting_epoch = components.checkpoint.unwrap_or(0) + 1;
        let (model, events) = self.fit(components, learner, train, valid, starting_epoch);
        LearningResult {
            model: model.valid(),
            renderer: events.renderer(),
            interrupted: interrupter.interruption(),
            error: interrupter.error(),
        }
    }

    fn fit(
        &self,
        components: TrainingComponents<M>,
        learner: Learner<M>,
        train: TrainLoader<M>,
        valid: ValidLoader<M>,
        starting_epoch: usize,
    ) -> Trained<M> {
        self.0.fit(components, learner, &train, &valid, starting_epoch)
    }
}

impl Strategy {
    /// Trains. After a failure the components say why.
    fn fit<M: LearnerModel>(
        &self,
        mut components: TrainingComponents<M>,
        mut learner: Learner<M>,
        train: &TrainLoader<M>,
        valid: &ValidLoader<M>,
        starting_epoch: usize,
    ) -> Trained<M> {
        self.has_begun.store(true, Ordering::Relaxed);
        if let Err(error) = self.run(&mut components, &mut learner, train, valid, starting_epoch) {
            if !is_agreed(&error) {
                self.elastic.group().abort(); // the other ranks wait for this one
            }
            let rank = error.culprit().unwrap_or(self.elastic.group().rank());
            components.interrupter.fail(failure(rank, error.to_string()));
        }
        (learner.model(), components.event_processor)
    }

    fn run<M: LearnerModel>(
        &self,
        components: &mut TrainingComponents<M>,
        learner: &mut Learner<M>,
        train: &TrainLoader<M>,
        valid: &ValidLoader<M>,
        starting_epoch: usize,
    ) -> Result<()> {
        let (group, elastic) = (&self.group, &self.elastic);
        let device = self.device_of(&learner.model());
        learner.fork(&device);
        let shares = Shares::new(train, self.deals_shares);
        let problem = self.problem(components, learner, &shares, &**valid);
        elastic.run(|group| {
            let problem = problem.clone();
            self.agree_on_settings(components, &shares, problem, starting_epoch, group)
        })?;
        let averager = elastic.run(|group| -> Result<_> {
            let (wrapped, model) = (self.wrapped.as_ref(), learner.model());
            let (averager, mut model) = Averager::new(wrapped, model, self.shards, group)?;
            if starting_epoch > 1 {
                let is_from_files = components.checkpointer.is_some();
                model =
                    state::share(learner, model, is_from_files, &components.event_store, group)?;
            }
            load(learner, model, group);
            Ok(averager)
        })?;

        let train = shares.of_rank(group, starting_epoch).to_device(&device);
        let valid = valid.to_device(&device.inner());
        let dealer = shares.dealer.filter(|_| self.shards.is_some());
        let by_shards = ByShards::new(&*train, dealer, &learner.model());
        let all_items = match &by_shards {
            Some(ByShards { data, .. }) => data.items * data.count,
            None => train.num_items() * group.world_size(),
        };
        let begins =
            || events::begins(starting_epoch, components.num_epochs, components.label.clone());
        let mut run = Run {
            elastic,
            averager: &averager,
            accumulation: components.grad_accumulation.unwrap_or(1),
            listener: Listener {
                begins: (group.rank() > 0).then(begins),
                events: &mut components.event_processor,
                interrupter: &components.interrupter,
                elastic,
                epoch: (starting_epoch, all_items),
            },
            learner,
            is_compared: false,
        };
        let mut flow = Flow::GoOn;
        // The epoch of which this rank has made a checkpoint, as rank 0.
        let (mut last, mut saved) = (starting_epoch - 1, starting_epoch - 1);
        for epoch in starting_epoch..=components.num_epochs {
            last = epoch;
            run.listener.begin(epoch, all_items);
            flow = match &by_shards {
                Some(by_shards) => run.train_shards(by_shards, epoch)?,
                None => run.train(&*train)?,
            };
            run.listener.train(events::split_ends(epoch));
            if flow != Flow::GoOn {
                break;
            }
            run.compare()?;
            run.sync_buffers()?;

            let mut stops_early = false;
            flow = elastic.run(|group| {
                if group.rank() == 0 && saved < epoch {
                    saved = epoch;
                    let total_items = valid.num_items();
                    run.listener.valid(events::split_begins(epoch, total_items));
                    run.validate(&*valid);
                    run.listener.valid(events::split_ends(epoch));
                    run.listener.train(LearnerEvent::EndEpoch(epoch));
                    if components.checkpointer.is_some() || components.early_stopping.is_some() {
                        run.listener.flush();
                    }
                    if !components.interrupter.should_stop() {
                        let store = &components.event_store;
                        if let Some(checkpointer) = &mut components.checkpointer {
                            checkpointer.checkpoint(run.learner, epoch, store);
                        }
                        stops_early = components
                            .early_stopping
                            .as_mut()
                            .is_some_and(|strategy| strategy.should_stop(epoch, store));
                    }
                }
                run.listener.agree(group, stops_early)
            })?;
            if flow != Flow::GoOn {
                break;
            }
        }
        if flow != Flow::Stop {
            // burn writes checkpoints in the background. Only now all ranks can know whether the last one was written.
            elastic.run(|group| {
                if group.rank() == 0
                    && let Some(mut checkpointer) = components.checkpointer.take()
                    && saved < last
                {
                    // A rank 0 that has died since may not have written it.
                    checkpointer.checkpoint(run.learner, last, &components.event_store);
                }
                run.listener.agree(group, false)
            })?;
        }
        Ok(())
    }

    /// Where to train.
    fn device_of<M: Module>(&self, model: &M) -> Device {
        let device = match &self.device {
            Some(device) => device.clone(),
            None => model.devices().first().cloned().unwrap_or_default(),
        };
        if device.is_autodiff() { device } else { device.autodiff() }
    }

    /// Why this rank cannot begin.
    fn problem<M: LearnerModel>(
        &self,
        components: &TrainingComponents<M>,
        learner: &Learner<M>,
        shares: &Shares<'_, <M as TrainStep>::Input>,
        valid: &dyn DataLoader<<M as InferenceStep>::Input>,
    ) -> Option<String> {
        let misfit = || self.wrapped.as_ref()?.misfit(&learner.model(), &self.group, self.shards);
        let accumulation = || {
            let steps = components.grad_accumulation.filter(|_| self.shards.is_some())?;
            Some(format!(
                "`grads_accumulation({steps})` has no place beside shards, whose gradients are added anyway: leave it out, \
                 or multiply the number of shards"
            ))
        };
        let problem = shares.problem(&self.group, self.shards);
        problem.or_else(|| problem_of_validation(valid)).or_else(accumulation).or_else(misfit)
    }

    /// Returns an error on all ranks if one of them cannot begin, or would train in another way.
    fn agree_on_settings<M: LearnerModel>(
        &self,
        components: &TrainingComponents<M>,
        shares: &Shares<'_, <M as TrainStep>::Input>,
        problem: Option<String>,
        starting_epoch: usize,
        group: &ProcessGroup,
    ) -> Result<()> {
        let shards = self.shards.map_or("none".to_owned(), |count| count.to_string());
        let settings = [
            ("num_epochs", components.num_epochs.to_string()),
            ("checkpoint", (starting_epoch - 1).to_string()),
            ("grads_accumulation", components.grad_accumulation.unwrap_or(1).to_string()),
            ("wrapped", self.wrapped.is_some().to_string()),
            ("shards", shards),
            ("deals_shares", shares.are_dealt.to_string()),
            ("items of the training data", shares.items().to_string()),
        ];
        agreement::begin_alike(group, problem, &settings)?.map_err(failure::learner)
    }
}

/// Whether all ranks get this error, or have told each other all but the first.
fn is_agreed(error: &Error) -> bool {
    use ErrorKind::{Gradients, Model, ModelsDiffer, OtherRanks, ParametersDiffer};
    matches!(error.kind(), Gradients | Model | ModelsDiffer | OtherRanks | ParametersDiffer)
}
