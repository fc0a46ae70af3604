//! Passes the core's log to Python's `logging`.
//!
//! A thread that logs (it may be driving calls) only puts a record into a queue, and never waits for the
//! interpreter. Another thread, which exists while there are records, passes them to `drumline._log` with the
//! interpreter's lock. The interpreter's end waits for that thread, and no other one is started. A fork has a
//! queue of its own, which is emptied only once the fork uses the core itself.

use std::{
    collections::VecDeque,
    env,
    fmt::{self, Write as _},
    mem,
    sync::{Condvar, Mutex, MutexGuard, Once, PoisonError},
    thread,
    time::{Duration, SystemTime},
};

use drumline::{PerProcess, deadline};
use pyo3::prelude::*;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    EnvFilter, Layer,
    filter::filter_fn,
    layer::{Context, SubscriberExt as _},
};

use crate::config::patience;

/// The most records that wait for the interpreter. Further ones are counted.
const WAITING_MAX: usize = 256;

/// Level (of `logging`), target, text, source file, line, seconds since 1970, and the thread.
type Record = (u8, &'static str, String, &'static str, u32, f64, String);

#[derive(Default)]
struct Log {
    state: Mutex<State>,
    has_told: Condvar,
}

#[derive(Default)]
struct State {
    records: VecDeque<Record>,
    dropped: usize,
    /// True from `open` to `close_log`.
    is_open: bool,
    is_closed: bool,
    /// Whether a thread is passing records on.
    is_telling: bool,
}

static LOG: PerProcess<Log> = PerProcess::new();

fn log() -> &'static Log {
    LOG.get(Log::default)
}

impl Log {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Sends the log of this process to Python from now on.
pub(crate) fn open(py: Python<'_>) -> PyResult<()> {
    static SUBSCRIBER: Once = Once::new();
    let is_begun = |state: MutexGuard<'_, State>| state.is_open || state.is_closed;
    if is_begun(log().lock()) {
        return Ok(());
    }
    let module = py.import("drumline._log")?;
    let mut level = None;
    SUBSCRIBER.call_once(|| level = subscribe());
    module.call_method1("begin", (level,))?;
    log().lock().is_open = true;
    // Records that were logged before have waited in the queue.
    tell_beside();
    Ok(())
}

/// Receives the core's log from now on. Returns the lowest level of `RUST_LOG`, if it is set.
///
/// Without `RUST_LOG`, all records go to Python, which has levels of its own. (They are few: a call that
/// succeeds logs nothing.)
fn subscribe() -> Option<u8> {
    let wanted = env::var("RUST_LOG").ok().filter(|directives| !directives.is_empty());
    let filter = match &wanted {
        Some(directives) => EnvFilter::new(format!("warn,{directives}")),
        None => EnvFilter::new("drumline=debug"),
    };
    let level = filter.max_level_hint().and_then(|filter| filter.into_level());
    // A span for every call would cost time.
    let only_events = filter_fn(|metadata| metadata.is_event());
    let subscriber = tracing_subscriber::registry().with(filter).with(only_events).with(ToPython);
    // The command line has a subscriber of its own. Then this call changes nothing.
    drop(tracing::subscriber::set_global_default(subscriber));
    wanted.and(level.as_ref().map(number))
}

/// Sends no more records to Python, because the interpreter ends. Waits at most `limit` seconds for records
/// that are on their way.
#[pyfunction]
pub(crate) fn close_log(py: Python<'_>, limit: f64) -> PyResult<()> {
    let limit = deadline::bounded(patience("limit", limit)?);
    py.detach(|| {
        let log = log();
        let waited = log.has_told.wait_timeout_while(log.lock(), limit, |it| it.is_telling);
        let mut state = waited.unwrap_or_else(PoisonError::into_inner).0;
        (state.is_open, state.is_closed) = (false, true);
    });
    Ok(())
}

struct ToPython;

impl<S: Subscriber> Layer<S> for ToPython {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let metadata = event.metadata();
        let mut text = Text::default();
        event.record(&mut text);
        let since_1970 = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let record = (
            number(metadata.level()),
            metadata.target(),
            text.whole(),
            metadata.file().unwrap_or_default(),
            metadata.line().unwrap_or_default(),
            since_1970.unwrap_or(Duration::ZERO).as_secs_f64(),
            thread::current().name().unwrap_or_default().to_owned(),
        );
        let mut state = log().lock();
        if state.records.len() < WAITING_MAX {
            state.records.push_back(record);
        } else {
            state.dropped += 1;
        }
        drop(state);
        tell_beside();
    }
}

/// Starts a thread that passes records on, unless there is one.
fn tell_beside() {
    let mut state = log().lock();
    if !state.is_open || state.is_telling || state.records.is_empty() {
        return;
    }
    state.is_telling = true;
    drop(state);
    let thread = thread::Builder::new().name("drumline-log".to_owned());
    if thread.spawn(tell_all).is_err() {
        // The records wait for the next attempt.
        log().lock().is_telling = false;
    }
}

/// Passes records on until none is left.
fn tell_all() {
    loop {
        let mut state = log().lock();
        if state.records.is_empty() && state.dropped == 0 {
            state.is_telling = false;
            drop(state);
            return log().has_told.notify_all();
        }
        let records: Vec<Record> = mem::take(&mut state.records).into();
        let dropped = mem::take(&mut state.dropped);
        drop(state);
        // `close_log` waits for this thread, so the interpreter is there.
        Python::try_attach(|py| {
            let told = py
                .import("drumline._log")
                .and_then(|module| module.call_method1("tell", (records, dropped)));
            if let Err(raised) = told {
                raised.write_unraisable(py, None);
            }
        });
    }
}

/// The level as a number of `logging`.
fn number(level: &Level) -> u8 {
    match *level {
        Level::ERROR => 40,
        Level::WARN => 30,
        Level::INFO => 20,
        Level::DEBUG => 10,
        Level::TRACE => 5,
    }
}

/// The message of an event, then its error, then its other fields.
#[derive(Default)]
struct Text {
    message: String,
    error: String,
    fields: String,
}

impl Text {
    fn whole(self) -> String {
        let Text { mut message, error, fields } = self;
        if !error.is_empty() {
            message.push_str(": ");
            message.push_str(&error);
        }
        if !fields.is_empty() {
            message.push_str(" (");
            message.push_str(&fields);
            message.push(')');
        }
        message
    }
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        // Writing to a string does not fail.
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            "error" => write!(self.error, "{value:?}"),
            name => {
                let comma = if self.fields.is_empty() { "" } else { ", " };
                write!(self.fields, "{comma}{name}={value:?}")
            }
        };
    }
}
