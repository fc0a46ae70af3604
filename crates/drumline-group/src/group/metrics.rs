//! What the calls of groups have taken.

use std::{fmt::Write, time::Duration};

use drumline_engine::usage::Calls;

use super::ProcessGroup;

/// The number, bytes and time of this rank's calls in these groups, by kind, in the text format of
/// Prometheus. Return it where your program is scraped.
///
/// | metric | what |
/// |---|---|
/// | `drumline_calls_total` | calls that have ended; for messages, those that have arrived or left |
/// | `drumline_bytes_total` | bytes of this rank's buffers in these calls |
/// | `drumline_seconds_total` | their time, including the time spent waiting for other ranks. Of short calls that do not wait long, one in 64 is timed and counts for all |
/// | `drumline_group_failed` | 1 after a failure, which poisons the group; else 0 |
///
/// Labels are `group`, `rank` (in the group) and `operation`. Groups always count, so no setting is needed. It waits for
/// no call: any thread may ask while others are in calls.
pub fn text<'a>(groups: impl IntoIterator<Item = &'a ProcessGroup>) -> String {
    let labelled = |group: &'a ProcessGroup| {
        let name = escaped(&group.inner.member.name);
        (format!("group=\"{name}\",rank=\"{}\"", group.rank()), group.usage())
    };
    let groups: Vec<_> = groups.into_iter().map(labelled).collect();
    let mut text = String::new();
    // Writing to a string does not fail.
    for (name, help, value) in COUNTERS {
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} counter");
        for (labels, usage) in &groups {
            for (operation, calls) in usage.by_name() {
                let value = value(&calls);
                let _ = writeln!(text, "{name}{{{labels},operation=\"{operation}\"}} {value}");
            }
        }
    }
    let name = "drumline_group_failed";
    let _ = writeln!(text, "# HELP {name} Whether a call has failed.\n# TYPE {name} gauge");
    for (labels, usage) in &groups {
        let _ = writeln!(text, "{name}{{{labels}}} {}", u8::from(usage.has_failed()));
    }
    text
}

/// The time that calls of the group have taken on this rank, including the time spent waiting for other ranks. Of short calls
/// that do not wait long, one in 64 is timed and counts for all.
pub fn communication_time(group: &ProcessGroup) -> Duration {
    group.usage().collective_time()
}

/// The name, the explanation and the value.
type Counter = (&'static str, &'static str, fn(&Calls) -> String);

const COUNTERS: [Counter; 3] = [
    ("drumline_calls_total", "Calls that have ended.", |calls| calls.ended.to_string()),
    ("drumline_bytes_total", "Bytes of this rank's buffers.", |calls| calls.bytes.to_string()),
    ("drumline_seconds_total", "Time in calls, waiting included.", |calls| {
        calls.time.as_secs_f64().to_string()
    }),
];

/// Escapes the value of a label.
fn escaped(label: &str) -> String {
    label.replace('\\', r"\\").replace('"', "\\\"").replace('\n', r"\n")
}
