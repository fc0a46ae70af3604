use crate::Rank;

use super::{channel::Channel, level::Level, nonce::Nonce, refusal::Refusal};

/// The greeting: which rank opens or answers a connection, and for which channel. It is the first 56 bytes in
/// either direction. All numbers are little-endian.
///
/// ```text
/// 0        4        6      7         8        12           16             24       56
/// ┌────────┬────────┬──────┬─────────┬────────┬────────────┬──────────────┬────────┐
/// │ "DRUM" │version │ auth │ channel │  rank  │ world size │ group digest │ nonce  │
/// └────────┴────────┴──────┴─────────┴────────┴────────────┴──────────────┴────────┘
/// ```
///
/// `auth` says how the two ends prove that they belong together: 0 not at all; 1 to 3 as [`auth`](super)
/// describes, at the three [`Level`]s in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The channel of the connection.
    pub channel: Channel,
    /// The rank of the sender, in `0..world_size`.
    pub rank: Rank,
    /// The number of ranks in the group.
    pub world_size: usize,
    /// The group's digest. It tells groups, and lives of one group, apart. It is no secret.
    pub group: u64,
}

const MAGIC: [u8; 4] = *b"DRUM";
const VERSION: u16 = 3;
const NO_AUTHENTICATION: u8 = 0;

impl Hello {
    /// The length of a greeting.
    pub const BYTES: usize = 56;

    /// The length of the first part of a greeting, which says how to read the rest.
    pub(super) const FRONT_BYTES: usize = 6;

    /// The greeting of either end of a connection to a store.
    pub const STORE: Hello = Hello { channel: Channel::Store, rank: 0, world_size: 1, group: 0 };

    /// The greeting as bytes. `level` is the level of the connection, if the sender has a secret.
    pub fn encode(&self, level: Option<Level>, nonce: &Nonce) -> [u8; Hello::BYTES] {
        let mut bytes = [0; Hello::BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = level.map_or(NO_AUTHENTICATION, Level::code);
        bytes[7] = self.channel.code();
        bytes[8..12].copy_from_slice(&(self.rank as u32).to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.world_size as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.group.to_le_bytes());
        bytes[24..56].copy_from_slice(&nonce.0);
        bytes
    }

    /// Checks the beginning of a greeting, as far as it has come.
    pub(super) fn check_front(bytes: &[u8]) -> Result<(), Refusal> {
        if bytes.iter().zip(&MAGIC).any(|(byte, magic)| byte != magic) {
            return Err(Refusal::NotDrumline);
        }
        if bytes.len() >= Hello::FRONT_BYTES {
            let version = u16::from_le_bytes(array(bytes, 4));
            if version != VERSION {
                return Err(Refusal::Version { theirs: version, ours: VERSION });
            }
        }
        Ok(())
    }

    /// Decodes a greeting. Also returns its level, if the sender has a secret.
    ///
    /// # Errors
    ///
    /// [`Refusal`] for another protocol, release, kind of authentication or channel.
    pub fn decode(bytes: &[u8; Hello::BYTES]) -> Result<(Hello, Option<Level>), Refusal> {
        Hello::check_front(bytes)?;
        let level = match bytes[6] {
            NO_AUTHENTICATION => None,
            code => {
                let level = Level::ALL.into_iter().find(|level| level.code() == code);
                Some(level.ok_or(Refusal::UnknownAuthentication(code))?)
            }
        };
        let Some(channel) = Channel::from_code(bytes[7]) else {
            return Err(Refusal::UnknownChannel(bytes[7]));
        };
        let hello = Hello {
            channel,
            rank: u32::from_le_bytes(array(bytes, 8)) as usize,
            world_size: u32::from_le_bytes(array(bytes, 12)) as usize,
            group: u64::from_le_bytes(array(bytes, 16)),
        };
        Ok((hello, level))
    }
}

/// `N` bytes from position `at` of a greeting.
fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}
#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Hello =
        Hello { channel: Channel::Data(1), rank: 3, world_size: 8, group: 0x0102_0304_0506_0708 };

    #[test]
    fn greetings_survive_the_wire_and_lie_where_the_drawing_says() {
        for (level, code) in [(None, 0), (Some(Level::Auth), 1), (Some(Level::Tls), 3)] {
            let bytes = HELLO.encode(level, &Nonce([9; 32]));
            assert_eq!(Hello::decode(&bytes), Ok((HELLO, level)));
            assert_eq!(&bytes[..8], &[b'D', b'R', b'U', b'M', 3, 0, code, 17]);
            assert_eq!((bytes[8], bytes[12], bytes[16], bytes[24], bytes[55]), (3, 8, 8, 9, 9));
        }
    }

    #[test]
    fn foreign_greetings_are_refused_with_the_reason() {
        for (at, value, reason) in [
            (0, b'X', "protocol"),
            (4, 1, "version 1"),
            (6, 7, "authentication"),
            (6, 2, "authentication"),
            (7, 9, "channel"),
        ] {
            let mut bytes = HELLO.encode(Some(Level::Auth), &Nonce([0; 32]));
            bytes[at] = value;
            let refused = Hello::decode(&bytes).unwrap_err().to_string();
            assert!(refused.contains(reason), "{refused}");
        }
    }
}
