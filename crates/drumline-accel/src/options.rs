use drumline_device::Rule;

use crate::{Error, Result};

/// How an all-reduce of device memory goes through the memory of the host. The same on all ranks.
///
/// ```
/// use drumline_accel::DeviceOptions;
///
/// let options = DeviceOptions::default().window_bytes(1 << 20);
/// assert_eq!((options.window_bytes, options.slots, options.lag), (1 << 20, 4, 2));
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceOptions {
    /// How much of the data is under way as one piece: 4 MiB unless set. A multiple of 16 bytes.
    pub window_bytes: usize,
    /// How many windows a rank has room for in the memory of the host: 4 unless set.
    pub slots: usize,
    /// How many windows may be between their sum and the end of their copy to the device: 2 unless set.
    pub lag: usize,
    /// An error that tests plant.
    #[doc(hidden)]
    pub planted: Option<Planted>,
}

/// An error that tests plant, to see that they would find it.
#[doc(hidden)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Planted {
    /// The pipeline follows other rules.
    Rules([Rule; 4]),
    /// What is copied out does not wait for the caller's stream.
    ReadsEarly,
    /// What is copied in does not wait for the caller's stream.
    WritesEarly,
    /// A message is copied out without a wait for the caller's stream.
    SendsEarly,
    /// A call ends when its last copy is queued.
    EndsEarly,
    /// Streams that join a call do not wait for its end.
    OpensEarly,
    /// What this rank sums is copied in before it is summed.
    CopiesInEarly,
    /// What neighbours sum is copied in before they have said that it is summed.
    FetchesEarly,
}

impl Default for DeviceOptions {
    fn default() -> DeviceOptions {
        DeviceOptions { window_bytes: 4 << 20, slots: 4, lag: 2, planted: None }
    }
}

impl DeviceOptions {
    /// Sets [`window_bytes`](DeviceOptions#structfield.window_bytes).
    #[must_use]
    pub fn window_bytes(mut self, bytes: usize) -> Self {
        self.window_bytes = bytes;
        self
    }

    /// Sets [`slots`](DeviceOptions#structfield.slots).
    #[must_use]
    pub fn slots(mut self, slots: usize) -> Self {
        self.slots = slots;
        self
    }

    /// Sets [`lag`](DeviceOptions#structfield.lag).
    #[must_use]
    pub fn lag(mut self, lag: usize) -> Self {
        self.lag = lag;
        self
    }

    #[doc(hidden)]
    #[must_use]
    pub fn planted(mut self, planted: Planted) -> Self {
        self.planted = Some(planted);
        self
    }

    pub(crate) fn has(&self, planted: Planted) -> bool {
        self.planted == Some(planted)
    }

    pub(crate) fn check(&self) -> Result<()> {
        let DeviceOptions { window_bytes, slots, lag, .. } = *self;
        let invalid = |problem| Err(Error::Argument { operation: "DeviceGroup::new", problem });
        if window_bytes == 0 || !window_bytes.is_multiple_of(16) {
            return invalid(format!(
                "windows of {window_bytes} bytes: take a multiple of 16, so that all types fit"
            ));
        }
        if lag == 0 || lag >= slots {
            return invalid(format!(
                "a lag of {lag} windows does not fit {slots} slots: it must be at least 1 and less than the slots"
            ));
        }
        Ok(())
    }
}
