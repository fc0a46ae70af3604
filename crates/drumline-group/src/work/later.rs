//! Defers wakers until this thread has unlocked the lane on which their calls ended.

use std::{
    cell::{Cell, RefCell},
    marker::PhantomData,
    task::Waker,
};

use drumline_engine::panics::shielded;

use crate::callbacks;

thread_local! {
    /// The number of [`Later`]s of this thread that are alive.
    static NESTED: Cell<usize> = const { Cell::new(0) };
    /// Whether [`WAKERS`] holds any. A look at this costs less than a look at a value with a destructor.
    static KEPT: Cell<bool> = const { Cell::new(false) };
    static WAKERS: RefCell<Vec<Waker>> = const { RefCell::new(Vec::new()) };
    /// Whether this thread serves all groups, so that no waker may hold it up.
    static SERVES: Cell<bool> = const { Cell::new(false) };
}

/// While a `Later` exists, [`wake`] keeps the wakers of this thread. Dropping the `Later` calls them. It is
/// made before a lane is locked, so it is dropped after the lane is unlocked.
#[must_use]
pub(crate) struct Later {
    /// How many there were before.
    before: usize,
    /// Keeps it on its thread.
    _thread: PhantomData<*const ()>,
}

impl Later {
    pub(crate) fn begin() -> Later {
        Later::with(NESTED.get() + 1)
    }

    fn with(nested: usize) -> Later {
        Later { before: NESTED.replace(nested), _thread: PhantomData }
    }

    /// Runs foreign code between two turns, while this thread has locked no lane. It may wait for calls that wake it.
    pub(crate) fn outside<R>(foreign: impl FnOnce() -> R) -> R {
        let _inside = Later::with(0);
        wake_kept();
        foreign()
    }

    /// From now on, another thread calls the wakers of this one.
    pub(crate) fn on_a_thread_that_serves() {
        SERVES.set(true);
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        NESTED.set(self.before);
        if self.before == 0 {
            wake_kept();
        }
    }
}

fn wake_kept() {
    if KEPT.take() {
        wake_all();
    }
}

#[cold]
fn wake_all() {
    // A waker may call [`wake`] again.
    while let Some(waker) = WAKERS.with_borrow_mut(Vec::pop) {
        match SERVES.get().then(callbacks::of_wakers) {
            // This cannot fail, because the thread never ends.
            Some(Ok(thread)) => drop(thread.send(Box::new(|| waker.wake()))),
            // Without another thread, this one must do it.
            Some(Err(_)) | None => shielded(|| waker.wake()),
        }
    }
}

/// Calls `waker`, at once or when the last [`Later`] of this thread is dropped.
pub(super) fn wake(waker: Waker) {
    match NESTED.get() {
        0 => shielded(|| waker.wake()),
        _ => {
            WAKERS.with_borrow_mut(|wakers| wakers.push(waker));
            KEPT.set(true);
        }
    }
}
