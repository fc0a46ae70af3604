//! Defers wakers until this thread has unlocked the lane on which their calls ended.

use std::{
    cell::{Cell, RefCell},
    marker::PhantomData,
    task::Waker,
};

use drumline_engine::panics::shielded;

thread_local! {
    /// The number of [`Later`]s of this thread that are alive.
    static NESTED: Cell<usize> = const { Cell::new(0) };
    /// Whether [`WAKERS`] holds any. A look at this costs less than a look at a value with a destructor.
    static KEPT: Cell<bool> = const { Cell::new(false) };
    static WAKERS: RefCell<Vec<Waker>> = const { RefCell::new(Vec::new()) };
}

/// While a `Later` exists, [`wake`] keeps the wakers of this thread. Dropping the `Later` calls them. It is
/// made before a lane is locked, so it is dropped after the lane is unlocked.
#[must_use]
pub(crate) struct Later {
    /// Keeps it on its thread.
    _thread: PhantomData<*const ()>,
}

impl Later {
    pub(crate) fn begin() -> Later {
        NESTED.set(NESTED.get() + 1);
        Later { _thread: PhantomData }
    }
}

impl Drop for Later {
    fn drop(&mut self) {
        let nested = NESTED.get() - 1;
        NESTED.set(nested);
        if nested == 0 && KEPT.take() {
            wake_all();
        }
    }
}

#[cold]
fn wake_all() {
    // A waker may call [`wake`] again.
    while let Some(waker) = WAKERS.with_borrow_mut(Vec::pop) {
        shielded(|| waker.wake());
    }
}

/// Calls `waker`, at once or when the last [`Later`] of this thread is dropped.
pub(super) fn wake(waker: Waker) {
    match NESTED.get() {
        0 => waker.wake(),
        _ => {
            WAKERS.with_borrow_mut(|wakers| wakers.push(waker));
            KEPT.set(true);
        }
    }
}
