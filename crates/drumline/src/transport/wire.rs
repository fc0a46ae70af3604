//! What ranks say to each other besides data: the greeting of every connection, and the
//! messages of control connections. All numbers are little-endian.

use drumline_schedule::step::Rank;

use crate::executor::array;

/// The first bytes on every connection between two ranks, in both directions.
///
/// ```text
/// 0        4        6      7         8        12           16             24       32
/// ┌────────┬────────┬──────┬─────────┬────────┬────────────┬──────────────┬────────┐
/// │ "DRUM" │version │ auth │ channel │  rank  │ world size │ group digest │ nonce  │
/// └────────┴────────┴──────┴─────────┴────────┴────────────┴──────────────┴────────┘
/// ```
///
/// `auth` says how the two ends prove that they belong together; only [`NO_AUTHENTICATION`]
/// exists, and `nonce` is zero with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub(super) channel: Channel,
    pub(super) rank: Rank,
    pub(super) world_size: usize,
    pub(super) group: u64,
}

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    /// Leave-taking and failures: read whenever its owner waits, never held up by data.
    Control = 0,
    /// The messages of collectives.
    Data = 1,
}

impl Channel {
    pub(super) const ALL: [Channel; 2] = [Channel::Control, Channel::Data];
}

const MAGIC: [u8; 4] = *b"DRUM";
const VERSION: u16 = 1;
const NO_AUTHENTICATION: u8 = 0;

impl Hello {
    pub(super) const BYTES: usize = 32;

    pub(super) fn encode(&self) -> [u8; Hello::BYTES] {
        let mut bytes = [0; Hello::BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = NO_AUTHENTICATION;
        bytes[7] = self.channel as u8;
        bytes[8..12].copy_from_slice(&(self.rank as u32).to_le_bytes());
        bytes[12..16].copy_from_slice(&(self.world_size as u32).to_le_bytes());
        bytes[16..24].copy_from_slice(&self.group.to_le_bytes());
        bytes
    }

    /// The greeting, or what is wrong with it.
    pub(super) fn decode(bytes: &[u8; Hello::BYTES]) -> Result<Hello, String> {
        if bytes[0..4] != MAGIC {
            return Err("it does not speak this protocol".to_owned());
        }
        let version = u16::from_le_bytes(array(bytes, 4));
        if version != VERSION {
            return Err(format!(
                "it speaks version {version} of the protocol, this rank version {VERSION}: \
                 install the same release everywhere"
            ));
        }
        if bytes[6] != NO_AUTHENTICATION {
            return Err(format!("it asks for authentication of kind {}, unknown here", bytes[6]));
        }
        let Some(channel) = Channel::ALL.into_iter().find(|channel| *channel as u8 == bytes[7])
        else {
            return Err(format!("it opens a channel of kind {}, unknown here", bytes[7]));
        };
        Ok(Hello {
            channel,
            rank: u32::from_le_bytes(array(bytes, 8)) as usize,
            world_size: u32::from_le_bytes(array(bytes, 12)) as usize,
            group: u64::from_le_bytes(array(bytes, 16)),
        })
    }
}

/// A message on a control connection: one byte of kind, three zero bytes, the length of the
/// body in four bytes, the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// The sender leaves the group in good order and will send no more.
    Goodbye,
    /// The sender's operation failed. The body is the rank at fault (`u32::MAX`: none) and a
    /// text for people.
    Abort { culprit: Option<Rank>, text: String },
}

const GOODBYE: u8 = 1;
const ABORT: u8 = 2;
const NOBODY: u32 = u32::MAX;

impl Control {
    const FRONT_BYTES: usize = 8;
    /// Longer texts are cut by the sender and refused by the receiver.
    const BODY_BYTES_MAX: usize = 4096;

    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, body) = match self {
            Control::Goodbye => (GOODBYE, Vec::new()),
            Control::Abort { culprit, text } => {
                let culprit = culprit.map_or(NOBODY, |rank| rank as u32);
                let mut body = culprit.to_le_bytes().to_vec();
                body.extend_from_slice(text.as_bytes());
                body.truncate(Control::BODY_BYTES_MAX);
                (ABORT, body)
            }
        };
        let mut bytes = vec![kind, 0, 0, 0];
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Takes the first message off `bytes`, if all of it is there.
    pub(super) fn take(bytes: &mut Vec<u8>) -> Result<Option<Control>, String> {
        if bytes.len() < Control::FRONT_BYTES {
            return Ok(None);
        }
        let len = u32::from_le_bytes(array(bytes, 4)) as usize;
        if len > Control::BODY_BYTES_MAX {
            return Err(format!("a control message of {len} bytes"));
        }
        if bytes.len() < Control::FRONT_BYTES + len {
            return Ok(None);
        }
        let message: Vec<u8> = bytes.drain(..Control::FRONT_BYTES + len).collect();
        let body = &message[Control::FRONT_BYTES..];
        match message[0] {
            GOODBYE => Ok(Some(Control::Goodbye)),
            ABORT if len >= 4 => {
                let culprit = u32::from_le_bytes(array(body, 0));
                Ok(Some(Control::Abort {
                    culprit: (culprit != NOBODY).then_some(culprit as usize),
                    text: String::from_utf8_lossy(&body[4..]).into_owned(),
                }))
            }
            kind => Err(format!("a control message of unknown kind {kind}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const HELLO: Hello =
        Hello { channel: Channel::Data, rank: 3, world_size: 8, group: 0x0102_0304_0506_0708 };

    #[test]
    fn greetings_survive_the_wire_and_lie_where_the_drawing_says() {
        let bytes = HELLO.encode();
        assert_eq!(Hello::decode(&bytes), Ok(HELLO));
        assert_eq!(&bytes[..8], b"DRUM\x01\0\0\x01");
        assert_eq!((bytes[8], bytes[12], bytes[16]), (3, 8, 8));
    }

    #[test]
    fn foreign_greetings_are_refused_with_the_reason() {
        for (at, value, reason) in [
            (0, b'X', "protocol"),
            (4, 2, "version 2"),
            (6, 1, "authentication"),
            (7, 9, "channel"),
        ] {
            let mut bytes = HELLO.encode();
            bytes[at] = value;
            let refused = Hello::decode(&bytes).unwrap_err();
            assert!(refused.contains(reason), "{refused}");
        }
    }

    #[test]
    fn control_messages_are_taken_whole_however_they_arrive() {
        let messages = [
            Control::Abort { culprit: Some(2), text: "rank 2 stumbled".to_owned() },
            Control::Abort { culprit: None, text: String::new() },
            Control::Goodbye,
        ];
        let bytes: Vec<u8> = messages.iter().flat_map(Control::encode).collect();
        let (mut arrived, mut taken) = (Vec::new(), Vec::new());
        for byte in bytes {
            arrived.push(byte);
            taken.extend(Control::take(&mut arrived).unwrap());
        }
        assert_eq!(taken, messages);
        assert!(arrived.is_empty());
    }

    #[test]
    fn long_texts_are_cut_and_longer_messages_refused() {
        let long = Control::Abort { culprit: None, text: "é".repeat(4096) };
        let mut bytes = long.encode();
        assert!(matches!(Control::take(&mut bytes), Ok(Some(Control::Abort { .. }))));
        assert!(Control::take(&mut vec![2, 0, 0, 0, 1, 16, 0, 0]).is_err());
        assert!(Control::take(&mut vec![9, 0, 0, 0, 0, 0, 0, 0]).is_err());
    }
}
