//! What this library offers, under the names that users of torch look for.

use std::{env, path::Path};

use crate::{Config, Error, Result, backend::mpi};

/// Whether this program is built with the feature `mpi`, and an MPI library is found ([`Config::mpi_library`](crate::Config::mpi_library) says where it is looked
/// for). The library is loaded then, and not started.
pub fn is_mpi_available() -> bool {
    let library = env::var_os("DRUMLINE_MPI_LIBRARY").filter(|path| !path.is_empty());
    mpi::describe(library.as_deref().map(Path::new)).is_ok()
}

/// Which MPI library the backend `mpi` would load, in words: its version, its ABI and its path. Loads it, and starts
/// nothing.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Config, backend::{describe_mpi, is_mpi_available}};
///
/// match describe_mpi(&Config::from_env()?) {
///     Ok(library) => println!("MPI: {library}"),
///     Err(error) => println!("no MPI: {error}"), // says where it was looked for
/// }
/// assert_eq!(describe_mpi(&Config::from_env()?).is_ok(), is_mpi_available());
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`Setting`](crate::ErrorKind::Setting) lists what was tried, and says what to install.
pub fn describe_mpi(config: &Config) -> Result<String> {
    mpi::describe(config.mpi_library.as_deref())
        .map_err(|problem| Error::setting("mpi_library (DRUMLINE_MPI_LIBRARY)", problem))
}

/// Whether `torchrun` started this process: `TORCHELASTIC_RUN_ID` is set. See
/// [`is_launched`](crate::is_launched) for any launcher.
pub fn is_torchelastic_launched() -> bool {
    env::var_os("TORCHELASTIC_RUN_ID").is_some()
}
