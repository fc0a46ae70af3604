use std::fmt;

use drumline::Section;

/// The result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model cannot be trained data-parallel, or a step failed.
///
/// ```
/// use burn::{nn::LinearConfig, tensor::{Device, Tensor}};
/// use drumline::ProcessGroup;
/// use drumline_burn::{DistributedDataParallel, Error};
///
/// let device = Device::flex().autodiff();
/// let model = LinearConfig::new(2, 1).init(&device);
/// let (ddp, model) = DistributedDataParallel::wrap(model, &ProcessGroup::alone())?;
/// let loss = model.forward(Tensor::<2>::ones([4, 2], &device)).mean().detach();
/// let error = ddp.backward(loss, &model).map(drop).unwrap_err();
/// assert!(matches!(error, Error::LossWithoutGradient));
/// assert_eq!(format!("{error:?}"), error.to_string()); // what `unwrap` prints
/// # Ok::<_, Error>(())
/// ```
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The process group or the reduction failed. The text names the rank and the call.
    #[error(transparent)]
    Drumline(#[from] drumline::train::Error),

    /// A tensor of the model has a dtype that cannot travel.
    #[error(
        "tensor `{name}` is {dtype}; Drumline carries f32, f64, f16, bf16, integers and booleans: convert it, or \
         leave it out with `DdpOptions::ignore` {}",
        Section::ModelsOfBurn
    )]
    UnsupportedDType {
        /// The tensor's path.
        name: String,
        /// Its dtype, by burn's name.
        dtype: String,
    },

    /// The model carries gradient taps of an earlier wrapping.
    #[error(
        "parameter `{name}` was wrapped before; use that handle, or `unwrap` the model with it first \
         {}",
        Section::ModelsOfBurn
    )]
    AlreadyWrapped {
        /// The parameter's path.
        name: String,
    },

    /// The model was wrapped by a [`ShardedOptimizer`](crate::ShardedOptimizer), which alone can take its steps. burn's
    /// `Learner` owns its optimizer, so it cannot train such a model.
    #[error(
        "parameter `{name}` was wrapped by a `ShardedOptimizer`, which must take the steps, but a `Learner` owns its \
         optimizer, as does every other wrapping: train in a loop of your own with that `ShardedOptimizer`, or \
         `unwrap` the model with it first {}",
        Section::ModelsOfBurn
    )]
    OptimizerIsSharded {
        /// The parameter's path.
        name: String,
    },

    /// A [`ShardedOptimizer`](crate::ShardedOptimizer) cannot be made, or cannot take a step.
    #[error("the sharded optimizer: {problem} {}", Section::ModelsOfBurn)]
    Sharded {
        /// The reason: rank, parameter, and what to do.
        problem: String,
    },

    /// Two parameters of the model share an id, so their gradients cannot be told apart.
    #[error(
        "parameters `{first}` and `{second}` have the same id; to tie weights, use one parameter \
         twice in forward {}",
        Section::ModelsOfBurn
    )]
    SharedParameter {
        /// The path of one parameter.
        first: String,
        /// The path of the other parameter.
        second: String,
    },

    /// A frozen copy of a parameter, in the model of an exponential moving average or a target network, has the
    /// parameter's id. burn's optimizers find gradients by id, and may give the copy the gradient.
    #[error(
        "`{copy}` is not trained, but has the id of parameter `{trained}`, as a clone and a loaded record do: burn's \
         optimizer may update it in place of the parameter. Give the copy ids of its own: make it anew, and load \
         values by name, `load_named_tensors(Model::new(&device), named_tensors(&model)?)`; or keep it outside of the \
         wrapped model {}",
        Section::ModelsOfBurn
    )]
    FrozenCopy {
        /// The path of the parameter.
        trained: String,
        /// The path of its copy.
        copy: String,
    },

    /// Two tensors of the model have the same path, by which ranks and checkpoints tell tensors apart.
    #[error(
        "two tensors of the model have the path `{path}`: a container between them does not name its parts; call \
         `enter_module` and `exit_module` around each part in its `visit` and `map`, as `#[derive(Module)]` does \
         {}",
        Section::ModelsOfBurn
    )]
    SharedPath {
        /// The path.
        path: String,
    },

    /// No tensor of the model requires a gradient.
    #[error("the model has no parameter to train: {problem} {}", Section::ModelsOfBurn)]
    NothingToTrain {
        /// Why, and what to do.
        problem: String,
    },

    /// The model of other ranks cannot be wrapped. They get the reason as an error of its own.
    #[error("{problem}")]
    OnOtherRanks {
        /// The ranks, and what is wrong there.
        problem: String,
    },

    /// The loss does not depend on anything that requires a gradient.
    #[error(
        "the loss has no gradient: it was computed without autodiff (`model.valid()`?) or detached \
         {}",
        Section::ModelsOfBurn
    )]
    LossWithoutGradient,

    /// No parameter of the model got a gradient on any rank. All ranks get this error.
    #[error(
        "the loss of no rank depends on the model of this step: it was computed from another one \
         {}",
        Section::ModelsOfBurn
    )]
    LossOfAnotherModel,

    /// Wrapped models cannot take part in one step together.
    #[error("these models cannot take a step together: {problem} {}", Section::ModelsOfBurn)]
    CannotCombine {
        /// The reason, and what would be right.
        problem: String,
    },

    /// A device failed, so a gradient could not be read. The other ranks get [`Error::Drumline`] in the same step,
    /// which names this rank.
    #[error(
        "the gradient of parameter `{name}` could not be read from {device}: {problem} \
         {}",
        Section::ModelsOfBurn
    )]
    Device {
        /// The parameter's path.
        name: String,
        /// The device, by burn's name.
        device: String,
        /// What burn says.
        problem: String,
    },

    /// The norm of the gradients is infinite or NaN, and [`ClipGradNorm`](crate::ClipGradNorm) was told that this is an
    /// error. The gradients are alike on all ranks, so every rank gets this error.
    #[error(
        "the norm of all gradients is {norm}, so they cannot be clipped: skip this step, or lower the \
         learning rate or the loss scale {}",
        Section::ModelsOfBurn
    )]
    NonFiniteNorm {
        /// The norm.
        norm: f64,
    },

    /// Gradients cannot be clipped or unscaled.
    #[error("gradients cannot be scaled: {problem} {}", Section::ModelsOfBurn)]
    CannotScale {
        /// The reason.
        problem: String,
    },

    /// The model given to `sync_buffers` is in validation mode.
    #[error(
        "the model is in validation mode (`valid()`), so its buffers were not synchronised and \
         nothing was sent; synchronise the model that is trained, on all ranks, before `valid()` \
         {}",
        Section::ModelsOfBurn
    )]
    NotTraining,

    /// The input of a [`SyncBatchNorm`](crate::SyncBatchNorm) cannot be normalised.
    #[error("SyncBatchNorm cannot normalise its input: {problem} {}", Section::ModelsOfBurn)]
    CannotNormalize {
        /// The problem with the input.
        problem: String,
    },

    /// A training of burn's `Learner` cannot begin or go on. Every rank gets this error.
    #[error("{problem} {}", Section::ModelsOfBurn)]
    Learner {
        /// The rank and the setting at fault, and what to do.
        problem: String,
    },

    /// Tensors do not fit a model.
    #[error("the tensors do not fit the model: {problem} {}", Section::ModelsOfBurn)]
    TensorsDoNotFit {
        /// The tensors that are missing, left over, or of another shape.
        problem: String,
    },
}

impl From<drumline::Error> for Error {
    fn from(error: drumline::Error) -> Error {
        Error::Drumline(error.into())
    }
}

impl<B> From<drumline::WorkError<B>> for Error {
    fn from(failed: drumline::WorkError<B>) -> Error {
        Error::Drumline(failed.into())
    }
}

/// The text for users, which `unwrap` and a `main` that returns an error print.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
