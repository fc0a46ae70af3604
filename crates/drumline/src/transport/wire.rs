//! What ranks say to each other on control connections. All numbers are little-endian.

use drumline_schedule::step::Rank;

use super::Waits;
use crate::executor::{Header, array};

/// A message on a control connection: one byte of kind, three zero bytes, the length of the
/// body in four bytes, the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Control {
    /// The sender leaves the group in good order and will send no more.
    Goodbye,
    /// Nothing. It makes the receiver's kernel answer, so that its silence is noticed, and
    /// answers [`Control::Waits`].
    Beat,
    /// The sender's operation failed. The body is the rank at fault (`u32::MAX`: none) and a
    /// text for people.
    Abort { culprit: Option<Rank>, text: String },
    /// The sender waits. The body is the header of a message of the call that it is in, with zeros
    /// for what only messages have, and four bytes for each rank that it awaits: none if the call
    /// is over, and not all if they are too many.
    Waits(Waits),
}

const GOODBYE: u8 = 1;
const BEAT: u8 = 3;
const ABORT: u8 = 2;
const WAITS: u8 = 4;
const NOBODY: u32 = u32::MAX;

impl Control {
    const FRONT_BYTES: usize = 8;
    /// Longer texts are cut by the sender and refused by the receiver.
    const BODY_BYTES_MAX: usize = 4096;
    const AWAITED_MAX: usize = (Control::BODY_BYTES_MAX - Header::BYTES) / 4;

    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, body) = match self {
            Control::Goodbye => (GOODBYE, Vec::new()),
            Control::Beat => (BEAT, Vec::new()),
            Control::Abort { culprit, text } => {
                let culprit = culprit.map_or(NOBODY, |rank| rank as u32);
                let mut body = culprit.to_le_bytes().to_vec();
                body.extend_from_slice(text.as_bytes());
                body.truncate(Control::BODY_BYTES_MAX);
                (ABORT, body)
            }
            Control::Waits(Waits { call, ranks }) => {
                let header = Header { description: *call, part: 0, payload: 0 };
                let mut body = header.encode().to_vec();
                let ranks = ranks.iter().take(Control::AWAITED_MAX);
                body.extend(ranks.flat_map(|rank| (*rank as u32).to_le_bytes()));
                (WAITS, body)
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
            BEAT => Ok(Some(Control::Beat)),
            ABORT if len >= 4 => {
                let culprit = u32::from_le_bytes(array(body, 0));
                Ok(Some(Control::Abort {
                    culprit: (culprit != NOBODY).then_some(culprit as usize),
                    text: String::from_utf8_lossy(&body[4..]).into_owned(),
                }))
            }
            WAITS if len >= Header::BYTES && len.is_multiple_of(4) => {
                let header = Header::decode(&array(body, 0));
                let header = header.ok_or("a control message about no call")?;
                let ranks = (Header::BYTES..len).step_by(4);
                Ok(Some(Control::Waits(Waits {
                    call: header.description,
                    ranks: ranks.map(|at| u32::from_le_bytes(array(body, at)) as Rank).collect(),
                })))
            }
            kind => Err(format!("a control message of unknown kind {kind}")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        DType,
        executor::{Description, Operation},
    };

    fn waits(ranks: Vec<Rank>) -> Control {
        let call = Description::new(7, 3, Operation::Barrier, DType::U8, 0, "direct");
        Control::Waits(Waits { call, ranks })
    }

    #[test]
    fn control_messages_are_taken_whole_however_they_arrive() {
        let messages = [
            Control::Abort { culprit: Some(2), text: "rank 2 stumbled".to_owned() },
            Control::Abort { culprit: None, text: String::new() },
            waits(vec![1, 70_000]),
            waits(vec![]),
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
    fn what_is_too_long_is_cut_and_what_makes_no_sense_refused() {
        let long = Control::Abort { culprit: None, text: "é".repeat(4096) };
        let mut bytes = long.encode();
        assert!(matches!(Control::take(&mut bytes), Ok(Some(Control::Abort { .. }))));
        let mut bytes = waits((0..2000).collect()).encode();
        let Ok(Some(Control::Waits(some))) = Control::take(&mut bytes) else { panic!() };
        assert_eq!(some.ranks, (0..1008).collect::<Vec<_>>());
        assert!(Control::take(&mut vec![4, 0, 0, 0, 0, 0, 0, 0]).is_err());
        assert!(Control::take(&mut [&[4, 0, 0, 0, 64, 0, 0, 0][..], &[0; 64]].concat()).is_err());
        assert!(Control::take(&mut vec![2, 0, 0, 0, 1, 16, 0, 0]).is_err());
        assert!(Control::take(&mut vec![9, 0, 0, 0, 0, 0, 0, 0]).is_err());
    }
}
