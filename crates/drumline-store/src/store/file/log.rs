//! The file as a log, under torch's lock: reads on from the last position, and writes behind the end.

use std::{
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use drumline_shm::files::open_shared;
use rustix::fs::{FlockOperation, OFlags, flock};

use super::record::{COVER_BYTES, Record, cover, is_plausible, next_whole};
use crate::{
    Error, Result,
    store::values::{Misfit, Values},
    text::escaped,
};

/// How long other processes may hold the lock.
const LOCK_PATIENCE: Duration = Duration::from_secs(10);

/// How long to wait between two attempts to lock.
const LOCK_PAUSE: Duration = Duration::from_micros(200);

/// The kernel writes each page as a whole. Between two pages, a process can be killed.
const PAGE_BYTES: u64 = 4096;

/// The file, and the state that its records give up to `end`.
#[derive(Debug)]
pub(super) struct Log {
    path: PathBuf,
    file: File,
    end: u64,
    values: Values,
    bytes_max: usize,
}

/// The name of the store in the file at `path`, for messages.
pub(super) fn name_of(path: &Path) -> String {
    escaped(&format!("file://{}", path.display()))
}

/// Holds the file's lock, as torch does while it reads or writes.
struct Lock<'f>(&'f File);

impl Drop for Lock<'_> {
    fn drop(&mut self) {
        // For an open descriptor it cannot fail.
        let _ = flock(self.0, FlockOperation::Unlock);
    }
}

impl Log {
    /// Opens the file at `path`, or creates it.
    pub(super) fn open(path: &Path, bytes_max: usize) -> Result<Log> {
        // A user who wants to share the file with other users makes it with other permissions.
        let (file, _) = open_shared(path, OFlags::RDWR, 0o600).map_err(|error| {
            let hint = match error.kind() {
                ErrorKind::NotFound => "; its directory must exist",
                ErrorKind::InvalidInput => "; name one that does not exist yet",
                _ => "",
            };
            Error::io(format!("open file store {}{hint}", path.display()), error)
        })?;
        let values = Values::new(bytes_max);
        Ok(Log { path: path.to_owned(), file, end: 0, values, bytes_max })
    }

    pub(super) fn name(&self) -> String {
        name_of(&self.path)
    }

    /// The state that the file has now.
    pub(super) fn read(&mut self) -> Result<&Values> {
        if self.size()? != self.end {
            let torn = self.locked(FlockOperation::NonBlockingLockShared, Log::refresh)?;
            if torn {
                // Repairs the file before a torch process reads it, which would wait for the rest of the
                // record for ever.
                let _ = self.write(|_, _| Ok(()))?;
            }
        }
        Ok(&self.values)
    }

    /// Writes the records that `plan` makes from the present state: all of them or none.
    pub(super) fn write<T>(
        &mut self,
        plan: impl FnOnce(&Values, &mut Vec<u8>) -> Result<T, Misfit>,
    ) -> Result<Result<T, Misfit>> {
        self.locked(FlockOperation::NonBlockingLockExclusive, |log| log.write_locked(plan))
    }

    /// As for [`Log::write`]; deletes the file if `plan` returns `true`. A process that opens the file
    /// meanwhile waits for the lock and then sees that the file has gone.
    pub(super) fn write_or_remove(
        &mut self,
        plan: impl FnOnce(&Values, &mut Vec<u8>) -> Result<bool, Misfit>,
    ) -> Result<Result<(), Misfit>> {
        self.locked(FlockOperation::NonBlockingLockExclusive, |log| {
            let is_last = log.write_locked(plan)?;
            if is_last == Ok(true) {
                fs::remove_file(&log.path).map_err(|error| log.failed("delete", error))?;
            }
            Ok(is_last.map(|_| ()))
        })
    }

