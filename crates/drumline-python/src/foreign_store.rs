//! A store that is a Python object, torch's or another with the same methods.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use drumline::{
    Error, Result,
    store::{DEFAULT_TIMEOUT, Store},
};
use pyo3::{
    exceptions::{PyAttributeError, PyNotImplementedError},
    prelude::*,
    types::PyBytes,
};

use crate::store;

/// The store behind a Python object.
pub(crate) fn any_store(object: &Bound<'_, PyAny>) -> PyResult<Arc<dyn Store>> {
    if let Ok(own) = object.cast::<store::Store>() {
        return Ok(own.get().inner());
    }
    Ok(Arc::new(ForeignStore {
        name: object.get_type().name()?.to_string(),
        object: object.clone().unbind(),
        timeout: Mutex::new(DEFAULT_TIMEOUT),
    }))
}

/// Calls the methods of a Python object. What it lacks is made of what it has: `check` of a short
/// `wait`, and `compare_set` of `add`, which says who is the first to make a key. (To replace a value
/// is not atomic then.)
struct ForeignStore {
    name: String,
    object: Py<PyAny>,
    timeout: Mutex<Duration>,
}

/// How long a store is asked for a key that may not be there, if it has no other way to tell.
const A_MOMENT: Duration = Duration::from_millis(10);

impl ForeignStore {
    /// Calls the object with the lock of the interpreter.
    fn call<R>(
        &self,
        operation: &str,
        call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<R>,
    ) -> Result<R> {
        self.attempt(operation, call).unwrap_or_else(|| {
            Err(self.error(operation, "this kind of store has no such method".to_owned()))
        })
    }

    /// The same; `None` if the object lacks the method.
    fn attempt<R>(
        &self,
        operation: &str,
        call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<R>,
    ) -> Option<Result<R>> {
        let result = Python::try_attach(|py| {
            call(self.object.bind(py)).map_err(|raised| match is_lacking(py, &raised) {
                true => None,
                false => Some(self.error(operation, raised.to_string())),
            })
        });
        match result {
            None => Some(Err(self.error(operation, "the interpreter has ended".to_owned()))),
            Some(Ok(value)) => Some(Ok(value)),
            Some(Err(Some(error))) => Some(Err(error)),
            Some(Err(None)) => None,
        }
    }

    fn error(&self, operation: &str, problem: String) -> Error {
        Error::Store { store: self.name.clone(), operation: operation.to_owned(), problem }
    }

    fn lacks(&self, operation: &str) -> Error {
        self.error(operation, "drumline makes no use of it in a store of torch's".to_owned())
    }
}

fn is_lacking(py: Python<'_>, raised: &PyErr) -> bool {
    raised.is_instance_of::<PyNotImplementedError>(py)
        || raised.is_instance_of::<PyAttributeError>(py)
        || raised.to_string().to_lowercase().contains("not implemented")
        || raised.to_string().to_lowercase().contains("not supported")
}

