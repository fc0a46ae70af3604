//! The format of the TCP store: requests and replies, encoded and decoded without I/O.
//!
//! The format is that of PyTorch's `TCPStore`, so a torch process can be the other end on either side.
//! Requests have no frame, no version and no authentication. A request is one opcode byte and its arguments.
//! Integers are little-endian. Text and bytes are a `u64` length and that many bytes. A list is a 64-bit
//! count and its items.
//!
//! ```text
//! VALIDATE   00 | ce f7 85 3c                                     magic
//! SET        01 | 02 00 00 00 00 00 00 00  2f 6b                  key "/k"
//!               | 01 00 00 00 00 00 00 00  76                     value "v"
//! ADD        04 | 02 00 00 00 00 00 00 00  2f 6e                  key "/n"
//!               | ff ff ff ff ff ff ff ff                         amount -1
//! ```
//!
//! Two requests are ours: FETCH and TAKE wait and answer in one round trip. torch's clients wait first and
//! ask then. A client learns without a round trip of its own whether the server supports them: its first
//! request is a PING of [`ASK_EXTENSIONS`]. Our servers answer with [`EXTENSIONS`], all other servers with
//! the same number.
//!
//! [`Request`] is the whole table. The decoder works on a prefix of a stream. It returns the first request in
//! it, or the number of bytes that must be there before another try can succeed. It refuses anything that
//! exceeds a `*_MAX` limit as soon as it sees the length.
//!
//! ```
//! # use drumline_store as drumline;
//! use drumline::store::tcp::protocol::{Decoded, Key, Request, Value, decode};
//!
//! let mut bytes = Vec::new();
//! Request::Set(Key(b"/k"), Value(b"v")).encode(&mut bytes);
//! assert_eq!(bytes, b"\x01\x02\0\0\0\0\0\0\0/k\x01\0\0\0\0\0\0\0v");
//! assert_eq!(decode(&bytes[..5]), Ok(Decoded::NeedsBytes(9)));
//! assert_eq!(decode(&bytes), Ok(Decoded::Request(Request::Set(Key(b"/k"), Value(b"v")), 20)));
//! ```

use std::fmt;

/// The argument of [`Request::Validate`]. It tells a store's client from a stray connection.
pub const MAGIC: u32 = 0x3C85_F7CE;

/// VALIDATE, with which every connection begins.
pub(super) const OPENING: [u8; 5] = [0, 0xCE, 0xF7, 0x85, 0x3C];

/// The longest key in bytes, including the `/` that clients put in front.
pub const KEY_BYTES_MAX: usize = 8192;

/// The longest value, in bytes.
pub const VALUE_BYTES_MAX: usize = 8 << 20;

/// The most keys (or pairs) in one request.
pub const KEYS_PER_REQUEST_MAX: usize = 131_072;

/// The longest request, in bytes. torch has no such limit: its largest legal request is a terabyte.
pub const REQUEST_BYTES_MAX: usize = 32 << 20;

/// The most keys that a client lets a server list.
pub const KEYS_STORED_MAX: usize = 16 << 20;

/// Reply to [`Request::Check`]: all keys are present.
pub const READY: u8 = 0;

/// Reply to [`Request::Check`]: a key is absent.
pub const NOT_READY: u8 = 1;

/// Reply to [`Request::Wait`] and [`Request::Barrier`]: the wait is over.
pub const STOP_WAITING: u8 = 0;

/// Reply to [`Request::CancelWait`].
pub const WAIT_CANCELED: u8 = 1;

/// The nonce of a [`Request::Ping`] that asks for our extensions. torch's clients send their process id,
/// which is never this large.
pub const ASK_EXTENSIONS: u32 = 0xD5D5_0001;

/// The answer to [`ASK_EXTENSIONS`]: the server knows [`Request::Fetch`] and [`Request::Take`].
pub const EXTENSIONS: u32 = 0xD5D5_8001;

/// A key as the server sees it: opaque bytes. Clients put a `/` in front of the user's key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Key<'a>(pub &'a [u8]);

/// A value: opaque bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Value<'a>(pub &'a [u8]);

/// The number of handles that have joined. It is torch's only key without a leading `/`.
pub(super) const WORKERS: Key<'static> = Key(b"init/");

