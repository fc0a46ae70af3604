use std::fmt;

/// How the ranks of a new communicator find each other: one rank [makes](crate::nccl::Nccl::unique_id) it, and gives it
/// to all others.
#[derive(Clone, PartialEq, Eq)]
#[repr(transparent)]
pub struct UniqueId([u8; UniqueId::BYTES]);

impl UniqueId {
    /// How long it is.
    pub const BYTES: usize = 128;

    /// What another rank has sent.
    pub const fn from_bytes(bytes: [u8; UniqueId::BYTES]) -> UniqueId {
        UniqueId(bytes)
    }

    /// For the other ranks.
    pub const fn to_bytes(&self) -> [u8; UniqueId::BYTES] {
        self.0
    }
}

impl fmt::Debug for UniqueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("UniqueId")
    }
}
