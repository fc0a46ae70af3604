use std::fmt;

use drumline::{Section, checkpoint::Misfit};

/// The result of every fallible function of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why a model cannot be trained data-parallel, or a step or a checkpoint failed.
///
/// ```
/// use candle_nn::VarMap;
/// use drumline::ProcessGroup;
/// use drumline_candle::{DataParallel, Error};
///
/// let error = DataParallel::wrap(&VarMap::new(), &ProcessGroup::alone()).unwrap_err();
/// assert!(matches!(error, Error::Ranks(_)));
/// assert_eq!(format!("{error:?}"), error.to_string()); // what `unwrap` prints
/// ```
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The process group or the reduction failed. The text names the rank and the call.
    #[error(transparent)]
    Drumline(#[from] drumline::train::Error),

    /// candle failed on this rank.
    #[error("candle: {} {}", .0, Section::ModelsOfCandle)]
    Candle(#[from] candle_core::Error),

    /// Some ranks cannot take part. Every rank gets this error, with the same text, and nothing was averaged.
    #[error("{} {}", list(.0), Section::ModelsOfCandle)]
    Ranks(Vec<RankProblem>),

    /// The tensors of a checkpoint are not those of the model or of the optimizer. Nothing was loaded.
    #[error(transparent)]
    Misfit(#[from] Misfit),

    /// A checkpoint has a part that cannot be used, or lacks one. Nothing was loaded.
    #[error("the checkpoint {problem} {}", Section::ModelsOfCandle)]
    Checkpoint {
        /// What is wrong with it.
        problem: String,
    },

    /// The optimizer has a variable that the `VarMap` does not have, so its state has no name.
    #[error(
        "the optimizer changes a variable of shape {shape:?} that is not in the VarMap; make the optimizer of \
         `varmap.all_vars()` {}",
        Section::ModelsOfCandle
    )]
    UnnamedVariable {
        /// The variable's shape.
        shape: Vec<usize>,
    },
}

/// What is wrong on which ranks.
///
/// ```
/// use candle_nn::VarMap;
/// use drumline::ProcessGroup;
/// use drumline_candle::{DataParallel, Error};
///
/// let nothing = DataParallel::wrap(&VarMap::new(), &ProcessGroup::alone());
/// let Err(Error::Ranks(problems)) = nothing else { panic!() };
/// assert_eq!(problems[0].ranks, [0]);
/// assert!(problems[0].problem.contains("build the model before `wrap`"));
/// ```
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

fn list(problems: &[RankProblem]) -> String {
    problems.iter().map(RankProblem::to_string).collect::<Vec<_>>().join("; ")
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_with_the_same_problem_share_a_sentence() {
        let mut of_ranks = vec![Some("no variable".to_owned()); 12];
        of_ranks[1] = None;
        of_ranks[2] = Some("`x` is f8e4m3".to_owned());
        let text = Error::Ranks(group_problems(of_ranks)).to_string();
        assert_eq!(
            text,
            "ranks 0, 3, 4, 5, 6, 7, 8, 9 and 2 more: no variable; rank 2: `x` is f8e4m3 \
             (drumline explain models-of-candle)"
        );
    }
}
