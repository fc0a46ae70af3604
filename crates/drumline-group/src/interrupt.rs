//! Lets a program check for signals while a call blocks its thread.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

thread_local! {
    static WANTED: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// The longest time that a thread sleeps before it asks again, because a signal may have come just before it
/// fell asleep.
pub const ASK_EVERY: Duration = Duration::from_millis(200);

/// Runs `call`. Blocking collectives that wait on this thread ask `is_wanted` several times a second, and at
/// once when a signal has been handled. When it returns true, they abort their group, as
/// [`ProcessGroup::abort`](crate::ProcessGroup::abort) does.
///
/// For bindings to languages whose signal handlers only set a flag.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{ProcessGroup, interruptible};
///
/// let group = ProcessGroup::alone();
/// interruptible(|| false, || group.barrier())?;
/// # Ok::<_, drumline::Error>(())
/// ```
pub fn interruptible<R>(is_wanted: fn() -> bool, call: impl FnOnce() -> R) -> R {
    let _before = Restore(WANTED.replace(Some(is_wanted)));
    call()
}

struct Restore(Option<fn() -> bool>);

impl Drop for Restore {
    fn drop(&mut self) {
        WANTED.set(self.0);
    }
}

/// When a waiting thread must ask again, if the program wants to be asked.
pub fn look_again_at() -> Option<Instant> {
    WANTED.get().map(|_| Instant::now() + ASK_EVERY)
}

/// Whether the program wants to abort the calls of this thread.
pub fn is_wanted() -> bool {
    WANTED.get().is_some_and(|is_wanted| is_wanted())
}
