//! The collective that a backend is asked to carry out.

use std::{fmt, ops::Range, time::Instant};

use drumline_engine::{
    Cause, call,
    executor::{Description, Header},
    operator::{OperatorKind, Reducer},
};
use drumline_schedule::{
    Blocks,
    step::{Buffer, Rank},
};

use crate::DType;
#[cfg(feature = "mpi")]
use crate::ReduceOp;
use drumline_schedule::Collective;
#[cfg(feature = "mpi")]
use drumline_schedule::Counts;

/// One collective on this rank.
///
/// | operation | `input` | `data` before | `data` after |
/// |---|---|---|---|
/// | all_reduce | | what this rank brings | the reduction |
/// | reduce | | what this rank brings | the reduction at the root; elsewhere as before |
/// | broadcast | | at the root: what it brings | what the root brought |
/// | reduce_scatter | a block for every rank | | this rank's block of the reduction |
/// | all_gather | this rank's block | | the blocks of all ranks |
/// | gather | this rank's block | | at the root: the blocks of all ranks; elsewhere empty |
/// | scatter | at the root: a block for every rank | | this rank's block |
/// | all_to_all | a block for every rank | | a block from every rank |
/// | barrier, monitored_barrier | | | |
///
/// Blocks follow each other in order of rank. [`Call::input_block`] and [`Call::data_block`] say where they
/// are. Elements are in the machine's byte order.
///
/// ```
/// # use drumline_group as drumline;
/// # use drumline_testing::carried_by;
/// use drumline::{Cause, backend::{Request, Collective}};
///
/// /// Carries out the calls of a backend.
/// fn collective(request: &mut Request<'_>) -> Result<(), Cause> {
///     match request.call.collective() {
///         Collective::AllReduce => Ok(()), // in place, and here nobody else brings anything
///         Collective::ReduceScatter => request.call.reduce(&[request.input], request.data),
///         _ => Ok(request.data.copy_from_slice(request.input)),
///     }
/// }
/// # for group in carried_by(collective, 1)? {
/// let mut gathered = [0.0_f32; 2];
/// group.all_gather(&[1.0, 2.0], &mut gathered)?;
/// assert_eq!(gathered, [1.0, 2.0]);
/// # }
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Debug)]
pub struct Request<'a> {
    /// The buffer for the result.
    pub data: &'a mut [u8],
    /// The bytes that are only read, if the collective does not work in place.
    pub input: &'a [u8],
    /// The call without its buffers.
    pub call: Call<'a>,
}

impl Request<'_> {
    /// What this rank contributes: the input, or the data if the collective works in place.
    pub fn contribution(&self) -> &[u8] {
        match self.call.collective() {
            Collective::AllReduce | Collective::ReduceSlices | Collective::Reduce => self.data,
            Collective::Broadcast if self.call.is_root() => self.data,
            Collective::Broadcast => &[],
            _ => self.input,
        }
    }
}

/// A call without its buffers.
///
/// ```
/// # use drumline_group as drumline;
/// # use drumline_testing::carried_by;
/// use drumline::{Cause, ReduceOp, backend::{Call, Request, Signature}};
///
/// /// Carries out the calls of a backend.
/// fn collective(request: &mut Request<'_>) -> Result<(), Cause> {
///     let call: Call<'_> = request.call;
///     // What this rank tells the others, and what it hears from one that calls the same.
///     let told: [u8; Signature::BYTES] = call.signature().to_bytes();
///     assert_eq!(Signature::from_bytes(&told), Some(call.signature()));
///     // Two ranks that bring the same.
///     let own = request.contribution().to_vec();
///     call.reduce(&[&own, &own], request.data)
/// }
/// # for group in carried_by(collective, 1)? {
/// let mut data = [1.0_f32, 2.0];
/// group.all_reduce(&mut data, ReduceOp::Sum)?;
/// assert_eq!(data, [2.0, 4.0]);
/// # }
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Copy)]
pub struct Call<'a> {
    pub(crate) call: &'a call::Call,
    pub(crate) rank: Rank,
    pub(crate) world_size: usize,
    pub(crate) signature: Signature,
    pub(crate) deadline: Instant,
    pub(crate) reducer: Reducer<'a>,
}

