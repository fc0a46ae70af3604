//! The Python module `drumline._core`: process groups, stores and the launcher, for the package
//! around it (`python/drumline`), which has the public API.
//!
//! A tensor comes as its address, its length, its type and an object that keeps it alive
//! ([`memory`]); the package sees to it that its elements lie side by side. Whatever may take long
//! runs without the interpreter's lock.

mod async_reduce;
mod call;
mod config;
mod ddp;
mod error;
mod foreign_store;
mod group;
mod launch;
mod memory;
mod operations;
mod registered;
mod sampler;
mod signals;
mod store;
mod tellers;
mod work;

use pyo3::prelude::*;

/// What the package `drumline` is made of. Use that instead.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::{
        async_reduce::AsyncReduce,
        ddp::{broadcast, verify_model},
        error::{
            CollectiveError, CollectiveMismatchError, CollectiveTimeoutError, ConnectError,
            DrumlineError, NotBroughtError, StoreError, StoreTimeoutError,
        },
        group::Group,
        launch::main,
        memory::supports,
        registered::Registered,
        sampler::Sampler,
        store::Store,
        tellers::wait_for_callbacks,
        work::Work,
    };

    use pyo3::prelude::*;

    #[pymodule_init]
    fn init(module: &Bound<'_, PyModule>) -> PyResult<()> {
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        module.add("DTYPES", super::memory::names())
    }
}
