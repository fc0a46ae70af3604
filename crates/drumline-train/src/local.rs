//! Ranks as threads of one process, for tests and examples.

use std::{
    error::Error as StdError,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    sync::{Mutex, PoisonError},
    thread,
};

use drumline_engine::panics::panic_text;
use drumline_group::{Config, ProcessGroup};

use crate::{Error, Result, failure};

/// Any error of a rank.
type Failure = Box<dyn StdError + Send + Sync>;

/// Runs `rank` once for each rank of a local world, each in a thread of its own, and returns what they return, in the
/// order of ranks.
///
/// ```
/// use drumline::ReduceOp;
///
/// let sums = drumline::local(3, |group| {
///     let mut sum = [group.rank() as u64];
///     group.all_reduce(&mut sum, ReduceOp::Sum)?;
///     Ok(sum[0])
/// })?;
/// assert_eq!(sums, [3, 3, 3]);
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`Rank`](crate::ErrorKind::Rank) with the error of the rank that failed first. Its group is aborted, so the other
/// ranks end, too. As for [`drumline_group::rendezvous::local_world`] when there is no world.
///
/// # Panics
///
/// If a rank panics, with its text, and `rank 1: ...` in front of it.
pub fn local<R: Send>(
    world_size: usize,
    rank: impl Fn(ProcessGroup) -> Result<R, Failure> + Sync,
) -> Result<Vec<R>> {
    local_with(world_size, &Config::default(), rank)
}

/// Like [`local`], with settings.
///
/// ```
/// use drumline::Config;
///
/// let over_sockets = Config::default().shared_memory(false);
/// let share = drumline::train::local_with(2, &over_sockets, |group| Ok(drumline::algorithms::shares_memory(&group)))?;
/// assert_eq!(share, [false, false]);
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// As for [`local`].
///
/// # Panics
///
/// As for [`local`].
pub fn local_with<R: Send>(
    world_size: usize,
    config: &Config,
    rank: impl Fn(ProcessGroup) -> Result<R, Failure> + Sync,
) -> Result<Vec<R>> {
    let groups = drumline_group::rendezvous::local_world_with(world_size, config)?;
    let first: Mutex<Option<End>> = Mutex::new(None);
    let run = |group: ProcessGroup| {
        // The others hear of a failure when this handle goes, so it is the first.
        let (number, handle) = (group.rank(), group.clone());
        let end = match catch_unwind(AssertUnwindSafe(|| rank(group))) {
            Ok(Ok(value)) => return Some(value),
            Ok(Err(error)) => End::Error(failure::rank(number, error)),
            Err(panic) => End::Panic(format!("rank {number}: {}", panic_text(&*panic))),
        };
        first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(end);
        handle.abort();
        None
    };
    let values: Option<Vec<R>> = thread::scope(|threads| {
        let started: Vec<_> =
            groups.into_iter().map(|group| threads.spawn(|| run(group))).collect();
        let ended = started
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        // All of them, also after one that has failed.
        ended.collect::<Vec<_>>().into_iter().collect()
    });
    match (values, first.into_inner().unwrap_or_else(PoisonError::into_inner)) {
        (Some(values), _) => Ok(values),
        (None, Some(End::Error(error))) => Err(error),
        (None, Some(End::Panic(text))) => resume_unwind(Box::new(text)),
        (None, None) => unreachable!("a rank without a value has failed"),
    }
}

/// How a rank has failed.
enum End {
    Error(Error),
    Panic(String),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_ranks() {
        let ranks = local(4, |group| {
            group.barrier()?;
            Ok(group.rank())
        });
        assert_eq!(ranks.unwrap(), [0, 1, 2, 3]);
        let error = local(0, |_| Ok(())).unwrap_err().to_string();
        assert!(error.contains("at least one rank"), "{error}");
    }

    #[test]
    fn the_first_error_is_that_of_the_call_and_frees_the_others() {
        for _ in 0..20 {
            let failed = local(3, |group| match group.rank() {
                1 => Err("no data".into()),
                _ => Ok(group.barrier()?),
            });
            let error = failed.unwrap_err();
            assert_eq!(error.to_string(), "rank 1: no data (drumline explain the-launcher)");
        }
    }

    #[test]
    fn a_panic_is_that_of_the_call_and_frees_the_others() {
        for _ in 0..20 {
            let run = || {
                local(3, |group| match group.rank() {
                    2 => panic!("out of tea"),
                    _ => Ok(group.barrier()?),
                })
            };
            let panic = catch_unwind(run).unwrap_err();
            assert_eq!(panic_text(&*panic), "rank 2: out of tea");
        }
    }
}
