//! A store in a file that several processes share.

mod log;
mod record;

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread,
    time::{Duration, Instant},
};

use self::{
    log::{Log, name_of},
    record::{CLOSED, REFERENCES, Record},
};
use super::{
    BYTES_MAX, Store,
    interface::{deadline_after, in_a_fork},
    limits::{VALUE_BYTES_MAX, check_value, raw_key, raw_keys, raw_pairs, shown},
    timeout::Timeout,
    values::{Misfit, Values},
};
use crate::{Error, Result, text::escaped};

/// How often a waiting call reads the file, as in torch.
const POLL: Duration = Duration::from_millis(10);

/// A store in a file, for processes that see the same file. Processes that use torch's
/// [`FileStore`](https://docs.pytorch.org/docs/stable/distributed.html) can share it.
///
/// The format of the file is exactly torch's, and it is locked as torch does, so both can use it at the same
/// time. If a process of ours is killed, it leaves complete records. If a torch process leaves an incomplete
/// record, the first process of ours that sees it removes it.
///
/// The file counts its open handles. The process that closes the last one deletes the file, if as many
/// handles were closed as the world has processes. A process that is killed does not close its handle. Then
/// the file stays, and must be deleted before the next job uses the path.
///
/// On a network file system it needs locks (`flock`).
///
/// ```
/// # use drumline_store as drumline;
/// use drumline::store::{FileStore, Store};
///
/// let path = std::env::temp_dir().join(format!("drumline-doc-{}", std::process::id()));
/// // In two processes.
/// let one = FileStore::open(&path, 2)?;
/// let two = FileStore::open(&path, 2)?;
/// one.set("address/0", b"10.0.0.1:4000")?;
/// assert_eq!(two.get("address/0")?, b"10.0.0.1:4000");
///
/// drop((one, two));
/// assert!(!path.exists());
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Debug)]
pub struct FileStore {
    handle: Arc<Handle>,
    timeout: Timeout,
}

/// A handle that the file counts as open.
#[derive(Debug)]
struct Handle {
    log: Mutex<Log>,
    path: PathBuf,
    world_size: usize,
    bytes_max: usize,
    /// Whether the file counts this handle. It does not count a clone made in a fork.
    is_counted: bool,
    /// The process that opened it. A fork shares its lock, so the lock does not protect the two from each
    /// other.
    process: u32,
}

impl FileStore {
    /// Opens or creates the store in the file at `path`, for `world_size` processes. The last of them deletes
    /// the file. With a `world_size` of 0 the file is never deleted.
    ///
    /// # Errors
    ///
    /// [`Io`](drumline_error::ErrorKind::Io) if the file cannot be opened or created.
    /// [`Store`](drumline_error::ErrorKind::Store) if it is not a store's file, or if another process keeps it locked
    /// for 10 s.
    pub fn open(path: impl AsRef<Path>, world_size: usize) -> Result<FileStore> {
        FileStore::with_limit(path, world_size, BYTES_MAX)
    }

    /// Like [`FileStore::open`], with a limit for what this handle stores and keeps in memory.
    ///
    /// # Errors
    ///
    /// As for [`FileStore::open`].
    pub fn with_limit(
        path: impl AsRef<Path>,
        world_size: usize,
        bytes_max: usize,
    ) -> Result<FileStore> {
        // A relative path would mean another file after a change of directory.
        let path = std::path::absolute(path.as_ref())
            .map_err(|error| Error::io(format!("find {}", path.as_ref().display()), error))?;
        let log = Log::open_counted(&path, bytes_max)?;
        let handle = Handle::new(log, world_size, bytes_max, true);
        Ok(FileStore { handle: Arc::new(handle), timeout: Timeout::default() })
    }

    /// The path of the file.
    pub fn path(&self) -> PathBuf {
        self.handle.path.clone()
    }

