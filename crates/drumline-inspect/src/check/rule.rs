use std::fmt;

/// A rule that an executor relies on. Each concerns one step of one rank.
#[derive(Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rule {
    /// A peer is another rank of the world. A place in a rank's own memory names no peer.
    #[error("its peer must be another rank of the world")]
    Peer,
    /// Spans lie in their buffer. Scratch has any length.
    #[error("a span must lie in its buffer: `of` at least 1, `first + count` at most `of`")]
    Span,
    /// Some collectives have no input beside their data.
    #[error("this collective has no input buffer")]
    Input,
    /// In a buffer with a block for every rank, each block has its own windows and borders.
    #[error("a staged algorithm names such blocks one by one")]
    ManyBlocks,
    /// Blocks of any length have no common number of equal parts.
    #[error("an algorithm for blocks of different lengths names whole blocks only")]
    PartOfBlock,
    /// The input belongs to the user.
    #[error("the input is read only")]
    InputWritten,
    /// Ranks share memory, and count posts, on one host only.
    #[error("its peer must share the host")]
    OtherHost,
    /// An executor sets up only the memory that the algorithm declares.
    #[error("an algorithm that uses private memory has no slot, no post and no wait")]
    Undeclared,
    /// Neighbours share slots, and one of the users' buffers if it is registered.
    #[error("of a peer's memory only the slot may be named, or the buffer that is registered")]
    NotShared,
    /// Messages and `Reduce` act on the rank's own memory.
    #[error("only `Copy` and `ReduceTree` act on a peer's memory")]
    PeerOperand,
    /// Operands lie in different buffers, so that the executor can borrow one for writing.
    #[error("source and destination must be in different buffers")]
    SameBuffer,
    /// A tree has destinations in different buffers.
    #[error("a tree must have a destination, and no two in the same buffer")]
    TreeOutputs,
    /// An input of a tree is a destination itself or lies in another buffer.
    #[error("an input of the tree shares a destination's buffer without being the destination")]
    TreeInput,
    /// The inputs of a tree tile a node of the world's ranks.
    #[error("the inputs must tile one node of the tree, by ascending rank")]
    NotATree,
    /// An executor starts consecutive receives together, and they complete in any order.
    #[error("it overlaps a receive before it, with no other step between the two")]
    ReceivesMeet,
    /// A flush covers only messages that the rank has sent.
    #[error("flushes more messages than have been sent")]
    FlushAhead,
}

impl fmt::Debug for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
