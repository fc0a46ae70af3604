use std::fmt;
use std::ops::Range;

/// Bytes in the memory of a device. It owns nothing and may be wrong: devices [check](crate::Device::check) it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The device's address of the first byte.
    pub address: u64,
    /// The number of bytes.
    pub bytes: usize,
}

impl Place {
    /// Some of the bytes. `None`: they do not lie within the place.
    pub fn part(self, range: Range<usize>) -> Option<Place> {
        let address = self.address.checked_add(range.start as u64)?;
        let is_within = range.start <= range.end && range.end <= self.bytes;
        is_within.then_some(Place { address, bytes: range.len() })
    }

    /// Whether the two share a byte.
    pub fn overlaps(self, other: Place) -> bool {
        let ends_after =
            |a: Place, b: Place| u128::from(a.address) + a.bytes as u128 > b.address.into();
        self.bytes > 0 && other.bytes > 0 && ends_after(self, other) && ends_after(other, self)
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes at {:#x}", self.bytes, self.address)
    }
}
