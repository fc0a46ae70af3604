//! An optimizer's state as tensors named after parameters: `optimizer.fc.weight.momentum.velocity`.
//!
//! burn keeps the state by parameter id, and ids differ from process to process.

use std::{
    any::type_name,
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
};

use burn::{
    module::{Module, Param},
    optim::{
        AdaGradConfig, AdafactorConfig, AdamConfig, AdamWConfig, AdanConfig, LBFGS, LBFGSConfig,
        LambConfig, LionConfig, ModuleOptimizer, MuonConfig, OptimizerRecord, RmsPropConfig,
        SgdConfig,
    },
    tensor::Tensor,
};
use drumline::checkpoint::{self, Checkpoint};

use super::record::{Entry, Record};
use crate::tensors::{VisitFloat, visit_floats};

/// What the names of an optimizer's tensors in a checkpoint begin with.
pub(super) const PREFIX: &str = "optimizer.";
/// The name under which burn keeps the number of dimensions of a state.
const RANK: &str = "__rank";

/// What [`TrainingState::new`](super::TrainingState::new) makes an optimizer of: an optimizer, or the
/// configuration of one.
///
/// A configuration is better. The checkpoint then holds it as text, so a checkpoint of another optimizer, or of
/// the same one with other settings, cannot be resumed unnoticed. (Adam and AdamW, for example, have states of
/// the same form.) An optimizer that was made with `init()` no longer tells what it is. Give such a one if it
/// has parameter groups, or to resume with other settings on purpose.
///
/// ```
/// use burn::{nn::LinearConfig, optim::AdamWConfig, tensor::Device};
/// use drumline_burn::checkpoint::{IntoOptimizer, TrainingState};
///
/// fn state(optimizer: impl IntoOptimizer) {
///     let model = LinearConfig::new(2, 1).init(&Device::flex().autodiff());
///     TrainingState::new(model, optimizer);
/// }
/// state(AdamWConfig::new());
/// state(AdamWConfig::new().init());
/// ```
pub trait IntoOptimizer {
    /// [`ModuleOptimizer`] or [`LBFGS`].
    type Optimizer: OptimizerState;

    /// The optimizer, and the text of its configuration if there is one.
    fn into_optimizer(self) -> (Self::Optimizer, Option<String>);
}

/// An optimizer whose state a checkpoint can hold: burn's [`ModuleOptimizer`], which is the type of all of
/// burn's optimizers but one, [`LBFGS`], and [`ShardedOptimizer`](crate::ShardedOptimizer).
///
/// ```
/// use burn::optim::{LBFGSConfig, SgdConfig};
/// use drumline_burn::checkpoint::OptimizerState;
///
/// fn can_be_saved(_: &impl OptimizerState) {}
/// can_be_saved(&SgdConfig::new().init());
/// can_be_saved(&LBFGSConfig::new().init());
/// ```
pub trait OptimizerState: sealed::Saved {}

impl OptimizerState for ModuleOptimizer {}
impl OptimizerState for LBFGS {}

impl IntoOptimizer for ModuleOptimizer {
    type Optimizer = Self;

    fn into_optimizer(self) -> (Self, Option<String>) {
        (self, None)
    }
}

impl IntoOptimizer for LBFGS {
    type Optimizer = Self;

    fn into_optimizer(self) -> (Self, Option<String>) {
        (self, None)
    }
}

macro_rules! from_configuration {
    ($($config:ty => $optimizer:ty,)*) => {
        $(impl IntoOptimizer for $config {
            type Optimizer = $optimizer;

            fn into_optimizer(self) -> ($optimizer, Option<String>) {
                let text = describe(type_name::<$config>(), &self.to_string());
                (self.init(), Some(text))
            }
        })*
    };
}

from_configuration! {
    AdaGradConfig => ModuleOptimizer,
    AdafactorConfig => ModuleOptimizer,
    AdamConfig => ModuleOptimizer,
    AdamWConfig => ModuleOptimizer,
    AdanConfig => ModuleOptimizer,
    LBFGSConfig => LBFGS,
    LambConfig => ModuleOptimizer,
    LionConfig => ModuleOptimizer,
    MuonConfig => ModuleOptimizer,
    RmsPropConfig => ModuleOptimizer,
    SgdConfig => ModuleOptimizer,
}

/// The name of the type and burn's text of a configuration, on one line.
fn describe(type_name: &str, config: &str) -> String {
    let name = type_name.rsplit("::").next().unwrap_or(type_name);
    let words: Vec<&str> = [name].into_iter().chain(config.split_whitespace()).collect();
    words.join(" ")
}

