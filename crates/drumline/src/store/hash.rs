use std::{
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{DEFAULT_TIMEOUT, Store, values::Values};
use crate::{Error, Result};

/// A store inside one process, for ranks that are threads.
///
/// ```
/// use drumline::store::{HashStore, Store};
///
/// let store = HashStore::new();
/// std::thread::scope(|scope| {
///     scope.spawn(|| store.set("address/1", b"10.0.0.2:4000"));
///     assert_eq!(store.get("address/1")?, b"10.0.0.2:4000");
///     Ok::<(), drumline::Error>(())
/// })?;
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Debug)]
pub struct HashStore {
    values: Mutex<Values>,
    changed: Condvar,
    timeout: Mutex<Duration>,
}

impl HashStore {
    /// An empty store.
    pub fn new() -> HashStore {
        HashStore {
            values: Mutex::default(),
            changed: Condvar::new(),
            timeout: Mutex::new(DEFAULT_TIMEOUT),
        }
    }

    fn values(&self) -> MutexGuard<'_, Values> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until all `keys` exist and returns the map in that very state.
    fn wait_for(&self, keys: &[&str], timeout: Duration) -> Result<MutexGuard<'_, Values>> {
        let start = Instant::now();
        let is_missing =
            |values: &mut Values| keys.iter().any(|key| !values.contains(key.as_bytes()));
        let (values, result) = self
            .changed
            .wait_timeout_while(self.values(), timeout, is_missing)
            .unwrap_or_else(PoisonError::into_inner);
        if !result.timed_out() {
            return Ok(values);
        }
        let missing = keys.iter().filter(|key| !values.contains(key.as_bytes()));
        Err(Error::StoreTimeout {
            store: NAME.into(),
            keys: missing.map(|key| key.to_string()).collect(),
            waited: start.elapsed(),
        })
    }
}

const NAME: &str = "hash";

impl Default for HashStore {
    fn default() -> HashStore {
        HashStore::new()
    }
}

impl Store for HashStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.values().set(key.as_bytes(), value);
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let values = self.wait_for(&[key], self.timeout())?;
        Ok(values.get(key.as_bytes()).unwrap_or_default().to_vec())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let sum = self.values().add(key.as_bytes(), amount).map_err(|error| Error::Store {
            store: NAME.into(),
            operation: format!("add {amount} to {key}"),
            problem: error.to_string(),
        })?;
        self.changed.notify_all();
        Ok(sum)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let value = self.values().compare_set(key.as_bytes(), expected, desired);
        self.changed.notify_all();
        Ok(value)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.wait_for(keys, timeout).map(drop)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let values = self.values();
        Ok(keys.iter().all(|key| values.contains(key.as_bytes())))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.values().delete(key.as_bytes()))
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_timeout(&self, timeout: Duration) {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
    }
}
