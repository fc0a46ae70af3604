//! The settings that a lane needs.

use std::time::Duration;

/// What a lane takes from the configuration of its group; the same on all ranks, but for
/// [`Settings::warn_after`] and [`Settings::spread_over_cores`].
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// The time limit of a call that has none of its own.
    pub timeout: Duration,
    /// After this time a waiting call warns and names the late ranks.
    pub warn_after: Duration,
    /// Bytes of a window of long data over links.
    pub window_bytes: usize,
    /// The name of the algorithm that every all_reduce must use.
    pub all_reduce: Option<String>,
    /// Whether a thread may move to an emptier core when ranks outnumber cores.
    pub spread_over_cores: bool,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings {
            timeout: Duration::from_secs(600),
            warn_after: Duration::from_secs(10),
            window_bytes: 1 << 20,
            all_reduce: None,
            spread_over_cores: false,
        }
    }
}
