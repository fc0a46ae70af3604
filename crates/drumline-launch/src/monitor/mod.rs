//! Tells others what happens to a job.
//!
//! ```text
//!  Launch: job ───────┐
//!                     ├─► Monitor ─► a file of events
//!  WorkerNews: world ─┘
//! ```

mod event_log;
pub(crate) mod happening;
pub(crate) mod settings;
pub(crate) mod workers;

use std::sync::Arc;

use self::{event_log::EventWriter, happening::Happening, settings::Monitoring};
use crate::Result;

/// All who hear what happens to a job. Mostly nobody.
#[derive(Clone, Debug, Default)]
pub(crate) struct Monitor(Option<Arc<Listeners>>);

#[derive(Debug)]
struct Listeners {
    events: Option<EventWriter>,
}

impl Monitor {
    /// Everybody to whom the job of this name is told.
    pub(crate) fn open(to: &Monitoring, run_id: &str) -> Result<Monitor> {
        if *to == Monitoring::default() {
            return Ok(Monitor::default());
        }
        let events = to.events.as_ref().map(|to| EventWriter::open(to, run_id)).transpose()?;
        Ok(Monitor(Some(Arc::new(Listeners { events }))))
    }

    /// Tells what has happened.
    pub(crate) fn tell(&self, happening: Happening) {
        let Some(listeners) = &self.0 else { return };
        if let Some(events) = &listeners.events {
            events.tell(&happening);
            if matches!(happening, Happening::JobEnds { .. }) {
                events.finish();
            }
        }
    }
}
