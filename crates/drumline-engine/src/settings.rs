//! The settings that a lane needs.

use std::time::Duration;

use crate::deadline::bounded;

/// The part of a group's configuration that a lane needs. It is the same on all ranks, except for
/// [`Settings::warn_after`] and [`Settings::spread_over_cores`].
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The time limit of a call without one of its own.
    pub timeout: Duration,
    /// Whether the program has set `timeout`, and not the environment.
    pub is_own_timeout: bool,
    /// A call that has waited for this time logs a warning that names the late ranks.
    pub warn_after: Duration,
    /// Length of a window of long data over links, in bytes.
    pub window_bytes: usize,
    /// The name of the algorithm that every all_reduce must use.
    pub all_reduce: Option<String>,
    /// Whether a thread may move to an emptier core when ranks outnumber cores.
    pub spread_over_cores: bool,
}

impl Settings {
    /// The same with limits that a clock can count: [`Duration::MAX`] means none.
    pub(crate) fn bounded(self) -> Settings {
        Settings { timeout: bounded(self.timeout), warn_after: bounded(self.warn_after), ..self }
    }
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            timeout: Duration::from_secs(600),
            is_own_timeout: false,
            warn_after: Duration::from_secs(10),
            window_bytes: 1 << 20,
            all_reduce: None,
            spread_over_cores: false,
        }
    }
}
