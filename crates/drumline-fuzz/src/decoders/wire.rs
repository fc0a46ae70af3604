//! Decoders of what the ranks of a group send each other over streams and through shared memory.

use drumline_engine::{
    executor::Header,
    transport::{Control, frame_again, messages_of},
};
use drumline_shm::{Announcement, Parity, PeerSegment, Segment, SegmentSize, header_again};
use drumline_store::auth::{Channel, Expected, Handshake, Hello, Nonce, Refusal, Secret};

use crate::Verdict;

/// A greeting. It must encode to the same bytes.
pub(super) fn greeting(bytes: &[u8]) -> Verdict {
    let Ok(greeting) = <&[u8; Hello::BYTES]>::try_from(bytes) else { return Verdict::Refused };
    let Ok((hello, level)) = Hello::decode(greeting) else { return Verdict::Refused };
    let nonce: [u8; 32] = std::array::from_fn(|at| greeting[24 + at]);
    assert_eq!(&hello.encode(level, &Nonce(nonce)), greeting);
    Verdict::Taken
}

/// A handshake. The first byte chooses which end this is, whether there is a secret, and whether the handshake
/// is between ranks or with the store. It must end alike however the rest is split into pieces.
pub(super) fn handshake(bytes: &[u8]) -> Verdict {
    let Some((&form, said)) = bytes.split_first() else { return Verdict::Refused };
    let said = &said[..said.len().min(Hello::BYTES + 64)];
    let whole = shake(form, &[said]);
    for cut in 0..=said.len() {
        let (front, rest) = said.split_at(cut);
        assert_eq!(shake(form, &[front, rest]), whole, "torn after {cut} bytes");
    }
    let single: Vec<&[u8]> = said.chunks(1).collect();
    assert_eq!(shake(form, &single), whole, "torn at every byte");
    whole.2.into()
}

/// The outcome of a handshake: the number of bytes that it has taken or why it refuses, its output, and the
/// peer.
type Shaken = (Result<usize, Refusal>, Vec<u8>, Option<Hello>);

fn shake(form: u8, pieces: &[&[u8]]) -> Shaken {
    let secret = (form & 2 != 0).then(|| Secret::new([b's'; 32]).ok()).flatten();
    let (ours, expected) = match form & 4 {
        0 => handshake_of_ranks(),
        _ => (Hello::STORE, Expected::STORE),
    };
    let nonce = Nonce([7; 32]);
    let mut handshake = match form & 1 {
        0 => Handshake::call(ours, expected, secret, nonce),
        _ => Handshake::answer(ours, expected, secret, nonce),
    };
    let mut output = handshake.take_output();
    let mut taken = Ok(0);
    for piece in pieces {
        let wanted = handshake.wanted();
        let more = handshake.receive(piece);
        output.extend(handshake.take_output());
        match (more, &mut taken) {
            (Ok(more), Ok(taken)) => {
                assert!(more == piece.len() || handshake.wanted() == 0);
                assert!(more > 0 || piece.is_empty() || wanted == 0);
                *taken += more;
            }
            (Err(refusal), _) => {
                assert_eq!((handshake.wanted(), handshake.peer()), (0, None));
                let _ = refusal.to_string();
                taken = Err(refusal);
                break;
            }
            (Ok(_), Err(_)) => {}
        }
    }
    (taken, output, handshake.peer().copied())
}

/// The greeting of rank 1 of 8, which expects any of the ranks.
pub(crate) fn handshake_of_ranks() -> (Hello, Expected) {
    let ours = Hello { channel: Channel::Control, rank: 1, world_size: 8, group: 7 };
    (ours, Expected { ranks: 0..8, world_size: 8, group: 7 })
}

/// A stream of control messages. The encoding of a message may differ from the input (invalid text is
/// replaced, reserved bytes are ignored), but must decode to the same message.
pub(super) fn control(bytes: &[u8]) -> Verdict {
    let mut rest = bytes.to_vec();
    let mut taken = Verdict::Refused;
    loop {
        match Control::take(&mut rest) {
            Err(_) => return Verdict::Refused,
            Ok(None) => return taken,
            Ok(Some(message)) => {
                let written = message.encode();
                // A longer encoding may have a text that was cut at the maximum length.
                if written.len() < CONTROL_BYTES_MAX - 64 {
                    let again = Control::take(&mut written.clone());
                    assert_eq!(again, Ok(Some(message)));
                }
                taken = Verdict::Taken;
            }
        }
    }
}

