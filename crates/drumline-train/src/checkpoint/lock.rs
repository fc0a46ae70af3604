//! One job at a time saves in a directory: its process has a lock on a file there.
//!
//! The system releases the lock when the process ends, however it ends. A forked process, such as a worker that loads
//! data, does not keep it.

use std::{
    collections::HashMap,
    fs::{self, File, TryLockError},
    io::{self, ErrorKind},
    os::unix::fs::{FileExt, MetadataExt},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use drumline_shm::{PerProcess, Unforked, files};
use rustix::{fs::OFlags, system::uname};

use super::disk::is_still_there;

/// The name of the file.
const NAME: &str = ".lock";

/// How often other processes may come first.
const TRIES_MAX: usize = 100;

/// The longest text of a holder that is shown.
const HOLDER_BYTES_MAX: usize = 400;

/// The right to save in a directory, for this process, as long as it lives.
#[derive(Debug)]
pub(super) struct Lock {
    file: Unforked<File>,
    path: PathBuf,
}

/// What came of the attempt to lock a directory.
#[derive(Debug)]
pub(super) enum Taken {
    /// This process has the lock.
    Ours(Arc<Lock>),
    /// The file system has no locks, for this reason.
    NoLocks(io::Error),
    /// Another process has it. The text says which, as far as it is known.
    Others(String),
}

/// The locks of this process, by directory: all of its objects are of one job.
static OURS: PerProcess<Mutex<Held>> = PerProcess::new();

type Held = HashMap<(u64, u64), Weak<Lock>>;

impl Lock {
    /// Locks a directory that is there. Does not wait.
    pub(super) fn take(directory: &Path) -> io::Result<Taken> {
        let about = fs::metadata(files::here_if_empty(directory))?;
        let place = (about.dev(), about.ino());
        let mut ours = OURS.get(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(lock) = ours.get(&place).and_then(Weak::upgrade).filter(|it| it.holds()) {
            return Ok(Taken::Ours(lock));
        }
        let taken = Lock::lock_file(directory.join(NAME))?;
        if let Taken::Ours(lock) = &taken {
            ours.retain(|_, lock| lock.strong_count() > 0);
            ours.insert(place, Arc::downgrade(lock));
        }
        Ok(taken)
    }

    fn lock_file(path: PathBuf) -> io::Result<Taken> {
        for _ in 0..TRIES_MAX {
            let file = Unforked::open(|| open(&path))?;
            match file.try_lock() {
                // Who had the lock has removed the file.
                Ok(()) if !is_still_there(&file, &path)? => continue,
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => return Ok(Taken::Others(holder(&path))),
                Err(TryLockError::Error(error)) if error.kind() == ErrorKind::Interrupted => {
                    continue;
                }
                Err(TryLockError::Error(error)) => return Ok(Taken::NoLocks(error)),
            }
            let host = uname().nodename().to_string_lossy().into_owned();
            let text = format!("process {} on {host}\n", std::process::id());
            // Only for people. The disk may be full.
            let _ = file.set_len(0).and_then(|()| file.write_all_at(text.as_bytes(), 0));
            return Ok(Taken::Ours(Arc::new(Lock { file, path })));
        }
        Ok(Taken::Others("processes that come and go".to_owned()))
    }

    /// Whether nobody has removed the file, and another process may have made it anew.
    pub(super) fn holds(&self) -> bool {
        is_still_there(&self.file, &self.path).unwrap_or(false)
    }
}

/// Nothing is left of a job that has ended well. In a forked process the descriptor leads to no file, and the file stays.
impl Drop for Lock {
    fn drop(&mut self) {
        if self.holds() {
            let _ = fs::remove_file(&self.path); // It is of no harm.
        }
    }
}

/// The file of another user, whose process was killed, can perhaps only be read. That is enough for a lock on most file
/// systems.
fn open(path: &Path) -> io::Result<File> {
    match files::open_shared(path, OFlags::RDWR, 0o666) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied && path.exists() => {
            Ok(files::open_regular(path, OFlags::RDONLY | OFlags::NOFOLLOW)?.0)
        }
        opened => Ok(opened?.0),
    }
}

/// Which process has the lock.
fn holder(path: &Path) -> String {
    let text = files::read_text(path, HOLDER_BYTES_MAX).unwrap_or_default();
    let text: String = text.chars().filter(|letter| !letter.is_control()).collect();
    if text.is_empty() { "another process".to_owned() } else { text }
}
