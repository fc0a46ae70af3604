//! The header of every message, and how ranks find out that they made different calls.
//!
//! Each data message begins with a header of 64 bytes, little-endian:
//!
//! ```text
//!  0        4    5    6    7    8                16               24               32
//!  ┌────────┬────┬────┬────┬────┬────────────────┬────────────────┬────────────────┐
//!  │ "DRM1" │ op │red.│type│  0 │  group digest  │    sequence    │     count      │
//!  ├────────┼────┴────┴────┴────┼────────────────┼────────────────┼────────────────┤
//!  │  root  │       part        │   algorithm    │ payload bytes  │ splits │custom │
//!  └────────┴───────────────────┴────────────────┴────────────────┴────────┴────────┘
//!  32       36                  40               48               56       60       64
//! ```
//!
//! `splits` is 0 where every rank has the same share, `custom` a digest of the name of a custom
//! operator, where there is one.
//!
//! The whole description travels, not only a digest of it: 64 bytes vanish beside the cost of a
//! packet, and the first rank that sees a difference can say at once who called what.

use std::fmt;

use drumline_schedule::{ALGORITHMS, Collective, Counts, MemoryUse};
use xxhash_rust::xxh3::xxh3_64;

use crate::{DType, operator::OperatorKind};

/// A call as one rank describes it to the others.
///
/// Codes are kept as they travel. So a description from a peer can be compared and shown even if this build
/// does not know a code.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Description {
    group: u64,
    sequence: u64,
    collective: u8,
    reduce_op: u8,
    dtype: u8,
    root: u32,
    count: u64,
    splits: u32,
    custom: u32,
    algorithm: [u8; 8],
    name: OwnName,
}

/// The name of a custom operator, in descriptions that this rank made itself. It does not travel and is not
/// compared.
#[derive(Clone, Copy, Default)]
struct OwnName(&'static str);

impl PartialEq for OwnName {
    fn eq(&self, _: &OwnName) -> bool {
        true
    }
}

impl Eq for OwnName {}

const NO_ROOT: u32 = u32::MAX;

/// The value of `splits` if all blocks have the same number of elements.
const EVEN: u32 = 0;

/// The name of an algorithm as it travels. A long name is cut; its last two bytes then stand for its length
/// and its last letter, so that all names differ.
fn short(name: &str) -> [u8; 8] {
    let mut short = [0; 8];
    for (to, from) in short.iter_mut().zip(name.bytes()) {
        *to = from;
    }
    if let (true, Some(last)) = (name.len() > short.len(), name.bytes().last()) {
        short[6] = b'a' + (name.len() % 26) as u8;
        short[7] = last;
    }
    short
}

/// The value of `splits` if only the two ends of a message know its length.
const BY_PAIR: u32 = u32::MAX;

impl Description {
    /// `count` elements of `dtype` in every block.
    pub fn new(
        group: u64,
        sequence: u64,
        collective: Collective,
        dtype: DType,
        count: usize,
        algorithm: &str,
    ) -> Description {
        Description {
            group,
            sequence,
            collective: collective.code(),
            reduce_op: 0,
            dtype: dtype as u8,
            root: NO_ROOT,
            count: count as u64,
            splits: EVEN,
            custom: 0,
            algorithm: short(algorithm),
            name: OwnName::default(),
        }
    }

    pub(crate) fn with_operator(self, operator: OperatorKind) -> Description {
        let name = match operator {
            OperatorKind::Custom(name) => name,
            OperatorKind::Builtin(_) | OperatorKind::PremulSum => "",
        };
        Description {
            reduce_op: operator.code(),
            custom: operator.digest(),
            name: OwnName(name),
            ..self
        }
    }

    pub(crate) fn with_root(self, root: usize) -> Description {
        Description { root: root as u32, ..self }
    }

    /// The same description with blocks of these lengths.
    pub fn with_counts(self, counts: &Counts) -> Description {
        match counts {
            Counts::Even(elements) => Description { count: *elements as u64, splits: EVEN, ..self },
            Counts::ByRank(borders) => {
                let counts = (0..borders.blocks()).map(|rank| borders.block(rank).len());
                Description { count: borders.total() as u64, ..self }.with_blocks(counts)
            }
            Counts::Own { .. } => Description { count: 0, splits: BY_PAIR, ..self },
        }
    }

    /// The same description with a digest of these lengths, which must agree on all ranks.
    pub fn with_blocks(self, lengths: impl Iterator<Item = usize>) -> Description {
        let bytes: Vec<u8> = lengths.flat_map(|len| (len as u64).to_le_bytes()).collect();
        Description { splits: (xxh3_64(&bytes) as u32).clamp(EVEN + 1, BY_PAIR - 1), ..self }
    }

    /// Whether only the two ends of a message know its length.
    pub fn is_by_pair(&self) -> bool {
        self.splits == BY_PAIR
    }

    /// The description of no call.
    pub(crate) const NONE: Description = Description {
        group: 0,
        sequence: 0,
        collective: 0,
        reduce_op: 0,
        dtype: 0,
        root: NO_ROOT,
        count: 0,
        splits: EVEN,
        custom: 0,
        algorithm: [0; 8],
        name: OwnName(""),
    };

    /// The same description with another sequence number.
    pub(crate) fn numbered(self, sequence: u64) -> Description {
        Description { sequence, ..self }
    }

    /// A digest, for places that have no room for the description.
    pub(crate) fn digest(self) -> u64 {
        xxh3_64(&Header { description: self, part: 0, payload: 0 }.encode())
    }

    /// The number of collectives that the group had called before.
    pub fn sequence(&self) -> u64 {
        self.sequence
    }

    pub(crate) fn group(&self) -> u64 {
        self.group
    }
}

/// `all_reduce(sum) of 10 f32 [doubling]`, `all_gather of 10 f32 in blocks #1a2b3c4d [direct]`
impl fmt::Display for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Collective::from_code(self.collective) {
            Some(collective) => f.write_str(collective.name())?,
            None => write!(f, "operation {}", self.collective)?,
        }
        if self.reduce_op != 0 {
            f.write_str("(")?;
            OperatorKind::show(f, self.reduce_op, self.custom, self.name.0)?;
            f.write_str(")")?;
        }
        if self.root != NO_ROOT {
            write!(f, "(root {})", self.root)?;
        }
        let barriers = [Collective::Barrier, Collective::MonitoredBarrier];
        if !barriers.iter().any(|barrier| barrier.code() == self.collective) {
            f.write_str(" of ")?;
            if self.splits != BY_PAIR {
                write!(f, "{} ", self.count)?;
            }
            match DType::from_code(self.dtype) {
                Some(dtype) => write!(f, "{dtype}")?,
                None => write!(f, "elements of type {}", self.dtype)?,
            }
            match self.splits {
                EVEN => {}
                BY_PAIR => f.write_str(" in uneven blocks")?,
                digest => write!(f, " in blocks #{digest:08x}")?,
            }
        }
        let cut = self.algorithm.split(|byte| *byte == 0).next().unwrap_or_default();
        match ALGORITHMS.iter().find(|row| short(row.name) == self.algorithm) {
            Some(row) if row.memory == MemoryUse::Registered => {
                write!(f, " in registered memory [{}]", row.name)
            }
            Some(row) => write!(f, " [{}]", row.name),
            None => write!(f, " [{}]", cut.escape_ascii()),
        }
    }
}

