//! The state of a learner beside its model, when a training resumes: rank 0 reads it, and gives it to all ranks.

use std::{slice::ChunksExact, sync::mpsc};

use burn::{
    lr_scheduler::LrSchedulerRecord,
    module::{ModuleMapper, ModuleVisitor, Param, ParamId},
    optim::OptimizerRecord,
    store::{ModuleRecord, RecordError},
    tensor::{Bool, Bytes, Int, Tensor},
    train::{
        Learner, LearnerModel, LearningCheckpointer, SupervisedTraining,
        checkpoint::{
            AsyncCheckpointer, Checkpoint, Checkpointer, CheckpointerError, CheckpointingAction,
            CheckpointingStrategy,
        },
        metric::store::EventStoreClient,
    },
};
use burn_pack::{Reader, Writer};
use drumline::ProcessGroup;

use crate::{Result, agreement, failure};

/// A training on a rank other than 0: it neither reads nor writes files.
pub(super) fn without_files<M: LearnerModel>(
    training: SupervisedTraining<M>,
) -> SupervisedTraining<M> {
    training.with_custom_checkpointers(
        Elsewhere(|| {
            let nothing = Writer::new(Vec::new()).into_bytes().map_err(RecordError::from)?;
            Ok(ModuleRecord::from_bytes(nothing)?.allow_partial(true))
        }),
        Elsewhere(|| Ok(OptimizerRecord::default())),
        Elsewhere(|| Ok(LrSchedulerRecord::new())),
    )
}

/// Gives all ranks the state of rank 0's optimizer and scheduler. `model` gets rank 0's ids of parameters, by which
/// burn's optimizers keep their state. `is_from_files` says whether rank 0 has the state from a checkpoint of burn.
pub(super) fn share<M: LearnerModel>(
    learner: &mut Learner<M>,
    model: M,
    is_from_files: bool,
    store: &EventStoreClient,
    group: &ProcessGroup,
) -> Result<M> {
    let is_root = group.rank() == 0;
    let failed = failure::learner;
    let own = match is_root {
        true => State::of(learner, &model, is_from_files, store),
        false => Ok(State::default()),
    };
    let mut state = agreement::agree(group, own)?.map_err(failed)?;
    for part in [&mut state.ids, &mut state.optimizer, &mut state.scheduler] {
        broadcast(part, group)?;
    }
    let State { ids, optimizer, scheduler } = state;
    let loaded = if is_root { Ok(()) } else { load(learner, optimizer, scheduler) };
    let loaded = loaded.map_err(|error| format!("cannot take the state of rank 0: {error}"));
    agreement::agree(group, loaded)?.map_err(failed)?;
    Ok(if is_root { model } else { model.map(&mut SetIds(ids.chunks_exact(size_of::<u64>()))) })
}

/// What travels: burn's records, and the ids of the parameters in the order of the model.
#[derive(Default)]
struct State {
    ids: Vec<u8>,
    optimizer: Vec<u8>,
    scheduler: Vec<u8>,
}

impl State {
    fn of<M: LearnerModel>(
        learner: &Learner<M>,
        model: &M,
        is_from_files: bool,
        store: &EventStoreClient,
    ) -> Result<Self, String> {
        let (optimizer, scheduler) = records(learner, store)
            .ok_or_else(|| "burn does not give the state of the optimizer".to_owned())?;
        let text = |error: RecordError| error.to_string();
        let optimizer = optimizer.into_bytes().map_err(text)?.to_vec();
        let scheduler = scheduler.into_bytes().map_err(text)?.to_vec();
        if is_from_files && !trains_any_parameter(&optimizer)? {
            return Err("the checkpoint holds no state that this optimizer can use; give the learner the optimizer \
                        that it had when the checkpoint was written"
                .to_owned());
        }
        let mut ids = Ids::default();
        model.visit(&mut ids);
        Ok(Self { ids: ids.0, optimizer, scheduler })
    }
}

/// The state of optimizer and scheduler. burn gives them to checkpointers alone.
fn records<M: LearnerModel>(
    learner: &Learner<M>,
    store: &EventStoreClient,
) -> Option<(OptimizerRecord, LrSchedulerRecord)> {
    let (to_nobody, _) = mpsc::channel::<ModuleRecord>();
    let (from_optimizer, optimizer) = mpsc::channel();
    let (from_scheduler, scheduler) = mpsc::channel();
    LearningCheckpointer::<M>::new(
        AsyncCheckpointer::new(Keep(to_nobody)),
        AsyncCheckpointer::new(Keep(from_optimizer)),
        AsyncCheckpointer::new(Keep(from_scheduler)),
        Box::new(AtOnce),
    )
    .checkpoint(learner, 0, store);
    Some((optimizer.recv().ok()?, scheduler.recv().ok()?))
}

