use std::{sync::Arc, time::Duration};

use super::Store;
use crate::Result;

/// A part of another store, under keys that begin with `prefix/`.
///
/// It lets two users of one store choose the same keys. The time-out is the other store's: setting
/// it here sets it there.
///
/// ```
/// use std::sync::Arc;
///
/// use drumline::store::{HashStore, PrefixStore, Store};
///
/// let whole = Arc::new(HashStore::new());
/// let part = PrefixStore::new("group/0", whole.clone());
/// part.set("ready", b"yes")?;
/// assert_eq!(whole.get("group/0/ready")?, b"yes");
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PrefixStore {
    prefix: String,
    store: Arc<dyn Store>,
}

impl PrefixStore {
    /// The part of `store` under `prefix`. The `/` behind it is added here.
    pub fn new(prefix: impl Into<String>, store: Arc<dyn Store>) -> PrefixStore {
        PrefixStore { prefix: prefix.into(), store }
    }

    fn full(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    fn full_keys(&self, keys: &[&str]) -> Vec<String> {
        keys.iter().map(|key| self.full(key)).collect()
    }
}

impl Store for PrefixStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.set(&self.full(key), value)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.store.get(&self.full(key))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.store.add(&self.full(key), amount)
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.store.compare_set(&self.full(key), expected, desired)
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let keys = self.full_keys(keys);
        self.store.wait(&keys.iter().map(String::as_str).collect::<Vec<_>>(), timeout)
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let keys = self.full_keys(keys);
        self.store.check(&keys.iter().map(String::as_str).collect::<Vec<_>>())
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.store.delete_key(&self.full(key))
    }

    fn timeout(&self) -> Duration {
        self.store.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.store.set_timeout(timeout);
    }
}
