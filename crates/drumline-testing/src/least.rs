//! A store with the required methods alone, as a user would write it. The tests of groups meet in it, too.

use std::{
    collections::BTreeMap,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant},
};

use drumline_store::{
    Error, Result,
    store::{DEFAULT_TIMEOUT, Store},
};

type Values = Mutex<BTreeMap<String, Vec<u8>>>;

/// Keeps its values in this process.
#[derive(Debug)]
pub struct Least {
    shared: Arc<(Values, Condvar)>,
    timeout: Mutex<Duration>,
}

impl Default for Least {
    fn default() -> Least {
        Least { shared: Arc::default(), timeout: Mutex::new(DEFAULT_TIMEOUT) }
    }
}

impl Least {
    fn change<R>(&self, change: impl FnOnce(&mut BTreeMap<String, Vec<u8>>) -> R) -> R {
        let result = change(&mut self.shared.0.lock().unwrap());
        self.shared.1.notify_all();
        result
    }
}

impl Store for Least {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.change(|map| map.insert(key.to_owned(), value.to_vec()));
        Ok(())
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.wait(&[key], self.timeout())?;
        self.change(|map| Ok(map.get(key).cloned().unwrap_or_default()))
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        let refused = |problem: String| Error::store("least", &format!("add {key}"), problem);
        self.change(|map| {
            let before = map.get(key).map_or("0".into(), |text| String::from_utf8_lossy(text));
            let before: i64 = before.parse().map_err(|_| refused(format!("{before} there")))?;
            let sum = before.checked_add(amount).ok_or_else(|| refused("too large".to_owned()))?;
            map.insert(key.to_owned(), sum.to_string().into_bytes());
            Ok(sum)
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        self.change(|map| match map.get(key) {
            Some(value) if value != expected => Ok(value.clone()),
            None if !expected.is_empty() => Ok(expected.to_vec()),
            _ => {
                map.insert(key.to_owned(), desired.to_vec());
                Ok(desired.to_vec())
            }
        })
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let started = Instant::now();
        let mut map = self.shared.0.lock().unwrap();
        loop {
            let absent = keys.iter().filter(|key| !map.contains_key(**key));
            let keys: Vec<String> = absent.map(|key| (*key).to_owned()).collect();
            if keys.is_empty() {
                return Ok(());
            }
            let waited = started.elapsed();
            let Some(left) = timeout.checked_sub(waited).filter(|left| !left.is_zero()) else {
                return Err(Error::missing_keys("least", keys, waited));
            };
            map = self.shared.1.wait_timeout(map, left).unwrap().0;
        }
    }

    fn delete_key(&self, key: &str) -> Result<bool> {
        Ok(self.change(|map| map.remove(key).is_some()))
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock().unwrap()
    }

    fn set_timeout(&self, timeout: Duration) {
        *self.timeout.lock().unwrap() = timeout;
    }

    fn try_clone(&self) -> Result<Box<dyn Store>> {
        let timeout = Mutex::new(self.timeout());
        Ok(Box::new(Least { shared: self.shared.clone(), timeout }))
    }
}
