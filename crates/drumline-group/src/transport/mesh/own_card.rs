use std::fs;

use drumline_engine::start_up::card::Card;
use drumline_store::auth::Nonce;
use rustix::process::geteuid;

use crate::Result;

/// The card of this process, which listens on the Unix socket of this name, if it has one.
pub(super) fn of_this_process(unix: Option<String>) -> Result<Card> {
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
    let network = fs::read_link("/proc/self/ns/net");
    let (boot, network) = match (boot, network) {
        (Ok(boot), Ok(network)) => (boot.trim().to_owned(), network.to_string_lossy().into_owned()),
        // Without them nobody is known to be near: everybody is reached over TCP.
        (boot, network) => {
            tracing::warn!(?boot, ?network, "/proc does not say which host this is");
            let Nonce(unlike_any) = Nonce::random()?;
            (format!("unknown-{:02x?}", &unlike_any[..8]).replace(' ', ""), "-".to_owned())
        }
    };
    Ok(Card { boot, network, uid: geteuid().as_raw(), unix })
}
