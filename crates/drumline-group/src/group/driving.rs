//! Access for engines that drive a group themselves, such as those of `drumline-train`.
//!
//! Each call here ends in a function, `end`, which may begin other calls. `end` runs on the thread that
//! drives the group, while the group is locked. So it must not wait for a call.

use std::{any::Any, sync::Arc, time::Instant};

use drumline_engine::recorder::Recorder;
pub use drumline_engine::{
    bytes::Bytes,
    operator::{AnyOperator, Operator},
};
pub use drumline_kernels::Number;
use drumline_schedule::Collective;
use drumline_shm::{Arena, PeerWindow};

use super::{ProcessGroup, process_group::Carrier};
pub use super::{
    ask::Ask,
    members::{round_sum, sum_of_members},
    points::{recv_any_bytes, recv_bytes, send_bytes},
};
pub use crate::interrupt::{ASK_EVERY, Caller, handling, is_wanted, look_again_at};
use crate::{Cause, DType, Element, Error, Rank, Result, Work, WorkError};

/// [`ProcessGroup::all_gather_async`] that ends in `end`.
pub fn all_gather_then<T: Element>(
    group: &ProcessGroup,
    own: Vec<T>,
    end: impl FnOnce(Result<Vec<T>>) + Send + 'static,
) {
    let all = vec![T::zeroed(); own.len() * group.world_size()];
    let end = |result: Result<()>, all| end(result.map(|()| all));
    group.begin_both_then::<T, Vec<T>>(Ask::of::<T>(Collective::AllGather), all, own, end);
}

/// The ranks of this host that hold the slices of a [`reduce_slices_then`] of this type: the `i`-th holds block `i` of
/// as many equal blocks as there are holders. `None` where ranks share no memory, or no algorithm leaves slices.
/// All ranks get such an answer, or none does.
///
/// # Errors
///
/// The thread that drives the group does not answer.
pub fn slice_holders(group: &ProcessGroup, dtype: DType) -> Result<Option<Vec<Rank>>> {
    let Some(lane) = group.inner.driven().upgrade() else { return Ok(None) };
    lane.ask(move |lane| lane.slice_holders(dtype))
}

/// Sums as all_reduce does, and leaves the result in slices, in the registered buffers of the ranks of each host
/// ([`slice_holders`]). All else in the buffers is undefined then. Neighbours may read a rank's slice until they call
/// again, so the rank must not write there before it knows that they have done so.
///
/// `end` gets [`Argument`](crate::ErrorKind::Argument) for a buffer that is not registered. It gets the buffer after a failure, too.
pub fn reduce_slices_then<T, B>(
    group: &ProcessGroup,
    buffer: B,
    op: impl Into<Operator<T>>,
    end: impl FnOnce(Result<()>, B) + Send + 'static,
) where
    T: Element,
    B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
{
    group.begin_then(Ask::of::<T>(Collective::ReduceSlices).of_type_by(op), buffer, end);
}

/// Bytes of the arena of `peer`, a neighbour, for a device that copies them.
///
/// # Errors
///
/// [`Memory`](crate::ErrorKind::Memory) when there are no such bytes.
pub fn window_of(
    group: &ProcessGroup,
    peer: Rank,
    byte_offset: usize,
    bytes: usize,
) -> Result<PeerWindow> {
    let window = group.inner.driven().upgrade().map(|lane| {
        lane.ask(move |lane| lane.host().map(|it| it.window_of(peer, byte_offset, bytes)))
    });
    let no_memory = || Err("the ranks share no memory".to_owned());
    let window = window.transpose()?.flatten();
    window.unwrap_or_else(no_memory).map_err(Error::memory)
}

/// Drives the group on this thread until `done` or `deadline`. `false`: another thread drives it or wants to,
/// or no call is left.
pub fn help(group: &ProcessGroup, deadline: Option<Instant>, done: &dyn Fn() -> bool) -> bool {
    group.inner.driven().upgrade().is_some_and(|lane| lane.help(deadline, done))
}

/// What a foreign backend has for the memory of devices: [`Backend::on_device`](crate::backend::Backend::on_device).
pub fn on_device(group: &ProcessGroup) -> Option<Arc<dyn Any + Send + Sync>> {
    match &group.inner.carrier {
        Carrier::Lane(_) => None,
        Carrier::Backend(backend) => backend.on_device(),
    }
}

/// Looks whether a peer has ended or failed, or `peer` has left, also when no call is under way. What it says is a
/// hint: a call that needs the peer names it.
pub fn hear(group: &ProcessGroup, peer: Option<Rank>) -> Option<Cause> {
    let lane = group.inner.driven().upgrade()?;
    let mut lane = lane.try_lane()?;
    let heard = lane.hear(Instant::now()).err();
    heard.or_else(|| lane.left(peer?))
}

/// Connects to all peers, which all do the same, so that [`hear`] hears each of them.
pub fn meet_all(group: &ProcessGroup, deadline: Instant) {
    if let Some(lane) = group.inner.driven().upgrade() {
        lane.meet_all(deadline);
    }
}

/// Poisons the group for a cause that an engine has found elsewhere, and tells the peers. A group that has failed stays
/// as it is. Not to be called by an `end`.
pub fn fail(group: &ProcessGroup, operation: &str, cause: Cause) {
    match &group.inner.carrier {
        Carrier::Lane(lane) => drop(lane.break_off(operation.into(), Instant::now(), cause)),
        Carrier::Backend(backend) => backend.fail_because(operation, cause),
    }
}

/// The recorder of the group's calls.
pub fn recorder(group: &ProcessGroup) -> &Recorder {
    group.inner.recorder.recorder()
}

/// The arena of this rank, if ranks of its host share memory.
pub fn arena(group: &ProcessGroup) -> Option<&Arena> {
    group.arena()
}

/// Why this thread cannot wait for the end of a call: it is in a handler of a signal, and must first go on with a call
/// that it is in.
pub fn hindrance<B>(work: &Work<B>) -> Option<Error> {
    work.hindrance()
}

/// [`Work::wait`] that also returns when the call ended.
///
/// # Errors
///
/// As for [`Work::wait`].
pub fn wait_and_tell<B>(work: Work<B>) -> Result<(B, Instant), WorkError<B>> {
    work.wait_and_tell()
}