impl Store for ForeignStore {
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(&format!("set {key}"), |store| {
            store.call_method1("set", (key, PyBytes::new(store.py(), value))).map(drop)
        })
    }

    fn get(&self, key: &str) -> Result<Vec<u8>> {
        self.call(&format!("get {key}"), |store| store.call_method1("get", (key,))?.extract())
    }

    fn add(&self, key: &str, amount: i64) -> Result<i64> {
        self.call(&format!("add {key}"), |store| {
            store.call_method1("add", (key, amount))?.extract()
        })
    }

    fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
        let set = self.attempt(&format!("compare_set {key}"), |store| {
            let py = store.py();
            let (expected, desired) = (PyBytes::new(py, expected), PyBytes::new(py, desired));
            store.call_method1("compare_set", (key, expected, desired))?.extract()
        });
        if let Some(result) = set {
            return result;
        }
        if self.check(&[key])? {
            let value = self.get(key)?;
            if value != expected {
                return Ok(value);
            }
        } else if !expected.is_empty() {
            return Ok(expected.to_vec());
        } else if self.add(&format!("{key}/makers"), 1)? > 1 {
            // Somebody else is about to make it.
            return self.get(key);
        }
        self.set(key, desired)?;
        Ok(desired.to_vec())
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let started = Instant::now();
        if timeout.is_zero() {
            return match self.check(keys)? {
                true => Ok(()),
                false => Err(self.missing(keys, started)),
            };
        }
        // torch takes whole milliseconds, and nothing of them for without end.
        let limit = timeout.max(Duration::from_millis(1));
        let waited = self.call(&format!("wait for {}", keys.join(", ")), |store| {
            store.call_method1("wait", (keys.to_vec(), limit)).map(drop)
        });
        match waited {
            // Whatever torch's store says then.
            Err(_) if started.elapsed() >= timeout.mul_f64(0.9) => Err(self.missing(keys, started)),
            result => result,
        }
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let checked = self.attempt(&format!("check {}", keys.join(", ")), |store| {
            store.call_method1("check", (keys.to_vec(),))?.extract()
        });
        checked.unwrap_or_else(|| {
            match self.call("wait", |store| {
                store.call_method1("wait", (keys.to_vec(), A_MOMENT)).map(drop)
            }) {
                Ok(()) => Ok(true),
                Err(_) => Ok(false),
            }
        })
    }

    fn num_keys(&self) -> Result<usize> {
        self.call("num_keys", |store| store.call_method0("num_keys")?.extract())
    }

    /// Keys that a store cannot delete stay in it: then it serves one group of each name.
    fn delete_key(&self, key: &str) -> Result<bool> {
        let deleted = self.attempt(&format!("delete_key {key}"), |store| {
            store.call_method1("delete_key", (key,))?.extract()
        });
        deleted.unwrap_or(Ok(false))
    }

    fn append(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(&format!("append {key}"), |store| {
            store.call_method1("append", (key, PyBytes::new(store.py(), value))).map(drop)
        })
    }

    fn multi_get(&self, keys: &[&str]) -> Result<Vec<Vec<u8>>> {
        keys.iter().map(|key| self.get(key)).collect()
    }

    fn multi_set(&self, pairs: &[(&str, &[u8])]) -> Result<()> {
        pairs.iter().try_for_each(|(key, value)| self.set(key, value))
    }

    fn queue_push(&self, key: &str, value: &[u8]) -> Result<()> {
        self.call(&format!("queue_push {key}"), |store| {
            store.call_method1("queue_push", (key, PyBytes::new(store.py(), value))).map(drop)
        })
    }

    fn queue_pop(&self, key: &str) -> Result<Vec<u8>> {
        self.call(&format!("queue_pop {key}"), |store| {
            store.call_method1("queue_pop", (key,))?.extract()
        })
    }

    fn queue_try_pop(&self, _key: &str) -> Result<Option<Vec<u8>>> {
        Err(self.lacks("queue_try_pop"))
    }

    fn queue_len(&self, key: &str) -> Result<usize> {
        self.call(&format!("queue_len {key}"), |store| {
            store.call_method1("queue_len", (key,))?.extract()
        })
    }

    fn list_keys(&self) -> Result<Vec<String>> {
        self.call("list_keys", |store| store.call_method0("list_keys")?.extract())
    }

    fn barrier(&self, key: &str, world_size: usize, timeout: Duration) -> Result<()> {
        self.call(&format!("barrier {key}"), |store| {
            store.call_method1("barrier", (key, world_size, timeout)).map(drop)
        })
    }

    fn timeout(&self) -> Duration {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set_timeout(&self, timeout: Duration) {
        *self.timeout.lock().unwrap_or_else(PoisonError::into_inner) = timeout;
    }

    fn try_clone(&self) -> Result<Box<dyn Store>> {
        let object = Python::try_attach(|py| self.object.clone_ref(py))
            .ok_or_else(|| self.error("clone", "the interpreter has ended".to_owned()))?;
        Ok(Box::new(ForeignStore {
            name: self.name.clone(),
            object,
            timeout: Mutex::new(self.timeout()),
        }))
    }
}

impl ForeignStore {
    fn missing(&self, keys: &[&str], started: Instant) -> Error {
        let is_missing = |key: &&&str| !matches!(self.check(&[key]), Ok(true));
        let missing = keys.iter().filter(is_missing).map(ToString::to_string).collect();
        Error::StoreTimeout { store: self.name.clone(), keys: missing, waited: started.elapsed() }
    }
}

impl fmt::Debug for ForeignStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignStore").field("name", &self.name).finish_non_exhaustive()
    }
}
