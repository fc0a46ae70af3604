//! Backends that are Python objects.

use std::{fmt, sync::Arc, time::Instant};

use drumline::{
    Cause, CollectiveError, Error,
    backend::{Backend, BackendOptions, Request},
};
use pyo3::{prelude::*, types::PyBytes};

use crate::{error::raise, signals, store::Store};

/// Makes `name` a backend. On every rank of every group on it, `make(store, rank, world_size, seconds)`
/// returns an object with a method `collective(call)`; the methods `abort()` and `shutdown()` are optional.
#[pyfunction]
pub(crate) fn register_backend(name: &str, make: Py<PyAny>) -> PyResult<()> {
    drumline::backend::register_backend(name, move |options| made_by(&make, options)).map_err(raise)
}

fn made_by(make: &Py<PyAny>, options: &BackendOptions) -> Result<Arc<dyn Backend>, Error> {
    let store = Store::around(options.store.clone());
    let arguments = (store, options.rank, options.world_size, left_until(options.deadline));
    let object = with_python(|py| make.call1(py, arguments));
    object.map(of_python).map_err(|problem| options.error(problem))
}

fn of_python(object: Py<PyAny>) -> Arc<dyn Backend> {
    Arc::new(OfPython(object))
}

struct OfPython(Py<PyAny>);

/// A call, as the backend object gets it.
#[pyclass(frozen, get_all, module = "drumline._core")]
pub(crate) struct BackendCall {
    /// `all_reduce`, `broadcast` and so on.
    name: &'static str,
    /// The name of the element type in the core: `f32`.
    dtype: &'static str,
    /// The operator, if the call reduces.
    op: Option<&'static str>,
    root: Option<usize>,
    rank: usize,
    world_size: usize,
    /// The number of the call in its group.
    sequence: u64,
    /// The time that is left for the call, in seconds.
    timeout: f64,
    /// The part of the call on which all ranks must agree, to compare with that of other ranks.
    signature: Py<PyBytes>,
    /// The bytes that this rank contributes.
    input: Py<PyBytes>,
    /// The length of the result on this rank, in bytes.
    output_bytes: usize,
}

impl Backend for OfPython {
    fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause> {
        let call = request.call;
        let result = with_python(|py| {
            let asked = BackendCall {
                name: call.collective().name(),
                dtype: call.dtype().name(),
                op: call.operator(),
                root: call.root(),
                rank: call.rank(),
                world_size: call.world_size(),
                sequence: call.sequence(),
                timeout: left_until(call.deadline()),
                signature: PyBytes::new(py, &call.signature().to_bytes()).unbind(),
                input: PyBytes::new(py, request.contribution()).unbind(),
                output_bytes: request.data.len(),
            };
            let result = self.0.bind(py).call_method1("collective", (asked,))?;
            if result.is_none() {
                return Ok(Brought::Nothing);
            }
            match result.extract::<Vec<Vec<u8>>>() {
                Ok(all) if !result.is_instance_of::<PyBytes>() => Ok(Brought::OfAllRanks(all)),
                _ => result.extract().map(Brought::Result),
            }
        });
        let failed = |problem| Cause::Backend { problem };
        match result.map_err(failed)? {
            Brought::Nothing => Ok(()),
            Brought::Result(bytes) if bytes.len() == request.data.len() => {
                request.data.copy_from_slice(&bytes);
                Ok(())
            }
            Brought::Result(bytes) => Err(failed(format!(
                "its result has {} bytes in place of {}",
                bytes.len(),
                request.data.len()
            ))),
            Brought::OfAllRanks(all) => {
                let all: Vec<&[u8]> = all.iter().map(Vec::as_slice).collect();
                if call.operator().is_none() || all.iter().any(|it| it.len() != request.data.len())
                {
                    let problem = format!("it has no result of {} bytes", request.data.len());
                    return Err(failed(problem));
                }
                call.reduce(&all, request.data)
            }
        }
    }

    fn abort(&self, _: &CollectiveError) {
        self.tell("abort");
    }

    fn shutdown(&self, _: Instant) -> Result<(), Cause> {
        self.tell("shutdown");
        Ok(())
    }
}

/// The value that the object has returned.
enum Brought {
    /// `None`: the buffer does not change.
    Nothing,
    Result(Vec<u8>),
    /// The contributions of all ranks, which the core then reduces in its order.
    OfAllRanks(Vec<Vec<u8>>),
}

impl OfPython {
    /// Calls an optional method of the object. Prints what the method raises.
    fn tell(&self, method: &str) {
        let told = Python::try_attach(|py| {
            let object = self.0.bind(py);
            if let Err(raised) = object.getattr(method).and_then(|method| method.call0())
                && !raised.is_instance_of::<pyo3::exceptions::PyAttributeError>(py)
            {
                raised.write_unraisable(py, Some(object));
            }
        });
        // After the end of the interpreter there is nothing to call.
        told.unwrap_or(());
    }
}

impl fmt::Debug for OfPython {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OfPython").finish_non_exhaustive()
    }
}

fn with_python<R>(call: impl FnOnce(Python<'_>) -> PyResult<R>) -> Result<R, String> {
    let called = Python::try_attach(|py| call(py).map_err(|raised| signals::text_of(py, raised)));
    called.unwrap_or_else(|| Err("the interpreter has ended".to_owned()))
}

fn left_until(deadline: Instant) -> f64 {
    deadline.saturating_duration_since(Instant::now()).as_secs_f64()
}
