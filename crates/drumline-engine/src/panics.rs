//! Panics in the caller's code: wakers, callbacks, buffers and operators.

use std::{
    any::Any,
    panic::{AssertUnwindSafe, catch_unwind},
};

/// Runs the caller's `code`. Logs a panic and stops it.
pub fn shielded(code: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(code)) {
        tracing::error!(
            "a waker, a callback or a buffer of a call panicked: {}",
            panic_text(&*panic)
        );
    }
}

/// The message of a panic.
pub fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str)).unwrap_or("without a text")
}