/// Makes [`Request`] from the table of the protocol, which has one row for each opcode.
macro_rules! requests {
    ($($(#[$doc:meta])* $opcode:literal $name:ident($($field:ident: $kind:ty),*),)*) => {
        /// A request of a client. Each row says what the server replies.
        #[derive(Clone, Debug, PartialEq, Eq)]
        pub enum Request<'a> {
            $($(#[$doc])* $name($($kind),*),)*
        }

        impl<'a> Request<'a> {
            /// Appends the request's bytes to `out`.
            pub fn encode(&self, out: &mut Vec<u8>) {
                match self {
                    $(Request::$name($($field),*) => {
                        out.push($opcode);
                        $($field.write(out);)*
                    })*
                }
            }

            fn read(reader: &mut Reader<'a>) -> Result<Self, Stop> {
                match u8::read(reader)? {
                    $($opcode => Ok(Request::$name($(<$kind>::read(reader)?),*)),)*
                    opcode => Err(ProtocolError::UnknownOpcode(opcode).into()),
                }
            }
        }
    };
}

requests! {
    /// Must be the first request of a connection, with [`MAGIC`]. No reply.
    0 Validate(magic: u32),
    /// Stores a value. No reply.
    1 Set(key: Key<'a>, value: Value<'a>),
    /// Key, expected, desired. Replies with a value.
    2 CompareSet(key: Key<'a>, expected: Value<'a>, desired: Value<'a>),
    /// Replies with the value, empty if absent.
    3 Get(key: Key<'a>),
    /// Adds to a decimal number. Replies with the sum, an `i64`.
    4 Add(key: Key<'a>, amount: i64),
    /// Replies [`READY`] or [`NOT_READY`].
    5 Check(keys: Vec<Key<'a>>),
    /// Replies [`STOP_WAITING`] once all keys have appeared.
    6 Wait(keys: Vec<Key<'a>>),
    /// Replies with the number of keys, an `i64`.
    7 GetNumKeys(),
    /// Replies with the number of keys removed, an `i64`: 0 or 1.
    8 DeleteKey(key: Key<'a>),
    /// Appends a value to the present one. No reply.
    9 Append(key: Key<'a>, value: Value<'a>),
    /// Replies with one value for each key, without a count.
    10 MultiGet(keys: Vec<Key<'a>>),
    /// Stores values. No reply.
    11 MultiSet(pairs: Vec<(Key<'a>, Value<'a>)>),
    /// Ends a wait of any kind. Replies [`WAIT_CANCELED`], even if the wait was over already.
    12 CancelWait(),
    /// Replies with the same number, or with [`EXTENSIONS`] to [`ASK_EXTENSIONS`].
    13 Ping(nonce: u32),
    /// Puts a value at the end of a queue. No reply.
    14 QueuePush(key: Key<'a>, value: Value<'a>),
    /// Replies with the length before, an `i64`, and if that is not 0 with the first value.
    15 QueuePop(key: Key<'a>),
    /// Replies with the length, an `i64`.
    16 QueueLen(key: Key<'a>),
    /// Replies with the number of keys, an `i64`, and each key.
    17 ListKeys(),
    /// Key, world size. Replies [`STOP_WAITING`] once that many have come.
    18 Barrier(key: Key<'a>, world_size: i64),
    /// Ours. Replies [`STOP_WAITING`] once all keys have values, and their values at that moment.
    208 Fetch(keys: Vec<Key<'a>>),
    /// Ours. Replies [`STOP_WAITING`] once the queue has an item for this client, and the item.
    209 Take(key: Key<'a>),
}

/// What [`decode`] found at the beginning of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Decoded<'a> {
    /// A request, and how many bytes it takes up.
    Request(Request<'a>, usize),
    /// The request is incomplete: it takes up at least this many bytes.
    NeedsBytes(usize),
}

/// Why bytes are not a request. The connection cannot go on, because the start of the next request is
/// unknown.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// No request has this opcode.
    #[error("opcode {0} is unknown")]
    UnknownOpcode(u8),
    /// A key has more than [`KEY_BYTES_MAX`] bytes.
    #[error("a key of {0} bytes exceeds {KEY_BYTES_MAX}")]
    KeyTooLong(u64),
    /// A value has more than [`VALUE_BYTES_MAX`] bytes.
    #[error("a value of {0} bytes exceeds {VALUE_BYTES_MAX}")]
    ValueTooLong(u64),
    /// A list has more than [`KEYS_PER_REQUEST_MAX`] items.
    #[error("a request with {0} keys exceeds {KEYS_PER_REQUEST_MAX}")]
    TooManyKeys(u64),
    /// A request has more than [`REQUEST_BYTES_MAX`] bytes.
    #[error("a request of {0} bytes or more exceeds {REQUEST_BYTES_MAX}")]
    RequestTooLong(usize),
}

impl fmt::Debug for ProtocolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Decodes the first request of `bytes`.
pub fn decode(bytes: &[u8]) -> Result<Decoded<'_>, ProtocolError> {
    let mut reader = Reader { bytes, position: 0 };
    let (decoded, length) = match Request::read(&mut reader) {
        Ok(request) => (Decoded::Request(request, reader.position), reader.position),
        Err(Stop::NeedsBytes(needed)) => (Decoded::NeedsBytes(needed), needed),
        Err(Stop::Invalid(error)) => return Err(error),
    };
    if length > REQUEST_BYTES_MAX {
        return Err(ProtocolError::RequestTooLong(length));
    }
    Ok(decoded)
}

/// One argument of a request, or one part of a reply.
pub(super) trait Field<'a>: Sized {
    /// The least length of such a field in bytes.
    const BYTES_MIN: usize;

    fn read(reader: &mut Reader<'a>) -> Result<Self, Stop>;

    fn write(&self, out: &mut Vec<u8>);
}

/// A position in bytes that may end too early.
pub(super) struct Reader<'a> {
    bytes: &'a [u8],
    position: usize,
}

/// Why a field could not be read.
pub(super) enum Stop {
    NeedsBytes(usize),
    Invalid(ProtocolError),
}

impl From<ProtocolError> for Stop {
    fn from(error: ProtocolError) -> Stop {
        Stop::Invalid(error)
    }
}

impl<'a> Reader<'a> {
    fn take(&mut self, length: usize) -> Result<&'a [u8], Stop> {
        let end = self.position.saturating_add(length);
        let taken = self.bytes.get(self.position..end).ok_or(Stop::NeedsBytes(end))?;
        self.position = end;
        Ok(taken)
    }

    /// A length and that many bytes.
    fn take_prefixed(
        &mut self,
        limit: usize,
        too_long: fn(u64) -> ProtocolError,
    ) -> Result<&'a [u8], Stop> {
        let length = self.length(limit, too_long)?;
        self.take(length)
    }

    fn length(&mut self, limit: usize, too_long: fn(u64) -> ProtocolError) -> Result<usize, Stop> {
        let length = u64::read(self)?;
        usize::try_from(length).ok().filter(|&l| l <= limit).ok_or(too_long(length).into())
    }
}

macro_rules! integer_fields {
    ($($integer:ty),*) => {$(
        impl Field<'_> for $integer {
            const BYTES_MIN: usize = size_of::<$integer>();

            fn read(reader: &mut Reader<'_>) -> Result<Self, Stop> {
                let mut bytes = [0; size_of::<$integer>()];
                bytes.copy_from_slice(reader.take(size_of::<$integer>())?);
                Ok(<$integer>::from_le_bytes(bytes))
            }

            fn write(&self, out: &mut Vec<u8>) {
                out.extend_from_slice(&self.to_le_bytes());
            }
        }
    )*};
}

integer_fields!(u8, u32, u64, i64);

impl<'a> Field<'a> for Key<'a> {
    const BYTES_MIN: usize = u64::BYTES_MIN;

    fn read(reader: &mut Reader<'a>) -> Result<Self, Stop> {
        reader.take_prefixed(KEY_BYTES_MAX, ProtocolError::KeyTooLong).map(Key)
    }

    fn write(&self, out: &mut Vec<u8>) {
        (self.0.len() as u64).write(out);
        out.extend_from_slice(self.0);
    }
}

impl<'a> Field<'a> for Value<'a> {
    const BYTES_MIN: usize = u64::BYTES_MIN;

    fn read(reader: &mut Reader<'a>) -> Result<Self, Stop> {
        reader.take_prefixed(VALUE_BYTES_MAX, ProtocolError::ValueTooLong).map(Value)
    }

    fn write(&self, out: &mut Vec<u8>) {
        (self.0.len() as u64).write(out);
        out.extend_from_slice(self.0);
    }
}

impl<'a, A: Field<'a>, B: Field<'a>> Field<'a> for (A, B) {
    const BYTES_MIN: usize = A::BYTES_MIN + B::BYTES_MIN;

    fn read(reader: &mut Reader<'a>) -> Result<Self, Stop> {
        Ok((A::read(reader)?, B::read(reader)?))
    }

    fn write(&self, out: &mut Vec<u8>) {
        self.0.write(out);
        self.1.write(out);
    }
}

impl<'a, T: Field<'a>> Field<'a> for Vec<T> {
    const BYTES_MIN: usize = u64::BYTES_MIN;

    fn read(reader: &mut Reader<'a>) -> Result<Self, Stop> {
        let count = reader.length(KEYS_PER_REQUEST_MAX, ProtocolError::TooManyKeys)?;
        let mut items = Vec::with_capacity(count.min(reader.bytes.len() / T::BYTES_MIN));
        for left in (0..count).rev() {
            // Asks also for the least length of the items behind the incomplete one. So a long list that
            // arrives in small pieces is scanned a few times, and not once for each piece.
            items.push(T::read(reader).map_err(|stop| match stop {
                Stop::NeedsBytes(needed) => Stop::NeedsBytes(needed + left * T::BYTES_MIN),
                invalid => invalid,
            })?);
        }
        Ok(items)
    }

    fn write(&self, out: &mut Vec<u8>) {
        (self.len() as u64).write(out);
        for item in self {
            item.write(out);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_holds_as_soon_as_the_length_is_visible() {
        for (opcode, limit, error) in [
            (1, KEY_BYTES_MAX, ProtocolError::KeyTooLong as fn(u64) -> _),
            (6, KEYS_PER_REQUEST_MAX, ProtocolError::TooManyKeys),
            (11, KEYS_PER_REQUEST_MAX, ProtocolError::TooManyKeys),
        ] {
            let mut bytes = vec![opcode];
            (limit as u64).write(&mut bytes);
            assert!(matches!(decode(&bytes), Ok(Decoded::NeedsBytes(_))), "{opcode}");
            for excess in [limit as u64 + 1, u64::MAX] {
                bytes.truncate(1);
                excess.write(&mut bytes);
                assert_eq!(decode(&bytes), Err(error(excess)));
            }
        }
        let mut bytes = vec![1];
        Key(b"/k").write(&mut bytes);
        (VALUE_BYTES_MAX as u64 + 1).write(&mut bytes);
        assert_eq!(decode(&bytes), Err(ProtocolError::ValueTooLong(VALUE_BYTES_MAX as u64 + 1)));
        assert_eq!(decode(&[19]), Err(ProtocolError::UnknownOpcode(19)));
    }

    #[test]
    fn a_request_of_many_large_values_is_refused_before_it_is_buffered() {
        let value = vec![0; VALUE_BYTES_MAX];
        let pairs = vec![(Key(b"/k"), Value(&value)); 5];
        let mut bytes = Vec::new();
        Request::MultiSet(pairs).encode(&mut bytes);
        let needed = REQUEST_BYTES_MAX / VALUE_BYTES_MAX * VALUE_BYTES_MAX;
        assert!(matches!(decode(&bytes[..needed]), Err(ProtocolError::RequestTooLong(_))));
        assert!(matches!(decode(&bytes), Err(ProtocolError::RequestTooLong(_))));
    }

    #[test]
    fn a_long_list_in_small_pieces_is_scanned_a_few_times() {
        let mut bytes = Vec::new();
        Request::Wait(vec![Key(b"/a-key"); KEYS_PER_REQUEST_MAX]).encode(&mut bytes);
        let (mut scans, mut length) = (0, 0);
        while let Decoded::NeedsBytes(needed) = decode(&bytes[..length]).unwrap() {
            assert!(needed > length);
            (scans, length) = (scans + 1, needed);
        }
        assert_eq!(length, bytes.len());
        assert!(scans < 30, "{scans} scans");
    }
}
