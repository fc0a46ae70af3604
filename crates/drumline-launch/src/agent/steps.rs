//! Stops the ranks of this host before a step that all hosts agree on: the launcher's side of [`drumline::step`].

use std::time::{Duration, Instant};

use drumline::steps::keys;

use crate::{Result, attempt::Attempt};

/// Ranks that are held, or that are about to be.
#[derive(Debug)]
pub(super) struct Holding {
    /// The local ranks that call `step`.
    ranks: Vec<usize>,
    since: Instant,
}

/// How long a rank may take to answer. The thread that answers needs no lock that a step holds.
const ANSWER_MAX: Duration = Duration::from_secs(10);

impl Holding {
    /// Asks the ranks of this host to hold. `None` if none of them calls `step`.
    pub(super) fn begin(attempt: &Attempt) -> Result<Option<Holding>> {
        let Attempt { stores, world, .. } = attempt;
        let ranks = (0..world.local_size).filter(|&rank| stores.has(keys::FIRST, rank));
        let ranks: Vec<usize> = ranks.collect();
        if ranks.is_empty() {
            return Ok(None);
        }
        stores.tell(keys::ASK, "")?;
        Ok(Some(Holding { ranks, since: Instant::now() }))
    }

    /// The last step that a rank of this host has begun, once all ranks have answered that are not lost. A rank that is
    /// stuck does not.
    pub(super) fn answer(&self, attempt: &Attempt) -> Option<Option<u64>> {
        let ranks = self.ranks.iter().filter(|rank| !attempt.supervisor.is_lost(**rank));
        let answers = ranks.map(|&rank| attempt.stores.told(keys::BEGUN, rank));
        let answers: Vec<Option<Vec<u8>>> = answers.collect();
        if answers.iter().any(Option::is_none) && self.since.elapsed() < ANSWER_MAX {
            return None;
        }
        let number = |answer: Vec<u8>| String::from_utf8(answer).ok()?.parse().ok();
        Some(answers.into_iter().flatten().filter_map(number).max())
    }
}

/// Once all ranks of this host have said that they go on when others die: so many must be left of the job.
pub(super) fn regroups(attempt: &Attempt) -> Option<usize> {
    let ranks = (0..attempt.world.local_size).map(|rank| attempt.stores.regroups(rank));
    ranks.collect::<Option<Vec<usize>>>()?.into_iter().max()
}
