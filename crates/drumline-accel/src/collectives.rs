//! The calls, and what is checked before any rank hears of one.

use std::sync::Arc;

use drumline_device::{Place, Stream};
use drumline_group::{DType, Rank};

use crate::direct::DirectCall;
use crate::host_call::Operation;
use crate::inbox::Body;
use crate::operator;
use crate::ring::Piece;
use crate::staged::{Request, Staged};
use crate::{DeviceGroup, DeviceOp, DeviceSlice, DeviceWork, Error, Result};

/// All of them return when they are queued. Of the arguments: a [`DeviceSlice`] must be memory of the group's device,
/// and its elements must be aligned. Ranks that make different calls all get an error.
impl DeviceGroup {
    /// Replaces the data by the sum over all ranks, or what `op` makes of them. The same bits as
    /// [`ProcessGroup::all_reduce`](drumline_group::ProcessGroup::all_reduce) of the same data.
    ///
    /// # Errors
    ///
    /// [`Argument`](drumline_error::ErrorKind::Argument) and [`Device`](drumline_error::ErrorKind::Device) for data
    /// that cannot be used, before any other rank hears of the call; [`Poisoned`](drumline_error::ErrorKind::Poisoned)
    /// after a failure. What fails later, the [`DeviceWork`] tells.
    pub fn all_reduce_on(
        &self,
        stream: &Arc<dyn Stream>,
        data: DeviceSlice,
        op: impl Into<DeviceOp>,
    ) -> Result<DeviceWork> {
        let op = op.into();
        operator::check("all_reduce", &op, data.dtype)?;
        self.check("all_reduce", data)?;
        let operation = Operation::AllReduce(op.clone());
        if let Some(call) = self.direct_call(&operation, data, data)? {
            return self.submit("all_reduce", stream, Body::Direct(Box::new(call)));
        }
        match data.is_empty() {
            true => self.in_place(stream, operation, data, true, true),
            false => {
                let whole = Piece { from: data.place, to: data.place };
                let windows = self.windows(&[whole], data.dtype, &op);
                self.submit("all_reduce", stream, Body::Windows(windows))
            }
        }
    }

