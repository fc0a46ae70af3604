//! A store that is a Python object, torch's or another with the same methods.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
    thread,
    time::{Duration, Instant},
};

use drumline::{
    Error, Result, deadline,
    store::{DEFAULT_TIMEOUT, Store},
};
use pyo3::{
    exceptions::{PyAttributeError, PyNotImplementedError, PyRuntimeError},
    prelude::*,
    types::PyBytes,
};

/// Calls the methods of a Python object. Methods that the object lacks are built from others: `check`
/// from a short `wait`, and `compare_set` from `add`, which tells one caller that it is the first to make
/// a key. (Then `compare_set` does not replace a value atomically.)
pub(crate) struct ForeignStore {
    name: String,
    object: Py<PyAny>,
    timeout: Mutex<Duration>,
}

/// torch's client of a store logs two warnings for each wait in vain. So a wait up to this long asks again and again,
/// with pauses up to [`PAUSE_MAX`].
const ASKED_MAX: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_millis(50);

/// How long `wait` gets to find a key, if the object has no `check`.
const A_MOMENT: Duration = Duration::from_millis(10);

/// Exceptions by which a Python object says that it lacks a method.
#[derive(Clone, Copy)]
enum Lacking {
    /// `NotImplementedError` and `AttributeError`.
    Named,
    /// These two, and `RuntimeError` itself (no class derived from it). torch's C++ stores raise
    /// `RuntimeError` for a method without a body, and derived classes for failures.
    OrRuntimeError,
}

impl Lacking {
    fn is(self, raised: &PyErr, py: Python<'_>) -> bool {
        raised.is_instance_of::<PyNotImplementedError>(py)
            || raised.is_instance_of::<PyAttributeError>(py)
            || matches!(self, Lacking::OrRuntimeError)
                && raised.get_type(py).is(py.get_type::<PyRuntimeError>())
    }
}

impl ForeignStore {
    pub(crate) fn new(object: &Bound<'_, PyAny>) -> PyResult<ForeignStore> {
        Ok(ForeignStore {
            name: object.get_type().name()?.to_string(),
            object: object.clone().unbind(),
            timeout: Mutex::new(DEFAULT_TIMEOUT),
        })
    }

    /// Calls the object with the lock of the interpreter.
    fn call<R>(
        &self,
        operation: &str,
        call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<R>,
    ) -> Result<R> {
        self.attempt(operation, Lacking::Named, call)?.ok_or_else(|| {
            self.error(operation, "this kind of store has no such method".to_owned())
        })
    }

    /// The same; `None` if the object lacks the method.
    fn attempt<R>(
        &self,
        operation: &str,
        lacking: Lacking,
        call: impl FnOnce(&Bound<'_, PyAny>) -> PyResult<R>,
    ) -> Result<Option<R>> {
        let called = Python::try_attach(|py| match call(self.object.bind(py)) {
            Err(raised) if lacking.is(&raised, py) => Ok(None),
            Err(raised) => Err(self.error(operation, raised.to_string())),
            Ok(value) => Ok(Some(value)),
        });
        let ended = || Err(self.error(operation, "the interpreter has ended".to_owned()));
        called.unwrap_or_else(ended)
    }

    fn error(&self, operation: &str, problem: String) -> Error {
        Error::store(&self.name, operation, problem)
    }

    fn lacks(&self, operation: &str) -> Error {
        self.error(operation, "drumline does not use it on a store of torch's".to_owned())
    }
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
        let operation = format!("compare_set {key}");
        let set = self.attempt(&operation, Lacking::OrRuntimeError, |store| {
            let py = store.py();
            let (expected, desired) = (PyBytes::new(py, expected), PyBytes::new(py, desired));
            store.call_method1("compare_set", (key, expected, desired))?.extract()
        })?;
        if let Some(value) = set {
            return Ok(value);
        }
        if self.check(&[key])? {
            let value = self.get(key)?;
            if value != expected {
                return Ok(value);
            }
        } else if !expected.is_empty() {
            return Ok(expected.to_vec());
        } else if self.add(&format!("{key}/makers"), 1)? > 1 {
            // Another caller was first, and is about to set the key.
            return self.get(key);
        }
        self.set(key, desired)?;
        Ok(desired.to_vec())
    }

    fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
        let started = Instant::now();
        if timeout <= ASKED_MAX {
            let mut pause = Duration::from_millis(1);
            while !self.check(keys)? {
                let left = timeout.saturating_sub(started.elapsed());
                if left.is_zero() {
                    return Err(self.missing(keys, started));
                }
                thread::sleep(pause.min(left));
                pause = (2 * pause).min(PAUSE_MAX);
            }
            return Ok(());
        }
        // torch takes whole milliseconds, and 0 means no limit. Python and torch can count only some thousand
        // years.
        let limit = deadline::bounded(timeout).max(Duration::from_millis(1));
        let waited = self.call(&format!("wait for {}", keys.join(", ")), |store| {
            store.call_method1("wait", (keys.to_vec(), limit)).map(drop)
        });
        match waited {
            // If the call fails at about the time limit, it counts as a time-out, because stores raise many
            // kinds of exceptions.
            Err(_) if started.elapsed() >= timeout.mul_f64(0.9) => Err(self.missing(keys, started)),
            result => result,
        }
    }

    fn check(&self, keys: &[&str]) -> Result<bool> {
        let operation = format!("check {}", keys.join(", "));
        let checked = self.attempt(&operation, Lacking::Named, |store| {
            store.call_method1("check", (keys.to_vec(),))?.extract()
        })?;
        Ok(checked.unwrap_or_else(|| {
            let waited = self.call("wait", |store| {
                store.call_method1("wait", (keys.to_vec(), A_MOMENT)).map(drop)
            });
            waited.is_ok()
        }))
    }

    fn num_keys(&self) -> Result<usize> {
        self.call("num_keys", |store| store.call_method0("num_keys")?.extract())
    }

    /// Keys that a store cannot delete stay in it: then the store serves one group of each name.
    fn delete_key(&self, key: &str) -> Result<bool> {
        let operation = format!("delete_key {key}");
        let deleted = self.attempt(&operation, Lacking::OrRuntimeError, |store| {
            store.call_method1("delete_key", (key,))?.extract()
        })?;
        Ok(deleted.unwrap_or(false))
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
            store.call_method1("barrier", (key, world_size, deadline::bounded(timeout))).map(drop)
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
        Error::missing_keys(&self.name, missing, started.elapsed())
    }
}

impl fmt::Debug for ForeignStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ForeignStore").field("name", &self.name).finish_non_exhaustive()
    }
}
