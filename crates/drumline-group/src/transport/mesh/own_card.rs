use std::{
    fs,
    io::{self, ErrorKind},
};

use drumline_engine::start_up::card::Card;
use drumline_store::auth::Nonce;
use rustix::process::geteuid;

use crate::{Error, Result};

/// The card of this process. `unix` is the name of the Unix socket on which it listens, if it does.
pub(super) fn of_this_process(unix: Option<String>) -> Result<Card> {
    const BOOT: &str = "/proc/sys/kernel/random/boot_id";
    const NETWORK: &str = "/proc/self/ns/net";
    let boot = if_shown(BOOT, fs::read_to_string(BOOT))?;
    let network = if_shown(NETWORK, fs::read_link(NETWORK))?;
    let (boot, network) = match (boot, network) {
        (Some(boot), Some(network)) => {
            (boot.trim().to_owned(), network.to_string_lossy().into_owned())
        }
        // Without these files no rank is known to be near, so all ranks use TCP.
        (boot, network) => {
            tracing::warn!(?boot, ?network, "/proc does not say which host this is");
            let Nonce(unlike_any) = Nonce::random()?;
            (format!("unknown-{:02x?}", &unlike_any[..8]).replace(' ', ""), "-".to_owned())
        }
    };
    Ok(Card { boot, network, uid: geteuid().as_raw(), unix })
}

/// `None` if the system does not have this file. Any other failure is an error: it must not look like another
/// host.
fn if_shown<T>(path: &str, read: io::Result<T>) -> Result<Option<T>> {
    match read {
        Ok(read) => Ok(Some(read)),
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::PermissionDenied) => {
            Ok(None)
        }
        Err(error) => Err(Error::io(format!("cannot read {path}"), error)),
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
