//! Jobs of MPI that must end.

use std::{
    fmt, fs,
    io::{Read as _, Seek as _},
    path::Path,
    process::{Command, ExitStatus, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

/// So long no job takes, on a busy machine too.
const GIVE_UP: Duration = Duration::from_secs(120);

/// How a job has ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: ExitStatus,
    /// What it has printed.
    pub(crate) text: String,
}

/// Runs a job to its end.
///
/// # Panics
///
/// If the job hangs.
pub(crate) fn finish(mut command: Command) -> Ended {
    // A file: ranks that outlive their launcher would keep a pipe open.
    let mut output: fs::File = tempfile::tempfile().unwrap();
    command.stdin(Stdio::null()).stdout(output.try_clone().unwrap());
    let mut job = command.stderr(output.try_clone().unwrap()).spawn().unwrap();
    let until = Instant::now() + GIVE_UP;
    let (status, hangs) = loop {
        match job.try_wait().unwrap() {
            Some(status) => break (status, false),
            None if Instant::now() >= until => {
                job.kill().unwrap();
                break (job.wait().unwrap(), true);
            }
            None => sleep(Duration::from_millis(5)),
        }
    };
    let mut text = Vec::new();
    output.rewind().unwrap();
    output.read_to_end(&mut text).unwrap();
    let ended = Ended { status, text: String::from_utf8_lossy(&text).into_owned() };
    assert!(!hangs, "{command:?} hangs\n{ended}");
    ended
}

impl fmt::Display for Ended {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n{}", self.status, self.text)
    }
}

/// What a rank has written to a file, or nothing. Open MPI's launcher may end before the ranks that it has spared: with
/// `waits` the rank gets time for its last word.
pub(crate) fn last_word(file: &Path, waits: bool) -> String {
    let until = Instant::now() + GIVE_UP;
    loop {
        let word = fs::read_to_string(file).unwrap_or_default();
        if !word.is_empty() || !waits || Instant::now() >= until {
            return word;
        }
        sleep(Duration::from_millis(1));
    }
}
