//! What stands for the backend `mpi` in a build without the feature `mpi`: it says so.

use std::{path::Path, sync::Arc};

use super::interface::{Backend, BackendOptions};
use crate::Result;

/// Its name.
pub(crate) const MPI: &str = "mpi";

/// Why nothing goes over MPI.
pub(crate) const NOT_BUILT: &str = "this program is built without the feature `mpi`";

pub(crate) fn connect(options: &BackendOptions) -> Result<Arc<dyn Backend>> {
    Err(options.error(NOT_BUILT.to_owned()))
}

pub(crate) fn describe(_library: Option<&Path>) -> Result<String, String> {
    Err(NOT_BUILT.to_owned())
}

/// MPI is never finalised.
pub(crate) fn before_finalize(_see_off: fn() -> bool) {}

pub(crate) fn is_loaded() -> bool {
    false
}
