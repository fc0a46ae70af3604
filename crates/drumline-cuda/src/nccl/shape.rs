//! Which operands fit.

use drumline_device::Place;
use drumline_kernels::DType;

/// A rank, and how many there are.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seat {
    pub(crate) rank: usize,
    pub(crate) size: usize,
}

impl Seat {
    pub(crate) fn check(self, rank: usize) -> Result<(), String> {
        if rank < self.size {
            return Ok(());
        }
        Err(format!("there is no rank {rank}: the communicator has {} ranks", self.size))
    }

    /// The blocks of a place, one for each rank, each as long as `one`.
    pub(crate) fn blocks(self, whole: Place, one: Place) -> Result<Vec<Place>, String> {
        if one.bytes.checked_mul(self.size) != Some(whole.bytes) {
            return Err(format!("{whole} are not {} blocks of {} bytes", self.size, one.bytes));
        }
        Ok(self.cut(whole, one.bytes))
    }

    /// The blocks of a place, all of the same length.
    pub(crate) fn equal_blocks(self, whole: Place) -> Result<Vec<Place>, String> {
        if !whole.bytes.is_multiple_of(self.size) {
            return Err(format!(
                "{whole} are not blocks of the same length for {} ranks",
                self.size
            ));
        }
        Ok(self.cut(whole, whole.bytes / self.size))
    }

    fn cut(self, whole: Place, bytes: usize) -> Vec<Place> {
        let starts = (0..self.size).map(|rank| rank * bytes);
        starts.filter_map(|start| whole.part(start..start + bytes)).collect()
    }
}

/// How many elements there are.
pub(crate) fn count(place: Place, dtype: DType) -> Result<usize, String> {
    let size = dtype.size();
    if !place.bytes.is_multiple_of(size) {
        return Err(format!("{place} are not a number of {dtype}"));
    }
    if place.bytes > 0 && !place.address.is_multiple_of(size as u64) {
        return Err(format!("{place} are not aligned for {dtype}"));
    }
    Ok(place.bytes / size)
}

pub(crate) fn same_length(from: Place, to: Place) -> Result<(), String> {
    if from.bytes == to.bytes { Ok(()) } else { Err(format!("{from} do not fit {to}")) }
}

/// Whether two operands share no byte, or are in place.
pub(crate) fn apart(from: Place, to: Place, is_in_place: bool) -> Result<(), String> {
    if is_in_place || !from.overlaps(to) {
        return Ok(());
    }
    Err(format!("{from} overlap {to}, and are not in place"))
}