pub(super) mod sealed {
    use super::*;

    /// How a state is named in a checkpoint, which only this crate decides.
    pub trait Saved: Sized {
        fn to_tensors<M: Module>(&self, model: &M) -> Result<Vec<checkpoint::Tensor>, String>;
        fn with_tensors<M: Module>(self, model: &M, from: &Checkpoint) -> Result<Self, String>;

        /// Whether each rank has a part of the state.
        fn is_shared_out(&self) -> bool {
            false
        }

        /// Whether this rank has the state of a parameter.
        fn keeps(&self, _parameter: &str) -> bool {
            true
        }

        /// Whether this rank brings the state of a parameter, which it has, to a checkpoint.
        fn saves(&self, _parameter: &str) -> bool {
            true
        }
    }
}

/// Adds the state of `optimizer`, which trains `model`, to a checkpoint.
pub(super) fn save<M: Module>(
    optimizer: &impl OptimizerState,
    model: &M,
    checkpoint: &mut Checkpoint,
) -> Result<(), String> {
    for tensor in optimizer.to_tensors(model)? {
        checkpoint.insert(tensor);
    }
    Ok(())
}

/// This rank's part of the state, for a checkpoint. `None` if the state is not shared out.
pub(super) fn part<M: Module>(
    optimizer: &impl OptimizerState,
    model: &M,
) -> Option<Result<Checkpoint, String>> {
    optimizer.is_shared_out().then(|| {
        let mut part = Checkpoint::default();
        save(optimizer, model, &mut part)?;
        Ok(state_of(&part, model, |parameter| optimizer.saves(parameter)))
    })
}

/// The state of some parameters in a checkpoint, and what belongs to no parameter of `model`.
fn state_of<M: Module>(
    checkpoint: &Checkpoint,
    model: &M,
    is_chosen: impl Fn(&str) -> bool,
) -> Checkpoint {
    let chosen: BTreeMap<String, bool> =
        parameters(model).into_iter().map(|it| (it.name.clone(), is_chosen(&it.name))).collect();
    let mut state = Checkpoint::default();
    for (key, tensor) in checkpoint.section(PREFIX) {
        let parameter = split_key(key, |name| chosen.get(name).copied());
        if parameter.is_none_or(|(_, is_chosen, _)| is_chosen) {
            state.insert(tensor.clone());
        }
    }
    state
}

/// Gives `optimizer`, which trains `model`, the state in a checkpoint.
pub(super) fn load<M: Module, O: OptimizerState>(
    optimizer: O,
    model: &M,
    checkpoint: &Checkpoint,
) -> Result<O, String> {
    let checkpoint = match optimizer.is_shared_out() {
        true => &state_of(checkpoint, model, |parameter| optimizer.keeps(parameter)),
        false => checkpoint,
    };
    // burn panics when a tensor has another number of dimensions than the optimizer expects.
    let loaded = catch_unwind(AssertUnwindSafe(|| optimizer.with_tensors(model, checkpoint)));
    let optimizer = loaded.unwrap_or_else(|_| {
        Err("burn cannot load the state of the optimizer: it has other dimensions".into())
    })?;

    // burn ignores values that it does not know, so check that all were loaded.
    let mut loaded = Checkpoint::default();
    save(&optimizer, model, &mut loaded)?;
    for (name, saved) in checkpoint.section(PREFIX) {
        match loaded.tensor(saved.name()) {
            Some(loaded) if loaded == saved => {}
            Some(loaded) if loaded.dtype() != saved.dtype() => {
                return Err(format!(
                    "{PREFIX}{name} is {}, but burn loads it as {}, the type of its default \
                     device; set that first with `Device::default().configure(..)`",
                    saved.dtype(),
                    loaded.dtype()
                ));
            }
            _ => {
                return Err(format!(
                    "it is of another optimizer: this one has no use for {PREFIX}{name}"
                ));
            }
        }
    }
    Ok(optimizer)
}

