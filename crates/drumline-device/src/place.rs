use std::fmt;
use std::ops::Range;

/// Bytes in the memory of a device. It owns nothing and may be wrong: devices [check](crate::Device::check) it.
///
/// ```
/// use drumline_device::Place;
///
/// let tensor = Place { address: 0x7000_0000, bytes: 4096 };
/// assert_eq!(tensor.part(1024..2048), Some(Place { address: 0x7000_0400, bytes: 1024 }));
/// assert_eq!(tensor.part(4000..5000), None);
/// assert!(tensor.overlaps(Place { address: 0x7000_0fff, bytes: 1 }));
/// ```
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
