//! Which algorithm an operation takes: what it says of itself when it is carried out.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use tracing::{
    Event, Id, Level, Metadata, Subscriber,
    field::{Field, Visit},
    span::{Attributes, Record},
};

use super::trial::Trial;

/// Carries the operation out once more, and listens. `None` if it says nothing, as messages do.
pub(super) fn algorithm(trial: &mut dyn Trial) -> drumline::Result<Option<String>> {
    let heard = Arc::new(Mutex::new(None));
    let listener = Listener(heard.clone());
    trial.clear();
    tracing::subscriber::with_default(listener, || trial.run(1))?;
    let heard = heard.lock().unwrap_or_else(PoisonError::into_inner).take();
    Ok(heard)
}

/// Keeps the algorithm that the library names last.
struct Listener(Arc<Mutex<Option<String>>>);

impl Subscriber for Listener {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target() == "drumline::operation" && *metadata.level() <= Level::DEBUG
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        span.record(&mut Name(self));
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn event(&self, _: &Event<'_>) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}
}

struct Name<'a>(&'a Listener);

impl Visit for Name<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "algorithm" {
            let mut heard = self.0.0.lock().unwrap_or_else(PoisonError::into_inner);
            *heard = Some(value.to_owned());
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn fmt::Debug) {}
}