impl Call<'_> {
    /// The kind of the collective.
    pub fn collective(&self) -> Collective {
        self.call.collective
    }

    /// The type of the elements.
    pub fn dtype(&self) -> DType {
        self.call.dtype
    }

    /// The operator, if the collective reduces: `sum`, `premul_sum`, or the name of a custom operator. For
    /// `premul_sum`, this rank's contribution is already multiplied.
    pub fn operator(&self) -> Option<&'static str> {
        self.call.operator.map(OperatorKind::name)
    }

    /// The root, if the collective has one.
    pub fn root(&self) -> Option<Rank> {
        self.call.root
    }

    /// This rank's number in the group.
    pub fn rank(&self) -> Rank {
        self.rank
    }

    /// The number of ranks in the group.
    pub fn world_size(&self) -> usize {
        self.world_size
    }

    /// Whether this rank is the root.
    pub fn is_root(&self) -> bool {
        self.call.root == Some(self.rank)
    }

    /// The number of collectives that the group had called before.
    pub fn sequence(&self) -> u64 {
        self.signature.0.sequence()
    }

    /// The time by which the call must have ended.
    pub fn deadline(&self) -> Instant {
        self.deadline
    }

    /// The part of the call that must be the same on all ranks.
    pub fn signature(&self) -> Signature {
        self.signature
    }

    /// Divides the sums that a backend has made by itself, if the call wants the average.
    #[cfg(feature = "mpi")]
    pub(crate) fn divide(&self, sums: &mut [u8]) -> Result<(), Cause> {
        match self.built_in() {
            Some(ReduceOp::Avg) => {
                let undivided = sums.to_vec();
                self.reducer.reduce(&[&undivided], sums, self.world_size)
            }
            _ => Ok(()),
        }
    }

    /// The operator of the library that this call has, if it is one of them.
    #[cfg(feature = "mpi")]
    pub(crate) fn built_in(&self) -> Option<ReduceOp> {
        match self.call.operator? {
            OperatorKind::Builtin(op) => Some(op),
            _ => None,
        }
    }

    /// The bytes of each rank's block in `buffer`, for all ranks, whether or not this rank has the block. In an
    /// uneven all-to-all a rank knows its own blocks only.
    #[cfg(feature = "mpi")]
    pub(crate) fn blocks(&self, buffer: Buffer) -> Vec<Range<usize>> {
        let mut start = 0;
        let block = |rank| {
            let block =
                start..start + self.call.counts.block(buffer, rank) * self.call.dtype.size();
            start = block.end;
            block
        };
        (0..self.world_size).map(block).collect()
    }

    /// Whether ranks may exchange blocks of lengths that others do not know.
    #[cfg(feature = "mpi")]
    pub(crate) fn has_own_counts(&self) -> bool {
        matches!(self.call.counts, Counts::Own { .. })
    }

    /// The range of `rank`'s block in the input, in bytes. Empty if the input has no such block.
    pub fn input_block(&self, rank: Rank) -> Range<usize> {
        self.block(Buffer::Input, rank)
    }

    /// The range of `rank`'s block in the data, in bytes. For an all-to-all it is the block that comes from
    /// `rank`. Empty if the data has no such block.
    pub fn data_block(&self, rank: Rank) -> Range<usize> {
        self.block(Buffer::Data, rank)
    }

    fn block(&self, buffer: Buffer, rank: Rank) -> Range<usize> {
        let (call, size) = (self.call, self.call.dtype.size());
        let collective = call.collective;
        let len = call.counts.block(buffer, rank) * size;
        match collective.blocks(buffer, self.rank, call.root.unwrap_or(0)) {
            Blocks::None => 0..0,
            Blocks::One if rank == self.rank => 0..len,
            Blocks::One => 0..0,
            Blocks::All => {
                let start: usize = (0..rank).map(|it| call.counts.block(buffer, it) * size).sum();
                start..start + len
            }
        }
    }

    /// Reduces what ranks 0, 1, 2, ... brought into `output`, with the call's operator and in the canonical
    /// order of sums. The result is final: averages are divided, and narrow floats are rounded once. All
    /// backends that call this get the same bits.
    ///
    /// # Errors
    ///
    /// [`Cause::Panicked`] when the user's operator panics. [`Cause::Backend`] when there are no inputs, or
    /// when lengths differ or are no multiple of the element's size.
    pub fn reduce(&self, inputs: &[&[u8]], output: &mut [u8]) -> Result<(), Cause> {
        let len = output.len();
        let fits = len.is_multiple_of(self.call.dtype.size())
            && !inputs.is_empty()
            && inputs.iter().all(|input| input.len() == len);
        if fits {
            return self.reducer.reduce(inputs, output, inputs.len());
        }
        let lens: Vec<usize> = inputs.iter().map(|input| input.len()).collect();
        let problem = format!("inputs of {lens:?} bytes cannot be reduced to {len} bytes");
        Err(Cause::Backend { problem })
    }
}

impl fmt::Debug for Call<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Call").field(&self.signature).finish()
    }
}

/// The part of a call that must be the same on all ranks. Compare signatures of two ranks; if they differ,
/// give both to a [`Cause::Mismatch`].
///
/// It leaves out the lengths in an uneven all-to-all, because no rank knows those of other ranks. There the
/// receiver compares what arrives with [`Call::data_block`].
///
/// ```
/// # use drumline_group as drumline;
/// # use drumline_testing::carried_by;
/// use drumline::{Cause, backend::Request};
///
/// /// Carries out the calls of a backend.
/// fn collective(request: &mut Request<'_>) -> Result<(), Cause> {
///     let signature = request.call.signature();
///     assert_eq!(signature.to_string(), "#0 broadcast(root 0) of 10 f32 [example]");
///     Ok(())
/// }
/// # for group in carried_by(collective, 1)? {
/// group.broadcast(&mut [1.0_f32; 10], 0)?;
/// # }
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Signature(pub(crate) Description);

impl Signature {
    /// The length of [`Signature::to_bytes`].
    pub const BYTES: usize = Header::BYTES;

    /// The signature as bytes, to send it to another rank.
    pub fn to_bytes(&self) -> [u8; Signature::BYTES] {
        Header { description: self.0, part: 0, payload: 0 }.encode()
    }

    /// Decodes the signature of another rank. `None` if the bytes are no signature.
    pub fn from_bytes(bytes: &[u8; Signature::BYTES]) -> Option<Signature> {
        Header::decode(bytes).map(|header| Signature(header.description))
    }
}

/// `#3 all_reduce(sum) of 10 f32 [hub]`
impl fmt::Display for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl fmt::Debug for Signature {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}
