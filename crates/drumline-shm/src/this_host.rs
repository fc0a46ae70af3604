//! What tells this host, and its network, from others.

use std::{
    fs,
    io::{self, ErrorKind},
};

/// The boot of the machine and the network namespace of this process, as text. Copies of one virtual machine may have the
/// same. `None` if the system does not show them.
///
/// # Errors
///
/// The system shows them, and reading them failed: that must not look like another host.
pub fn this_host() -> io::Result<Option<(String, String)>> {
    const BOOT: &str = "/proc/sys/kernel/random/boot_id";
    const NETWORK: &str = "/proc/self/ns/net";
    let boot = if_shown(BOOT, fs::read_to_string(BOOT))?;
    let network = if_shown(NETWORK, fs::read_link(NETWORK))?;
    Ok(boot
        .zip(network)
        .map(|(boot, network)| (boot.trim().to_owned(), network.to_string_lossy().into_owned())))
}

/// `None` if the system does not have this file.
fn if_shown<T>(path: &str, read: io::Result<T>) -> io::Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            Ok(None)
        }
        Err(error) => Err(io::Error::new(error.kind(), format!("cannot read {path}: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_file_that_is_not_shown_may_be_missing() {
        let read = |error: ErrorKind| if_shown("/proc/x", Err::<(), _>(error.into()));
        assert!(matches!(read(ErrorKind::NotFound), Ok(None)));
        let error = read(ErrorKind::OutOfMemory).unwrap_err().to_string();
        assert!(error.contains("/proc/x: out of memory"), "{error}");
    }
}
