//! All-reduces of data that lies in pieces.

use std::sync::Arc;

use drumline_device::{Event, Place, Stream};
use drumline_group::DType;

use crate::host_call::Operation;
use crate::inbox::Body;
use crate::operator;
use crate::ring::{Piece, Window};
use crate::{DeviceGroup, DeviceOp, DeviceSlice, DeviceWork, Error, Result};

const OPERATION: &str = "all_reduce_coalesced";

impl DeviceGroup {
    /// One all-reduce of many pieces: those of `from`, one behind the other, are reduced to those of `to`. A copy
    /// engine brings them together and deals them out, so there is no copy on the device. The same bits as an
    /// [`all_reduce_on`](DeviceGroup::all_reduce_on) of all of them in one place.
    ///
    /// Each piece of `to` is as long as its piece of `from`; it is the same memory, or shares no byte with any other
    /// piece. Ranks may cut the data differently.
    ///
    /// # Errors
    ///
    /// As for [`all_reduce_on`](DeviceGroup::all_reduce_on).
    pub fn all_reduce_coalesced_on(
        &self,
        stream: &Arc<dyn Stream>,
        from: &[DeviceSlice],
        to: &[DeviceSlice],
        op: impl Into<DeviceOp>,
    ) -> Result<DeviceWork> {
        let op = op.into();
        let (pieces, dtype) = self.pieces(from, to, &op)?;
        if pieces.is_empty() {
            let nothing = DeviceSlice::empty(dtype);
            return self.in_place(stream, Operation::AllReduce(op), nothing, true, true);
        }
        let windows = self.windows(&pieces, dtype, &op);
        self.submit(OPERATION, stream, Body::Windows(windows))
    }

    /// The same after events that have been recorded, for pieces of several streams. There is one event at least.
    #[doc(hidden)]
    pub fn all_reduce_coalesced_after(
        &self,
        mut after: Vec<Arc<dyn Event>>,
        from: &[DeviceSlice],
        to: &[DeviceSlice],
        op: impl Into<DeviceOp>,
    ) -> Result<DeviceWork> {
        let op = op.into();
        let (pieces, dtype) = self.pieces(from, to, &op)?;
        let Some(last) = after.pop().filter(|_| !pieces.is_empty()) else {
            let problem = "there is no event, or no data";
            return Err(Error::argument(OPERATION, problem));
        };
        let mut windows = self.windows(&pieces, dtype, &op);
        windows[0].after = after;
        self.submit_after(OPERATION, last, Body::Windows(windows))
    }

    /// The pieces that are not empty, and their type.
    fn pieces(
        &self,
        from: &[DeviceSlice],
        to: &[DeviceSlice],
        op: &DeviceOp,
    ) -> Result<(Vec<Piece>, DType)> {
        let refuse = |problem| Err(Error::argument(OPERATION, problem));
        let Some(DeviceSlice { dtype, .. }) = from.first().copied() else {
            return refuse("there is no data".to_owned());
        };
        if from.len() != to.len() {
            return refuse(format!("there are {} inputs and {} outputs", from.len(), to.len()));
        }
        for (number, (from, to)) in from.iter().zip(to).enumerate() {
            if (from.dtype, to.dtype) != (dtype, dtype) {
                return refuse(format!(
                    "piece {number} is of {} and {}, and piece 0 of {dtype}: they must be of one type",
                    from.dtype, to.dtype
                ));
            }
            if from.len() != to.len() {
                return refuse(format!(
                    "piece {number} has an input of {} elements and an output of {}",
                    from.len(),
                    to.len()
                ));
            }
            self.check(OPERATION, *from)?;
            self.check(OPERATION, *to)?;
        }
        operator::check(OPERATION, op, dtype)?;
        let pieces = from.iter().zip(to).filter(|(from, _)| !from.is_empty());
        let pieces: Vec<Piece> =
            pieces.map(|(from, to)| Piece { from: from.place, to: to.place }).collect();
        match overlap(&pieces) {
            None => Ok((pieces, dtype)),
            Some([written, other]) => {
                refuse(format!("an output overlaps another piece: {written} and {other}"))
            }
        }
    }

