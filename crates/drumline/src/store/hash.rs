use std::{
    collections::HashMap,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use super::Store;
use crate::{Error, Result};

/// A store in this process's memory, for ranks that are threads.
#[derive(Debug)]
pub struct HashStore {
    values: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
    timeout: Mutex<Duration>,
}

impl Default for HashStore {
    fn default() -> Self {
        HashStore {
            values: Mutex::default(),
            changed: Condvar::new(),
            timeout: Mutex::new(Duration::from_secs(300)),
        }
    }
}

impl HashStore {
    /// An empty store.
    pub fn new() -> HashStore {
        HashStore::default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Vec<u8>>> {
        self.values.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_with(
        &self,
        keys: &[&str],
        timeout: Duration,
    ) -> Result<MutexGuard<'_, HashMap<String, Vec<u8>>>> {
        let deadline = Instant::now() + timeout;
        let mut values = self.lock();
        loop {
            let missing: Vec<String> = keys
                .iter()
                .filter(|key| !values.contains_key(**key))
                .map(ToString::to_string)
                .collect();
            if missing.is_empty() {
                return Ok(values);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let store = "hash".to_owned();
                return Err(Error::StoreTimeout { store, keys: missing, waited: timeout });
            }
            let woken = self.changed.wait_timeout(values, left);
            values = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Store for HashStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.lock().insert(key.to_owned(), value.to_owned());
        self.changed.notify_all();
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        let values = self.lock_with(&[key], self.timeout())?;
        Ok(values.get(key).cloned().unwrap_or_default())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let mut values = self.lock();
        let old = values.get(key).map_or(Ok("0"), |value| std::str::from_utf8(value));
        let old: i64 = old.ok().and_then(|text| text.parse().ok()).ok_or_else(|| Error::Store {
            store: "hash".to_owned(),
            operation: format!("add to {key:?}"),
            problem: "its value is not a number".to_owned(),
        })?;
        let new = old.wrapping_add(amount);
        values.insert(key.to_owned(), new.to_string().into_bytes());
        self.changed.notify_all();
        Ok(new)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let mut values = self.lock();
        match values.get(key) {
            None if !expected.is_empty() => return Ok(expected.to_owned()),
            Some(value) if value != expected => return Ok(value.clone()),
            _ => values.insert(key.to_owned(), desired.to_owned()),
        };
        self.changed.notify_all();
        Ok(desired.to_owned())
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        self.lock_with(keys, timeout).map(|_| ())
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let values = self.lock();
        Ok(keys.iter().all(|key| values.contains_key(*key)))
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.lock().remove(key).is_some())
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_timeout(&self, timeout: Duration) {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
    }
}
