//! Process groups: creation, properties, end.

use std::{
    mem,
    sync::{Arc, Mutex, MutexGuard},
};

use drumline::{
    GroupOptions, ProcessGroup, backend, connect_members, deadline, driving, init_process_group,
    rendezvous::init_with_store, site,
};
use pyo3::{exceptions::PyValueError, prelude::*, types::PyDict};

use crate::{
    config::{config, duration},
    log,
    signals::{self, lock},
    store::any_store,
};

/// A process group. Its collectives and messages are in `collectives.rs`; with `background=True` they
/// return a `Work` at once.
#[pyclass(frozen, weakref, module = "drumline._core")]
pub(crate) struct Group {
    group: Mutex<Option<ProcessGroup>>,
    /// The same while it is closed, so that it can be aborted.
    closing: Arc<Mutex<Option<ProcessGroup>>>,
    /// The group's name, for errors after the group has gone.
    name: String,
    /// The process that made this object.
    process: rustix::process::Pid,
}

#[pymethods]
impl Group {
    /// The group `world`. Ranks meet at `url`.
    #[staticmethod]
    #[pyo3(signature = (url, settings=None))]
    fn init(py: Python<'_>, url: String, settings: Option<&Bound<'_, PyDict>>) -> PyResult<Group> {
        log::open(py)?;
        let config = config(settings)?;
        signals::run_beside(py, move || init_process_group(&url, &config)).map(Group::new)
    }

    /// The group `world`. Ranks meet in `store`.
    #[staticmethod]
    #[pyo3(signature = (store, rank, world_size, settings=None))]
    fn init_with_store(
        store: &Bound<'_, PyAny>,
        rank: usize,
        world_size: usize,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Group> {
        log::open(store.py())?;
        let (py, config, store) = (store.py(), config(settings)?, any_store(store)?);
        signals::run_beside(py, move || init_with_store(store, rank, world_size, &config))
            .map(Group::new)
    }

    /// A group of one rank.
    #[staticmethod]
    fn alone() -> Group {
        Group::new(ProcessGroup::alone())
    }

    /// Connects the members of a group whose job another library has started. `ranks` are their numbers in
    /// the job.
    #[staticmethod]
    #[pyo3(signature = (name, store, rank, ranks, master=None, settings=None))]
    fn connect(
        name: String,
        store: &Bound<'_, PyAny>,
        rank: usize,
        ranks: Vec<usize>,
        master: Option<(String, u16)>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Group> {
        log::open(store.py())?;
        let (py, config, store) = (store.py(), config(settings)?, any_store(store)?);
        signals::run_beside(py, move || {
            let until = deadline::after(std::time::Instant::now(), config.timeout);
            let master = master.and_then(|(host, port)| {
                site::resolve(&host, port, until).ok()?.into_iter().next()
            });
            connect_members(&name, store, rank, &ranks, master, &config)
        })
        .map(Group::new)
    }

    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    #[getter]
    fn rank(&self) -> PyResult<usize> {
        Ok(self.get()?.rank())
    }

    #[getter]
    fn world_size(&self) -> PyResult<usize> {
        Ok(self.get()?.world_size())
    }

    /// The members' numbers in the whole job.
    #[getter]
    fn ranks(&self) -> PyResult<Vec<usize>> {
        Ok(self.get()?.ranks())
    }

    /// The time limit of calls, in seconds.
    #[getter]
    fn timeout(&self) -> PyResult<f64> {
        Ok(self.get()?.config().timeout.as_secs_f64())
    }

    /// The most bytes that an object may take.
    #[getter]
    fn object_bytes_max(&self) -> PyResult<usize> {
        Ok(self.get()?.config().object_bytes_max)
    }

    /// What carries its calls.
    #[getter]
    fn backend(&self) -> PyResult<String> {
        let name = self.get()?.config().backend.as_deref().map(|it| it.trim().to_lowercase());
        let is_foreign = |name: &String| name != "auto";
        Ok(name.filter(is_foreign).unwrap_or_else(|| backend::BUILT_IN.to_owned()))
    }

    /// How much training logs.
    #[getter]
    fn debug(&self) -> PyResult<&'static str> {
        Ok(self.get()?.config().debug.name())
    }

    #[getter]
    fn is_destroyed(&self) -> bool {
        self.lock().is_none()
    }

    /// Sets the time limit of later calls, in seconds.
    fn set_timeout(&self, seconds: f64) -> PyResult<()> {
        let group = self.get()?.within(duration("timeout", seconds)?);
        *self.lock() = Some(group);
        Ok(())
    }

    /// A handle of the group whose calls have another time limit, in seconds.
    fn within(&self, seconds: f64) -> PyResult<Group> {
        Ok(Group::new(self.get()?.within(duration("timeout", seconds)?)))
    }

    /// Seconds spent in calls.
    fn communication_time(&self) -> PyResult<f64> {
        Ok(drumline::metrics::communication_time(&self.get()?).as_secs_f64())
    }

    /// What calls have taken, in the text format of Prometheus. Groups that are destroyed, or of the process
    /// that forked this one, are left out.
    #[staticmethod]
    fn metrics_text(py: Python<'_>, groups: Vec<PyRef<'_, Group>>) -> String {
        let groups: Vec<_> = groups.iter().filter_map(|group| group.get().ok()).collect();
        py.detach(|| drumline::metrics::text(&groups))
    }

    /// A group of some of the members. Only those call this.
    #[pyo3(signature = (ranks, name=None, timeout=None, keep_order=false))]
    fn new_group(
        &self,
        py: Python<'_>,
        ranks: Vec<usize>,
        name: Option<String>,
        timeout: Option<f64>,
        keep_order: bool,
    ) -> PyResult<Group> {
        let (group, mut options) = (self.get()?, GroupOptions::default());
        options.name = name;
        options.timeout = timeout.map(|limit| duration("timeout", limit)).transpose()?;
        options.keep_order = keep_order;
        signals::run_beside(py, move || group.new_group(&ranks, &options)).map(Group::new)
    }

    /// Aborts the group, on all ranks.
    fn abort(&self, py: Python<'_>) {
        let closing = lock(&self.closing).clone();
        if let Some(group) = self.get().ok().or(closing) {
            py.detach(|| group.abort());
        }
    }

    /// Closes the group together with all other ranks.
    fn destroy(&self, py: Python<'_>) -> PyResult<()> {
        self.close(py, ProcessGroup::destroy)
    }

    /// Closes the group, after waiting for the other ranks at most `patience` seconds.
    fn leave(&self, py: Python<'_>, patience: f64) -> PyResult<()> {
        let patience = duration("patience", patience)?;
        self.close(py, move |group| group.leave(patience))
    }

    /// Why this rank of the group takes no part any more, or why the group fails at its next call. A hint.
    fn gone(&self, py: Python<'_>, rank: usize) -> PyResult<Option<String>> {
        let group = self.get()?;
        Ok(py.detach(|| driving::hear(&group, Some(rank))).map(|cause| cause.to_string()))
    }

    /// Leaves the group without waiting for other ranks.
    pub(crate) fn drop(&self, py: Python<'_>) -> PyResult<()> {
        let group = self.take()?;
        py.detach(|| drop(group));
        Ok(())
    }

    /// At the end of the process: closes nothing, so that the peers see this process die. To finalise MPI would wait
    /// for peers that wait for this rank.
    fn forget(&self) {
        if let Some(mpi) = drumline_mpi::Mpi::loaded() {
            mpi.forgo_finalize();
        }
        if let Some(group) = self.lock().take() {
            mem::forget(group);
        }
    }

    fn __repr__(&self) -> String {
        match self.get() {
            Ok(group) => format!(
                "<drumline group {:?}, rank {} of {}>",
                self.name,
                group.rank(),
                group.world_size()
            ),
            Err(_) => format!("<drumline group {:?}, destroyed>", self.name),
        }
    }
}

impl Group {
    pub(crate) fn new(group: ProcessGroup) -> Group {
        let (name, process) = (group.name().to_owned(), rustix::process::getpid());
        Group { group: Mutex::new(Some(group)), closing: Arc::default(), name, process }
    }

