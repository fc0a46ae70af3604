//! The trace file of one rank, and the thread that writes it.
//!
//! Calls add events to a list and go on. The thread turns them into text. The file on disk is a complete JSON
//! array at any time: every write ends with `]`, which the next write replaces.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::unix::fs::FileExt,
    path::PathBuf,
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use drumline_engine::{membership::Membership, recorder::What};
use drumline_schedule::step::Rank;
use drumline_shm::PerProcess;
use drumline_store::store::Store;
use rustix::{
    process::{Pid, getpid},
    system::uname,
};

use crate::{
    Error, Result,
    clock::{self, Clock, Inquiry},
    destination::{Trace, file_name},
    format,
};

/// The longest time before an event is written.
const WRITE_EVERY: Duration = Duration::from_millis(100);

/// The most events that may wait. If the disk is too slow, further events are left out and counted.
const WAITING_MAX: usize = 1 << 16;

/// Room for the last event of a file that has reached its limit.
const LAST_WORDS_BYTES: u64 = 1_024;

const END: &str = "\n]\n";

/// See the [module's documentation](self).
#[derive(Debug)]
pub(crate) struct TraceFile {
    /// The process that writes. Its forks share the file and have no thread that writes.
    process: Pid,
    rank: Rank,
    path: PathBuf,
    clock: Clock,
    /// Whether more can be recorded. False once nothing more can be written.
    is_open: AtomicBool,
    waiting: Mutex<Waiting>,
    has_more: Condvar,
    /// Whether the file has the offset of its clock from rank 0's. The first group writes it.
    is_aligned: AtomicBool,
    disk: Mutex<Disk>,
}

#[derive(Debug, Default)]
struct Waiting {
    events: Vec<Event>,
    /// The number of events that were left out since the last write.
    lost: u64,
    /// Whether the thread must write at once: the process may soon be killed.
    is_urgent: bool,
    /// The number of groups so far.
    groups: u32,
}

#[derive(Debug)]
enum Event {
    Operation { track: u32, group: Arc<str>, what: What, started: Instant, ended: Instant },
    Mark { track: u32, name: &'static str, text: String, at: Instant },
    Line(String),
}

#[derive(Debug)]
struct Disk {
    file: File,
    /// The length of the file without the closing bracket.
    end: u64,
    bytes_max: u64,
    operations: u64,
    /// An empty list. [`Waiting`] gets it in exchange for a full one.
    spare: Vec<Event>,
    text: String,
}

type Files = Mutex<BTreeMap<(PathBuf, Rank), Arc<TraceFile>>>;

/// The trace files of this process. A rank has one file for all of its groups, as long as the process lives.
static FILES: PerProcess<Files> = PerProcess::new();

impl TraceFile {
    /// The file of `rank`. The first caller makes it anew. `None`: the file belongs to a process from which
    /// this one was forked.
    pub(crate) fn open(trace: &Trace, rank: Rank) -> Result<Option<Arc<TraceFile>>> {
        let path = trace.dir.join(file_name(rank));
        let refused = |source: io::Error| {
            Error::setting(
                "the trace (DRUMLINE_TRACE)",
                format!("cannot write {}: {source}", path.display()),
            )
        };
        fs::create_dir_all(&trace.dir).map_err(refused)?;
        let dir = trace.dir.canonicalize().map_err(refused)?;
        let key = (dir, rank);
        let mut files = lock(FILES.get(Files::default));
        if let Some(known) = files.get(&key) {
            return Ok(Some(known.clone()));
        }
        if FILES.inherited().any(|theirs| may_hold(theirs, &key)) {
            tracing::warn!(
                path = %path.display(),
                "the process from which this one is forked writes this trace, so this process leaves \
                 no trace: give it another directory (DRUMLINE_TRACE) or rank"
            );
            return Ok(None);
        }
        let path = key.0.join(file_name(rank));
        let file = Arc::new(TraceFile::create(path, trace, rank).map_err(refused)?);
        let writer = file.clone();
        std::thread::Builder::new()
            .name("drumline-trace".to_owned())
            .spawn(move || writer.run())
            .map_err(refused)?;
        files.insert(key, file.clone());
        Ok(Some(file))
    }

    fn create(path: PathBuf, trace: &Trace, rank: Rank) -> io::Result<TraceFile> {
        // A new file, and not an emptied one: a program that reads the old file can go on.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let clock = Clock::of_this_host();
        let mut text = "[\n".to_owned();
        let host = uname().nodename().to_string_lossy().into_owned();
        format::file(&mut text, rank, &host, std::process::id(), &clock);
        let mut disk = Disk {
            file: File::create_new(&path)?,
            end: 0,
            bytes_max: trace.bytes_max,
            operations: 0,
            spare: Vec::new(),
            text,
        };
        disk.write()?;
        Ok(TraceFile {
            process: getpid(),
            rank,
            path,
            clock,
            is_open: AtomicBool::new(true),
            waiting: Mutex::default(),
            has_more: Condvar::new(),
            is_aligned: AtomicBool::new(false),
            disk: Mutex::new(disk),
        })
    }

