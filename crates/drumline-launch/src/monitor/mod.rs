//! Tells others what happens to a job.
//!
//! ```text
//!  run: the job ──────────┐              ┌─► a file of events
//!  WorkerNews: its worlds ├─► Monitor ───┼─► Status ◄── who asks over HTTP
//!  watch: steps of ranks  │              └─► the service manager
//!  Events: that all turns ┘
//! ```

mod event_log;
pub(crate) mod happening;
mod http;
mod service;
pub(crate) mod settings;
mod status;
pub(crate) mod workers;

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use self::{
    event_log::EventWriter, happening::Happening, http::Server, service::Service,
    settings::Monitoring, status::Status,
};
use crate::Result;

/// All who hear what happens to a job. Mostly nobody.
#[derive(Clone, Debug, Default)]
pub(crate) struct Monitor(Option<Arc<Listeners>>);

#[derive(Debug)]
struct Listeners {
    status: Arc<Mutex<Status>>,
    events: Option<EventWriter>,
    server: Option<Server>,
    service: Option<Service>,
    /// How often the launcher shows that it lives.
    beat_every: Option<Duration>,
}

/// With this rate, a launcher that hangs is known in half a minute.
const BEAT_EVERY: Duration = Duration::from_secs(5);

impl Monitor {
    /// Everybody to whom the job of this name is told.
    pub(crate) fn open(to: &Monitoring, run_id: &str) -> Result<Monitor> {
        if *to == Monitoring::default() {
            return Ok(Monitor::default());
        }
        let status = Arc::new(Mutex::new(Status::new(run_id)));
        let events = to.events.as_ref().map(|to| EventWriter::open(to, run_id)).transpose()?;
        let server = to.health.as_ref();
        let server = server.map(|(host, port)| Server::listen(host, *port, Arc::clone(&status)));
        let server = server.transpose()?;
        let watchdog = to.service.as_ref().and_then(|manager| manager.watchdog);
        let beats = [server.as_ref().map(|_| BEAT_EVERY), watchdog.map(|limit| limit / 2)];
        Ok(Monitor(Some(Arc::new(Listeners {
            status,
            events,
            server,
            service: to.service.as_ref().and_then(Service::of),
            beat_every: beats.into_iter().flatten().min(),
        }))))
    }

    /// Tells what has happened.
    pub(crate) fn tell(&self, happening: Happening) {
        let Some(listeners) = &self.0 else { return };
        let is_over = matches!(happening, Happening::JobEnds { .. });
        if let Some(events) = &listeners.events {
            events.tell(&happening);
            if is_over {
                events.finish();
            }
        }
        let (line, all_run) = {
            let mut status = listeners.status();
            status.hear(&happening);
            (status.line(), status.all_run())
        };
        let Some(service) = &listeners.service else { return };
        let news = match happening {
            Happening::WorkerStarts(_) if all_run => service.ready(),
            Happening::WorkerStarts(_) => return,
            Happening::Stops { .. } | Happening::JobEnds { .. } => "STOPPING=1\n",
            _ => "",
        };
        service.say(&format!("{news}STATUS={line}"));
    }

    /// Tells the last step of each rank of this host.
    pub(crate) fn tell_steps(&self, steps: &[Option<u64>]) {
        if let Some(listeners) = &self.0 {
            listeners.status().hear_steps(steps);
        }
    }

    /// Whether somebody may ask for the steps of ranks.
    pub(crate) fn wants_steps(&self) -> bool {
        self.0.as_ref().is_some_and(|listeners| listeners.server.is_some())
    }

    /// Where others may ask about the health.
    pub(crate) fn health_address(&self) -> Option<String> {
        Some(self.0.as_ref()?.server.as_ref()?.address.to_string())
    }

    /// How often the launcher is to show that it lives.
    pub(crate) fn beat_every(&self) -> Option<Duration> {
        self.0.as_ref()?.beat_every
    }

    /// The launcher lives.
    pub(crate) fn beat(&self) {
        let Some(listeners) = &self.0 else { return };
        listeners.status().beat();
        if let (Some(service), Some(_)) = (&listeners.service, listeners.beat_every) {
            service.say("WATCHDOG=1");
        }
    }
}

impl Listeners {
    fn status(&self) -> MutexGuard<'_, Status> {
        self.status.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
