//! Access for engines that drive a group themselves, such as those of `drumline-train`.
//!
//! Each call here ends in a function, `end`, which may begin other calls. `end` runs on the thread that
//! drives the group, while the group is locked. So it must not wait for a call.

use std::time::Instant;

use drumline_engine::{operator::Operator, recorder::Recorder};
use drumline_schedule::Collective;
use drumline_shm::Arena;

use super::{ProcessGroup, collectives::call};
pub use crate::interrupt::{ASK_EVERY, is_wanted, look_again_at};
use crate::{Element, Result, Work, WorkError};

/// [`ProcessGroup::all_reduce_async`] that ends in `end`. `end` gets the buffer after a failure, too.
pub fn all_reduce_then<T, B>(
    group: &ProcessGroup,
    buffer: B,
    op: impl Into<Operator<T>>,
    end: impl FnOnce(Result<()>, B) + Send + 'static,
) where
    T: Element,
    B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
{
    let call = call::<T>(Collective::AllReduce, buffer.as_ref().len());
    group.submit_and(call, Some(op.into()), buffer, Vec::new(), end);
}

/// [`ProcessGroup::all_gather_async`] that ends in `end`.
pub fn all_gather_then<T: Element>(
    group: &ProcessGroup,
    own: Vec<T>,
    end: impl FnOnce(Result<Vec<T>>) + Send + 'static,
) {
    let all = vec![T::zeroed(); own.len() * group.world_size()];
    let call = call::<T>(Collective::AllGather, own.len());
    group.submit_and(call, None, all, own, |result, all: Vec<T>| end(result.map(|()| all)));
}

/// Drives the group on this thread until `done` or `deadline`. `false`: another thread drives it or wants to,
/// or no call is left.
pub fn help(group: &ProcessGroup, deadline: Option<Instant>, done: &dyn Fn() -> bool) -> bool {
    group.inner.driven().upgrade().is_some_and(|lane| lane.help(deadline, done))
}

/// The recorder of the group's calls.
pub fn recorder(group: &ProcessGroup) -> &Recorder {
    group.inner.recorder.recorder()
}

/// The arena of this rank, if ranks of its host share memory.
pub fn arena(group: &ProcessGroup) -> Option<&Arena> {
    group.arena()
}

/// [`Work::wait`] that also returns when the call ended.
///
/// # Errors
///
/// As for [`Work::wait`].
pub fn wait_and_tell<B>(work: Work<B>) -> Result<(B, Instant), WorkError<B>> {
    work.wait_and_tell()
}
