//! Who hears what happens to a job.

use clap::Args;
use drumline_launch::{EventLog, Monitoring};

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
pub(super) struct MonitoringArgs {
    /// Where events are written, as lines of JSON: null, console (stderr), or the path of a file, such as ./events.jsonl
    #[arg(long, visible_alias = "events", value_name = "FILE", default_value = "null", value_parser = events)]
    event_log_handler: Events,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Events(Option<EventLog>);

impl MonitoringArgs {
    pub(super) fn monitoring(self) -> Monitoring {
        let Events(events) = self.event_log_handler;
        Monitoring { events }
    }
}

/// `null`, `console` or a path. The name of a handler in Python is no path.
fn events(text: &str) -> Result<Events, String> {
    match text {
        "null" => Ok(Events(None)),
        "console" => Ok(Events(Some(EventLog::Console))),
        path if path.contains(['/', '.']) => Ok(Events(Some(EventLog::File(path.into())))),
        name => {
            Err(format!("handlers in Python are not loaded: null, console, or a file (./{name})"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_go_nowhere_to_stderr_or_to_a_file() {
        assert_eq!(events("null"), Ok(Events(None)));
        assert_eq!(events("console"), Ok(Events(Some(EventLog::Console))));
        for file in ["./events", "events.jsonl", "/tmp/events"] {
            assert_eq!(events(file), Ok(Events(Some(EventLog::File(file.into())))));
        }
        assert!(events("dynamic").unwrap_err().contains("(./dynamic)"));
        assert!(events("").is_err());
    }
}
