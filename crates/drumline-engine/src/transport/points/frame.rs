//! The bytes of messages from rank to rank.
//!
//! Everything on the stream begins with a frame of 40 bytes, little-endian:
//!
//! ```text
//!  0      1      2        8        16       24       32       40
//!  ┌──────┬──────┬────────┬────────┬────────┬────────┬────────┐
//!  │ kind │ type │   0    │ number │  tag   │ count  │ bytes  │
//!  └──────┴──────┴────────┴────────┴────────┴────────┴────────┘
//!   1 offer: all fields; `bytes` is the size of the whole message
//!   2 grant: number
//!   3 payload: number, and how many `bytes` of the message follow the frame
//! ```
//!
//! For an object, `type` is 255 and `count` is the length of its description in bytes.
//!
//! The sender numbers its offers to the receiver: 0, 1, 2, ...

use std::fmt;

use drumline_kernels::DType;

use crate::executor::array;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Frame {
    Offer(Offer),
    Grant { id: u64 },
    Payload { id: u64, bytes: u64 },
}

/// A message that a peer would like to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Offer {
    pub(crate) id: u64,
    pub(crate) tag: u64,
    /// The type as it travelled: this build may not know it.
    pub(crate) dtype: u8,
    pub(crate) count: u64,
    pub(crate) bytes: u64,
}

/// The value of `type` for an object.
pub(crate) const OBJECT: u8 = u8::MAX;

const OFFER: u8 = 1;
const GRANT: u8 = 2;
const PAYLOAD: u8 = 3;

impl Frame {
    pub(crate) const BYTES: usize = 40;

    pub(crate) fn encode(&self) -> [u8; Frame::BYTES] {
        let (kind, dtype, numbers) = match *self {
            Frame::Offer(Offer { id, tag, dtype, count, bytes }) => {
                (OFFER, dtype, [id, tag, count, bytes])
            }
            Frame::Grant { id } => (GRANT, 0, [id, 0, 0, 0]),
            Frame::Payload { id, bytes } => (PAYLOAD, 0, [id, 0, 0, bytes]),
        };
        let mut encoded = [0; Frame::BYTES];
        encoded[..2].copy_from_slice(&[kind, dtype]);
        for (place, number) in encoded[8..].chunks_exact_mut(8).zip(numbers) {
            place.copy_from_slice(&number.to_le_bytes());
        }
        encoded
    }

    /// `None`: no frame is of this kind, so the stream is not ours or has lost its place.
    pub(crate) fn decode(bytes: &[u8; Frame::BYTES]) -> Option<Frame> {
        let number = |at| u64::from_le_bytes(array(bytes, at));
        let (id, tag, count, size) = (number(8), number(16), number(24), number(32));
        match bytes[0] {
            OFFER => Some(Frame::Offer(Offer { id, tag, dtype: bytes[1], count, bytes: size })),
            GRANT => Some(Frame::Grant { id }),
            PAYLOAD => Some(Frame::Payload { id, bytes: size }),
            _ => None,
        }
    }
}

/// Decodes a frame and encodes it again, for `drumline-fuzz`; not part of the API.
pub fn frame_again(bytes: &[u8; 40]) -> Option<[u8; 40]> {
    let frame = Frame::decode(bytes)?;
    if let Frame::Offer(offer) = &frame {
        let _ = offer.to_string();
    }
    Some(frame.encode())
}

/// `send(tag 7) of 4 f32`
impl fmt::Display for Offer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.dtype == OBJECT {
            return write!(f, "send_object(tag {}) of {} bytes", self.tag, self.count);
        }
        write!(f, "send(tag {}) of {} ", self.tag, self.count)?;
        match DType::from_code(self.dtype) {
            Some(dtype) => write!(f, "{dtype}"),
            None => write!(f, "elements of type {}", self.dtype),
        }
    }
}
