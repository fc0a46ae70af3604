//! The interface of all stores.

use std::{
    fmt,
    time::{Duration, Instant},
};

use drumline_error::ErrorKind;

use super::limits;
use crate::{Error, Result};

/// The limit of a waiting [`Store::get`] unless set, as in torch.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(300);

/// The limit of the bytes in a store unless it was opened with another one: 1 GiB.
pub const BYTES_MAX: usize = 1 << 30;

/// A small shared map from text keys to bytes. Callers can wait for keys.
///
/// Ranks meet through a store: they publish their addresses and wait for those of the others. All methods may
/// be called from many threads. A waiting call never holds up a call of another thread.
///
/// A key can have a value, and also a queue. [`wait`](Store::wait) and [`check`](Store::check) look for
/// either. All other methods use the value, unless they have `queue` in their name.
///
/// ```
/// # use drumline_store as drumline;
/// use std::{sync::Arc, time::Duration};
///
/// use drumline::{Result, store::{HashStore, Store}};
///
/// /// The first rank that comes leads. The others hear who it is.
/// fn elect(store: &dyn Store, name: &str) -> Result<Vec<u8>> {
///     store.compare_set("leader", b"", name.as_bytes())
/// }
///
/// let store: Arc<dyn Store> = Arc::new(HashStore::new()); // or any other
/// assert_eq!(elect(&*store, "rank 3")?, b"rank 3");
/// assert_eq!(elect(&*store, "rank 5")?, b"rank 3");
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// For every method: [`Argument`](drumline_error::ErrorKind::Argument) for an argument that exceeds a limit;
/// [`Store`](drumline_error::ErrorKind::Store) if the store is gone, is full, or holds a value that does not fit the
/// call; [`Io`](drumline_error::ErrorKind::Io) if the system fails. For methods that wait:
/// [`StoreTimeout`](drumline_error::ErrorKind::StoreTimeout), which names the missing keys. A time-out of zero looks
/// once.
///
/// # A store of your own
///
/// Nine methods are required. `check`, `num_keys`, `multi_get`, `multi_set` and `barrier` have default
/// implementations that use these nine: override them if the store can do better. `append`, `list_keys` and
/// the queues cannot be implemented like that, because of two concurrent callers one would lose its change.
/// Unless overridden they return errors. Process groups need none of these.
pub trait Store: fmt::Debug + Send + Sync {
    /// Sets `key` to `value` and wakes all callers that wait for it.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// Waits until `key` exists, at most for [`Store::timeout`], and returns its value.
    fn get(&self, key: &str) -> Result<Vec<u8>>;

    /// Adds `amount` to the decimal number under `key` (0 if absent) and returns the sum.
    fn add(&self, key: &str, amount: i64) -> Result<i64>;

    /// Replaces the value of `key` by `desired` if it is `expected`. Returns the value that `key` has
    /// afterwards.
    ///
    /// An absent key is created if `expected` is empty. Otherwise nothing is stored and `expected` is
    /// returned, as in torch.
    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>>;

    /// Waits until all `keys` exist, at most for `timeout`.
    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()>;

    /// Whether all `keys` exist now.
    fn check(&self, keys: &[&str]) -> Result<bool> {
        match self.wait(keys, Duration::ZERO) {
            Ok(()) => Ok(true),
            Err(error) if error.kind() == ErrorKind::StoreTimeout => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// The number of keys that [`Store::list_keys`] would list.
    fn num_keys(&self) -> Result<usize> {
        Ok(self.list_keys()?.len())
    }

    /// Removes `key` and returns whether it was there.
    fn delete_key(&self, key: &str) -> Result<bool>;

    /// Appends `value` to the value of `key`, or creates it.
    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let _ = value;
        missing::<Self, _>(format!("append {key}"))
    }

    /// Waits until all `keys` exist, at most for [`Store::timeout`]. Returns their values in the order of
    /// `keys`. All values together may have 32 MiB.
    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.wait(keys, self.timeout())?;
        keys.iter().map(|key| self.get(key)).collect()
    }

