//! The stores of the core, with torch's methods.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use drumline::{
    Error, site,
    store::{self, FileStore, HashStore, PrefixStore, Store as _, tcp::TcpStore},
};
use pyo3::{prelude::*, types::PyBytes};

use crate::{
    config::{duration, patience},
    error::raise,
    foreign_store::ForeignStore,
    log,
    signals::run_beside,
};

/// A key-value store.
#[pyclass(frozen, module = "drumline._core")]
pub(crate) struct Store {
    store: Arc<dyn store::Store>,
    address: Option<SocketAddr>,
}

impl Store {
    fn of(store: impl store::Store + 'static) -> Store {
        Store { store: Arc::new(store), address: None }
    }

    /// A store that the core has made.
    pub(crate) fn around(store: Arc<dyn store::Store>) -> Store {
        Store { store, address: None }
    }

    fn inner(&self) -> Arc<dyn store::Store> {
        self.store.clone()
    }

    /// Calls the store without the interpreter's lock. Ctrl-C ends the wait.
    fn wait_for<R: Send + 'static, E: Into<drumline::Error> + Send + 'static>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&dyn store::Store) -> Result<R, E> + Send + 'static,
    ) -> PyResult<R> {
        let store = self.inner();
        run_beside(py, move || call(&*store))
    }

    fn run<R: Send, E: Into<drumline::Error> + Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&dyn store::Store) -> Result<R, E> + Send,
    ) -> PyResult<R> {
        py.detach(|| call(&*self.store)).map_err(raise)
    }

    fn limit(&self, timeout: Option<f64>) -> PyResult<Duration> {
        timeout.map_or_else(|| Ok(self.store.timeout()), |seconds| patience("timeout", seconds))
    }
}

#[pymethods]
impl Store {
    #[staticmethod]
    fn hash() -> Store {
        Store::of(HashStore::new())
    }

    #[staticmethod]
    fn file(py: Python<'_>, path: std::path::PathBuf, world_size: usize) -> PyResult<Store> {
        log::open(py)?;
        FileStore::open(path, world_size).map(Store::of).map_err(raise)
    }

    #[staticmethod]
    fn prefix(prefix: String, store: &Bound<'_, PyAny>) -> PyResult<Store> {
        Ok(Store::of(PrefixStore::new(prefix, any_store(store)?)))
    }

    /// Hosts the store (`is_master`) or connects to it.
    #[staticmethod]
    #[pyo3(signature = (host, port, is_master, timeout, world_size=None, exposed=false))]
    fn tcp(
        py: Python<'_>,
        host: String,
        port: u16,
        is_master: bool,
        timeout: f64,
        world_size: Option<usize>,
        exposed: bool,
    ) -> PyResult<Store> {
        log::open(py)?;
        let timeout = duration("timeout", timeout)?;
        run_beside(py, move || {
            if is_master {
                site::reach_resolver(&host, port, timeout)?;
            }
            let store = match (is_master, exposed) {
                (true, true) => TcpStore::host_exposed(&host, port)?,
                (true, false) => TcpStore::host(&host, port)?,
                (false, true) => TcpStore::connect_trusting(&host, port, timeout)?,
                (false, false) => TcpStore::connect(&host, port, timeout)?,
            };
            store.set_timeout(timeout);
            if let Some(world_size) = world_size {
                store.wait_for_workers(world_size, timeout)?;
            }
            let address = store.address();
            Ok::<_, Error>(Store { store: Arc::new(store), address })
        })
    }

    /// Where a store over TCP listens.
    #[getter]
    fn address(&self) -> Option<(String, u16)> {
        self.address.map(|address| (address.ip().to_string(), address.port()))
    }

    fn set(&self, py: Python<'_>, key: &str, value: &[u8]) -> PyResult<()> {
        self.run(py, |store| store.set(key, value))
    }

