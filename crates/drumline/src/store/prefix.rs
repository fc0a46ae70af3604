use std::{sync::Arc, time::Duration};

use super::Store;
use crate::Result;

/// Part of another store: every key gets a prefix and a slash.
#[derive(Clone, Debug)]
pub struct PrefixStore {
    prefix: String,
    store: Arc<dyn Store>,
}

impl PrefixStore {
    /// Keys `prefix/...` of `store`.
    pub fn new(prefix: impl Into<String>, store: Arc<dyn Store>) -> PrefixStore {
        PrefixStore { prefix: prefix.into(), store }
    }

    fn key(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn keys(&self, keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| self.key(key)).collect()
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.key(key), value)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.store.get(&self.key(key))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.store.add(&self.key(key), amount)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(&self.key(key), expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let keys = self.keys(keys);
        self.store.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let keys = self.keys(keys);
        self.store.check(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.store.delete_key(&self.key(key))
    }

    fn timeout(&self) -> Duration {
        self.store.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.store.set_timeout(timeout);
    }
}
