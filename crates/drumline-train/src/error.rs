//! Why training cannot go on, which rank is at fault, and what to do next.

use std::{fmt, path::PathBuf, sync::Arc};

use drumline_error::{Section, in_section};
use drumline_group::CollectiveError;

use crate::{
    async_reduce::MissingTensors,
    ddp::{GradientFault, list_ranks},
};

/// The result of the fallible functions of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a step, a checkpoint or a sampler failed.
///
/// ```
/// use drumline::{sampler::DistributedSampler, train::Error};
///
/// let error = DistributedSampler::builder(100, 2, 2).build().unwrap_err();
/// assert!(matches!(error, Error::InvalidArgument { .. }), "{error}");
/// assert_eq!(format!("{error:?}"), error.to_string()); // what `unwrap` prints
/// ```
#[derive(Clone, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A call of the process group failed.
    #[error(transparent)]
    Group(#[from] drumline_group::Error),

    /// A call on a device failed: an error of `drumline::device`, whose crate is above this one.
    #[error(transparent)]
    Device(Arc<dyn std::error::Error + Send + Sync>),

    /// A rank of [`local`](crate::local()) has failed.
    #[error("rank {rank}: {error}")]
    Rank {
        /// The rank that failed first.
        rank: usize,
        /// Its error.
        error: Arc<dyn std::error::Error + Send + Sync>,
    },

    /// The caller's argument cannot be used. Nothing was sent to any peer.
    #[error("{}", in_section(Section::Argument, &format!("{operation}: {problem}")))]
    InvalidArgument {
        /// The function that was called.
        operation: &'static str,
        /// What is wrong, and what would be right.
        problem: String,
    },

    /// A checkpoint cannot be written or read.
    #[error("{}", in_section(Section::Checkpoints, &format!("checkpoint {}: {problem}", path.display())))]
    Checkpoint {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        problem: String,
    },

    /// Ranks were given different models. Every rank gets this error, with the same text.
    #[error("the model differs between ranks: {problem} {}", Section::ModelsThatDiffer)]
    ModelMismatch {
        /// The first difference: which ranks, which tensor, and what each rank has.
        problem: String,
    },

    /// A parameter does not have the same value on all ranks. Every rank gets this error, with the same text.
    #[error(
        "after step {step}, parameter `{parameter}`{} on {} differs from that of rank {reference}: give all ranks the \
         same optimizer and learning rate, train the model that was wrapped, and load weights before it is wrapped, \
         or on all ranks {}",
        match count { 1 => String::new(), count => format!(" (and {} more)", count - 1) },
        ranks_of(ranks), Section::ParametersThatDiffer)]
    ParametersDiffer {
        /// The number of steps that were averaged before.
        step: u64,
        /// The first parameter that differs, in the order in which the model defines them.
        parameter: String,
        /// The ranks whose value is not the one that most ranks have, in rising order.
        ranks: Vec<usize>,
        /// The lowest rank with the value that most ranks have.
        reference: usize,
        /// The number of parameters that differ.
        count: usize,
    },

    /// Gradients are missing or unusable, so a step cannot be averaged. Every rank gets this error (except
    /// for a gradient that was handed in again after all buckets were launched).
    #[error(
        "step {step}: {}; {} {}",
        GradientFault::list(faults),
        GradientFault::advice(faults),
        Section::MissingGradients
    )]
    Gradients {
        /// The step, counted from 1.
        step: u64,
        /// What is wrong with which parameter, on which ranks.
        faults: Vec<GradientFault>,
    },

    /// Tensors are missing in a step of [`AsyncReduce`](crate::async_reduce::AsyncReduce). Every
    /// rank gets this error.
    #[error("{}", in_section(Section::MissingGradients, &format!(
        "step {step}: {}; every rank brings every tensor once in each step{}",
        MissingTensors::list(missing),
        by.as_ref().map(|by| format!(" ({by})")).unwrap_or_default()
    )))]
    NotBrought {
        /// The step, counted from 1.
        step: u64,
        /// What is missing, by rank.
        missing: Vec<MissingTensors>,
        /// The failure that ended the step and the engine: these ranks no longer answer. `None` if the ranks
        /// have said themselves that they bring no more tensors; then the next step can go on.
        by: Option<Arc<CollectiveError>>,
    },
}

/// The text for users, which `unwrap` and a `main` that returns an error print.
impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn ranks_of(ranks: &[usize]) -> String {
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, list_ranks(ranks))
}

impl<B> From<drumline_group::WorkError<B>> for Error {
    fn from(failed: drumline_group::WorkError<B>) -> Error {
        Error::Group(failed.error)
    }
}
