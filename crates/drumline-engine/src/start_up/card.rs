//! What a rank says of its place, and which ranks are near each other by that.

use std::fmt;

/// What a rank tells the others of its place, as text in the store:
/// `3 BOOT-ID NETWORK UID UNIX-NAME`, with `-` for no name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Card {
    /// The machine, since its last boot.
    pub boot: String,
    /// The network namespace: what abstract Unix sockets and loopback are local to.
    pub network: String,
    /// The user.
    pub uid: u32,
    /// The abstract Unix socket that it listens on, if it wants to be reached that way.
    pub unix: Option<String>,
}

const VERSION: &str = "3";
const NO_NAME: &str = "-";

impl Card {
    /// Reads a card.
    ///
    /// # Errors
    ///
    /// What is wrong with the rank that has left it.
    pub fn parse(bytes: &[u8]) -> Result<Card, String> {
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

    /// Whether both ranks are on one host and share its network namespace.
    pub fn is_same_network(&self, other: &Card) -> bool {
        (&self.boot, &self.network) == (&other.boot, &other.network)
    }

    /// Whether the two reach, and may trust, each other over Unix sockets. It is the same seen
    /// from either side.
    pub fn is_near(&self, other: &Card) -> bool {
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
        let [boot, network] = ["0f-2a", "net:[4026531840]"].map(str::to_owned);
        Card { boot, network, uid: 1000, unix: Some("drumline-mesh-1".to_owned()) }
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
