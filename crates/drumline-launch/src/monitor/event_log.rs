//! Events as lines of JSON. torch's `Event.deserialize` reads a line, too:
//!
//! ```text
//! {"name":"worker_ends","source":"WORKER","timestamp":1790000000123,"metadata":{"run_id":"a1",...,"exit_code":3}}
//! ```

use std::{sync::Arc, time::Duration};

use drumline::{Outlet, files::append_or_stream};
use serde::Serialize;
use serde_json::json;

use super::{happening::Happening, settings::EventLog};
use crate::{Error, Result, clock::milliseconds_since_1970, prefix::host_name};

/// How long the end of a job may wait for lines that nobody takes.
const PATIENCE: Duration = Duration::from_secs(1);

/// Writes events. A file system or a reader that is slow does not hold up the launcher.
#[derive(Debug)]
pub(crate) struct EventWriter {
    run_id: String,
    hostname: String,
    outlet: Arc<Outlet>,
}

#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    source: &'a str,
    /// Milliseconds since 1970.
    timestamp: u64,
    metadata: Metadata<'a>,
}

#[derive(Serialize)]
struct Metadata<'a> {
    run_id: &'a str,
    hostname: &'a str,
    #[serde(flatten)]
    happening: &'a Happening,
}

impl EventWriter {
    pub(crate) fn open(to: &EventLog, run_id: &str) -> Result<EventWriter> {
        let outlet = match to {
            EventLog::Console => Arc::clone(Outlet::stderr()),
            EventLog::File(path) => {
                let what = format!("open {} for events", path.display());
                let file = append_or_stream(path).map_err(Error::system(what))?;
                Outlet::over(file, &path.display().to_string(), dropped)
            }
        };
        Ok(EventWriter { run_id: run_id.to_owned(), hostname: host_name(), outlet })
    }

    pub(crate) fn tell(&self, happening: &Happening) {
        let line = Line {
            name: happening.name(),
            source: happening.source(),
            timestamp: milliseconds_since_1970(),
            metadata: Metadata { run_id: &self.run_id, hostname: &self.hostname, happening },
        };
        if let Ok(mut line) = serde_json::to_vec(&line) {
            line.push(b'\n');
            self.outlet.say(&line);
        }
    }

    /// Waits until all lines are written, but not for a reader who does not read.
    pub(crate) fn finish(&self) {
        self.outlet.settle(PATIENCE);
    }
}

/// The event that stands where events are missing.
fn dropped(count: u64) -> String {
    let event = json!({
        "name": "events_dropped",
        "source": "AGENT",
        "timestamp": milliseconds_since_1970(),
        "metadata": { "count": count },
    });
    format!("{event}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_events_are_an_event_with_the_fields_of_torchs() {
        let line = dropped(3);
        let event: serde_json::Value = serde_json::from_str(&line).unwrap();
        assert_eq!((&event["name"], &event["source"]), (&json!("events_dropped"), &json!("AGENT")));
        assert_eq!(event["metadata"], json!({ "count": 3 }));
        assert!(event["timestamp"].is_u64() && line.ends_with("}\n"));
    }
}
