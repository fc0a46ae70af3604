//! The counts and the time of a run.

use std::panic::{AssertUnwindSafe, catch_unwind};

/// The counts and the time of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RunSummary {
    /// Whether a fault struck.
    pub fault: bool,
    /// Number of simulated events.
    pub events: u64,
    /// Virtual time from start to end, in nanoseconds.
    pub virtual_ns: u64,
}

/// Turns a panic of `simulate` into an error.
pub(crate) fn caught<T>(simulate: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(simulate)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(format!("panic: {}", text.unwrap_or_default()))
    })
}
