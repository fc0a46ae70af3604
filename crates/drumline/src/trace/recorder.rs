//! What operations tell of themselves.

use std::{fmt, sync::Arc, time::Instant};

use drumline_schedule::step::Rank;
use tracing::{Level, Span, span::EnteredSpan};

use super::{Trace, clock::Inquiry, file::TraceFile};
use crate::{Result, store::Store, transport::mesh::Membership};

/// Records the operations of one group on one rank, for the rank's file and as `tracing` spans.
#[derive(Clone, Debug)]
pub(crate) struct Recorder {
    group: Arc<str>,
    rank: Rank,
    session: Option<Arc<Session>>,
    track: u32,
}

/// One user of a file. What it has recorded is written when it ends.
#[derive(Debug)]
struct Session(Arc<TraceFile>);

impl Drop for Session {
    fn drop(&mut self) {
        self.0.flush();
    }
}

/// An operation. Fields that do not apply are `None`.
#[derive(Clone, Debug, Default)]
pub(crate) struct What {
    pub(crate) category: Category,
    pub(crate) name: &'static str,
    /// What the caller's buffer holds.
    pub(crate) bytes: Option<u64>,
    pub(crate) sequence: Option<u64>,
    pub(crate) algorithm: Option<&'static str>,
    pub(crate) peer: Option<Rank>,
    pub(crate) tag: Option<u64>,
    pub(crate) bucket: Option<usize>,
    pub(crate) key: Option<Box<str>>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Category {
    Collective,
    Message,
    Bucket,
    #[default]
    StartUp,
    Store,
}

impl Category {
    pub(crate) const fn name(self) -> &'static str {
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
pub(crate) struct Open(Option<Box<Opened>>);

#[derive(Debug)]
struct Opened {
    span: Span,
    session: Option<Arc<Session>>,
    track: u32,
    group: Arc<str>,
    what: What,
    started: Instant,
    /// If not when this is dropped.
    ended: Option<Instant>,
}

impl Recorder {
    /// Spans only.
    pub(crate) fn of(group: &str, rank: Rank) -> Recorder {
        Recorder { group: group.into(), rank, session: None, track: 0 }
    }

    /// For the start of `group`; writes to the file of `trace`, if there is one.
    ///
    /// # Errors
    ///
    /// [`Error::InvalidSetting`](crate::Error::InvalidSetting) when the file cannot be written.
    pub(crate) fn start(trace: Option<&Trace>, group: &str, rank: Rank) -> Result<Recorder> {
        let session = match trace {
            Some(trace) => {
                Some(Arc::new(Session(TraceFile::open(trace, trace.rank.unwrap_or(rank))?)))
            }
            None => None,
        };
        Ok(Recorder { session, ..Recorder::of(group, rank) })
    }

    /// The group is known: what follows has a track of its own.
    pub(crate) fn join(&mut self, member: &Membership) {
        if let Some(session) = &self.session {
            self.track = session.0.add_group(member);
        }
    }

    /// Prepares [`Recorder::align`]. To be called on rank 0 before any other rank calls it, and
    /// on all ranks before rank 0 aligns. Ranks that do not trace leave nothing in the store.
    pub(crate) fn ask_time(&self, store: &dyn Store) -> Result<Inquiry> {
        match &self.session {
            Some(session) if self.rank == 0 => {
                session.0.offer_time(store)?;
                Ok(Inquiry::InVain)
            }
            Some(session) => session.0.ask_time(store),
            None => Ok(Inquiry::InVain),
        }
    }

    /// Finds out how far the clocks of other hosts are from that of rank 0.
    pub(crate) fn align(&self, store: &dyn Store, inquiry: Inquiry) -> Result<()> {
        match &self.session {
            Some(session) if self.rank == 0 => session.0.tell_time(store),
            Some(session) => session.0.align(store, inquiry),
            None => Ok(()),
        }
    }

    /// An operation begins. `what` is called only if somebody wants to know.
    pub(crate) fn begin(&self, what: impl FnOnce() -> What) -> Open {
        if !self.is_heard() {
            return Open(None);
        }
        self.open(what(), Instant::now())
    }

    /// An operation has begun at `started`.
    pub(crate) fn begin_at(&self, started: Instant, what: impl FnOnce() -> What) -> Open {
        if !self.is_heard() {
            return Open(None);
        }
        self.open(what(), started)
    }

    /// A phase of start-up, or of the end.
    pub(crate) fn phase(&self, name: &'static str) -> Open {
        self.begin(|| What { category: Category::StartUp, name, ..What::default() })
    }

    fn is_heard(&self) -> bool {
        let is_recorded = self.session.as_ref().is_some_and(|session| session.0.is_open());
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
        let (session, group) = (self.session.clone(), self.group.clone());
        let opened = Opened { span, session, track, group, what, started, ended: None };
        Open(Some(Box::new(opened)))
    }

    /// Something has happened to the group.
    pub(crate) fn mark(&self, name: &'static str, text: impl fmt::Display) {
        if let Some(session) = &self.session {
            session.0.mark(self.track, name, text.to_string());
        }
    }

    /// Writes what has been recorded.
    pub(crate) fn flush(&self) {
        if let Some(session) = &self.session {
            session.0.flush();
        }
    }
}

impl Open {
    /// What happens until the result is dropped belongs to the operation.
    pub(crate) fn enter(&self) -> Option<EnteredSpan> {
        let opened = self.0.as_ref()?;
        Some(opened.span.clone().entered())
    }

    /// It has ended at `ended`.
    pub(crate) fn end_at(mut self, ended: Instant) {
        if let Some(opened) = &mut self.0 {
            opened.ended = Some(ended);
        }
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(session) = &self.session {
            let what = std::mem::take(&mut self.what);
            let ended = self.ended.unwrap_or_else(Instant::now);
            session.0.record(self.track, self.group.clone(), what, self.started, ended);
        }
    }
}
