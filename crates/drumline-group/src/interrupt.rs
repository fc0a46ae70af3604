//! Lets a program look for signals while a call blocks its thread.

use std::{
    cell::Cell,
    time::{Duration, Instant},
};

thread_local! {
    static WANTED: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
}

/// How long a thread sleeps at most before it asks again: a signal may have come just before it
/// fell asleep.
pub const ASK_EVERY: Duration = Duration::from_millis(200);

/// Runs `call`. Blocking collectives that wait on this thread ask `is_wanted` several times a
/// second, and at once when a signal has been handled; when it says yes, they break their group
/// off, as [`ProcessGroup::abort`](crate::ProcessGroup::abort) does.
///
/// For bindings to languages whose signal handlers only leave a note.
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

/// When a thread that waits has to ask again, if a program wants to be asked.
pub fn look_again_at() -> Option<Instant> {
    WANTED.get().map(|_| Instant::now() + ASK_EVERY)
}

/// Whether the program wants the calls of this thread broken off.
pub fn is_wanted() -> bool {
    WANTED.get().is_some_and(|is_wanted| is_wanted())
}
