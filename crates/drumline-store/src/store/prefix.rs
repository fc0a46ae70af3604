use std::{sync::Arc, time::Duration};

use super::Store;
use crate::Result;

/// A part of another store: the keys that begin with `prefix/`.
///
/// So two users of one store can choose the same keys. A `PrefixStore` lists and counts only its own keys. It
/// shares the time-out of the other store: setting it here sets it there.
///
/// ```
/// # use drumline_store as drumline;
/// use std::sync::Arc;
///
/// use drumline::store::{HashStore, PrefixStore, Store};
///
/// let whole = Arc::new(HashStore::new());
/// let part = PrefixStore::new("group/0", whole.clone());
/// part.set("ready", b"yes")?;
/// assert_eq!(whole.get("group/0/ready")?, b"yes");
/// assert_eq!(part.list_keys()?, ["ready"]);
/// # Ok::<(), drumline::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct PrefixStore {
    prefix: String,
    store: Arc<dyn Store>,
}

impl PrefixStore {
    /// The part of `store` under `prefix`. This function adds the `/` after the prefix.
    pub fn new(prefix: impl Into<String>, store: Arc<dyn Store>) -> PrefixStore {
        PrefixStore { prefix: prefix.into(), store }
    }

    fn full(&self, key: &str) -> String {
        format!("{}/{key}", self.prefix)
    }

    /// Runs `call` with the full names of `keys`.
    fn with_full<T>(&self, keys: &[&str], call: impl FnOnce(&[&str]) -> T) -> T {
        let keys: Vec<_> = keys.iter().map(|key| self.full(key)).collect();
        call(&keys.iter().map(String::as_str).collect::<Vec<_>>())
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
        self.with_full(keys, |keys| self.store.wait(keys, timeout))
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        self.with_full(keys, |keys| self.store.check(keys))
    }

    fn num_keys(&self) -> Result<usize> {
        Ok(self.list_keys()?.len())
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        self.store.delete_key(&self.full(key))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.append(&self.full(key), value)
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        self.with_full(keys, |keys| self.store.multi_get(keys))
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        let keys: Vec<_> = pairs.iter().map(|(key, _)| self.full(key)).collect();
        let pairs = keys.iter().zip(pairs).map(|(key, &(_, value))| (key.as_str(), value));
        self.store.multi_set(&pairs.collect::<Vec<_>>())
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.store.queue_push(&self.full(key), value)
    }

    fn queue_pop(&self, key: &str) -> Result<Vec<u8>> {
        self.store.queue_pop(&self.full(key))
    }

    fn queue_try_pop(&self, key: &str) -> Result<Option<Vec<u8>>> {
        self.store.queue_try_pop(&self.full(key))
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        self.store.queue_len(&self.full(key))
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        let prefix = self.full("");
        let keys = self.store.list_keys()?;
        Ok(keys.iter().filter_map(|key| key.strip_prefix(&prefix)).map(str::to_owned).collect())
    }

    fn barrier(&self, key: &str, world_size: usize, timeout: Duration) -> Result<()> {
        self.store.barrier(&self.full(key), world_size, timeout)
    }

    fn timeout(&self) -> Duration {
        self.store.timeout()
    }

    fn set_timeout(&self, timeout: Duration) {
        self.store.set_timeout(timeout);
    }

    fn try_clone(&self) -> Result<Box<dyn Store>> {
        let store = Arc::from(self.store.try_clone()?);
        Ok(Box::new(PrefixStore { store, ..self.clone() }))
    }
}
