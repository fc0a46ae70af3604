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
            if let Some(backend) = text.strip_prefix(BACKEND) {
                return differing_backends(backend, "drumline");
            }
            let shown: String = text.chars().take(100).collect();
            format!(
                "it left {shown:?} in the store, which this release cannot read; do all ranks \
                 run the same one?"
            )
        })
    }

    /// What a rank writes in place of its card if a foreign backend carries the group.
    pub fn of_backend(name: &str) -> String {
        format!("{BACKEND}{name}")
    }

    /// Checks that a rank has written the same name of a foreign backend as this one.
    ///
    /// # Errors
    ///
    /// Names both backends.
    pub fn check_backend(bytes: &[u8], own: &str) -> Result<(), String> {
        let text = String::from_utf8_lossy(bytes);
        match text.strip_prefix(BACKEND) {
            Some(backend) if backend == own => Ok(()),
            Some(backend) => Err(differing_backends(backend, own)),
            None => Err(differing_backends("drumline", own)),
        }
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

const BACKEND: &str = "backend:";

fn differing_backends(theirs: &str, ours: &str) -> String {
    format!(
        "it uses the backend {theirs:?}, and this rank {ours:?}; all ranks of a group need the same one \
         (DRUMLINE_BACKEND, Config::backend)"
    )
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
    fn a_rank_on_another_backend_is_told_both() {
        let word = Card::of_backend("mpi");
        assert_eq!(Card::check_backend(word.as_bytes(), "mpi"), Ok(()));
        let told = [
            Card::check_backend(word.as_bytes(), "hub").unwrap_err(),
            Card::check_backend(card().to_string().as_bytes(), "mpi").unwrap_err(),
            Card::parse(word.as_bytes()).unwrap_err(),
        ];
        for (text, [theirs, ours]) in
            told.iter().zip([["mpi", "hub"], ["drumline", "mpi"], ["mpi", "drumline"]])
        {
            let both = format!("uses the backend {theirs:?}, and this rank {ours:?}");
            assert!(text.contains(&both), "{text}");
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