    /// Sets several keys, in the order of `pairs`. A store that does not override this sets them one after
    /// another, so other callers may see only some of them.
    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| self.set(key, value))
    }

    /// Puts `value` at the end of the queue of `key`, and wakes one of the callers that wait for it.
    ///
    /// ```
    /// # use drumline_store as drumline;
    /// # use drumline::store::{HashStore, Store};
    /// let store = HashStore::new();
    /// store.queue_push("work", b"first")?;
    /// store.queue_push("work", b"second")?;
    /// assert_eq!(store.queue_len("work")?, 2);
    /// assert_eq!(store.queue_pop("work")?, b"first");
    /// assert_eq!(store.queue_try_pop("work")?.as_deref(), Some(&b"second"[..]));
    /// assert_eq!(store.queue_try_pop("work")?, None);
    /// # Ok::<(), drumline::Error>(())
    /// ```
    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let _ = value;
        missing::<Self, _>(format!("queue_push {key}"))
    }

    /// Waits until the queue of `key` has an item, at most for [`Store::timeout`], and takes the first item.
    /// Every item goes to exactly one caller.
    fn queue_pop(&self, key: &str) -> Result<Vec<u8>> {
        missing::<Self, _>(format!("queue_pop {key}"))
    }

    /// Takes the first item of the queue of `key`; `None` if there is none now.
    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        missing::<Self, _>(format!("queue_try_pop {key}"))
    }

    /// The number of items in the queue of `key`.
    fn queue_len(&self, key: &str) -> Result<usize> {
        missing::<Self, _>(format!("queue_len {key}"))
    }

    /// All keys that have a value, in order. Leaves out queues and the store's own keys.
    fn list_keys(&self) -> Result<Vec<String>> {
        missing::<Self, _>("list_keys".to_owned())
    }

    /// Waits until `world_size` callers have come to the barrier `key`, at most for `timeout`.
    ///
    /// A barrier opens once and stays open: a later caller passes at once. So every barrier needs a key of
    /// its own. Its count is kept in keys that begin with `key`. A caller that has given up stays counted.
    ///
    /// ```
    /// # use drumline_store as drumline;
    /// # use std::time::Duration;
    /// # use drumline::store::{HashStore, Store};
    /// let store = HashStore::new();
    /// let other = store.try_clone()?;
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| other.barrier("start", 2, Duration::from_secs(60)));
    ///     store.barrier("start", 2, Duration::from_secs(60))
    /// })?;
    /// # Ok::<(), drumline::Error>(())
    /// ```
    fn barrier(&self, key: &str, world_size: usize, timeout: Duration) -> Result<()> {
        // The same keys that torch uses.
        let world_size = limits::check_world_size(world_size)?;
        let complete = format!("{key}/last_member");
        if self.add(&format!("{key}/num_members"), 1)? >= world_size {
            self.set(&complete, b"1")?;
        }
        self.wait(&[&complete], timeout)
    }

    /// The limit of a waiting [`Store::get`], [`Store::multi_get`] or [`Store::queue_pop`]. 300 s unless set.
    fn timeout(&self) -> Duration;

    /// Sets [`Store::timeout`], for this handle.
    fn set_timeout(&self, timeout: Duration);

    /// Another handle for the same keys. Its time-out is its own, and begins as that of this handle.
    ///
    /// ```
    /// # use drumline_store as drumline;
    /// # use std::time::Duration;
    /// # use drumline::store::{HashStore, Store};
    /// let store = HashStore::new();
    /// let impatient = store.try_clone()?;
    /// impatient.set_timeout(Duration::ZERO);
    /// store.set("key", b"value")?;
    /// assert_eq!(impatient.get("key")?, b"value");
    /// assert_ne!(store.timeout(), impatient.timeout());
    /// # Ok::<(), drumline::Error>(())
    /// ```
    fn try_clone(&self) -> Result<Box<dyn Store>>;
}

/// The error of a method that stores of type `S` do not have.
fn missing<S: ?Sized, T>(operation: String) -> Result<T> {
    let name = std::any::type_name::<S>();
    Err(Error::store(
        name,
        &operation,
        "this kind of store does not have the method; `TcpStore`, `FileStore` and `HashStore` do",
    ))
}

/// Why a handle that `process` has made cannot be used here: this process is a fork.
pub(super) fn in_a_fork(process: u32) -> Option<String> {
    let own = std::process::id();
    (own != process).then(|| {
        format!(
            "the handle belongs to process {process}, of which this process ({own}) is a fork: use \
             a clone of it that is made here, or open the store after the fork"
        )
    })
}

/// The time `timeout` from now.
pub(super) fn deadline_after(timeout: Duration) -> Instant {
    const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);
    Instant::now() + timeout.min(YEAR)
}
