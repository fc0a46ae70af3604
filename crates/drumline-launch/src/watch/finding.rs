//! A worker that hangs.

use rustix::process::Signal;

/// What a guard has found out about a worker that hangs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Finding {
    /// Its number on this host.
    pub(crate) worker: usize,
    /// The signal that ends it.
    pub(crate) signal: Signal,
    /// How it hangs: `it began step 17 and no other within 30s (--step-timeout)`.
    pub(crate) how: String,
    /// Lines that help to find out why.
    pub(crate) details: Vec<String>,
}
