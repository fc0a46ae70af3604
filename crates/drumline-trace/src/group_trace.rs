//! The trace of one group on one rank.

use std::{ops::Deref, sync::Arc, time::Instant};

use drumline_engine::{
    membership::Membership,
    recorder::{Recorder, Sink, What},
};
use drumline_schedule::step::Rank;
use drumline_store::store::Store;

use crate::{Result, clock::Inquiry, destination::Trace, file::TraceFile};

/// The recorder of a group, and the file to which it writes, if there is one.
#[derive(Clone, Debug)]
pub struct GroupTrace {
    recorder: Recorder,
    rank: Rank,
    session: Option<Arc<Session>>,
}

/// A user of a file. When it is dropped, the waiting events are written.
#[derive(Debug)]
struct Session(Arc<TraceFile>);

impl Drop for Session {
    fn drop(&mut self) {
        self.0.flush();
    }
}

impl Sink for Session {
    fn is_open(&self) -> bool {
        self.0.is_open()
    }

    fn record(&self, track: u32, group: Arc<str>, what: What, started: Instant, ended: Instant) {
        self.0.record(track, group, what, started, ended);
    }

    fn mark(&self, track: u32, name: &'static str, text: String) {
        self.0.mark(track, name, text);
    }
}

impl GroupTrace {
    /// Records spans only, without a file.
    pub fn of(group: &str, rank: Rank) -> GroupTrace {
        GroupTrace { recorder: Recorder::of(group, rank), rank, session: None }
    }

    /// Begins the records of `group`. If `trace` is set, they go to its file.
    ///
    /// # Errors
    ///
    /// [`Setting`](drumline_error::ErrorKind::Setting) when the file cannot be written.
    pub fn start(trace: Option<&Trace>, group: &str, rank: Rank) -> Result<GroupTrace> {
        let spans = GroupTrace::of(group, rank);
        let Some(trace) = trace else { return Ok(spans) };
        let file = TraceFile::open(trace, trace.rank.unwrap_or(rank))?;
        let Some(file) = file else { return Ok(spans) };
        let session = Arc::new(Session(file));
        let recorder = spans.recorder.into_sink(session.clone());
        Ok(GroupTrace { recorder, rank, session: Some(session) })
    }

    /// The group is connected. Later records go to a track of its own.
    pub fn join(&mut self, member: &Membership) {
        if let Some(session) = &self.session {
            self.recorder.set_track(session.0.add_group(member));
        }
    }

    /// Prepares [`GroupTrace::align`]. Rank 0 calls it before any other rank, and all ranks call it before
    /// rank 0 aligns. Ranks that write no trace leave nothing in the store.
    pub fn ask_time(&self, store: &dyn Store) -> Result<Inquiry> {
        match &self.session {
            Some(session) if self.rank == 0 => {
                session.0.offer_time(store)?;
                Ok(Inquiry::InVain)
            }
            Some(session) => session.0.ask_time(store),
            None => Ok(Inquiry::InVain),
        }
    }

    /// Measures how far the clocks of other hosts are from rank 0's.
    pub fn align(&self, store: &dyn Store, inquiry: Inquiry) -> Result<()> {
        match &self.session {
            Some(session) if self.rank == 0 => session.0.tell_time(store),
            Some(session) => session.0.align(store, inquiry),
            None => Ok(()),
        }
    }

    /// Writes the records that wait.
    pub fn flush(&self) {
        if let Some(session) = &self.session {
            session.0.flush();
        }
    }

    /// The recorder alone, for a lane.
    pub fn recorder(&self) -> &Recorder {
        &self.recorder
    }
}

impl Deref for GroupTrace {
    type Target = Recorder;

    fn deref(&self) -> &Recorder {
        &self.recorder
    }
}
