use std::{
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::{
    BYTES_MAX, Store,
    limits::{check_value, raw_key, raw_keys, raw_pairs, shown},
    timeout::Timeout,
    values::{Misfit, Values},
};
use crate::{Error, Result};

/// A store inside one process, for ranks that are threads of it.
///
/// ```
/// # use drumline_store as drumline;
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
    shared: Arc<Shared>,
    timeout: Timeout,
}

#[derive(Debug)]
struct Shared {
    values: Mutex<Values>,
    changed: Condvar,
}

const NAME: &str = "hash";

impl HashStore {
    /// An empty store with room for [`BYTES_MAX`] bytes.
    pub fn new() -> HashStore {
        HashStore::with_limit(BYTES_MAX)
    }

    /// An empty store with room for `bytes_max` bytes.
    pub fn with_limit(bytes_max: usize) -> HashStore {
        let values = Mutex::new(Values::new(bytes_max));
        let shared = Arc::new(Shared { values, changed: Condvar::new() });
        HashStore { shared, timeout: Timeout::default() }
    }

    fn values(&self) -> MutexGuard<'_, Values> {
        self.shared.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the map and wakes all waiting callers.
    fn change<T>(
        &self,
        operation: impl FnOnce() -> String,
        change: impl FnOnce(&mut Values) -> Result<T, Misfit>,
    ) -> Result<T> {
        let result = change(&mut self.values());
        self.shared.changed.notify_all();
        result.map_err(|misfit| Error::store(NAME, &operation(), misfit))
    }

    /// Waits until `is_there` holds for all `keys`. Returns the map, locked in that state.
    fn wait_for(
        &self,
        keys: &[String],
        timeout: Duration,
        is_there: impl Fn(&Values, &[u8]) -> bool,
    ) -> Result<MutexGuard<'_, Values>> {
        let start = Instant::now();
        let is_missing =
            |values: &mut Values| keys.iter().any(|key| !is_there(values, key.as_bytes()));
        let (values, result) = self
            .shared
            .changed
            .wait_timeout_while(self.values(), timeout, is_missing)
            .unwrap_or_else(PoisonError::into_inner);
        if !result.timed_out() {
            return Ok(values);
        }
        let missing = keys.iter().filter(|key| !is_there(&values, key.as_bytes()));
        Err(Error::missing_keys(
            NAME,
            missing.map(|key| shown(key.as_bytes())).collect(),
            start.elapsed(),
        ))
    }
}

fn has_value(values: &Values, key: &[u8]) -> bool {
    values.get(key).is_some()
}

fn has_item(values: &Values, key: &[u8]) -> bool {
    values.first(key).is_some()
}

impl Default for HashStore {
    fn default() -> HashStore {
        HashStore::new()
    }
}

impl Store for HashStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.multi_set(&[(key, value)])
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let raw = raw_key("get", key)?;
        let values = self.wait_for(std::slice::from_ref(&raw), self.timeout(), has_value)?;
        Ok(values.get(raw.as_bytes()).unwrap_or_default().to_vec())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let raw = raw_key("add", key)?;
        self.change(
            || format!("add {amount} to {key}"),
            |values| values.add(raw.as_bytes(), amount),
        )
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let raw = raw_key("compare_set", key)?;
        check_value("compare_set", desired)?;
        self.change(
            || format!("compare_set {key}"),
            |values| values.compare_set(raw.as_bytes(), expected, desired),
        )
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.wait_for(&raw_keys("wait", keys)?, timeout, Values::is_present).map(drop)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let keys = raw_keys("check", keys)?;
        let values = self.values();
        Ok(keys.iter().all(|key| values.is_present(key.as_bytes())))
    }

    fn num_keys(&self) -> Result<usize> {
        Ok(self.values().len())
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        let raw = raw_key("delete_key", key)?;
        Ok(self.values().delete(raw.as_bytes()))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        let raw = raw_key("append", key)?;
        self.change(|| format!("append to {key}"), |values| values.append(raw.as_bytes(), value))
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        let keys = raw_keys("multi_get", keys)?;
        let values = self.wait_for(&keys, self.timeout(), has_value)?;
        let value = |key: &String| values.get(key.as_bytes()).unwrap_or_default().to_vec();
        Ok(keys.iter().map(value).collect())
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let pairs = raw_pairs("set", pairs)?;
        let operation = || {
            pairs
                .first()
                .map_or_else(String::new, |(key, _)| format!("set {}", shown(key.as_bytes())))
        };
        self.change(operation, |values| {
            pairs.iter().try_for_each(|(key, value)| values.set(key.as_bytes(), value))
        })
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        let raw = raw_key("queue_push", key)?;
        check_value("queue_push", value)?;
        self.change(|| format!("queue_push {key}"), |values| values.push(raw.as_bytes(), value))
    }

    fn queue_pop(&self, key: &str) -> Result<Vec<u8>> {
        let raw = raw_key("queue_pop", key)?;
        let mut values = self.wait_for(std::slice::from_ref(&raw), self.timeout(), has_item)?;
        Ok(values.pop(raw.as_bytes()).unwrap_or_default())
    }

    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        Ok(self.values().pop(raw_key("queue_try_pop", key)?.as_bytes()))
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        Ok(self.values().queue_len(raw_key("queue_len", key)?.as_bytes()))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        Ok(self.values().keys().map(shown).collect())
    }

    fn timeout(&self) -> Duration {
        self.timeout.get()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.timeout.set(timeout);
    }

    fn try_clone(&self) -> Result<Box<dyn Store>> {
        let shared = Arc::clone(&self.shared);
        Ok(Box::new(HashStore { shared, timeout: self.timeout.clone() }))
    }
}
