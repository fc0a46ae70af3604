use std::{fmt, fs};

use drumline_store::auth::Nonce;
use rustix::process::geteuid;

use crate::Result;

/// What a rank tells the others of its place, as text in the store:
/// `2 BOOT-ID NETWORK UID UNIX-NAME`, with `-` for no name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Card {
    /// The machine, since its last boot.
    boot: String,
    /// The network namespace: what abstract Unix sockets and loopback are local to.
    network: String,
    uid: u32,
    /// The abstract Unix socket that it listens on, if it wants to be reached that way.
    pub(super) unix: Option<String>,
}

const VERSION: &str = "3";
const NO_NAME: &str = "-";

impl Card {
    pub(super) fn of_this_process(unix: Option<String>) -> Result<Card> {
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let network = fs::read_link("/proc/self/ns/net");
        let (boot, network) = match (boot, network) {
            (Ok(boot), Ok(network)) => {
                (boot.trim().to_owned(), network.to_string_lossy().into_owned())
            }
            // Without them nobody is known to be near: everybody is reached over TCP.
            (boot, network) => {
                tracing::warn!(?boot, ?network, "/proc does not say which host this is");
                let Nonce(unlike_any) = Nonce::random()?;
                (format!("unknown-{:02x?}", &unlike_any[..8]).replace(' ', ""), "-".to_owned())
            }
        };
        Ok(Card { boot, network, uid: geteuid().as_raw(), unix })
    }

    pub(crate) fn parse(bytes: &[u8]) -> Result<Card, String> {
        let text = String::from_utf8_lossy(bytes);
        let fields: Vec<&str> = text.split(' ').collect();
        let card = match fields[..] {
            [VERSION, boot, network, uid, unix] => uid.parse().ok().map(|uid| Card {
                boot: boot.to_owned(),
                network: network.to_owned(),
                uid,
                unix: (unix != NO_NAME).then(|| unix.to_owned()),
            }),
            _ => None,
        };
        card.ok_or_else(|| {
            let shown: String = text.chars().take(100).collect();
            format!(
                "it left {shown:?} in the store, which this release cannot read; do all ranks \
                 run the same one?"
            )
        })
    }

    /// Whether both are on one host and share its network.
    pub(super) fn is_same_network(&self, other: &Card) -> bool {
        (&self.boot, &self.network) == (&other.boot, &other.network)
    }

    /// Whether the two reach, and may trust, each other over Unix sockets. It is the same seen
    /// from either side.
    pub(super) fn is_near(&self, other: &Card) -> bool {
        let both_listen = self.unix.is_some() && other.unix.is_some();
        both_listen && self.is_same_network(other) && self.uid == other.uid
    }
}

impl fmt::Display for Card {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Card { boot, network, uid, unix } = self;
        let unix = unix.as_deref().unwrap_or(NO_NAME);
        write!(f, "{VERSION} {boot} {network} {uid} {unix}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn card() -> Card {
        Card::of_this_process(Some("drumline-mesh-1".to_owned())).unwrap()
    }

    #[test]
    fn cards_survive_the_store() {
        for card in [card(), Card { unix: None, ..card() }] {
            assert_eq!(Card::parse(card.to_string().as_bytes()), Ok(card));
        }
        for bad in [&b""[..], b"2 a b 0 c", b"3 a b many c", b"3 a b 0", b"\xff"] {
            assert!(Card::parse(bad).unwrap_err().contains("same one"));
        }
    }

    #[test]
    fn only_ranks_of_one_host_network_and_user_are_near() {
        assert!(card().is_near(&card()));
        for other in [
            Card { boot: "another".to_owned(), ..card() },
            Card { network: "net:[1]".to_owned(), ..card() },
            Card { uid: card().uid + 1, ..card() },
            Card { unix: None, ..card() },
        ] {
            assert!(!card().is_near(&other) && !other.is_near(&card()), "{other}");
        }
    }
}
