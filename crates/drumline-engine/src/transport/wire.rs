//! The messages between ranks on control connections. All numbers are little-endian.

use drumline_schedule::step::Rank;

use super::waits::{InCall, Waits};
use crate::{
    error::{Reason, one_line},
    executor::{Header, array},
    membership::SeenFailure,
};

/// A message on a control connection: one byte for the kind, one for the reason of an abort, two zero bytes,
/// the length of the body in four bytes, and the body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Control {
    /// The sender leaves the group in good order and will send no more. If it has seen a failure in another group, the
    /// body is as in [`Control::Abort`].
    Goodbye(Option<SeenFailure>),
    /// Means nothing. The receiver's kernel answers it, so a silent host is noticed. It also answers
    /// [`Control::Waits`].
    Beat,
    /// The sender's call failed. The body is the rank at fault (`u32::MAX`: none) and a text for people.
    Abort {
        /// The rank at fault, if this rank knows it.
        culprit: Option<Rank>,
        /// The class of the failure, in the second byte of the message ([`Reason::code`]).
        reason: Reason,
        /// The sender's description of the failure.
        text: String,
    },
    /// The sender waits, or waits no more. The body has the number of ranks that it awaits in a call (4
    /// bytes); if this is not 0, the message header of that call, with zeros in the fields that only messages
    /// use, and those ranks; and then the ranks for whose messages it waits. Each rank takes four bytes. If
    /// there are too many, some are left out.
    Waits(Waits),
}

const GOODBYE: u8 = 1;
const BEAT: u8 = 3;
const ABORT: u8 = 2;
const WAITS: u8 = 4;
const NOBODY: u32 = u32::MAX;

impl Control {
    const FRONT_BYTES: usize = 8;
    /// The longest body. Senders cut texts to it, and receivers refuse longer ones.
    const BODY_BYTES_MAX: usize = 4096;
    /// The length of the count at the start of [`Control::Waits`].
    const COUNT_BYTES: usize = 4;
    const AWAITED_MAX: usize = (Control::BODY_BYTES_MAX - Control::COUNT_BYTES - Header::BYTES) / 4;

