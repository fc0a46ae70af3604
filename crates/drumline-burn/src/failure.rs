//! The failures of models of burn, each with its text.

use std::{error::Error as StdError, fmt::Display, sync::Arc};

use drumline::{Error, ErrorKind, Section};

/// Why a program cannot compute a loss.
pub(crate) type ProgramError = Box<dyn StdError + Send + Sync>;

/// All ranks get it, or a rank has told the others of it.
fn model(text: impl Display) -> Error {
    Error::quoting(ErrorKind::Model, Section::ModelsOfBurn, text)
}

/// A call of this rank is wrong.
fn argument(text: impl Display) -> Error {
    Error::quoting(ErrorKind::Argument, Section::ModelsOfBurn, text)
}

/// A tensor of the model has a dtype that cannot travel.
pub(crate) fn unsupported_dtype(name: impl Display, dtype: impl Display) -> Error {
    model(format!(
        "tensor `{name}` is {dtype}; Drumline carries f32, f64, f16, bf16, integers and booleans: convert it, or leave it \
         out with `DdpOptions::ignore`"
    ))
}

/// The model carries gradient taps of an earlier wrapping.
pub(crate) fn already_wrapped(name: impl Display) -> Error {
    model(format!(
        "parameter `{name}` was wrapped before; use that handle, or `unwrap` the model with it first"
    ))
}

/// The model was wrapped by a [`ShardedOptimizer`](crate::ShardedOptimizer), which alone can take its steps. burn's
/// `Learner` owns its optimizer, so it cannot train such a model.
pub(crate) fn optimizer_is_sharded(name: impl Display) -> Error {
    argument(format!(
        "parameter `{name}` was wrapped by a `ShardedOptimizer`, which must take the steps, but a `Learner` owns its \
         optimizer, as does every other wrapping: train in a loop of your own with that `ShardedOptimizer`, or `unwrap` the \
         model with it first"
    ))
}

/// A [`ShardedOptimizer`](crate::ShardedOptimizer) cannot be made, or cannot take a step.
pub(crate) fn sharded(problem: impl Display) -> Error {
    argument(format!("the sharded optimizer: {problem}"))
}

/// Two parameters of the model share an id, so their gradients cannot be told apart.
pub(crate) fn shared_parameter(first: impl Display, second: impl Display) -> Error {
    model(format!(
        "parameters `{first}` and `{second}` have the same id; to tie weights, use one parameter twice in forward"
    ))
}

/// A frozen copy of a parameter, in the model of an exponential moving average or a target network, has the parameter's
/// id. burn's optimizers find gradients by id, and may give the copy the gradient.
pub(crate) fn frozen_copy(trained: impl Display, copy: impl Display) -> Error {
    model(format!(
        "`{copy}` is not trained, but has the id of parameter `{trained}`, as a clone and a loaded record do: burn's \
         optimizer may update it in place of the parameter. Give the copy ids of its own: make it anew, and load values by \
         name, `load_named_tensors(Model::new(&device), named_tensors(&model)?)`; or keep it outside of the wrapped model"
    ))
}

/// Two tensors of the model have the same path, by which ranks and checkpoints tell tensors apart.
pub(crate) fn shared_path(path: impl Display) -> Error {
    model(format!(
        "two tensors of the model have the path `{path}`: a container between them does not name its parts; call \
         `enter_module` and `exit_module` around each part in its `visit` and `map`, as `#[derive(Module)]` does"
    ))
}

/// No tensor of the model requires a gradient.
pub(crate) fn nothing_to_train(problem: impl Display) -> Error {
    model(format!("the model has no parameter to train: {problem}"))
}

/// The model of other ranks cannot be wrapped. They get the reason as an error of its own.
pub(crate) fn on_other_ranks(problem: impl Display) -> Error {
    Error::quoting(ErrorKind::OtherRanks, Section::ModelsOfBurn, problem)
}

/// The loss does not depend on anything that requires a gradient.
pub(crate) fn loss_without_gradient() -> Error {
    argument(
        "the loss has no gradient: it was computed without autodiff (`model.valid()`?) or detached",
    )
}

/// No parameter of the model got a gradient on any rank. All ranks get this error.
pub(crate) fn loss_of_another_model() -> Error {
    model("the loss of no rank depends on the model of this step: it was computed from another one")
}

/// The closure that computes a shard's loss has failed on this rank. The other ranks are told so. The error is the detail.
pub(crate) fn program(error: ProgramError) -> Error {
    let text = format!("the closure of a step of shards failed: {error}");
    Error::quoting(ErrorKind::Gradients, Section::MissingGradients, text).with(Arc::new(error))
}

/// A step of shards and one of batches cannot be mixed.
pub(crate) fn shards(problem: impl Display) -> Error {
    Error::argument("a step of shards", problem)
}

/// Wrapped models cannot take part in one step together.
pub(crate) fn cannot_combine(problem: impl Display) -> Error {
    argument(format!("these models cannot take a step together: {problem}"))
}

/// A device failed, so a gradient could not be read. The other ranks get an error in the same step that names this rank.
pub(crate) fn device(name: impl Display, device: impl Display, problem: impl Display) -> Error {
    let text =
        format!("the gradient of parameter `{name}` could not be read from {device}: {problem}");
    Error::new(ErrorKind::Device, Section::ModelsOfBurn, text)
}

/// The norm of the gradients is infinite or NaN, and [`ClipGradNorm`](crate::ClipGradNorm) was told that this is an error.
/// The gradients are alike on all ranks, so every rank gets this error.
pub(crate) fn non_finite_norm(norm: f64) -> Error {
    let text = format!(
        "the norm of all gradients is {norm}, so they cannot be clipped: skip this step, or lower the learning rate or the \
         loss scale"
    );
    Error::new(ErrorKind::NonFiniteNorm, Section::ModelsOfBurn, text)
}

/// Gradients cannot be clipped or unscaled.
pub(crate) fn cannot_scale(problem: impl Display) -> Error {
    argument(format!("gradients cannot be scaled: {problem}"))
}

/// The model given to `sync_buffers` is in validation mode.
pub(crate) fn not_training() -> Error {
    argument(
        "the model is in validation mode (`valid()`), so its buffers were not synchronised and nothing was sent; \
         synchronise the model that is trained, on all ranks, before `valid()`",
    )
}

/// The input of a [`SyncBatchNorm`](crate::SyncBatchNorm) cannot be normalised.
pub(crate) fn cannot_normalize(problem: impl Display) -> Error {
    argument(format!("SyncBatchNorm cannot normalise its input: {problem}"))
}

/// A training of burn's `Learner` cannot begin or go on. Every rank gets this error.
#[cfg(feature = "train")]
pub(crate) fn learner(problem: impl Display) -> Error {
    model(problem)
}

/// Tensors do not fit a model: they are missing, left over, or of another shape.
pub(crate) fn tensors_do_not_fit(problem: impl Display) -> Error {
    argument(format!("the tensors do not fit the model: {problem}"))
}

/// A batch of these samples cannot be loaded.
#[cfg(feature = "data")]
pub(crate) fn data(rank: usize, samples: &[usize], problem: impl Display) -> Error {
    /// A longer list would not help.
    const NAMED_MAX: usize = 4;
    let named: Vec<String> = samples.iter().take(NAMED_MAX).map(usize::to_string).collect();
    let more = match samples.len().saturating_sub(NAMED_MAX) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    let text = format!("rank {rank} cannot load samples {}{more}: {problem}", named.join(", "));
    Error::quoting(ErrorKind::Data, Section::ModelsOfBurn, text)
}