impl fmt::Debug for Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{} {self}", self.sequence)
    }
}

/// The header of one data message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The call that the message belongs to.
    pub description: Description,
    /// The number of messages of this call that the sender had sent to the receiver before.
    pub part: u32,
    /// The length of the payload in bytes.
    pub payload: u64,
}

const MAGIC: [u8; 4] = *b"DRM1";

impl Header {
    /// The length of a header.
    pub const BYTES: usize = 64;

    /// The bytes on the wire.
    pub fn encode(&self) -> [u8; Header::BYTES] {
        let d = &self.description;
        let mut bytes = [0; Header::BYTES];
        bytes[0..4].copy_from_slice(&MAGIC);
        bytes[4..8].copy_from_slice(&[d.collective, d.reduce_op, d.dtype, 0]);
        bytes[8..16].copy_from_slice(&d.group.to_le_bytes());
        bytes[16..24].copy_from_slice(&d.sequence.to_le_bytes());
        bytes[24..32].copy_from_slice(&d.count.to_le_bytes());
        bytes[32..36].copy_from_slice(&d.root.to_le_bytes());
        bytes[36..40].copy_from_slice(&self.part.to_le_bytes());
        bytes[40..48].copy_from_slice(&d.algorithm);
        bytes[48..56].copy_from_slice(&self.payload.to_le_bytes());
        bytes[56..60].copy_from_slice(&d.splits.to_le_bytes());
        bytes[60..64].copy_from_slice(&d.custom.to_le_bytes());
        bytes
    }

    /// Decodes a header. `None`: the bytes do not begin with the magic number, so the stream is not ours or
    /// has lost its place.
    pub fn decode(bytes: &[u8; Header::BYTES]) -> Option<Header> {
        if bytes[0..4] != MAGIC {
            return None;
        }
        let u32_at = |at| u32::from_le_bytes(array(bytes, at));
        let u64_at = |at| u64::from_le_bytes(array(bytes, at));
        Some(Header {
            description: Description {
                collective: bytes[4],
                reduce_op: bytes[5],
                dtype: bytes[6],
                group: u64_at(8),
                sequence: u64_at(16),
                count: u64_at(24),
                root: u32_at(32),
                algorithm: array(bytes, 40),
                splits: u32_at(56),
                custom: u32_at(60),
                name: OwnName::default(),
            },
            part: u32_at(36),
            payload: u64_at(48),
        })
    }
}

/// The bytes that all headers of one kind of call have in common. They differ only in sequence number and
/// payload.
#[derive(Clone, Debug, PartialEq)]
pub struct Frame([u8; Header::BYTES]);

impl Frame {
    pub(crate) fn of(description: Description) -> Frame {
        Frame(Header { description, part: 0, payload: 0 }.encode())
    }

