//! Calls whose blocks differ in length, on data that lies in pieces.

use std::sync::Arc;

use drumline_device::Stream;
use drumline_group::Rank;

use crate::host_call::Operation;
use crate::operator;
use crate::{DeviceGroup, DeviceOp, DeviceSlice, DeviceWork, Error, Result};

/// Inputs and outputs are lists of pieces, which count as one memory, one piece behind the other. A copy engine brings
/// them together and deals them out, so there is no copy on the device. Pieces of one output must not overlap.
impl DeviceGroup {
    /// Like [`all_gather_on`](DeviceGroup::all_gather_on), with `counts[k]` elements of rank `k`. All ranks pass the
    /// same counts.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn all_gather_v_on(
        &self,
        stream: &Arc<dyn Stream>,
        input: &[DeviceSlice],
        output: &[DeviceSlice],
        counts: &[usize],
    ) -> Result<DeviceWork> {
        let blocks = self.blocks("all_gather_v", counts)?;
        blocks.check("an input", input, counts[self.rank()])?;
        blocks.check("an output", output, blocks.total)?;
        self.in_pieces(stream, Operation::AllGatherV(counts.to_vec()), input, output)
    }

    /// Like [`reduce_scatter_on`](DeviceGroup::reduce_scatter_on), with `counts[k]` elements for rank `k`. All ranks
    /// pass the same counts.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn reduce_scatter_v_on(
        &self,
        stream: &Arc<dyn Stream>,
        input: &[DeviceSlice],
        counts: &[usize],
        output: &[DeviceSlice],
        op: impl Into<DeviceOp>,
    ) -> Result<DeviceWork> {
        let op = op.into();
        let blocks = self.blocks("reduce_scatter_v", counts)?;
        blocks.check("an input", input, blocks.total)?;
        blocks.check("an output", output, counts[self.rank()])?;
        if let Some(piece) = input.first() {
            operator::check(blocks.operation, &op, piece.dtype)?;
        }
        self.in_pieces(stream, Operation::ReduceScatterV(op, counts.to_vec()), input, output)
    }

    /// Like [`gather_on`](DeviceGroup::gather_on), with `counts[k]` elements of rank `k`. All ranks pass the same
    /// counts.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn gather_v_on(
        &self,
        stream: &Arc<dyn Stream>,
        input: &[DeviceSlice],
        output: &[DeviceSlice],
        counts: &[usize],
        root: Rank,
    ) -> Result<DeviceWork> {
        let blocks = self.blocks("gather_v", counts)?;
        let all = if self.is_root(blocks.operation, root)? { blocks.total } else { 0 };
        blocks.check("an input", input, counts[self.rank()])?;
        blocks.check("an output", output, all)?;
        self.in_pieces(stream, Operation::GatherV(counts.to_vec(), root), input, output)
    }

    /// Like [`scatter_on`](DeviceGroup::scatter_on), with `counts[k]` elements for rank `k`. All ranks pass the same
    /// counts.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn scatter_v_on(
        &self,
        stream: &Arc<dyn Stream>,
        input: &[DeviceSlice],
        counts: &[usize],
        output: &[DeviceSlice],
        root: Rank,
    ) -> Result<DeviceWork> {
        let blocks = self.blocks("scatter_v", counts)?;
        let all = if self.is_root(blocks.operation, root)? { blocks.total } else { 0 };
        blocks.check("an input", input, all)?;
        blocks.check("an output", output, counts[self.rank()])?;
        self.in_pieces(stream, Operation::ScatterV(counts.to_vec(), root), input, output)
    }

    /// Sends `send_counts[k]` elements to rank `k`, and gets `recv_counts[k]` from it.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn all_to_all_v_on(
        &self,
        stream: &Arc<dyn Stream>,
        input: &[DeviceSlice],
        send_counts: &[usize],
        output: &[DeviceSlice],
        recv_counts: &[usize],
    ) -> Result<DeviceWork> {
        let sent = self.blocks("all_to_all_v", send_counts)?;
        let received = self.blocks("all_to_all_v", recv_counts)?;
        sent.check("an input", input, sent.total)?;
        received.check("an output", output, received.total)?;
        let operation = Operation::AllToAllV(send_counts.to_vec(), recv_counts.to_vec());
        self.in_pieces(stream, operation, input, output)
    }

    fn blocks(&self, operation: &'static str, counts: &[usize]) -> Result<Blocks> {
        let ranks = self.world_size();
        if counts.len() != ranks {
            let problem = format!("there are {} counts for {ranks} ranks", counts.len());
            return Err(Error::argument(operation, problem));
        }
        match counts.iter().try_fold(0_usize, |sum, count| sum.checked_add(*count)) {
            Some(total) => Ok(Blocks { operation, total }),
            None => {
                let problem = "the counts add up to more than any memory holds";
                Err(Error::argument(operation, problem))
            }
        }
    }
}

/// The blocks of a call.
struct Blocks {
    operation: &'static str,
    total: usize,
}

impl Blocks {
    /// Checks that pieces hold so many elements.
    fn check(&self, what: &str, pieces: &[DeviceSlice], expected: usize) -> Result<()> {
        let found: usize = pieces.iter().map(DeviceSlice::len).sum();
        if found == expected {
            return Ok(());
        }
        let problem = format!("{what} has {found} elements, and {expected} fit the counts");
        Err(Error::argument(self.operation, problem))
    }
}
