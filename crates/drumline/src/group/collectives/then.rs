//! Operations whose end makes others begin, for engines that drive themselves.
//!
//! What is to happen then (`end`) is called where the operation ends: on the thread that drives the
//! group, which is locked meanwhile. It may begin other operations and must not wait for them.

use std::time::Instant;

use super::{ProcessGroup, call};
use crate::{Element, Operator, Result, executor::Operation as Kind};

impl ProcessGroup {
    /// [`ProcessGroup::all_reduce_async`]; the buffer comes back after a failure, too.
    pub(crate) fn all_reduce_then<T, B>(
        &self,
        buffer: B,
        op: impl Into<Operator<T>>,
        end: impl FnOnce(Result<()>, B) + Send + 'static,
    ) where
        T: Element,
        B: AsMut<[T]> + AsRef<[T]> + Send + 'static,
    {
        let call = call::<T>(Kind::AllReduce, buffer.as_ref().len()).reducing(op);
        self.submit_and(call, buffer, Vec::new(), end);
    }

    /// [`ProcessGroup::all_gather_async`].
    pub(crate) fn all_gather_then<T: Element>(
        &self,
        own: Vec<T>,
        end: impl FnOnce(Result<Vec<T>>) + Send + 'static,
    ) {
        let all = vec![T::zeroed(); own.len() * self.world_size()];
        let call = call::<T>(Kind::AllGather, own.len());
        self.submit_and(call, all, own, |result, all: Vec<T>| end(result.map(|()| all)));
    }

    /// Drives the group on this thread until `done` or `deadline`. `false`: somebody else drives
    /// it or wants to, or nothing is left to do.
    pub(crate) fn help(&self, deadline: Option<Instant>, done: &dyn Fn() -> bool) -> bool {
        self.inner.driven().upgrade().is_some_and(|lane| lane.help(deadline, done))
    }
}