/// burn's optimizers save for each parameter that they have updated at least its number of dimensions.
fn trains_any_parameter(optimizer: &[u8]) -> Result<bool, String> {
    let reader = Reader::from_bytes(Bytes::from_bytes_vec(optimizer.to_vec()));
    Ok(!reader.map_err(|error| error.to_string())?.scalars().is_empty())
}

fn load<M: LearnerModel>(
    learner: &mut Learner<M>,
    optimizer: Vec<u8>,
    scheduler: Vec<u8>,
) -> Result<(), RecordError> {
    let optimizer = OptimizerRecord::from_bytes(Bytes::from_bytes_vec(optimizer))?;
    let scheduler = LrSchedulerRecord::from_bytes(Bytes::from_bytes_vec(scheduler))?;
    learner.load_optim(optimizer);
    learner.load_scheduler(scheduler);
    Ok(())
}

/// Gives all ranks the bytes of rank 0.
fn broadcast(bytes: &mut Vec<u8>, group: &ProcessGroup) -> Result<()> {
    let mut length = [bytes.len() as u64];
    group.broadcast(&mut length, 0)?;
    bytes.resize(length[0] as usize, 0);
    group.broadcast(bytes, 0)?;
    Ok(())
}

/// Checkpoints that are on another rank: nothing is written, and what is read changes nothing.
struct Elsewhere<R>(fn() -> Result<R, RecordError>);

impl<R: Checkpoint> Checkpointer<R> for Elsewhere<R> {
    fn save(&self, _: usize, _: R) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn delete(&self, _: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _: usize) -> Result<R, CheckpointerError> {
        self.0().map_err(CheckpointerError::Record)
    }
}

/// Hands on what it is to save.
struct Keep<R>(mpsc::Sender<R>);

impl<R: Checkpoint> Checkpointer<R> for Keep<R> {
    fn save(&self, _: usize, record: R) -> Result<(), CheckpointerError> {
        self.0.send(record).ok(); // the record of the model has no receiver
        Ok(())
    }

    fn delete(&self, _: usize) -> Result<(), CheckpointerError> {
        Ok(())
    }

    fn restore(&self, _: usize) -> Result<R, CheckpointerError> {
        Err(CheckpointerError::Unknown("nothing was kept".to_owned()))
    }
}

/// Saves whenever it is asked.
struct AtOnce;

impl CheckpointingStrategy for AtOnce {
    fn checkpointing(&mut self, _: usize, _: &EventStoreClient) -> Vec<CheckpointingAction> {
        vec![CheckpointingAction::Save]
    }
}

/// The ids of parameters, eight bytes each.
#[derive(Default)]
struct Ids(Vec<u8>);

impl Ids {
    fn push(&mut self, id: ParamId) {
        self.0.extend(id.val().to_le_bytes());
    }
}

impl ModuleVisitor for Ids {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.push(param.id);
    }

    fn visit_int<const D: usize>(&mut self, param: &Param<Tensor<D, Int>>) {
        self.push(param.id);
    }

    fn visit_bool<const D: usize>(&mut self, param: &Param<Tensor<D, Bool>>) {
        self.push(param.id);
    }
}

/// Gives the parameters of a model these ids. Ranks have compared their models, so there is one for each.
struct SetIds<'a>(ChunksExact<'a, u8>);

impl SetIds<'_> {
    fn next_or(&mut self, own: ParamId) -> ParamId {
        let next = self.0.next().and_then(|bytes| bytes.try_into().ok());
        next.map_or(own, |bytes| ParamId::from(u64::from_le_bytes(bytes)))
    }
}

impl ModuleMapper for SetIds<'_> {
    fn map_float<const D: usize>(&mut self, mut param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        param.id = self.next_or(param.id);
        param
    }

    fn map_int<const D: usize>(
        &mut self,
        mut param: Param<Tensor<D, Int>>,
    ) -> Param<Tensor<D, Int>> {
        param.id = self.next_or(param.id);
        param
    }

    fn map_bool<const D: usize>(
        &mut self,
        mut param: Param<Tensor<D, Bool>>,
    ) -> Param<Tensor<D, Bool>> {
        param.id = self.next_or(param.id);
        param
    }
}
