//! The failures of training: their texts, and what a program may ask of them.

use std::{fmt::Display, path::Path, sync::Arc};

use drumline_error::{Error, ErrorKind, Section};

use crate::{
    async_reduce::MissingTensors,
    ddp::{GradientFault, list_ranks},
};

/// A checkpoint cannot be written or read.
pub fn checkpoint(path: impl AsRef<Path>, problem: impl Display) -> Error {
    let text = format!("checkpoint {}: {problem}", path.as_ref().display());
    Error::quoting(ErrorKind::Checkpoint, Section::Checkpoints, text)
}

/// `problem` is the first difference: which ranks, which tensor, and what each rank has.
pub(crate) fn models_differ(problem: impl Display) -> Error {
    let text = format!("the model differs between ranks: {problem}");
    Error::new(ErrorKind::ModelsDiffer, Section::ModelsThatDiffer, text)
}

/// After so many steps, `parameter` (and `count` − 1 others) has on `ranks` another value than on rank `reference` and
/// on most others.
pub(crate) fn parameters_differ(
    step: u64,
    parameter: &str,
    ranks: &[usize],
    reference: usize,
    count: usize,
) -> Error {
    let more = match count {
        1 => String::new(),
        count => format!(" (and {} more)", count - 1),
    };
    let s = if ranks.len() == 1 { "" } else { "s" };
    let of = list_ranks(ranks);
    let text = format!(
        "after step {step}, parameter `{parameter}`{more} on rank{s} {of} differs from that of rank {reference}: give all \
         ranks the same optimizer and learning rate, train the model that was wrapped, and load weights before it is \
         wrapped, or on all ranks"
    );
    let culprit = if let [one] = ranks { Some(*one) } else { None };
    Error::new(ErrorKind::ParametersDiffer, Section::ParametersThatDiffer, text).blaming(culprit)
}

/// The gradients of this step, counted from 1, cannot be averaged. The faults are its detail.
pub fn gradients(step: u64, faults: Vec<GradientFault>) -> Error {
    let (told, advice) = (GradientFault::list(&faults), GradientFault::advice(&faults));
    let text = format!("step {step}: {told}; {advice}");
    Error::new(ErrorKind::Gradients, Section::MissingGradients, text).with(Arc::new(faults))
}

/// Rank 0 runs step `first` of shards, and rank `other` step `theirs`.
pub(crate) fn steps_differ(first: u64, other: usize, theirs: u64) -> Error {
    let text = format!(
        "step {first}: rank 0 runs step {first}, and rank {other} step {theirs}; all ranks must pass the same number"
    );
    Error::new(ErrorKind::Mismatch, Section::Mismatch, text)
}

/// Tensors are missing in this step, counted from 1. They are its detail. If `by` has ended the step, these ranks no
/// longer answer. If nothing has, they have said themselves that they bring no more, and the next step can go on.
pub(crate) fn not_brought(step: u64, missing: Vec<MissingTensors>, by: Option<&Error>) -> Error {
    let list = MissingTensors::list(&missing);
    let mut text = format!("step {step}: {list}; every rank brings every tensor once in each step");
    if let Some(by) = by {
        text += &format!(" ({by})");
    }
    Error::quoting(ErrorKind::NotBrought, Section::MissingGradients, text)
        .blaming(by.and_then(Error::culprit))
        .because(by.and_then(Error::cause).cloned())
        .with(Arc::new(missing))
}

/// This rank of a local world has failed first.
pub(crate) fn rank(rank: usize, error: impl Display) -> Error {
    let text = format!("rank {rank}: {error}");
    Error::quoting(ErrorKind::Rank, Section::TheLauncher, text).blaming(Some(rank))
}