impl sealed::Saved for ModuleOptimizer {
    fn to_tensors<M: Module>(&self, model: &M) -> Result<Vec<checkpoint::Tensor>, String> {
        let record = self.into_bytes().map_err(|error| error.to_string())?;
        let names: BTreeMap<u64, String> =
            parameters(model).into_iter().map(|parameter| (parameter.id, parameter.name)).collect();
        let named = |(key, entry): (String, Entry)| {
            let (id, field) = key.split_once('.').unwrap_or((&key, ""));
            let name = id.parse().ok().and_then(|id: u64| names.get(&id));
            let name = name.ok_or_else(|| {
                format!("the optimizer trains parameter {id}, which the model does not have")
            })?;
            entry.into_tensor(format!("{PREFIX}{name}.{field}"))
        };
        Record::from_bytes(record)?.entries.into_iter().map(named).collect()
    }

    fn with_tensors<M: Module>(self, model: &M, from: &Checkpoint) -> Result<Self, String> {
        let parameters = parameters(model);
        let ids: BTreeMap<&str, u64> =
            parameters.iter().map(|parameter| (&parameter.name[..], parameter.id)).collect();
        let mut record = Record::default();
        for (key, tensor) in from.section(PREFIX) {
            let (name, id, field) = split_key(key, |name| ids.get(name).copied())
                .ok_or_else(|| format!("{PREFIX}{key} belongs to no parameter of the model"))?;
            record.entries.insert(format!("{id}.{field}"), Entry::from_tensor(tensor, Some(id))?);
            // burn finds the group of a parameter by its path.
            record.notes.insert(id.to_string(), name.to_owned());
        }
        let record = OptimizerRecord::from_bytes(record.into_bytes()?);
        Ok(self.load_record(record.map_err(|error| error.to_string())?))
    }
}

/// Its state belongs to all parameters together.
impl sealed::Saved for LBFGS {
    fn to_tensors<M: Module>(&self, _model: &M) -> Result<Vec<checkpoint::Tensor>, String> {
        let record = self.into_bytes().map_err(|error| error.to_string())?;
        let entries = Record::from_bytes(record)?.entries.into_iter();
        entries.map(|(field, entry)| entry.into_tensor(format!("{PREFIX}{field}"))).collect()
    }

    fn with_tensors<M: Module>(self, model: &M, from: &Checkpoint) -> Result<Self, String> {
        let elements: usize = parameters(model).iter().map(|parameter| parameter.elements).sum();
        let mut record = Record::default();
        for (field, tensor) in from.section(PREFIX) {
            let fits = matches!(tensor.shape(), [] | [1]) || tensor.shape() == [elements];
            if !fits {
                return Err(format!(
                    "{PREFIX}{field} has the shape {:?}, but the model has {elements} elements",
                    tensor.shape()
                ));
            }
            record.entries.insert(field.to_owned(), Entry::from_tensor(tensor, None)?);
        }
        let record = OptimizerRecord::from_bytes(record.into_bytes()?);
        Ok(self.load_record(record.map_err(|error| error.to_string())?))
    }
}

/// The names of the parameters for which `optimizer` has state.
pub(crate) fn names_with_state<M: Module>(
    optimizer: &ModuleOptimizer,
    model: &M,
) -> Result<Vec<String>, String> {
    use sealed::Saved;

    let tensors = optimizer.to_tensors(model)?;
    let has_state = |name: &str| {
        let rank = format!("{PREFIX}{name}.{RANK}"); // every state has one
        tensors.iter().any(|tensor| tensor.name() == rank)
    };
    let names = parameters(model).into_iter().map(|parameter| parameter.name);
    Ok(names.filter(|name| has_state(name)).collect())
}

/// The name of the parameter to which `key` belongs, a tensor's name without [`PREFIX`]. Names of parameters and of
/// fields may contain dots, so it looks for the dot that ends a known parameter.
pub(super) fn split_key<T>(
    key: &str,
    known: impl Fn(&str) -> Option<T>,
) -> Option<(&str, T, &str)> {
    key.match_indices('.')
        .find_map(|(dot, _)| Some((&key[..dot], known(&key[..dot])?, &key[dot + 1..])))
}

/// A floating-point parameter.
struct Parameter {
    name: String,
    id: u64,
    elements: usize,
}

fn parameters<M: Module>(model: &M) -> Vec<Parameter> {
    struct Collect(Vec<Parameter>);

    impl VisitFloat for Collect {
        fn float<const D: usize>(&mut self, name: &str, param: &Param<Tensor<D>>) {
            let (name, elements) = (name.to_owned(), param.shape().num_elements());
            self.0.push(Parameter { name, id: param.id.val(), elements });
        }
    }

    let mut collect = Collect(Vec::new());
    visit_floats(model, &mut collect);
    collect.0
}
