//! Settings from Python: those of the environment, overridden by arguments.

use std::{str::FromStr, time::Duration};

use drumline::{
    Config,
    auth::{Level, Secret},
    config::DebugLevel,
    deadline,
};
use pyo3::{
    exceptions::{PyTypeError, PyValueError},
    prelude::*,
    types::PyDict,
};

use crate::error::raise;

/// The settings of the environment, overridden by `settings`. The names are those of [`Config`]'s fields;
/// durations are in seconds.
pub(crate) fn config(settings: Option<&Bound<'_, PyDict>>) -> PyResult<Config> {
    let mut config = Config::from_env().map_err(raise)?;
    let has_default = config.streams == config.named_interfaces();
    for (name, value) in settings.into_iter().flatten() {
        let name: String = name.extract()?;
        match name.as_str() {
            "timeout" => config.timeout = seconds(&name, &value)?,
            "warn_after" => config.warn_after = seconds(&name, &value)?,
            "backend" => config.backend = value.extract()?,
            "mpi_library" => config.mpi_library = value.extract()?,
            "cuda_library" => config.cuda_library = value.extract()?,
            "nccl_library" => config.nccl_library = value.extract()?,
            "all_reduce" => config.all_reduce = value.extract()?,
            "streams" => config.streams = value.extract()?,
            "socket_ifname" => config.socket_ifname = value.extract()?,
            "bind_addresses" => config.bind_addresses = value.extract()?,
            "unix_sockets" => config.unix_sockets = value.extract()?,
            "shared_memory" => config.shared_memory = value.extract()?,
            "registered_bytes_max" => config.registered_bytes_max = value.extract()?,
            "object_bytes_max" => config.object_bytes_max = value.extract()?,
            "store_bytes_max" => config.store_bytes_max = value.extract()?,
            "trust_store" => config.trust_store = value.extract()?,
            "min_ranks" => config.min_ranks = value.extract()?,
            "secret" => {
                config.secret = Some(Secret::new(value.extract::<Vec<u8>>()?).map_err(raise)?);
            }
            "security" => config.security = level(&value.extract::<String>()?)?,
            "debug" => config.debug = debug_level(&value.extract::<String>()?)?,
            "sum_order" => config.sum_order = word(&name, &value)?,
            "rounding" => config.rounding = word(&name, &value)?,
            _ => {
                let problem =
                    format!("there is no setting {name:?}; docs/reference/settings.md lists them");
                return Err(PyTypeError::new_err(problem));
            }
        }
    }
    let is_given = |settings: &Bound<'_, PyDict>| settings.contains("streams").unwrap_or(true);
    if has_default && !settings.is_some_and(is_given) {
        config.streams = config.named_interfaces();
    }
    Ok(config)
}

fn seconds(name: &str, value: &Bound<'_, PyAny>) -> PyResult<Duration> {
    let seconds: f64 = value.extract()?;
    duration(name, seconds)
}

/// A duration above zero. What is too long for a clock means no limit.
pub(crate) fn duration(name: &str, seconds: f64) -> PyResult<Duration> {
    let duration = deadline::of_seconds(seconds).filter(|it| !it.is_zero());
    duration.ok_or_else(|| {
        PyValueError::new_err(format!("{name} is {seconds}; it should be seconds, more than 0"))
    })
}

/// How long to wait, perhaps not at all. What is too long for a clock means no limit.
pub(crate) fn patience(name: &str, seconds: f64) -> PyResult<Duration> {
    deadline::of_seconds(seconds).ok_or_else(|| {
        PyValueError::new_err(format!("{name} is {seconds}; it should be seconds, 0 or more"))
    })
}

fn level(name: &str) -> PyResult<Level> {
    name.parse().map_err(|error| PyValueError::new_err(format!("security is {name:?}; {error}")))
}

fn debug_level(name: &str) -> PyResult<DebugLevel> {
    name.parse().map_err(|problem| PyValueError::new_err(format!("debug is {problem}")))
}

/// A setting that is one of a few words.
fn word<T: FromStr<Err = String>>(name: &str, value: &Bound<'_, PyAny>) -> PyResult<T> {
    let word = value.extract::<String>()?.parse();
    word.map_err(|problem| PyValueError::new_err(format!("{name} is {problem}")))
}