    pub(crate) fn is_named(&self, name: &str) -> bool {
        self.name == name
    }

    fn lock(&self) -> MutexGuard<'_, Option<ProcessGroup>> {
        lock(&self.group)
    }

    fn close(
        &self,
        py: Python<'_>,
        close: impl FnOnce(ProcessGroup) -> drumline::Result<()> + Send + 'static,
    ) -> PyResult<()> {
        let Some(group) = self.take()? else { return Ok(()) };
        *lock(&self.closing) = Some(group.clone());
        let closing = self.closing.clone();
        signals::run_beside(py, move || {
            let closed = close(group);
            let closing = lock(&closing).take();
            drop(closing);
            closed
        })
    }

    pub(crate) fn get(&self) -> PyResult<ProcessGroup> {
        self.check_process()?;
        self.lock().clone().ok_or_else(|| {
            PyValueError::new_err(format!("group {:?} has been destroyed", self.name))
        })
    }

    fn take(&self) -> PyResult<Option<ProcessGroup>> {
        self.check_process()?;
        Ok(self.lock().take())
    }

    /// Fails in a fork, which shares the connections of its parent. Peers must not hear both.
    fn check_process(&self) -> PyResult<()> {
        let process = rustix::process::getpid();
        if process == self.process {
            return Ok(());
        }
        Err(PyValueError::new_err(format!(
            "group {:?} belongs to process {}, of which this process ({process}) is a fork: make a \
             group after the fork, or start processes by `spawn`",
            self.name, self.process
        )))
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let group = self.lock().take();
        match rustix::process::getpid() == self.process {
            true => drop(group),
            // The parent still uses the connections: a fork must not say goodbye on them.
            false => mem::forget((group, lock(&self.closing).take())),
        }
    }
}
