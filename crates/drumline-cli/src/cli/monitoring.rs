//! Who hears what happens to a job.

use std::{process, time::Duration};

use clap::Args;
use drumline_launch::{EventLog, Monitoring, ServiceManager};

use super::host::Host;

// No doc comment: clap would make it the description of the command.
#[derive(Args, Clone, Debug)]
pub(super) struct MonitoringArgs {
    /// Where events are written, as lines of JSON: null, console (stderr), or the path of a file, such as ./events.jsonl
    #[arg(long, visible_alias = "events", value_name = "FILE", default_value = "null", value_parser = events)]
    event_log_handler: Events,

    /// Answer GET /health and GET /metrics (for Prometheus) at this port of 127.0.0.1, or at HOST:PORT, where anybody
    /// may ask; 0: a free port [default: off]
    #[arg(long, value_name = "PORT", value_parser = place)]
    health_port: Option<Place>,
}

/// A host and a port.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Place(String, u16);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Events(Option<EventLog>);

impl MonitoringArgs {
    pub(super) fn monitoring(self, host: &Host<'_>) -> Result<Monitoring, String> {
        let Events(events) = self.event_log_handler;
        let health = match self.health_port {
            Some(given) => Some(given),
            None => host.parsed("TORCHELASTIC_HEALTH_CHECK_PORT", place)?,
        };
        let health = health.map(|Place(name, port)| (name, port));
        Ok(Monitoring { events, health, service: service(host, process::id()) })
    }
}

/// The service manager that has started this process, whose number is `id`.
fn service(host: &Host<'_>, id: u32) -> Option<ServiceManager> {
    let socket = host.variable("NOTIFY_SOCKET")?;
    let number = |name| host.variable(name)?.to_str()?.parse::<u64>().ok();
    let is_meant = host.variable("WATCHDOG_PID").is_none_or(|pid| *pid == *id.to_string());
    let limit = number("WATCHDOG_USEC").filter(|limit| *limit > 0 && is_meant);
    Some(ServiceManager { socket, watchdog: limit.map(Duration::from_micros) })
}

/// `8080`, `0.0.0.0:8080`, `[::]:8080`.
fn place(text: &str) -> Result<Place, String> {
    let (host, port) = text.rsplit_once(':').unwrap_or(("127.0.0.1", text));
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    let is_good = !host.is_empty() && (bare.is_some() || !host.contains(':'));
    let place = port.parse().ok().filter(|_| is_good);
    place.map(|port| Place(bare.unwrap_or(host).to_owned(), port)).ok_or_else(|| {
        "give a port like 8080, or a host and a port: 0.0.0.0:8080, [::]:8080".into()
    })
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

    #[test]
    fn a_place_is_a_port_or_a_host_and_a_port() {
        let of = |text| place(text).map(|Place(host, port)| format!("{host} {port}"));
        assert_eq!(of("8080"), Ok("127.0.0.1 8080".into()));
        assert_eq!(of("0.0.0.0:80"), Ok("0.0.0.0 80".into()));
        assert_eq!(of("[::1]:0"), Ok("::1 0".into()));
        for bad in ["", ":80", "host:", "65536", "::1:80", "host:http", "-1"] {
            assert!(of(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_watchdog_is_of_one_process() {
        let of = |variables: &'static [(&str, &str)]| {
            let environment = |name: &str| {
                variables.iter().find(|(known, _)| *known == name).map(|(_, value)| value.into())
            };
            let root = std::path::Path::new("/nowhere");
            service(&Host { environment: &environment, root, cores: None }, 7)
        };
        assert_eq!(of(&[("WATCHDOG_USEC", "5")]), None);
        let watchdog = |variables| of(variables).unwrap().watchdog;
        assert_eq!(of(&[("NOTIFY_SOCKET", "@x")]).unwrap().socket, "@x");
        assert_eq!(watchdog(&[("NOTIFY_SOCKET", "@x")]), None);
        const OWN: &[(&str, &str)] =
            &[("NOTIFY_SOCKET", "@x"), ("WATCHDOG_USEC", "5000"), ("WATCHDOG_PID", "7")];
        assert_eq!(watchdog(OWN), Some(Duration::from_millis(5)));
        const OTHER: &[(&str, &str)] =
            &[("NOTIFY_SOCKET", "@x"), ("WATCHDOG_USEC", "5000"), ("WATCHDOG_PID", "8")];
        assert_eq!(watchdog(OTHER), None);
    }
}