    /// Whether more can be written, and by this process. It takes no lock, because in a fork the lock may be
    /// held by a thread that does not exist there.
    pub(crate) fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed) && self.process == getpid()
    }

    pub(crate) fn record(
        &self,
        track: u32,
        group: Arc<str>,
        what: What,
        started: Instant,
        ended: Instant,
    ) {
        self.push(Event::Operation { track, group, what, started, ended });
    }

    pub(crate) fn mark(&self, track: u32, name: &'static str, text: String) {
        if !self.is_open() {
            return;
        }
        self.push(Event::Mark { track, name, text, at: Instant::now() });
        lock(&self.waiting).is_urgent = true;
        self.has_more.notify_one();
    }

    /// Records a group. Returns its track.
    pub(crate) fn add_group(&self, member: &Membership) -> u32 {
        if !self.is_open() {
            return 0;
        }
        let mut waiting = lock(&self.waiting);
        waiting.groups += 1;
        let track = waiting.groups;
        drop(waiting);
        self.push(Event::Line(format::group(self.rank, track, member)));
        track
    }

    pub(crate) fn offer_time(&self, store: &dyn Store) -> Result<()> {
        clock::offer(store, &self.clock.id)
    }

    pub(crate) fn ask_time(&self, store: &dyn Store) -> Result<Inquiry> {
        match self.is_aligned.load(Ordering::SeqCst) {
            true => Ok(Inquiry::InVain),
            false => clock::inquire(store, &self.clock.id),
        }
    }

    pub(crate) fn tell_time(&self, store: &dyn Store) -> Result<()> {
        clock::answer(store, &|| self.clock.ns(Instant::now()))
    }

    pub(crate) fn align(&self, store: &dyn Store, inquiry: Inquiry) -> Result<()> {
        let now_ns = || self.clock.ns(Instant::now());
        if let Some((reference, offset)) = clock::measure(store, &self.clock.id, inquiry, &now_ns)?
        {
            self.is_aligned.store(true, Ordering::SeqCst);
            self.push(Event::Line(format::clock(self.rank, &reference, offset)));
        }
        Ok(())
    }

    fn push(&self, event: Event) {
        if !self.is_open() {
            return;
        }
        let mut waiting = lock(&self.waiting);
        if waiting.events.len() >= WAITING_MAX {
            waiting.lost += 1;
            return;
        }
        waiting.events.push(event);
        let count = waiting.events.len();
        drop(waiting);
        if count == 1 || count == WAITING_MAX / 2 {
            self.has_more.notify_one();
        }
    }

    fn run(&self) {
        while self.is_open() {
            let waiting = lock(&self.waiting);
            let waiting = self
                .has_more
                .wait_while(waiting, |it| it.events.is_empty())
                .unwrap_or_else(PoisonError::into_inner);
            let is_little = |it: &mut Waiting| it.events.len() < WAITING_MAX / 2 && !it.is_urgent;
            let more = self.has_more.wait_timeout_while(waiting, WRITE_EVERY, is_little);
            drop(more);
            self.flush();
        }
    }

    /// Writes the waiting events.
    pub(crate) fn flush(&self) {
        if !self.is_open() {
            return;
        }
        let mut disk = lock(&self.disk);
        let mut events = std::mem::take(&mut disk.spare);
        let lost = {
            let mut waiting = lock(&self.waiting);
            std::mem::swap(&mut waiting.events, &mut events);
            waiting.is_urgent = false;
            std::mem::take(&mut waiting.lost)
        };
        if events.is_empty() || !self.is_open() {
            return;
        }
        for event in events.drain(..) {
            if !disk.add(self, &event) {
                self.is_open.store(false, Ordering::Relaxed);
                break;
            }
        }
        disk.spare = events;
        if lost > 0 {
            let text = format!("{lost} events are missing here: they came faster than the disk");
            disk.add(self, &Event::Mark { track: 0, name: "lost", text, at: Instant::now() });
        }
        if let Err(error) = disk.write() {
            self.is_open.store(false, Ordering::Relaxed);
            tracing::warn!(path = %self.path.display(), %error, "the trace ends here");
        }
    }
}

impl Disk {
    /// Adds an event to the text. `false`: only the last event of the file found room.
    fn add(&mut self, of: &TraceFile, event: &Event) -> bool {
        let before = self.text.len();
        self.text.push_str(",\n");
        match event {
            Event::Operation { track, group, what, started, ended } => {
                self.operations += 1;
                let (start, end) = (of.clock.ns(*started), of.clock.ns(*ended));
                let id = self.operations;
                format::operation(&mut self.text, of.rank, *track, id, group, what, start, end);
            }
            Event::Mark { track, name, text, at } => {
                let at_ns = of.clock.ns(*at);
                format::mark(&mut self.text, of.rank, *track, name, text, at_ns);
            }
            Event::Line(line) => self.text.push_str(line),
        }
        let fits = self.end + self.text.len() as u64 + LAST_WORDS_BYTES <= self.bytes_max;
        if !fits {
            self.text.truncate(before);
            self.text.push_str(",\n");
            let text = format!(
                "the file has reached its limit of {} bytes (DRUMLINE_TRACE_BYTES_MAX): what this \
                 rank did later is missing",
                self.bytes_max
            );
            let at_ns = of.clock.ns(Instant::now());
            format::mark(&mut self.text, of.rank, 0, "full", &text, at_ns);
        }
        fits
    }

    /// Writes the text to the file.
    fn write(&mut self) -> io::Result<()> {
        let bytes = self.text.len() as u64;
        self.text.push_str(END);
        let written = self.file.write_all_at(self.text.as_bytes(), self.end);
        self.text.clear();
        self.end += bytes;
        written
    }
}

/// Whether a process from which this one was forked may hold a file of that name. True also if one of its
/// threads held the list at the fork, because that lock is never released here.
fn may_hold(files: &Files, key: &(PathBuf, Rank)) -> bool {
    match files.try_lock() {
        Ok(files) => files.contains_key(key),
        Err(TryLockError::Poisoned(files)) => files.into_inner().contains_key(key),
        Err(TryLockError::WouldBlock) => true,
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
