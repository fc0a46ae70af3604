//! What a lane tells of its operations: `tracing` spans, and a sink if somebody keeps records.

use std::{fmt, sync::Arc, time::Instant};

use drumline_schedule::step::Rank;
use tracing::{Level, Span, span::EnteredSpan};

/// Keeps records of operations.
pub trait Sink: Send + Sync + fmt::Debug {
    /// Whether it still takes records.
    fn is_open(&self) -> bool;
    /// An operation of `group` has ended. `track` tells groups apart.
    fn record(&self, track: u32, group: Arc<str>, what: What, started: Instant, ended: Instant);
    /// Something has happened to the group.
    fn mark(&self, track: u32, name: &'static str, text: String);
}

/// Records the operations of one group on one rank.
#[derive(Clone, Debug)]
pub struct Recorder {
    group: Arc<str>,
    rank: Rank,
    sink: Option<Arc<dyn Sink>>,
    track: u32,
}

/// An operation. Fields that do not apply are `None`.
#[derive(Clone, Debug, Default)]
pub struct What {
    /// What kind of operation.
    pub category: Category,
    /// As the function is called: `all_reduce`.
    pub name: &'static str,
    /// What the caller's buffer holds.
    pub bytes: Option<u64>,
    /// The number of the collective in its group.
    pub sequence: Option<u64>,
    /// How it is carried out.
    pub algorithm: Option<&'static str>,
    /// The other rank of a message.
    pub peer: Option<Rank>,
    /// The tag of a message.
    pub tag: Option<u64>,
    /// The bucket of gradients.
    pub bucket: Option<usize>,
    /// The key of a call to the store.
    pub key: Option<Box<str>>,
}

/// The kinds of operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Category {
    /// A collective.
    Collective,
    /// A send or receive.
    Message,
    /// The reduction of a bucket of gradients.
    Bucket,
    /// A phase of start-up, or of the end.
    #[default]
    StartUp,
    /// A call to a store.
    Store,
}

impl Category {
    /// As traces spell it.
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

/// An operation that is under way. It ends when this is dropped.
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
    /// If not when this is dropped.
    ended: Option<Instant>,
}

impl Recorder {
    /// Spans only.
    pub fn of(group: &str, rank: Rank) -> Recorder {
        Recorder { group: group.into(), rank, sink: None, track: 0 }
    }

    /// The same, which also writes to `sink`.
    pub fn into_sink(self, sink: Arc<dyn Sink>) -> Recorder {
        Recorder { sink: Some(sink), ..self }
    }

    /// From now on, operations but those of start-up go to this track.
    pub fn set_track(&mut self, track: u32) {
        self.track = track;
    }

    /// An operation begins. `what` is called only if somebody wants to know.
    pub fn begin(&self, what: impl FnOnce() -> What) -> Open {
        if !self.is_heard() {
            return Open(None);
        }
        self.open(what(), Instant::now())
    }

    /// An operation has begun at `started`.
    pub fn begin_at(&self, started: Instant, what: impl FnOnce() -> What) -> Open {
        if !self.is_heard() {
            return Open(None);
        }
        self.open(what(), started)
    }

    /// A phase of start-up, or of the end.
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

    /// Something has happened to the group.
    pub fn mark(&self, name: &'static str, text: impl fmt::Display) {
        if let Some(sink) = &self.sink {
            sink.mark(self.track, name, text.to_string());
        }
    }
}

impl Open {
    /// What happens until the result is dropped belongs to the operation.
    pub fn enter(&self) -> Option<EnteredSpan> {
        let opened = self.0.as_ref()?;
        Some(opened.span.clone().entered())
    }

    /// The operation has ended at `ended`.
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