    /// The header of call number `sequence`, in the same bytes as [`Header::encode`] makes.
    pub fn header(&self, sequence: u64, payload: u64) -> [u8; Header::BYTES] {
        let mut bytes = self.0;
        bytes[16..24].copy_from_slice(&sequence.to_le_bytes());
        bytes[48..56].copy_from_slice(&payload.to_le_bytes());
        bytes
    }
}

/// `N` bytes from position `at` of a message of fixed size.
pub fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests {
    use drumline_schedule::{Algorithm, Borders};

    use super::*;
    use crate::ReduceOp;

    fn header() -> Header {
        let description = Description::new(
            0x1122_3344_5566_7788,
            7,
            Collective::AllReduce,
            DType::F32,
            10,
            "doubling",
        )
        .with_operator(OperatorKind::Builtin(ReduceOp::Avg));
        Header { description, part: 3, payload: 40 }
    }

    #[test]
    fn headers_survive_the_wire() {
        assert_eq!(Header::decode(&header().encode()), Some(header()));
    }

    #[test]
    fn the_bytes_lie_where_the_drawing_says() {
        let bytes = header().encode();
        assert_eq!(&bytes[..8], b"DRM1\x01\x02\x03\0");
        assert_eq!(bytes[8..16], 0x1122_3344_5566_7788_u64.to_le_bytes());
        assert_eq!((bytes[16], bytes[24], bytes[36], bytes[48]), (7, 10, 3, 40));
        assert_eq!(&bytes[32..36], b"\xff\xff\xff\xff");
        assert_eq!(&bytes[40..48], b"doubling");
    }

    #[test]
    fn every_field_of_a_description_counts() {
        for at in (4..7).chain(8..36).chain(40..48).chain(56..64) {
            let mut bytes = header().encode();
            bytes[at] ^= 1;
            let other = Header::decode(&bytes).unwrap();
            assert_ne!(other.description, header().description, "byte {at} is not compared");
        }
    }

    #[test]
    fn algorithms_are_told_apart_by_what_travels_of_their_names() {
        for (at, row) in ALGORITHMS.iter().enumerate() {
            let same = |other: &&Algorithm| short(other.name) == short(row.name);
            assert!(ALGORITHMS[..at].iter().filter(same).all(|other| other.name == row.name));
        }
    }

    #[test]
    fn descriptions_read_like_calls() {
        assert_eq!(header().description.to_string(), "all_reduce(avg) of 10 f32 [doubling]");
        let push = |name| Description::new(0, 0, Collective::AllReduce, DType::U8, 3, name);
        assert_eq!(
            push("hierarchical-push").to_string(),
            "all_reduce of 3 u8 in registered memory [hierarchical-push]"
        );
        assert_eq!(push("of a backend").to_string(), "all_reduce of 3 u8 [of a bmd]");
        let broadcast =
            Description::new(0, 0, Collective::Broadcast, DType::U8, 3, "binomial").with_root(2);
        assert_eq!(broadcast.to_string(), "broadcast(root 2) of 3 u8 [binomial]");
        let gather = Description::new(0, 0, Collective::AllGather, DType::F16, 0, "direct");
        let borders = |counts| Borders::new(counts).unwrap();
        let by_rank = |counts| gather.with_counts(&Counts::ByRank(borders(counts)));
        let text = by_rank(&[3, 4]).to_string();
        assert!(text.starts_with("all_gather of 7 f16 in blocks #"), "{text}");
        assert!(text.ends_with(" [direct]"), "{text}");
        assert_ne!(by_rank(&[3, 4]), by_rank(&[4, 3]));
        let own = Counts::Own { sent: borders(&[1]), received: borders(&[2]) };
        assert_eq!(
            gather.with_counts(&own).to_string(),
            "all_gather of f16 in uneven blocks [direct]"
        );
    }

    #[test]
    fn custom_operators_are_compared_by_their_names() {
        let named = |name| {
            let operator = OperatorKind::Custom(name);
            Header { description: header().description.with_operator(operator), ..header() }
        };
        let arrived = Header::decode(&named("gcd").encode()).unwrap();
        assert_eq!(arrived, named("gcd"));
        assert_ne!(arrived, named("lcm"));
        // The rank that made the call knows the name. The peer knows only the digest.
        let digest = OperatorKind::Custom("gcd").digest();
        let shown = |name| format!("all_reduce(custom{name} {digest:08x}) of 10 f32 [doubling]");
        assert_eq!(named("gcd").description.to_string(), shown(" gcd"));
        assert_eq!(arrived.description.to_string(), shown(""));
    }

    #[test]
    fn frames_stand_for_all_calls_of_a_kind() {
        let Header { description, payload, .. } = header();
        let frame = Frame::of(description.numbered(0));
        let whole = Header { description: description.numbered(9), part: 0, payload };
        assert_eq!(frame.header(9, payload), whole.encode());
    }

    #[test]
    fn strangers_are_not_decoded() {
        assert_eq!(Header::decode(&[0; 64]), None);
    }
}
