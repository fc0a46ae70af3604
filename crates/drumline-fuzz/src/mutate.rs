//! Random changes of bytes.

use fastrand::Rng;

/// The length of the longest input.
pub const BYTES_MAX: usize = 1 << 14;

/// Changes `bytes` in one to four places. Some changes copy bytes from `other`.
pub fn mutate(bytes: &[u8], other: &[u8], random: &mut Rng) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    for _ in 0..random.usize(1..=4) {
        change(&mut bytes, other, random);
    }
    bytes.truncate(BYTES_MAX);
    bytes
}

fn change(bytes: &mut Vec<u8>, other: &[u8], random: &mut Rng) {
    if bytes.is_empty() {
        bytes.push(random.u8(..));
        return;
    }
    let at = random.usize(..bytes.len());
    match random.u8(..10) {
        0 => bytes[at] ^= 1 << random.u8(..8),
        1 => {
            bytes[at] =
                random.choice([0, 1, b'0', b'9', b' ', b'\n', 0x7f, 0x80, 0xff]).unwrap_or(0)
        }
        2 => bytes[at] = random.u8(..),
        3 => bytes.truncate(at),
        4 => drop(bytes.drain(at..(at + random.usize(1..=16)).min(bytes.len()))),
        5 => {
            // Repeats a piece of the input.
            let end = (at + random.usize(1..=64)).min(bytes.len());
            let piece = bytes[at..end].to_vec();
            bytes.splice(at..at, piece);
        }
        6 => {
            // Joins the beginning of one input with the end of the other.
            bytes.truncate(at);
            bytes.extend_from_slice(&other[random.usize(..=other.len())..]);
        }
        7 => number(bytes, at, random),
        8 => digits(bytes, at, random),
        _ => bytes.insert(at, random.u8(..)),
    }
}

/// Overwrites the bytes at `at` with a number that might be a length.
fn number(bytes: &mut [u8], at: usize, random: &mut Rng) {
    let number = match random.u8(..8) {
        0 => u64::MAX,
        1 => u64::MAX >> 1,
        2 => 1 << 63,
        3 => u32::MAX.into(),
        4 => 1 << random.u8(..64),
        5 => bytes.len() as u64 + random.u64(..17),
        6 => (bytes.len() as u64).saturating_sub(random.u64(..17)),
        _ => random.u64(..),
    };
    let width = random.choice([1, 2, 4, 8]).unwrap_or(8);
    for (place, byte) in bytes[at..].iter_mut().zip(number.to_le_bytes()).take(width) {
        *place = byte;
    }
}

/// Replaces a number that is written in decimal digits by another one.
fn digits(bytes: &mut Vec<u8>, near: usize, random: &mut Rng) {
    let Some(start) = bytes[near..].iter().position(u8::is_ascii_digit).map(|at| near + at) else {
        return;
    };
    let count = bytes[start..].iter().take_while(|byte| byte.is_ascii_digit()).count();
    let number = match random.u8(..7) {
        0 => u64::MAX.to_string(),
        1 => i64::MIN.to_string(),
        2 => i64::MAX.to_string(),
        3 => "1e300".to_owned(),
        4 => "9".repeat(random.usize(1..60)),
        5 => random.u32(..).to_string(),
        _ => random.u8(..).to_string(),
    };
    bytes.splice(start..start + count, number.bytes());
}