    /// Like [`all_reduce_on`](DeviceGroup::all_reduce_on), but only the data of rank `root` changes.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn reduce_on(
        &self,
        stream: &Arc<dyn Stream>,
        data: DeviceSlice,
        op: impl Into<DeviceOp>,
        root: Rank,
    ) -> Result<DeviceWork> {
        let op = op.into();
        operator::check("reduce", &op, data.dtype)?;
        let is_root = self.is_root("reduce", root)?;
        self.in_place(stream, Operation::Reduce(op, root), data, true, is_root)
    }

    /// Replaces the data of all ranks by that of rank `root`.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn broadcast_on(
        &self,
        stream: &Arc<dyn Stream>,
        data: DeviceSlice,
        root: Rank,
    ) -> Result<DeviceWork> {
        let is_root = self.is_root("broadcast", root)?;
        self.in_place(stream, Operation::Broadcast(root), data, is_root, !is_root)
    }

    /// Every rank gets the inputs of all ranks, by rank. The input may be this rank's block of the output.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn all_gather_on(
        &self,
        stream: &Arc<dyn Stream>,
        input: DeviceSlice,
        output: DeviceSlice,
    ) -> Result<DeviceWork> {
        self.check_blocks("all_gather", input, output, "an output")?;
        self.check_apart("all_gather", input, output, Some(input))?;
        self.apart(stream, Operation::AllGather, input, output)
    }

    /// Every rank gets one block of the sum of the inputs: the one of its own number. The output may be that block of
    /// the input.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn reduce_scatter_on(
        &self,
        stream: &Arc<dyn Stream>,
        input: DeviceSlice,
        output: DeviceSlice,
        op: impl Into<DeviceOp>,
    ) -> Result<DeviceWork> {
        let op = op.into();
        operator::check("reduce_scatter", &op, input.dtype)?;
        self.check_blocks("reduce_scatter", output, input, "an input")?;
        self.check_apart("reduce_scatter", output, input, Some(output))?;
        self.apart(stream, Operation::ReduceScatter(op), input, output)
    }

    /// Rank `root` gets the inputs of all ranks, by rank. The output of the others is empty.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn gather_on(
        &self,
        stream: &Arc<dyn Stream>,
        input: DeviceSlice,
        output: DeviceSlice,
        root: Rank,
    ) -> Result<DeviceWork> {
        self.check_at_root("gather", root, input, output, "an output")?;
        self.check_apart("gather", input, output, Some(input))?;
        self.apart(stream, Operation::Gather(root), input, output)
    }

    /// Every rank gets the block of its own number of the input of rank `root`. The input of the others is empty.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn scatter_on(
        &self,
        stream: &Arc<dyn Stream>,
        input: DeviceSlice,
        output: DeviceSlice,
        root: Rank,
    ) -> Result<DeviceWork> {
        self.check_at_root("scatter", root, output, input, "an input")?;
        self.check_apart("scatter", output, input, Some(output))?;
        self.apart(stream, Operation::Scatter(root), input, output)
    }

    /// Every rank sends block `k` of its input to rank `k`, and gets one block from each.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn all_to_all_on(
        &self,
        stream: &Arc<dyn Stream>,
        input: DeviceSlice,
        output: DeviceSlice,
    ) -> Result<DeviceWork> {
        let operation = "all_to_all";
        if input.place.bytes != output.place.bytes {
            let problem = format!(
                "the input has {} elements, and the output {}: they must have as many",
                input.len(),
                output.len()
            );
            return Err(Error::argument(operation, problem));
        }
        let bytes = input.len() / self.world_size() * input.dtype.size();
        let block = DeviceSlice::new(Place { bytes, ..input.place }, input.dtype);
        self.check_blocks(operation, block, input, "an input")?;
        self.check_apart(operation, input, output, None)?;
        self.apart(stream, Operation::AllToAll, input, output)
    }

    /// Ends when the streams of all ranks have come to their barrier.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn barrier_on(&self, stream: &Arc<dyn Stream>) -> Result<DeviceWork> {
        self.in_place(stream, Operation::Barrier, DeviceSlice::empty(DType::U8), true, false)
    }

    /// Sends the data to a rank. Messages run beside collectives, and those with one receiver and tag keep their order.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn send_on(
        &self,
        stream: &Arc<dyn Stream>,
        data: DeviceSlice,
        to: Rank,
        tag: u64,
    ) -> Result<DeviceWork> {
        self.is_root("send", to)?;
        self.in_place(stream, Operation::Send(to, tag), data, true, false)
    }

    /// Receives data from a rank, of the type and the length that it sends.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn recv_on(
        &self,
        stream: &Arc<dyn Stream>,
        data: DeviceSlice,
        from: Rank,
        tag: u64,
    ) -> Result<DeviceWork> {
        self.is_root("recv", from)?;
        self.in_place(stream, Operation::Receive(Some(from), tag), data, false, true)
    }

    /// A call that changes its data.
    pub(crate) fn in_place(
        &self,
        stream: &Arc<dyn Stream>,
        operation: Operation,
        data: DeviceSlice,
        is_read: bool,
        is_written: bool,
    ) -> Result<DeviceWork> {
        let name = operation.name();
        self.check(name, data)?;
        if let Some(call) = self.direct_call(&operation, data, data)? {
            return self.submit(name, stream, Body::Direct(Box::new(call)));
        }
        let request = Request {
            operation,
            dtype: data.dtype,
            out: is_read.then_some(data.place).into_iter().collect(),
            in_place: true,
            data_bytes: data.place.bytes,
            into: is_written.then_some(data.place).into_iter().collect(),
        };
        self.submit(name, stream, Body::Staged(Box::new(Staged::new(request))))
    }

    /// The call that carries out an operation without the host, if it goes that way.
    fn direct_call(
        &self,
        operation: &Operation,
        from: DeviceSlice,
        to: DeviceSlice,
    ) -> Result<Option<DirectCall>> {
        match self.direct() {
            Some(direct) => direct.call(operation, self.rank(), from, to),
            None => Ok(None),
        }
    }

    /// A call that has an input and an output.
    fn apart(
        &self,
        stream: &Arc<dyn Stream>,
        operation: Operation,
        input: DeviceSlice,
        output: DeviceSlice,
    ) -> Result<DeviceWork> {
        self.in_pieces(stream, operation, &[input], &[output])
    }

    /// The same with an input and an output in pieces, of which there is one at least.
    pub(crate) fn in_pieces(
        &self,
        stream: &Arc<dyn Stream>,
        operation: Operation,
        input: &[DeviceSlice],
        output: &[DeviceSlice],
    ) -> Result<DeviceWork> {
        let name = operation.name();
        let all = || input.iter().chain(output);
        all().try_for_each(|piece| self.check(name, *piece))?;
        let Some(DeviceSlice { dtype, .. }) = all().next().copied() else {
            let problem = "there is neither an input nor an output";
            return Err(Error::argument(name, problem));
        };
        if let Some(other) = all().find(|piece| piece.dtype != dtype) {
            let problem = format!(
                "there are elements of {dtype} and of {}: they must be of one type",
                other.dtype
            );
            return Err(Error::argument(name, problem));
        }
        if let ([from], [to]) = (input, output)
            && let Some(call) = self.direct_call(&operation, *from, *to)?
        {
            return self.submit(name, stream, Body::Direct(Box::new(call)));
        }
        let places = |pieces: &[DeviceSlice]| pieces.iter().map(|piece| piece.place).collect();
        let request = Request {
            operation,
            dtype,
            out: places(input),
            in_place: false,
            data_bytes: output.iter().map(|piece| piece.place.bytes).sum(),
            into: places(output),
        };
        self.submit(name, stream, Body::Staged(Box::new(Staged::new(request))))
    }

    /// Checks that these are whole elements in memory of the device.
    #[doc(hidden)]
    pub fn check(&self, operation: &'static str, data: DeviceSlice) -> Result<()> {
        let checked = data.check(operation, self.device().as_ref());
        checked.map_err(|error| self.heed(error))
    }

    /// Whether this rank is the one that the call names.
    pub(crate) fn is_root(&self, operation: &'static str, rank: Rank) -> Result<bool> {
        if rank < self.world_size() {
            return Ok(rank == self.rank());
        }
        let problem = format!(
            "there is no rank {rank}: the ranks of group {:?} are 0 to {}",
            self.group().name(),
            self.world_size() - 1
        );
        Err(Error::argument(operation, problem))
    }

    fn check_blocks(
        &self,
        operation: &'static str,
        block: DeviceSlice,
        long: DeviceSlice,
        what: &str,
    ) -> Result<()> {
        if block.dtype != long.dtype {
            let problem =
                format!("the input and the output differ: {} and {}", block.dtype, long.dtype);
            return Err(Error::argument(operation, problem));
        }
        if block.place.bytes.checked_mul(self.world_size()) == Some(long.place.bytes) {
            return Ok(());
        }
        let problem = format!(
            "{what} of {} elements does not hold a block of {} elements for each of {} ranks",
            long.len(),
            block.len(),
            self.world_size()
        );
        Err(Error::argument(operation, problem))
    }

    fn check_at_root(
        &self,
        operation: &'static str,
        root: Rank,
        block: DeviceSlice,
        long: DeviceSlice,
        what: &str,
    ) -> Result<()> {
        if self.is_root(operation, root)? {
            return self.check_blocks(operation, block, long, what);
        }
        if long.is_empty() {
            return Ok(());
        }
        let problem = format!(
            "{what} of a rank that is not the root has {} elements where there should be 0",
            long.len()
        );
        Err(Error::argument(operation, problem))
    }

    /// Checks that two places share no byte, unless `block` is this rank's block of the long one.
    fn check_apart(
        &self,
        operation: &'static str,
        short: DeviceSlice,
        long: DeviceSlice,
        block: Option<DeviceSlice>,
    ) -> Result<()> {
        let own = block.and_then(|block| {
            let start = block.place.bytes * self.rank();
            long.place.part(start..start + block.place.bytes)
        });
        if !short.place.overlaps(long.place) || own == Some(short.place) {
            return Ok(());
        }
        let but = match block {
            Some(_) => "; it may only be this rank's own block of it",
            None => "",
        };
        let problem = format!("input and output overlap: {} and {}{but}", short.place, long.place);
        Err(Error::argument(operation, problem))
    }
}
