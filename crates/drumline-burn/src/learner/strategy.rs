//! The strategy that burn's training runs on each rank.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use burn::{
    module::Module,
    tensor::Device,
    train::{
        EventProcessorTraining, Learner, LearnerEvent, LearnerModel, LearningResult,
        SupervisedLearningStrategy, SupervisedTrainingEventProcessor, TrainLoader, TrainStep,
        TrainingComponents, ValidLoader,
    },
};
use drumline::ProcessGroup;

use super::{
    averaging::{Averager, Wrapped},
    epoch::{Flow, Listener, Run, failure, load},
    shares::{Shares, problem_of_validation},
    state,
};
use crate::{Error, ErrorKind, Result, agreement, burn_version::events, failure};

pub(super) struct Strategy {
    pub(super) group: ProcessGroup,
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
                self.group.abort(); // the other ranks wait for this one
            }
            let rank = error.culprit().unwrap_or(self.group.rank());
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
        let group = &self.group;
        let device = self.device_of(&learner.model());
        learner.fork(&device);
        let shares = Shares::new(train, self.deals_shares);
        let problem = shares.problem(group).or_else(|| problem_of_validation(&**valid));
        self.agree_on_settings(components, learner, &shares, problem, starting_epoch)?;
        let (averager, mut model) = Averager::new(self.wrapped.as_ref(), learner.model(), group)?;
        if starting_epoch > 1 {
            let is_from_files = components.checkpointer.is_some();
            model = state::share(learner, model, is_from_files, &components.event_store, group)?;
        }
        load(learner, model, group);

        let is_root = group.rank() == 0;
        let train = shares.of_rank(group, starting_epoch).to_device(&device);
        let valid = is_root.then(|| valid.to_device(&device.inner()));
        let mut run = Run {
            group,
            averager: &averager,
            accumulation: components.grad_accumulation.unwrap_or(1),
            learner,
            listener: Listener {
                events: &mut components.event_processor,
                interrupter: &components.interrupter,
                is_root,
            },
            is_compared: false,
        };
        let mut flow = Flow::GoOn;
        for epoch in starting_epoch..=components.num_epochs {
            let total_items = train.num_items() * group.world_size();
            run.listener.train(events::split_begins(epoch, total_items));
            flow = run.train(&*train)?;
            run.listener.train(events::split_ends(epoch));
            if flow != Flow::GoOn {
                break;
            }
            run.compare()?;
            run.sync_buffers()?;

            let mut stops_early = false;
            if let Some(valid) = &valid {
                let total_items = valid.num_items();
                run.listener.valid(events::split_begins(epoch, total_items));
                run.validate(&**valid);
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
            flow = run.listener.agree(group, stops_early)?;
            if flow != Flow::GoOn {
                break;
            }
        }
        if flow != Flow::Stop {
            // burn writes checkpoints in the background. Only now all ranks can know whether the last one was written.
            drop(components.checkpointer.take());
            run.listener.agree(group, false)?;
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

    /// Returns an error on all ranks if one of them cannot begin, or would train in another way.
    fn agree_on_settings<M: LearnerModel>(
        &self,
        components: &TrainingComponents<M>,
        learner: &Learner<M>,
        shares: &Shares<'_, <M as TrainStep>::Input>,
        problem: Option<String>,
        starting_epoch: usize,
    ) -> Result<()> {
        let settings = [
            ("num_epochs", components.num_epochs.to_string()),
            ("checkpoint", (starting_epoch - 1).to_string()),
            ("grads_accumulation", components.grad_accumulation.unwrap_or(1).to_string()),
            ("wrapped", self.wrapped.is_some().to_string()),
            ("deals_shares", shares.are_dealt.to_string()),
            ("items of the training data", shares.items().to_string()),
        ];
        let misfit = || self.wrapped.as_ref()?.misfit(&learner.model(), &self.group);
        agreement::begin_alike(&self.group, problem.or_else(misfit), &settings)?
            .map_err(failure::learner)
    }
}

/// Whether all ranks get this error, or have told each other all but the first.
fn is_agreed(error: &Error) -> bool {
    use ErrorKind::{Gradients, Model, ModelsDiffer, OtherRanks, ParametersDiffer};
    matches!(error.kind(), Gradients | Model | ModelsDiffer | OtherRanks | ParametersDiffer)
}
