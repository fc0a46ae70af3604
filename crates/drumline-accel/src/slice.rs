use drumline_device::{Device, Place};
use drumline_group::DType;

use crate::{Error, Result, error};

/// Elements in the memory of a device.
///
/// It owns nothing. What it names must stay allocated until the call that gets it has ended.
///
/// ```
/// use drumline_accel::{DType, DeviceSlice, Place};
///
/// let gradient = DeviceSlice::new(Place { address: 0x7000_0000, bytes: 4096 }, DType::F32);
/// assert_eq!(gradient.len(), 1024);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceSlice {
    /// Where they are.
    pub place: Place,
    /// What they are.
    pub dtype: DType,
}

impl DeviceSlice {
    /// Elements of this type at this place. The calls that get it check the place.
    pub const fn new(place: Place, dtype: DType) -> DeviceSlice {
        DeviceSlice { place, dtype }
    }

    /// No elements: for ranks that have no input or no output.
    pub const fn empty(dtype: DType) -> DeviceSlice {
        DeviceSlice { place: Place { address: 0, bytes: 0 }, dtype }
    }

    /// The number of elements.
    pub const fn len(&self) -> usize {
        self.place.bytes / self.dtype.size()
    }

    /// Whether there are none.
    pub const fn is_empty(&self) -> bool {
        self.place.bytes == 0
    }

    /// Checks that these are whole elements in memory of the device.
    pub(crate) fn check(&self, operation: &'static str, device: &dyn Device) -> Result<()> {
        let DeviceSlice { place, dtype } = self;
        let size = dtype.size();
        let invalid = |problem| Err(Error::argument(operation, problem));
        if !place.bytes.is_multiple_of(size) {
            return invalid(format!(
                "{place} are no whole number of {dtype}, which take {size} bytes each"
            ));
        }
        if place.bytes > 0 && !place.address.is_multiple_of(size as u64) {
            return invalid(format!(
                "{place} are not aligned: {dtype} begin at multiples of {size}"
            ));
        }
        device.check(*place).map_err(error::of(operation))
    }
}
