//! Buckets that are being reduced.

use std::{
    collections::VecDeque,
    time::{Duration, Instant},
};

use drumline_engine::recorder::{Category, Open, What};
use drumline_group::{ProcessGroup, driving};

use super::memory::{Arrived, Travelling};
use crate::Result;

/// The buckets with which the group works, in the order in which they were launched.
///
/// The group does so one after another, on the progress thread or on a thread that waits. It owns their
/// memory meanwhile.
#[derive(Debug, Default)]
pub(super) struct InFlight {
    buckets: VecDeque<(usize, Instant, Open, Travelling)>,
    /// When the previous bucket came back.
    last: Option<Instant>,
}

#[derive(Debug)]
pub(super) struct Done {
    pub(super) bucket: usize,
    pub(super) arrived: Arrived,
    /// How long the group worked on it: since it was launched, or since the previous bucket came back, if
    /// that was later.
    pub(super) took: Duration,
}

impl InFlight {
    /// Launches a bucket with `bytes` bytes of gradients or parameters, as `name` says.
    pub(super) fn launch(
        &mut self,
        group: &ProcessGroup,
        name: &'static str,
        (bucket, bytes): (usize, usize),
        begin: impl FnOnce(&ProcessGroup) -> Travelling,
    ) {
        let open = driving::recorder(group).begin(|| What {
            category: Category::Bucket,
            name,
            bucket: Some(bucket),
            bytes: Some(bytes as u64),
            ..What::default()
        });
        self.buckets.push_back((bucket, Instant::now(), open, begin(group)));
    }

    /// Waits for the bucket that was launched first. `None` when all are back.
    pub(super) fn wait(&mut self) -> Result<Option<Done>> {
        let Some((bucket, launched, open, work)) = self.buckets.pop_front() else {
            return Ok(None);
        };
        let arrived = work.wait()?;
        let at = arrived.at;
        open.end_at(at);
        let began = self.last.map_or(launched, |last| last.max(launched));
        self.last = Some(at);
        Ok(Some(Done { bucket, arrived, took: at.saturating_duration_since(began) }))
    }
}
