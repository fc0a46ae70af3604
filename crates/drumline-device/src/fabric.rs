//! What joins devices directly, without the memory of the host: NCCL.

use std::fmt::Debug;
use std::sync::Arc;

use drumline_kernels::{DType, ReduceOp};

use crate::{Place, Result, Stream};

/// A library that joins devices, for one of them.
pub trait Fabric: Debug + Send + Sync {
    /// What it is, with its version: the ranks of a communicator need not have the same.
    fn name(&self) -> String;

    /// Whether it can do this with elements of this type.
    ///
    /// # Errors
    ///
    /// What it lacks, as a sentence.
    fn supports(&self, dtype: DType, work: Work) -> Result<(), String>;

    /// How the ranks of a new communicator find each other: one rank makes these 128 bytes, and gives them to all others.
    ///
    /// # Errors
    ///
    /// What the library says.
    fn unique_id(&self) -> Result<Vec<u8>>;

    /// Begins to make a communicator, which all ranks do with the same id. It returns at once.
    ///
    /// # Errors
    ///
    /// What the library says.
    fn join(&self, id: &[u8], rank: usize, size: usize) -> Result<Arc<dyn Communicator>>;

    /// Why two ranks cannot share a device, and what would let them. `None`: they can.
    fn one_rank_each(&self) -> Option<String>;
}

/// One rank's end of a group of devices. Any thread may use it.
pub trait Communicator: Debug + Send + Sync {
    /// Whether all that was asked of it is done or queued. Does not wait.
    ///
    /// # Errors
    ///
    /// What has gone wrong since, as far as the library tells. A rank that dies is told to nobody.
    fn is_ready(&self) -> Result<bool>;

    /// Queues calls as one operation, if the communicator is ready; otherwise it waits for that. They are queued when it
    /// is ready again.
    ///
    /// # Errors
    ///
    /// Nothing is queued for wrong arguments, and no rank has heard of it. What the library says.
    fn queue(&self, calls: &[Call], stream: &dyn Stream) -> Result<()>;

    /// Ends what is queued, in whatever state. Streams go on.
    ///
    /// # Errors
    ///
    /// What the library says. The communicator is not usable then, either.
    fn abort(&self) -> Result<()>;
}

/// How elements are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operator {
    /// As the operator says.
    Plain(ReduceOp),
    /// Each rank's elements are multiplied with its factor, and then added.
    PreMulSum(f64),
}

impl Operator {
    /// What must be there for it.
    pub fn work(self) -> Work {
        match self {
            Operator::Plain(operator) => Work::Reduce(operator),
            Operator::PreMulSum(_) => Work::PreMulSum,
        }
    }
}

impl From<ReduceOp> for Operator {
    fn from(operator: ReduceOp) -> Operator {
        Operator::Plain(operator)
    }
}

/// An operation of a [`Communicator`]. What only moves data has no type: it moves bytes.
///
/// Operands do not overlap, but where an operation says that it can be in place.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Call {
    /// All ranks get the reduction of all. In place: `to` is `from`.
    AllReduce {
        /// This rank's elements.
        from: Place,
        /// For the result.
        to: Place,
        /// The type of the elements.
        dtype: DType,
        /// How they are combined.
        operator: Operator,
    },
    /// One rank gets the reduction of all. In place: `to` is `from`.
    Reduce {
        /// This rank's elements.
        from: Place,
        /// For the result, on the root.
        to: Option<Place>,
        /// The type of the elements.
        dtype: DType,
        /// How they are combined.
        operator: Operator,
        /// The rank that gets the result.
        root: usize,
    },
    /// Each rank gets its block of the reduction of all. In place: `to` is that block of `from`.
    ReduceScatter {
        /// This rank's elements: a block for each rank.
        from: Place,
        /// For this rank's block of the result.
        to: Place,
        /// The type of the elements.
        dtype: DType,
        /// How they are combined.
        operator: Operator,
    },
    /// All ranks get the bytes of one, in place.
    Broadcast {
        /// On the root what is sent, on the others where it goes.
        place: Place,
        /// The rank that sends.
        root: usize,
    },
    /// All ranks get the bytes of all. In place: `from` is this rank's block of `to`.
    AllGather {
        /// This rank's bytes.
        from: Place,
        /// A block for each rank.
        to: Place,
    },
    /// One rank gets the bytes of all. In place: `from` is the root's block of `to`.
    Gather {
        /// This rank's bytes.
        from: Place,
        /// On the root, a block for each rank.
        to: Option<Place>,
        /// The rank that gets them.
        root: usize,
    },
    /// Each rank gets a block of one rank's bytes. In place: `to` is the root's block of `from`.
    Scatter {
        /// On the root, a block for each rank.
        from: Option<Place>,
        /// For this rank's block.
        to: Place,
        /// The rank that sends.
        root: usize,
    },
    /// Each rank sends each rank a block.
    AllToAll {
        /// A block for each rank.
        from: Place,
        /// A block of each rank.
        to: Place,
    },
    /// One rank gets bytes of this rank. It is over when they were received.
    Send {
        /// What is sent.
        from: Place,
        /// The rank that receives.
        peer: usize,
    },
    /// This rank gets bytes that another sends.
    Receive {
        /// Where they go.
        to: Place,
        /// The rank that sends.
        peer: usize,
    },
}

/// A kind of work, for [`Fabric::supports`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Bytes are moved, and none is changed.
    Move,
    /// Elements are reduced.
    Reduce(ReduceOp),
    /// Elements are multiplied with a factor, and added.
    PreMulSum,
}
