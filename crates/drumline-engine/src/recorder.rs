//! Records of calls: `tracing` spans, and a sink if the group keeps a trace.

use std::{fmt, sync::Arc, time::Instant};

use drumline_schedule::step::Rank;
use tracing::{Level, Span, span::EnteredSpan};

/// Keeps records of calls.
pub trait Sink: Send + Sync + fmt::Debug {
    /// Whether the sink still takes records.
    fn is_open(&self) -> bool;
    /// A call of `group` has ended. `track` tells groups apart.
    fn record(&self, track: u32, group: Arc<str>, what: What, started: Instant, ended: Instant);
    /// Something has happened to the group, other than a call.
    fn mark(&self, track: u32, name: &'static str, text: String);
}

/// Records the calls of one group on one rank.
#[derive(Clone, Debug)]
pub struct Recorder {
    group: Arc<str>,
    rank: Rank,
    sink: Option<Arc<dyn Sink>>,
    track: u32,
}

/// What is recorded of a call. Fields that do not apply are `None`.
#[derive(Clone, Debug, Default)]
pub struct What {
    /// The kind of the call.
    pub category: Category,
    /// The name of the function: `all_reduce`.
    pub name: &'static str,
    /// The length of the caller's buffer, in bytes.
    pub bytes: Option<u64>,
    /// The number of the collective in its group.
    pub sequence: Option<u64>,
    /// The name of the algorithm.
    pub algorithm: Option<&'static str>,
    /// The other rank of a message.
    pub peer: Option<Rank>,
    /// The tag of a message.
    pub tag: Option<u64>,
    /// The number of the bucket of gradients.
    pub bucket: Option<usize>,
    /// The key in the store.
    pub key: Option<Box<str>>,
}

/// The kinds of calls that are recorded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Category {
    /// A collective.
    Collective,
    /// A send or receive.
    Message,
    /// The reduction of a bucket of gradients.
    Bucket,
    /// A phase of start-up or of closing.
    #[default]
    StartUp,
    /// A call to a store.
    Store,
}

impl Category {
    /// The name of the category in traces.
    pub const fn name(self) -> &'static str {
        match self {
            Category::Collective => "collective",
            Category::Message => "message",
            Category::Bucket => "bucket",
            Category::StartUp => "start-up",
            Category::Store => "store",
        }
    }
}

/// The open record of a call. The record ends when it is dropped.
#[derive(Debug)]
pub struct Open(Option<Box<Opened>>);

#[derive(Debug)]
struct Opened {
    span: Span,
    sink: Option<Arc<dyn Sink>>,
    track: u32,
    group: Arc<str>,
    what: What,
    started: Instant,
    /// The end, if it is not the time of the drop.
    ended: Option<Instant>,
}

impl Recorder {
    /// A recorder that writes spans only.
    pub fn of(group: &str, rank: Rank) -> Recorder {
        Recorder { group: group.into(), rank, sink: None, track: 0 }
    }

    /// The same recorder, which also writes to `sink`.
    pub fn into_sink(self, sink: Arc<dyn Sink>) -> Recorder {
        Recorder { sink: Some(sink), ..self }
    }

    /// Sends later calls to this track. Start-up and calls to a store stay on track 0.
    pub fn set_track(&mut self, track: u32) {
        self.track = track;
    }

    /// Opens the record of a call that begins now. `what` runs only if a span or a sink is listening.
    pub fn begin(&self, what: impl FnOnce() -> What) -> Open {
        if !self.is_heard() {
            return Open(None);
        }
        self.open(what(), Instant::now())
    }

    /// Opens the record of a call that began at `started`.
    pub fn begin_at(&self, started: Instant, what: impl FnOnce() -> What) -> Open {
        if !self.is_heard() {
            return Open(None);
        }
        self.open(what(), started)
    }

    /// Opens the record of a phase of start-up or of closing.
    pub fn phase(&self, name: &'static str) -> Open {
        self.begin(|| What { category: Category::StartUp, name, ..What::default() })
    }

    fn is_heard(&self) -> bool {
        let is_recorded = self.sink.as_ref().is_some_and(|sink| sink.is_open());
        is_recorded
            || tracing::span_enabled!(target: "drumline::operation", Level::DEBUG, "operation")
    }

    fn open(&self, what: What, started: Instant) -> Open {
        let span = tracing::debug_span!(
            target: "drumline::operation",
            "operation",
            name = what.name,
            group = &*self.group,
            rank = self.rank,
            sequence = what.sequence,
            bytes = what.bytes,
            algorithm = what.algorithm,
            peer = what.peer,
            tag = what.tag,
            bucket = what.bucket,
            key = what.key.as_deref(),
        );
        let track = match what.category {
            Category::StartUp | Category::Store => 0,
            Category::Collective | Category::Message | Category::Bucket => self.track,
        };
        let (sink, group) = (self.sink.clone(), self.group.clone());
        let opened = Opened { span, sink, track, group, what, started, ended: None };
        Open(Some(Box::new(opened)))
    }

    /// Records an event of the group.
    pub fn mark(&self, name: &'static str, text: impl fmt::Display) {
        if let Some(sink) = &self.sink {
            sink.mark(self.track, name, text.to_string());
        }
    }
}

impl Open {
    /// Enters the span of the call, until the result is dropped.
    pub fn enter(&self) -> Option<EnteredSpan> {
        let opened = self.0.as_ref()?;
        Some(opened.span.clone().entered())
    }

    /// Ends the record at `ended`.
    pub fn end_at(mut self, ended: Instant) {
        if let Some(opened) = &mut self.0 {
            opened.ended = Some(ended);
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(sink) = &self.sink {
            let what = std::mem::take(&mut self.what);
            let ended = self.ended.unwrap_or_else(Instant::now);
            sink.record(self.track, self.group.clone(), what, self.started, ended);
        }
    }
}
