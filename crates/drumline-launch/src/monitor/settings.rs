//! Who hears what happens to a job.

use std::path::PathBuf;

/// Who hears what happens to a job: by default nobody.
///
/// ```
/// use drumline_launch::{EventLog, Monitoring};
///
/// let monitoring = Monitoring { events: Some(EventLog::Console) };
/// assert!(monitoring != Monitoring::default());
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Monitoring {
    /// Where events are written, a line of JSON each.
    pub events: Option<EventLog>,
}

/// Where events are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventLog {
    /// To stderr.
    Console,
    /// At the end of this file.
    File(PathBuf),
}
