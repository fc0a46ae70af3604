//! Catches the warnings in which ranks log that other ranks are late.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use tracing::{
    Event, Level, Metadata, Subscriber,
    field::{Field, Visit},
    level_filters::LevelFilter,
    span,
};

use crate::{network::Network, time::Nanos};

/// A warning of late ranks.
#[derive(Clone, Debug, Default)]
pub(crate) struct Warning {
    pub(crate) at: Nanos,
    pub(crate) group: String,
    pub(crate) rank: usize,
    pub(crate) late: Vec<usize>,
}

/// A subscriber that keeps the warnings of one simulation.
#[derive(Clone, Debug)]
pub(crate) struct Warnings {
    network: Arc<Network>,
    gathered: Arc<Mutex<Vec<Warning>>>,
}

impl Warnings {
    pub(crate) fn new(network: &Arc<Network>) -> Warnings {
        Warnings { network: network.clone(), gathered: Arc::default() }
    }

    pub(crate) fn take(&self) -> Vec<Warning> {
        std::mem::take(&mut self.gathered.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Subscriber for Warnings {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        *metadata.level() == Level::WARN
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(LevelFilter::WARN)
    }

    fn new_span(&self, _span: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _span: &span::Id, _values: &span::Record<'_>) {}

    fn record_follows_from(&self, _span: &span::Id, _follows: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut warning = Warning { at: self.network.now(), ..Warning::default() };
        event.record(&mut warning);
        if !warning.late.is_empty() {
            self.gathered.lock().unwrap_or_else(PoisonError::into_inner).push(warning);
        }
    }

    fn enter(&self, _span: &span::Id) {}

    fn exit(&self, _span: &span::Id) {}
}

impl Visit for Warning {
    fn record_str(&mut self, field: &Field, value: &str) {
        if field.name() == "group" {
            self.group = value.to_owned();
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "rank" {
            self.rank = value as usize;
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "late" {
            let ranks = format!("{value:?}");
            let ranks = ranks.trim_matches(['[', ']']).split(", ");
            self.late = ranks.filter_map(|rank| rank.parse().ok()).collect();
        }
    }
}