    /// The bytes on the wire.
    pub fn encode(&self) -> Vec<u8> {
        let (front, body) = match self {
            Control::Goodbye(None) => ([GOODBYE, 0], Vec::new()),
            Control::Goodbye(Some(SeenFailure { culprit, text })) => {
                ([GOODBYE, 0], encode_failure(*culprit, text))
            }
            Control::Beat => ([BEAT, 0], Vec::new()),
            Control::Abort { culprit, reason, text } => {
                ([ABORT, reason.code()], encode_failure(*culprit, text))
            }
            Control::Waits(waits) => ([WAITS, 0], encode_waits(waits)),
        };
        let mut bytes = vec![front[0], front[1], 0, 0];
        bytes.extend_from_slice(&(body.len() as u32).to_le_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    /// Takes the first message off `bytes`, if all of it is there.
    pub fn take(bytes: &mut Vec<u8>) -> Result<Option<Control>, String> {
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
            GOODBYE if len == 0 => Ok(Some(Control::Goodbye(None))),
            GOODBYE if len >= 4 => {
                let (culprit, text) = decode_failure(body);
                Ok(Some(Control::Goodbye(Some(SeenFailure { culprit, text }))))
            }
            BEAT => Ok(Some(Control::Beat)),
            ABORT if len >= 4 => {
                let ((culprit, text), reason) =
                    (decode_failure(body), Reason::from_code(message[1]));
                Ok(Some(Control::Abort { culprit, reason, text }))
            }
            WAITS if len >= Control::COUNT_BYTES && len.is_multiple_of(4) => {
                decode_waits(body).map(|waits| Some(Control::Waits(waits)))
            }
            kind => Err(format!("a control message of unknown kind {kind}")),
        }
    }
}

fn encode_failure(culprit: Option<Rank>, text: &str) -> Vec<u8> {
    let culprit = culprit.map_or(NOBODY, |rank| rank as u32);
    let mut body = [&culprit.to_le_bytes(), text.as_bytes()].concat();
    body.truncate(Control::BODY_BYTES_MAX);
    body
}

/// `body` holds at least the rank.
fn decode_failure(body: &[u8]) -> (Option<Rank>, String) {
    let culprit = u32::from_le_bytes(array(body, 0));
    ((culprit != NOBODY).then_some(culprit as usize), one_line(&body[4..]))
}

fn encode_waits(waits: &Waits) -> Vec<u8> {
    let in_call = waits.call.iter().flat_map(|call| &call.ranks).take(Control::AWAITED_MAX);
    let in_call: Vec<Rank> = in_call.copied().collect();
    let mut body = (in_call.len() as u32).to_le_bytes().to_vec();
    if let (Some(InCall { call, .. }), false) = (&waits.call, in_call.is_empty()) {
        let header = Header { description: *call, part: 0, payload: 0 };
        body.extend_from_slice(&header.encode());
    }
    let messages = waits.messages.iter().take(Control::AWAITED_MAX - in_call.len());
    body.extend(in_call.iter().chain(messages).flat_map(|rank| (*rank as u32).to_le_bytes()));
    body
}

/// Decodes [`Control::Waits`]. `body` holds at least the count, and its length is a multiple of four.
fn decode_waits(body: &[u8]) -> Result<Waits, String> {
    let in_call = u32::from_le_bytes(array(body, 0)) as usize;
    let rest = &body[Control::COUNT_BYTES..];
    let ranks = |bytes: &[u8]| -> Vec<Rank> {
        let ranks = (0..bytes.len()).step_by(4);
        ranks.map(|at| u32::from_le_bytes(array(bytes, at)) as Rank).collect()
    };
    if in_call == 0 {
        return Ok(Waits { call: None, messages: ranks(rest) });
    }
    let header = rest.get(..Header::BYTES).and_then(|bytes| Header::decode(&array(bytes, 0)));
    let header = header.ok_or("a control message about no call")?;
    let rest = &rest[Header::BYTES..];
    let (awaited, messages) = in_call
        .checked_mul(4)
        .and_then(|bytes| rest.split_at_checked(bytes))
        .ok_or_else(|| format!("a control message with less than {in_call} ranks"))?;
    let call = InCall { call: header.description, ranks: ranks(awaited) };
    Ok(Waits { call: Some(call), messages: ranks(messages) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DType, executor::Description};
    use drumline_schedule::Collective;

    fn waits(ranks: Vec<Rank>, messages: Vec<Rank>) -> Control {
        let call = Description::new(7, 3, Collective::Barrier, DType::U8, 0, "direct");
        let call = (!ranks.is_empty()).then_some(InCall { call, ranks });
        Control::Waits(Waits { call, messages })
    }

    fn abort(culprit: Option<Rank>, reason: Reason, text: &str) -> Control {
        Control::Abort { culprit, reason, text: text.to_owned() }
    }

    #[test]
    fn the_text_of_a_peer_is_one_line() {
        let text = "rank 2 stumbled\nERROR rank 0 is to blame\x1b[2J".to_owned();
        let mut bytes = Control::Abort { culprit: Some(2), reason: Reason::Other, text }.encode();
        let Ok(Some(Control::Abort { text, .. })) = Control::take(&mut bytes) else {
            panic!("no abort: {bytes:?}");
        };
        assert_eq!(text, "rank 2 stumbled ERROR rank 0 is to blame [2J");
    }

    #[test]
    fn control_messages_are_taken_whole_however_they_arrive() {
        let messages = [
            abort(Some(2), Reason::Timeout, "rank 2 stumbled"),
            abort(None, Reason::Mismatch, ""),
            abort(None, Reason::Other, ""),
            waits(vec![1, 70_000], vec![]),
            waits(vec![1], vec![3, 70_000]),
            waits(vec![], vec![2]),
            waits(vec![], vec![]),
            Control::Goodbye(None),
            Control::Goodbye(Some(SeenFailure {
                culprit: Some(2),
                text: "rank 2 stumbled".into(),
            })),
            Control::Goodbye(Some(SeenFailure { culprit: None, text: String::new() })),
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
        let long = abort(None, Reason::Other, &"é".repeat(4096));
        let mut bytes = long.encode();
        assert!(matches!(Control::take(&mut bytes), Ok(Some(Control::Abort { .. }))));
        let cut = |ranks, messages| {
            let mut bytes = waits(ranks, messages).encode();
            let Ok(Some(Control::Waits(some))) = Control::take(&mut bytes) else { panic!() };
            (some.call.map(|call| call.ranks).unwrap_or_default(), some.messages)
        };
        let up_to = |count| (0..count).collect::<Vec<_>>();
        assert_eq!(cut(up_to(2000), vec![7]), (up_to(1007), vec![]));
        assert_eq!(cut(up_to(1000), up_to(2000)), (up_to(1000), up_to(7)));
        assert_eq!(cut(vec![], up_to(2000)), (vec![], up_to(1007)));
    }

    #[test]
    fn words_about_waiting_that_make_no_sense_are_refused() {
        let Control::Waits(sensible) = waits(vec![1, 2], vec![3]) else { panic!() };
        let sensible = encode_waits(&sensible);
        let take = |body: &[u8]| {
            let front = [&[4, 0, 0, 0][..], &(body.len() as u32).to_le_bytes()].concat();
            Control::take(&mut [&front[..], body].concat())
        };
        assert!(take(&sensible).is_ok());
        let with = |at: usize, byte: u8| {
            let mut body = sensible.clone();
            body[at] = byte;
            body
        };
        // Cut short in the count, in the header, in the ranks.
        for length in [0, 3, 4, 66, 68, 72, 75, 77] {
            assert!(take(&sensible[..length]).is_err(), "{length}");
        }
        // More ranks than the body has, and a header without a call.
        assert!(take(&with(0, 4)).is_err());
        assert!(take(&with(3, 0xff)).is_err());
        assert!(take(&with(4, 0)).is_err());
    }

    #[test]
    fn other_messages_that_make_no_sense_are_refused() {
        assert!(Control::take(&mut vec![2, 0, 0, 0, 1, 16, 0, 0]).is_err());
        assert!(Control::take(&mut vec![1, 0, 0, 0, 1, 0, 0, 0, 2]).is_err());
        assert!(Control::take(&mut vec![9, 0, 0, 0, 0, 0, 0, 0]).is_err());
    }
}