    fn get<'py>(&self, py: Python<'py>, key: String) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, &self.wait_for(py, move |store| store.get(&key))?))
    }

    fn add(&self, py: Python<'_>, key: &str, amount: i64) -> PyResult<i64> {
        self.run(py, |store| store.add(key, amount))
    }

    fn compare_set<'py>(
        &self,
        py: Python<'py>,
        key: &str,
        expected: &[u8],
        desired: &[u8],
    ) -> PyResult<Bound<'py, PyBytes>> {
        let value = self.run(py, |store| store.compare_set(key, expected, desired))?;
        Ok(PyBytes::new(py, &value))
    }

    #[pyo3(signature = (keys, timeout=None))]
    fn wait(&self, py: Python<'_>, keys: Vec<String>, timeout: Option<f64>) -> PyResult<()> {
        let limit = self.limit(timeout)?;
        self.wait_for(py, move |store| store.wait(&names(&keys), limit))
    }

    fn check(&self, py: Python<'_>, keys: Vec<String>) -> PyResult<bool> {
        self.run(py, |store| store.check(&names(&keys)))
    }

    fn num_keys(&self, py: Python<'_>) -> PyResult<usize> {
        self.run(py, |store| store.num_keys())
    }

    fn delete_key(&self, py: Python<'_>, key: &str) -> PyResult<bool> {
        self.run(py, |store| store.delete_key(key))
    }

    fn append(&self, py: Python<'_>, key: &str, value: &[u8]) -> PyResult<()> {
        self.run(py, |store| store.append(key, value))
    }

    fn multi_get<'py>(
        &self,
        py: Python<'py>,
        keys: Vec<String>,
    ) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let values = self.wait_for(py, move |store| store.multi_get(&names(&keys)))?;
        Ok(values.iter().map(|value| PyBytes::new(py, value)).collect())
    }

    fn multi_set(&self, py: Python<'_>, keys: Vec<String>, values: Vec<Vec<u8>>) -> PyResult<()> {
        if keys.len() != values.len() {
            let problem = format!("{} keys, but {} values", keys.len(), values.len());
            return Err(pyo3::exceptions::PyValueError::new_err(problem));
        }
        let pairs: Vec<(&str, &[u8])> =
            keys.iter().zip(&values).map(|(key, value)| (key.as_str(), &value[..])).collect();
        self.run(py, |store| store.multi_set(&pairs))
    }

    fn queue_push(&self, py: Python<'_>, key: &str, value: &[u8]) -> PyResult<()> {
        self.run(py, |store| store.queue_push(key, value))
    }

    /// `None` only without `block`, when the queue is empty.
    fn queue_pop<'py>(
        &self,
        py: Python<'py>,
        key: String,
        block: bool,
    ) -> PyResult<Option<Bound<'py, PyBytes>>> {
        let item = self.wait_for(py, move |store| match block {
            true => store.queue_pop(&key).map(Some),
            false => store.queue_try_pop(&key),
        })?;
        Ok(item.map(|item| PyBytes::new(py, &item)))
    }

    fn queue_len(&self, py: Python<'_>, key: &str) -> PyResult<usize> {
        self.run(py, |store| store.queue_len(key))
    }

    fn list_keys(&self, py: Python<'_>) -> PyResult<Vec<String>> {
        self.run(py, |store| store.list_keys())
    }

    #[pyo3(signature = (key, world_size, timeout=None))]
    fn barrier(
        &self,
        py: Python<'_>,
        key: String,
        world_size: usize,
        timeout: Option<f64>,
    ) -> PyResult<()> {
        let limit = self.limit(timeout)?;
        self.wait_for(py, move |store| store.barrier(&key, world_size, limit))
    }

    /// The time limit of calls without one of their own, in seconds.
    #[getter]
    fn timeout(&self) -> f64 {
        self.store.timeout().as_secs_f64()
    }

    fn set_timeout(&self, seconds: f64) -> PyResult<()> {
        self.store.set_timeout(duration("timeout", seconds)?);
        Ok(())
    }

    fn clone(&self, py: Python<'_>) -> PyResult<Store> {
        let store = self.run(py, |store| store.try_clone())?;
        Ok(Store { store: store.into(), address: self.address })
    }
}

/// The store behind a Python object: the core's own, or any object with torch's methods.
pub(crate) fn any_store(object: &Bound<'_, PyAny>) -> PyResult<Arc<dyn store::Store>> {
    match object.cast::<Store>() {
        Ok(own) => Ok(own.get().inner()),
        Err(_) => Ok(Arc::new(ForeignStore::new(object)?)),
    }
}

fn names(keys: &[String]) -> Vec<&str> {
    keys.iter().map(String::as_str).collect()
}