    /// The windows of an all-reduce.
    pub(crate) fn windows(&self, pieces: &[Piece], dtype: DType, op: &DeviceOp) -> Vec<Window> {
        let holders = self.holders(dtype);
        let window = |pieces| Window {
            call: 0,
            pieces,
            dtype,
            op: op.clone(),
            holders: holders.clone(),
            after: Vec::new(),
        };
        cut(pieces, self.options().window_bytes).into_iter().map(window).collect()
    }
}

/// Cuts pieces that count as one memory into parts of `bytes` bytes; the last may be shorter.
fn cut(pieces: &[Piece], bytes: usize) -> Vec<Vec<Piece>> {
    let mut windows: Vec<Vec<Piece>> = Vec::new();
    let mut room = 0;
    for piece in pieces {
        let mut start = 0;
        while start < piece.bytes() {
            if room == 0 {
                windows.push(Vec::new());
                room = bytes;
            }
            let end = piece.bytes().min(start + room);
            let part = piece.part(start..end);
            windows.last_mut().into_iter().for_each(|window| window.extend(part));
            room -= end - start;
            start = end;
        }
    }
    windows
}

/// An output that shares a byte with another piece, and that piece.
fn overlap(pieces: &[Piece]) -> Option<[Place; 2]> {
    let mut written: Vec<Place> = pieces.iter().map(|piece| piece.to).collect();
    written.sort_by_key(|place| place.address);
    if let Some([a, b]) = written.array_windows().find(|[a, b]| a.overlaps(*b)) {
        return Some([*a, *b]);
    }
    // Outputs are apart and in order. So those that an input may overlap lie side by side.
    pieces.iter().find_map(|Piece { from, to }| {
        let end = from.address.saturating_add(from.bytes as u64);
        let before_its_end = written.partition_point(|place| place.address < end);
        let near = written[..before_its_end].iter().rev();
        let other = near.take_while(|place| place.overlaps(*from)).find(|place| {
            let is_its_own = *place == to;
            !(is_its_own && to == from)
        });
        other.map(|place| [*place, *from])
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(address: u64, bytes: usize) -> Place {
        Place { address, bytes }
    }

    fn in_place(address: u64, bytes: usize) -> Piece {
        Piece { from: place(address, bytes), to: place(address, bytes) }
    }

    #[test]
    fn windows_are_cut_through_pieces() {
        let apart = Piece { from: place(500, 10), to: place(900, 10) };
        let pieces = [in_place(0, 4), apart, in_place(100, 3)];
        let windows = cut(&pieces, 8);
        let starts = |window: &Vec<Piece>| -> Vec<(u64, u64, usize)> {
            window.iter().map(|it| (it.from.address, it.to.address, it.bytes())).collect()
        };
        let found: Vec<_> = windows.iter().map(starts).collect();
        let expected = [
            vec![(0, 0, 4), (500, 900, 4)],
            vec![(504, 904, 6), (100, 100, 2)],
            vec![(102, 102, 1)],
        ];
        assert_eq!(found, expected);
        assert_eq!(cut(&[], 8).len(), 0);
    }

    #[test]
    fn outputs_overlap_nothing_but_their_own_inputs() {
        let moved = |from: u64, to: u64| Piece { from: place(from, 8), to: place(to, 8) };
        assert_eq!(overlap(&[in_place(0, 8), in_place(8, 8), moved(100, 50)]), None);
        // An input may be read twice.
        assert_eq!(overlap(&[moved(100, 0), moved(100, 8)]), None);
        for wrong in [
            [in_place(0, 8), in_place(7, 8)],
            [moved(100, 0), moved(200, 4)],
            [moved(0, 4), in_place(100, 8)],
            [in_place(0, 8), moved(4, 100)],
            [moved(0, 100), moved(100, 200)],
            [moved(0, 100), moved(50, 0)],
        ] {
            assert!(overlap(&wrong).is_some(), "{wrong:?}");
        }
    }
}
