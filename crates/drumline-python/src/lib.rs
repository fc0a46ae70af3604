//! The Python module `drumline._core`: process groups, stores and the launcher, for the package
//! around it (`python/drumline`), which has the public API.
//!
//! The package passes a tensor as its address, its length, its type and an object that keeps it alive
//! ([`memory`]). The package makes sure that the elements are contiguous. Calls that may take long run
//! without the interpreter's lock.

#![allow(
    clippy::result_large_err,
    reason = "the buffer, which is large, comes back with the error of a call that cannot begin"
)]

mod async_reduce;
mod backend;
mod call;
mod callbacks;
mod collectives;
mod config;
mod ddp;
mod device;
mod device_async_reduce;
mod elastic;
mod error;
mod files;
mod foreign_store;
mod group;
mod job_store;
mod launch;
mod lists;
mod log;
mod memory;
mod mpi;
mod parent;
mod registered;
mod sampler;
mod signals;
mod store;
mod work;

use pyo3::prelude::*;

/// The core of the package `drumline`. Programs use the package.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::{
        async_reduce::AsyncReduce,
        backend::{BackendCall, register_backend},
        callbacks::wait_for_callbacks,
        ddp::{Dealt, broadcast, deal, digests, verify_model},
        device::{DeviceGroup, DeviceMessages, DeviceWork},
        device_async_reduce::DeviceAsyncReduce,
        elastic::ElasticGroup,
        error::{
            CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, ConnectError,
            DrumlineError, NotBroughtError, PoisonedError, StoreError, StoreTimeoutError,
        },
        files::{read_file, write_file},
        group::Group,
        job_store::JobStore,
        launch::{main, refusal, step},
        log::close_log,
        memory::supports,
        mpi::{is_mpi_available, meet},
        parent::{culprit, end_with_parent},
        registered::Registered,
        sampler::Sampler,
        store::Store,
        work::Work,
    };

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("DTYPES", super::memory::names())?;
        super::mpi::look_beside_python(module.py())?;
        // The attributes of an exception that has none of its own.
        module.getattr("CollectiveError")?.setattr("cause", module.py().None())?;
        module.getattr("DrumlineError")?.setattr("culprit", module.py().None())
    }
}
