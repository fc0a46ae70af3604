//! Events as lines of JSON. torch's `Event.deserialize` reads a line, too:
//!
//! ```text
//! {"name":"worker_ends","source":"WORKER","timestamp":1790000000123,"metadata":{"run_id":"a1",...,"exit_code":3}}
//! ```

use std::{
    fs::{self, File, OpenOptions},
    io::{self, Write},
    sync::mpsc::{Receiver, Sender, channel},
    thread,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use drumline::named;
use serde::Serialize;

use super::{happening::Happening, settings::EventLog};
use crate::{Error, Result};

/// How long the end of a job may wait for lines that nobody takes.
const PATIENCE: Duration = Duration::from_secs(1);

/// Writes events, on a thread of its own: a file system or a reader that is slow does not hold up the launcher.
#[derive(Debug)]
pub(crate) struct EventWriter {
    run_id: String,
    hostname: String,
    messages: Sender<Message>,
}

enum Message {
    Line(Vec<u8>),
    /// All lines before this are written.
    Written(Sender<()>),
}

#[derive(Serialize)]
struct Line<'a> {
    name: &'a str,
    source: &'a str,
    /// Milliseconds since 1970.
    timestamp: u64,
    metadata: Metadata<'a>,
}

#[derive(Serialize)]
struct Metadata<'a> {
    run_id: &'a str,
    hostname: &'a str,
    #[serde(flatten)]
    happening: &'a Happening,
}

impl EventWriter {
    pub(crate) fn open(to: &EventLog, run_id: &str) -> Result<EventWriter> {
        let (messages, to_write) = channel();
        let destination = Destination::open(to)?;
        thread::Builder::new()
            .name("events".into())
            .stack_size(128 * 1024)
            .spawn(move || write(destination, &to_write))
            .map_err(named("clone3"))
            .map_err(Error::system("start a thread that writes events"))?;
        let hostname = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        Ok(EventWriter {
            run_id: run_id.to_owned(),
            hostname: hostname.trim().to_owned(),
            messages,
        })
    }

    pub(crate) fn tell(&self, happening: &Happening) {
        let since_1970 = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let line = Line {
            name: happening.name(),
            source: happening.source(),
            timestamp: u64::try_from(since_1970.as_millis()).unwrap_or(u64::MAX),
            metadata: Metadata { run_id: &self.run_id, hostname: &self.hostname, happening },
        };
        if let Ok(mut line) = serde_json::to_vec(&line) {
            line.push(b'\n');
            let _ = self.messages.send(Message::Line(line));
        }
    }

    /// Waits until all lines are written, for a moment at most.
    pub(crate) fn finish(&self) {
        let (written, all) = channel();
        let _ = self.messages.send(Message::Written(written));
        let _ = all.recv_timeout(PATIENCE);
    }
}

/// Writes all lines. A line is one write, so those of several hosts do not mix in one file.
fn write(mut to: Destination, messages: &Receiver<Message>) {
    let mut is_broken = false;
    for message in messages {
        match message {
            Message::Line(_) if is_broken => {}
            Message::Line(line) => {
                if let Err(error) = to.write(&line) {
                    tracing::warn!("cannot write events ({error}): none are written from now on");
                    is_broken = true;
                }
            }
            Message::Written(answer) => {
                let _ = answer.send(());
            }
        }
    }
}

enum Destination {
    Stderr,
    File(File),
}

impl Destination {
    fn open(to: &EventLog) -> Result<Destination> {
        match to {
            EventLog::Console => Ok(Destination::Stderr),
            EventLog::File(path) => {
                let file = OpenOptions::new().create(true).append(true).open(path);
                let what = format!("open {} for events", path.display());
                file.map(Destination::File).map_err(Error::system(what))
            }
        }
    }

    fn write(&mut self, line: &[u8]) -> io::Result<()> {
        match self {
            Destination::Stderr => io::stderr().write_all(line),
            Destination::File(file) => file.write_all(line),
        }
    }
}
