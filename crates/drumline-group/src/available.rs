//! What this library offers, under the names that users of torch look for.

use std::env;

/// Whether process groups are available: always. (torch can be built without them.)
///
/// ```
/// # use drumline_group as drumline;
/// assert!(drumline::is_available());
/// ```
pub const fn is_available() -> bool {
    true
}

/// Whether collectives can go through an MPI library. They cannot: all data goes through Drumline's own
/// transports.
///
/// ```
/// # use drumline_group as drumline;
/// assert!(!drumline::is_mpi_available());
/// ```
pub const fn is_mpi_available() -> bool {
    false
}

/// Whether collectives can go through NCCL, for memory of GPUs. They cannot.
///
/// ```
/// # use drumline_group as drumline;
/// assert!(!drumline::is_nccl_available());
/// ```
pub const fn is_nccl_available() -> bool {
    false
}

/// Whether collectives can go through gloo. They cannot: Drumline takes its place.
///
/// ```
/// # use drumline_group as drumline;
/// assert!(!drumline::is_gloo_available());
/// ```
pub const fn is_gloo_available() -> bool {
    false
}

/// Whether `torchrun` started this process: `TORCHELASTIC_RUN_ID` is set. See
/// [`is_launched`](crate::is_launched) for any launcher.
///
/// ```
/// # use drumline_group as drumline;
/// assert_eq!(drumline::is_torchelastic_launched(), std::env::var_os("TORCHELASTIC_RUN_ID").is_some());
/// ```
pub fn is_torchelastic_launched() -> bool {
    env::var_os("TORCHELASTIC_RUN_ID").is_some()
}