/// The longest control message.
const CONTROL_BYTES_MAX: usize = 8 + 4096;

/// The header of a data message. It must encode to the same bytes, except for one byte that is ignored.
pub(super) fn header(bytes: &[u8]) -> Verdict {
    let Ok(front) = <&[u8; Header::BYTES]>::try_from(bytes) else { return Verdict::Refused };
    let Some(header) = Header::decode(front) else { return Verdict::Refused };
    let _ = header.description.to_string();
    let mut expected = *front;
    expected[7] = 0;
    assert_eq!(header.encode(), expected);
    Verdict::Taken
}

/// The frame of a message from rank to rank. It must encode to the same bytes, except for fields that its
/// kind does not use, which become zeros.
pub(super) fn frame(bytes: &[u8]) -> Verdict {
    let Ok(frame) = <&[u8; 40]>::try_from(bytes) else { return Verdict::Refused };
    let Some(again) = frame_again(frame) else { return Verdict::Refused };
    assert_eq!(frame_again(&again), Some(again));
    assert_eq!((again[0], &again[8..16]), (frame[0], &frame[8..16]));
    Verdict::Taken
}

/// Frames and payloads of a peer, while sends and receives are posted. The first byte says into pieces of
/// what size the rest is split. The outcome must not depend on it.
pub(super) fn messages(bytes: &[u8]) -> Verdict {
    let Some((&piece, said)) = bytes.split_first() else { return Verdict::Refused };
    let done = messages_of(said, usize::from(piece));
    let whole = messages_of(said, said.len());
    assert_eq!(done.as_ref().ok(), whole.as_ref().ok());
    done.into()
}

/// The size of the file in 8 bytes, and the first line of a segment. The line must encode to the same bytes,
/// except for its reserved end.
pub(super) fn segment(bytes: &[u8]) -> Verdict {
    let Some((size, line)) = bytes.split_first_chunk() else { return Verdict::Refused };
    let Ok(line) = <&[u8; 64]>::try_from(line) else { return Verdict::Refused };
    let again = header_again(line, u64::from_le_bytes(*size));
    if let Some(again) = &again {
        assert_eq!(again[..32], line[..32]);
    }
    again.into()
}

/// What a neighbour announces in a real segment: digest, place and length in 8 bytes each, then the
/// description. A place outside the arena must be refused.
pub(super) fn announcement(bytes: &[u8]) -> Verdict {
    let Ok(bytes) = <&[u8; 88]>::try_from(bytes) else { return Verdict::Refused };
    let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    let (digest, place, length) = (number(0), number(8), number(16) as usize);
    let description: [u8; 64] = std::array::from_fn(|at| bytes[24 + at]);
    let size = SegmentSize { slot_bytes: 1, arena_bytes: 1 };
    let Ok(own) = Segment::create(size) else { return Verdict::Refused };
    let seen = own.handles().and_then(PeerSegment::map);
    let Ok(seen) = seen else { return Verdict::Refused };
    let announced = Announcement { digest, place };
    own.announce(Parity::Odd, announced, &description);
    own.post(Parity::Odd);
    assert_eq!((seen.announcement(Parity::Odd), seen.posted(Parity::Odd)), (announced, 1));
    assert_eq!(seen.description(Parity::Odd), description);
    if let Some(header) = Header::decode(&description) {
        let _ = header.description.to_string();
    }
    let lies = |arena: usize, bytes: usize| {
        usize::try_from(place)
            .ok()
            .and_then(|at| at.checked_add(bytes))
            .is_some_and(|end| end <= arena)
    };
    let place = usize::try_from(place).unwrap_or(usize::MAX);
    let floats = seen.arena::<f32>(place, length);
    if floats.is_ok() {
        assert!(place % 4 == 0 && lies(seen.slot_bytes(), 4 * length));
    }
    assert_eq!(seen.arena::<u8>(place, length).is_ok(), lies(seen.slot_bytes(), length));
    let end = place.saturating_add(length);
    let in_slot = seen.slot::<u8>(Parity::Odd, place..end).is_ok();
    assert_eq!(in_slot, place <= end && end <= seen.slot_bytes());
    let _ = seen.payload::<u8>(Parity::Odd, place..end);
    floats.into()
}
