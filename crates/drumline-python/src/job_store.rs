//! The store of ranks that this process starts.

use std::str;

use drumline::{
    Config,
    auth::Secret,
    rendezvous::Endpoint,
    store::tcp::{Door, TcpStoreServer},
};
use pyo3::prelude::*;

use crate::error::raise;

/// A store for the ranks of a job, on an abstract Unix socket, behind the job's secret.
#[pyclass(frozen, module = "drumline._core")]
pub(crate) struct JobStore {
    /// The server, which runs until it is dropped.
    _server: TcpStoreServer,
    endpoint: Endpoint,
    /// The secret; `None` if the ranks inherit the user's own.
    fresh: Option<Secret>,
}

#[pymethods]
impl JobStore {
    /// Hosts the store at `name`, with the secret of the environment or a fresh one.
    #[new]
    fn serve(name: String) -> PyResult<JobStore> {
        let config = Config::from_env().map_err(raise)?;
        let known =
            if has_secret_of_outer_job() { None } else { Secret::from_env().map_err(raise)? };
        let (secret, fresh) = match known {
            Some(secret) => (secret, None),
            None => {
                let secret = Secret::random().map_err(raise)?;
                (secret.clone(), Some(secret))
            }
        };
        let endpoint = Endpoint::Unix(name);
        let door = Door::Secured { endpoint: endpoint.clone(), secret, level: config.security };
        let _server = TcpStoreServer::open(&[door], config.store_bytes_max).map_err(raise)?;
        Ok(JobStore { _server, endpoint, fresh })
    }

    /// The value of `DRUMLINE_STORE` for a rank.
    #[getter]
    fn endpoint(&self) -> String {
        self.endpoint.to_string()
    }

    /// The secret, unless the ranks inherit one.
    #[getter]
    fn secret(&self) -> Option<&str> {
        str::from_utf8(self.fresh.as_ref()?.expose()).ok()
    }
}

/// Whether this process is a rank of `drumline run`, whose secret is in a descriptor. A process of
/// `multiprocessing` does not inherit descriptors, and another job has another secret.
fn has_secret_of_outer_job() -> bool {
    std::env::var("DRUMLINE_SECRET_FILE").is_ok_and(|path| path.starts_with("/proc/self/fd/"))
}