    fn write_locked<T>(
        &mut self,
        plan: impl FnOnce(&Values, &mut Vec<u8>) -> Result<T, Misfit>,
    ) -> Result<Result<T, Misfit>> {
        if self.refresh()? {
            self.repair()?;
        }
        let mut records = Vec::new();
        let result = plan(&self.values, &mut records);
        if result.is_ok() && !records.is_empty() {
            self.append(records)?;
        }
        Ok(result)
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the path still leads to this file.
    pub(super) fn is_at_its_path(&self) -> bool {
        let identity = |metadata: io::Result<fs::Metadata>| {
            metadata.ok().map(|metadata| (metadata.dev(), metadata.ino()))
        };
        identity(self.file.metadata()) == identity(fs::metadata(&self.path))
    }

    fn locked<T>(
        &mut self,
        kind: FlockOperation,
        call: impl FnOnce(&mut Log) -> Result<T>,
    ) -> Result<T> {
        let file = self.file.try_clone().map_err(|error| self.failed("lock", error))?;
        let deadline = Instant::now() + LOCK_PATIENCE;
        while let Err(error) = flock(&file, kind) {
            match error {
                rustix::io::Errno::AGAIN if Instant::now() < deadline => thread::sleep(LOCK_PAUSE),
                rustix::io::Errno::INTR => {}
                rustix::io::Errno::AGAIN => return Err(self.busy()),
                error => return Err(self.failed("lock", error.into())),
            }
        }
        let _lock = Lock(&file);
        self.size()?;
        call(self)
    }

    fn busy(&self) -> Error {
        Error::store(
            &self.name(),
            "lock",
            format!(
                "another process has kept it locked for {LOCK_PATIENCE:?} (`lslocks` shows which); \
                 it is stopped, or a torch process that found a record cut off, which makes it \
                 wait for ever"
            ),
        )
    }

    /// Applies the records that were added since the last time. Call it under a lock. Returns whether the
    /// last record is torn: since no process is writing, its writer has died.
    fn refresh(&mut self) -> Result<bool> {
        let new = self.new_bytes()?;
        if self.end == 0 && !is_plausible(&new) {
            return Err(Error::setting(
                &self.name(),
                "the file is no store's; name one that does not exist yet",
            ));
        }
        Ok(self.apply(&new) < new.len())
    }

    /// Applies the complete records at the beginning of `bytes`, which follow `end`. Returns their length in
    /// bytes.
    fn apply(&mut self, bytes: &[u8]) -> usize {
        let mut at = 0;
        while let Some((record, length)) = Record::decode(&bytes[at..]) {
            record.apply(&mut self.values);
            at += length;
        }
        self.end += at as u64;
        at
    }

    /// The bytes behind `end`.
    fn new_bytes(&self) -> Result<Vec<u8>> {
        let count = self.size()? - self.end;
        // Old values stay in the file, so it may be larger than the state.
        let limit = self.bytes_max.saturating_mul(2);
        let count = usize::try_from(count).ok().filter(|&count| count <= limit);
        let Some(count) = count else {
            return Err(self.wrong(format!("the file has grown by more than {limit} bytes")));
        };
        let mut bytes = vec![0; count];
        let read = self.file.read_exact_at(&mut bytes, self.end);
        read.map_err(|error| self.failed("read", error))?;
        Ok(bytes)
    }

    /// Removes a torn record, under the exclusive lock. Records that torch has written behind it stay.
    fn repair(&mut self) -> Result<()> {
        let bytes = self.new_bytes()?;
        let kept = &bytes[next_whole(&bytes)..];
        tracing::warn!(
            store = self.name(),
            bytes = bytes.len() - kept.len(),
            "a process was killed while it wrote: its last record is dropped"
        );
        let kept_end = self.end + kept.len() as u64;
        let written = self.file.write_all_at(kept, self.end);
        written
            .and_then(|()| self.file.set_len(kept_end))
            .map_err(|error| self.failed("repair", error))?;
        self.refresh().map(drop)
    }

    /// Appends `records` so that the file consists of complete records at every moment, even if this process
    /// is killed. (torch's processes hang when a record is cut off.)
    ///
    /// Records that fit into a page are written at once. For longer ones, the file first grows by zeros,
    /// which are empty records of eight bytes. Then the first of these becomes one record that covers all of
    /// them. Then the new records are written into the covered range, except for their first bytes, which lie
    /// under the header of the cover. These are written last, and replace the cover.
    fn append(&mut self, mut bytes: Vec<u8>) -> Result<()> {
        let start = self.end;
        let fits_page =
            start / PAGE_BYTES == (start + bytes.len() as u64).saturating_sub(1) / PAGE_BYTES;
        let written = if fits_page {
            self.file.write_all_at(&bytes, start)
        } else {
            let gap = bytes.len().next_multiple_of(8) - bytes.len();
            if gap > 0 {
                let mut padded = Vec::with_capacity(bytes.len() + 8 + gap);
                Record::Filler(gap).encode(&mut padded);
                padded.append(&mut bytes);
                bytes = padded;
            }
            let (first, rest) = bytes.split_at(COVER_BYTES);
            self.file
                .set_len(start + bytes.len() as u64)
                .and_then(|()| self.file.write_all_at(&cover(bytes.len()), start))
                .and_then(|()| self.file.write_all_at(rest, start + COVER_BYTES as u64))
                .and_then(|()| self.file.write_all_at(first, start))
        };
        written.map_err(|error| self.failed("write", error))?;
        self.apply(&bytes);
        Ok(())
    }

    fn size(&self) -> Result<u64> {
        let metadata = self.file.metadata().map_err(|error| self.failed("look at", error))?;
        if metadata.nlink() == 0 {
            return Err(self.wrong(
                "the file has been deleted: all other handles are closed, or somebody cleaned up \
                 too early"
                    .to_owned(),
            ));
        }
        if metadata.len() < self.end {
            return Err(self.wrong("the file has become shorter; who overwrites it?".to_owned()));
        }
        Ok(metadata.len())
    }

    fn failed(&self, operation: &str, error: io::Error) -> Error {
        Error::io(format!("{operation} file store {}", self.path.display()), error)
    }

    fn wrong(&self, problem: String) -> Error {
        Error::store(&self.name(), "read", problem)
    }
}