    fn log(&self) -> Result<MutexGuard<'_, Log>> {
        // This comes first, because another thread of the parent may have held the lock at the fork.
        if let Some(problem) = in_a_fork(self.handle.process) {
            let store = name_of(&self.handle.path);
            return Err(Error::store(&store, "use", problem));
        }
        Ok(self.handle.log.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// Writes the records that `plan` makes from the present state.
    fn write<T>(
        &self,
        operation: impl FnOnce() -> String,
        plan: impl FnOnce(&Values, &mut Vec<u8>) -> Result<T, Misfit>,
    ) -> Result<T> {
        let mut log = self.log()?;
        log.write(plan)?.map_err(|misfit| {
            Error::store(&log.name(), &escaped(&operation()), escaped(&misfit.to_string()))
        })
    }

    /// Reads the file until `find` finds something, at most for `timeout`. After that the error names the
    /// keys that are not `is_there`.
    fn poll<T>(
        &self,
        keys: &[String],
        timeout: Duration,
        is_there: impl Fn(&Values, &[u8]) -> bool,
        find: impl Fn(&Values) -> T,
    ) -> Result<T> {
        let start = Instant::now();
        let deadline = deadline_after(timeout);
        loop {
            // The lock must be released before the sleep.
            let missing: Vec<_> = {
                let mut log = self.log()?;
                let values = log.read()?;
                let missing = keys.iter().filter(|key| !is_there(values, key.as_bytes()));
                let missing: Vec<_> = missing.map(|key| escaped(&shown(key.as_bytes()))).collect();
                if missing.is_empty() {
                    return Ok(find(values));
                }
                missing
            };
            let now = Instant::now();
            if now >= deadline {
                let store = name_of(&self.handle.path);
                return Err(Error::missing_keys(&store, missing, start.elapsed()));
            }
            thread::sleep(POLL.min(deadline - now));
        }
    }
}

fn has_value(values: &Values, key: &[u8]) -> bool {
    values.get(key).is_some()
}

impl Handle {
    fn new(log: Log, world_size: usize, bytes_max: usize, is_counted: bool) -> Handle {
        let (path, process) = (log.path().to_owned(), std::process::id());
        Handle { log: Mutex::new(log), path, world_size, bytes_max, is_counted, process }
    }
}

impl Log {
    /// Opens the file and counts this handle in it.
    fn open_counted(path: &Path, bytes_max: usize) -> Result<Log> {
        loop {
            let mut log = Log::open(path, bytes_max)?;
            let counted = log.write(|values, records| add(values, REFERENCES, 1, records));
            match counted {
                Ok(Ok(_)) => return Ok(log),
                Ok(Err(misfit)) => return Err(log.miscounted(&misfit)),
                // The last earlier process has just deleted the file.
                Err(_) if !log.is_at_its_path() => {}
                Err(error) => return Err(error),
            }
        }
    }
}

fn add(values: &Values, key: &[u8], amount: i64, records: &mut Vec<u8>) -> Result<i64, Misfit> {
    let sum = values.sum(key, amount)?;
    set(values, key, sum.to_string().as_bytes(), records)?;
    Ok(sum)
}

fn set(values: &Values, key: &[u8], value: &[u8], records: &mut Vec<u8>) -> Result<(), Misfit> {
    values.check_room(key, value)?;
    Record::Set(key, value).encode(records);
    Ok(())
}

impl Drop for Handle {
    /// Counts the handle as closed. The last handle deletes the file.
    fn drop(&mut self) {
        if !self.is_counted || self.process != std::process::id() {
            return;
        }
        let log = self.log.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !log.is_at_its_path() {
            return;
        }
        if let Err(error) = log.close(self.world_size) {
            tracing::warn!(%error, "a file store was not closed properly: delete its file");
        }
    }
}

impl Log {
    fn close(&mut self, world_size: usize) -> Result<()> {
        let all = i64::try_from(world_size).unwrap_or(i64::MAX);
        let counted = self.write_or_remove(|values, records| {
            let closed = add(values, CLOSED, 1, records)?;
            let open = add(values, REFERENCES, -1, records)?;
            Ok(world_size > 0 && closed >= all && open == 0)
        })?;
        counted.map_err(|misfit| self.miscounted(&misfit))
    }

