//! Lets a program check for signals while a call blocks its thread.

use std::{
    cell::Cell,
    thread::{self, ThreadId},
    time::{Duration, Instant},
};

use drumline_engine::Error;

use crate::work::Later;

thread_local! {
    static WANTED: Cell<Option<fn() -> bool>> = const { Cell::new(None) };
    static HANDLING: Cell<bool> = const { Cell::new(false) };
    static ASKED: Cell<Option<Instant>> = const { Cell::new(None) };
    static ASKS_SOON: Cell<bool> = const { Cell::new(false) };
    static ACTS_FOR: Cell<Option<ThreadId>> = const { Cell::new(None) };
}

/// The longest time that a thread sleeps before it asks again, because a signal may have come just before it
/// fell asleep.
pub const ASK_EVERY: Duration = Duration::from_millis(200);

/// The shortest time between two questions. A wait over sockets ends often, and to ask costs more than to send.
const ASK_AT_MOST: Duration = Duration::from_millis(20);

/// Runs `call`. Blocking collectives that wait on this thread ask `is_wanted` several times a second, and at
/// once when a signal has been handled. When it returns true, they abort their group, as
/// [`ProcessGroup::abort`](crate::ProcessGroup::abort) does.
///
/// For bindings to languages whose signal handlers only set a flag. `is_wanted` may run such handlers. These may call
/// any group. In the group whose call waits here, they may abort, send and receive; to destroy it aborts it, and to
/// make a collective call is an error.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{ProcessGroup, backend::interruptible};
///
/// let group = ProcessGroup::alone();
/// interruptible(|| false, || group.barrier())?;
/// # Ok::<_, drumline::Error>(())
/// ```
pub fn interruptible<R>(is_wanted: fn() -> bool, call: impl FnOnce() -> R) -> R {
    let _before = Restore(&WANTED, WANTED.replace(Some(is_wanted)));
    call()
}

struct Restore<T: Copy + 'static>(&'static thread::LocalKey<Cell<T>>, T);

impl<T: Copy> Drop for Restore<T> {
    fn drop(&mut self) {
        self.0.set(self.1);
    }
}

/// When a waiting thread must ask again, if the program wants to be asked.
pub fn look_again_at() -> Option<Instant> {
    let after = if ASKS_SOON.get() { ASK_AT_MOST } else { ASK_EVERY };
    WANTED.get().map(|_| Instant::now() + after)
}

/// Whether it is time to ask the program. If not, [`look_again_at`] comes soon.
pub(crate) fn is_due() -> bool {
    if WANTED.get().is_none() {
        return false;
    }
    let is_due = ASKED.get().is_none_or(|asked| asked.elapsed() >= ASK_AT_MOST);
    ASKS_SOON.set(!is_due);
    is_due
}

/// Whether the program wants to abort the calls of this thread. Runs foreign code, so no lane may be locked.
pub fn is_wanted() -> bool {
    let Some(is_wanted) = WANTED.get() else { return false };
    ASKED.set(Some(Instant::now()));
    ASKS_SOON.set(false);
    handling(is_wanted)
}

/// Runs handlers of signals, which interrupt a wait of this thread.
pub fn handling<R>(handlers: impl FnOnce() -> R) -> R {
    let _before = Restore(&HANDLING, HANDLING.replace(true));
    Later::outside(handlers)
}

/// Whether this thread is in a handler that [`handling`] runs.
pub(crate) fn is_handling() -> bool {
    HANDLING.get()
}

/// A thread that waits while another one makes a call for it.
#[derive(Clone, Copy, Debug)]
pub struct Caller {
    thread: ThreadId,
    is_handling: bool,
}

impl Caller {
    /// This thread.
    pub fn this() -> Caller {
        let thread = ACTS_FOR.get().unwrap_or_else(|| thread::current().id());
        Caller { thread, is_handling: is_handling() }
    }

    /// Makes `call` on this thread in its place.
    pub fn act<R>(self, call: impl FnOnce() -> R) -> R {
        let _thread = Restore(&ACTS_FOR, ACTS_FOR.replace(Some(self.thread)));
        let _handling = Restore(&HANDLING, HANDLING.replace(self.is_handling));
        call()
    }
}

/// Whether this thread is `thread`, or acts for it.
pub(crate) fn is_this(thread: ThreadId) -> bool {
    thread == thread::current().id() || ACTS_FOR.get() == Some(thread)
}

/// The error of a call that a handler makes in a call of the same group.
pub(crate) fn inside(attempted: &'static str, call: &str, group: &str) -> Error {
    let problem = format!(
        "this thread is in {call} of group {group:?}, and a handler of a signal interrupts it: wait until the \
         handler has returned, or abort or destroy the group"
    );
    Error::argument(attempted, problem)
}
