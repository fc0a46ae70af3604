//! Who hears what happens to a job.

use std::{ffi::OsString, path::PathBuf, time::Duration};

/// Who hears what happens to a job: by default nobody.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Monitoring {
    /// Where events are written, a line of JSON each.
    pub events: Option<EventLog>,
    /// The address, a host and a port, at which anybody may ask over HTTP how the job is.
    pub health: Option<(String, u16)>,
    /// The service manager that started the launcher.
    pub service: Option<ServiceManager>,
}

/// Where events are written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EventLog {
    /// To stderr.
    Console,
    /// At the end of this file.
    File(PathBuf),
}

/// A service manager, such as systemd, that wants to hear how its service is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceManager {
    /// Its socket, as in `NOTIFY_SOCKET`: a path, or a name behind `@`.
    pub socket: OsString,
    /// It takes the launcher for hung if it does not hear of it for this long: `WATCHDOG_USEC`.
    pub watchdog: Option<Duration>,
}
