//! Operations, as data.

use drumline_device::Place;
use drumline_kernels::{DType, ReduceOp};

use crate::nccl::supports::Work;

/// How elements are combined.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Operator {
    /// As the operator says.
    Plain(ReduceOp),
    /// Each rank's elements are multiplied with its factor, and then added.
    PreMulSum(f64),
}

impl Operator {
    pub(crate) fn work(self) -> Work {
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

/// An operation of a [`Communicator`](crate::nccl::Communicator). What only moves data has no type: it moves bytes.
///
/// Operands do not overlap, but where an operation says that it can be in place.
///
/// ```no_run
/// # fn exchange(
/// #     communicator: &drumline_cuda::nccl::Communicator,
/// #     stream: &dyn drumline_device::Stream,
/// #     (mine, theirs): (drumline_device::Place, drumline_device::Place),
/// # ) -> drumline_device::Result<()> {
/// use drumline_cuda::nccl::Call;
///
/// // Together: one after the other would wait for ever.
/// let peer = 1 - communicator.rank();
/// let calls = [Call::Send { from: mine, peer }, Call::Receive { to: theirs, peer }];
/// communicator.queue(&calls, stream)
/// # }
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
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
