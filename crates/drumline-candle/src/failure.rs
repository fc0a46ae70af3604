//! The failures of models of candle, each with its text.

use std::{
    fmt::{self, Display},
    sync::Arc,
};

use drumline::{Error, ErrorKind, Result, Section};

/// candle failed on this rank.
pub(crate) trait OrFail<T> {
    fn or_fail(self) -> Result<T>;
}

impl<T> OrFail<T> for candle_core::Result<T> {
    fn or_fail(self) -> Result<T> {
        self.map_err(|error| candle(&error).with(Arc::new(error)))
    }
}

/// candle, or its part, says this.
pub(crate) fn candle(problem: impl Display) -> Error {
    Error::new(ErrorKind::Device, Section::ModelsOfCandle, format!("candle: {problem}"))
}

/// Some ranks cannot take part. Every rank gets this error, with the same text, and nothing was averaged.
pub(crate) fn ranks(problems: Vec<RankProblem>) -> Error {
    let told = problems.iter().map(RankProblem::to_string).collect::<Vec<_>>().join("; ");
    Error::quoting(ErrorKind::Model, Section::ModelsOfCandle, told).with(Arc::new(problems))
}

/// A checkpoint has a part that cannot be used, or lacks one. Nothing was loaded.
pub(crate) fn checkpoint(problem: impl Display) -> Error {
    let text = format!("the checkpoint {problem}");
    Error::new(ErrorKind::Checkpoint, Section::ModelsOfCandle, text)
}

/// The optimizer has a variable that the `VarMap` does not have, so its state has no name.
pub(crate) fn unnamed_variable(shape: &[usize]) -> Error {
    let text = format!(
        "the optimizer changes a variable of shape {shape:?} that is not in the VarMap; make the optimizer of \
         `varmap.all_vars()`"
    );
    Error::new(ErrorKind::Argument, Section::ModelsOfCandle, text)
}

/// What is wrong on which ranks. The detail of an error of kind [`Model`](drumline::ErrorKind::Model) is a list of
/// these.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankProblem {
    /// The ranks, in rising order.
    pub ranks: Vec<usize>,
    /// What is wrong there, and what to do.
    pub problem: String,
}

impl fmt::Display for RankProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMED_MAX: usize = 8;
        let named = &self.ranks[..self.ranks.len().min(NAMED_MAX)];
        let named = named.iter().map(usize::to_string).collect::<Vec<_>>().join(", ");
        match self.ranks.len() {
            1 => write!(f, "rank {named}")?,
            ..=NAMED_MAX => write!(f, "ranks {named}")?,
            more => write!(f, "ranks {named} and {} more", more - NAMED_MAX)?,
        }
        write!(f, ": {}", self.problem)
    }
}

/// Groups the problems of ranks, given in order of rank, by their text.
pub(crate) fn group_problems(of_ranks: Vec<Option<String>>) -> Vec<RankProblem> {
    let mut problems: Vec<RankProblem> = Vec::new();
    for (rank, problem) in of_ranks.into_iter().enumerate() {
        let Some(problem) = problem else { continue };
        match problems.iter_mut().find(|known| known.problem == problem) {
            Some(known) => known.ranks.push(rank),
            None => problems.push(RankProblem { ranks: vec![rank], problem }),
        }
    }
    problems
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_the_same_problem_share_a_sentence() {
        let mut of_ranks = vec![Some("no variable".to_owned()); 12];
        of_ranks[1] = None;
        of_ranks[2] = Some("`x` is f8e4m3".to_owned());
        let text = ranks(group_problems(of_ranks)).to_string();
        assert_eq!(
            text,
            "ranks 0, 3, 4, 5, 6, 7, 8, 9 and 2 more: no variable; rank 2: `x` is f8e4m3 \
             (drumline explain models-of-candle)"
        );
    }
}