    fn miscounted(&self, misfit: &Misfit) -> Error {
        Error::store(&self.name(), "count the open handles", misfit)
    }
}

impl Store for FileStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        let raw = raw_key("set", key)?;
        check_value("set", value)?;
        self.write(
            || format!("set {key}"),
            |values, records| set(values, raw.as_bytes(), value, records),
        )
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let raw = raw_key("get", key)?;
        let value = |values: &Values| values.get(raw.as_bytes()).unwrap_or_default().to_vec();
        self.poll(std::slice::from_ref(&raw), self.timeout(), has_value, value)
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let raw = raw_key("add", key)?;
        self.write(
            || format!("add {amount} to {key}"),
            |values, records| add(values, raw.as_bytes(), amount, records),
        )
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let raw = raw_key("compare_set", key)?;
        check_value("compare_set", desired)?;
        self.write(
            || format!("compare_set {key}"),
            |values, records| match values.objection(raw.as_bytes(), expected) {
                Some(value) => Ok(value.to_vec()),
                None => set(values, raw.as_bytes(), desired, records).map(|()| desired.to_vec()),
            },
        )
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.poll(&raw_keys("wait", keys)?, timeout, Values::is_present, |_| ())
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let keys = raw_keys("check", keys)?;
        let mut log = self.log()?;
        let values = log.read()?;
        Ok(keys.iter().all(|key| values.is_present(key.as_bytes())))
    }

    fn num_keys(&self) -> Result<usize> {
        Ok(self.list_keys()?.len())
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        let raw = raw_key("delete_key", key)?;
        self.write(
            || format!("delete {key}"),
            |values, records| {
                let is_there = has_value(values, raw.as_bytes());
                if is_there {
                    Record::Delete(raw.as_bytes()).encode(records);
                }
                Ok(is_there)
            },
        )
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let raw = raw_key("append", key)?;
        self.write(
            || format!("append to {key}"),
            |values, records| {
                let present = values.get(raw.as_bytes()).unwrap_or_default();
                if present.len() + value.len() > VALUE_BYTES_MAX {
                    return Err(Misfit::TooLong);
                }
                set(values, raw.as_bytes(), &[present, value].concat(), records)
            },
        )
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        let raw = raw_keys("multi_get", keys)?;
        let value =
            |values: &Values, key: &String| values.get(key.as_bytes()).unwrap_or_default().to_vec();
        self.poll(&raw, self.timeout(), has_value, |values| {
            raw.iter().map(|key| value(values, key)).collect()
        })
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let raw = raw_pairs("multi_set", pairs)?;
        self.write(
            || "multi_set".to_owned(),
            |values, records| {
                raw.iter().try_for_each(|(key, value)| set(values, key.as_bytes(), value, records))
            },
        )
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let raw = raw_key("queue_push", key)?;
        check_value("queue_push", value)?;
        self.write(
            || format!("queue_push {key}"),
            |values, records| {
                values.check_room_in_queue(raw.as_bytes(), value)?;
                Record::Push(raw.as_bytes(), value).encode(records);
                Ok(())
            },
        )
    }

    fn queue_pop(&self, key: &str) -> Result<Vec<u8>> {
        let raw = raw_key("queue_pop", key)?;
        let deadline = deadline_after(self.timeout());
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            let has_item = |values: &Values, key: &[u8]| values.queue_len(key) > 0;
            self.poll(std::slice::from_ref(&raw), left, has_item, |_| ())?;
            // Another caller may have been faster.
            if let Some(item) = self.queue_try_pop(key)? {
                return Ok(item);
            }
        }
    }

    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        let raw = raw_key("queue_try_pop", key)?;
        self.write(
            || format!("queue_try_pop {key}"),
            |values, records| {
                let first = values.first(raw.as_bytes()).map(<[u8]>::to_vec);
                if first.is_some() {
                    Record::Pop(raw.as_bytes()).encode(records);
                }
                Ok(first)
            },
        )
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        let raw = raw_key("queue_len", key)?;
        Ok(self.log()?.read()?.queue_len(raw.as_bytes()))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let mut log = self.log()?;
        let users = log.read()?.keys().filter(|key| key.starts_with(b"/"));
        Ok(users.map(shown).collect())
    }

    fn timeout(&self) -> Duration {
        self.timeout.get()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.timeout.set(timeout);
    }

    /// Shares the open file: the clone does not count as another process. In a fork the clone opens the file
    /// again, and does not count either.
    fn try_clone(&self) -> Result<Box<dyn Store>> {
        let handle = match in_a_fork(self.handle.process) {
            None => Arc::clone(&self.handle),
            Some(_) => {
                let Handle { path, world_size, bytes_max, .. } = &*self.handle;
                let log = Log::open(path, *bytes_max)?;
                Arc::new(Handle::new(log, *world_size, *bytes_max, false))
            }
        };
        Ok(Box::new(FileStore { handle, timeout: self.timeout.clone() }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In a fork, the handle is the same and the process id differs. So this test changes the id.
    #[test]
    fn a_fork_shares_no_lock_with_its_parent_and_makes_clones() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("store");
        let parent = FileStore::open(&path, 1).unwrap();
        let mut log = Log::open(&path, BYTES_MAX).unwrap();
        log.read().unwrap();
        let mut handle = Handle::new(log, 1, BYTES_MAX, true);
        handle.process += 1;
        let inherited = FileStore { handle: Arc::new(handle), timeout: Timeout::default() };
        let error = inherited.set("key", b"value").unwrap_err().to_string();
        assert!(error.contains("is a fork") && error.contains("clone"), "{error}");
        let clone = inherited.try_clone().unwrap();
        clone.set("key", b"value").unwrap();
        assert_eq!(parent.get("key").unwrap(), b"value");
        // Neither removes the parent's file.
        drop((clone, inherited));
        assert!(path.exists());
        drop(parent);
        assert!(!path.exists());
    }
}
