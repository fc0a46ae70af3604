use std::str::FromStr;

use drumline_device::Rule;
use drumline_group::algorithms::SumOrder;

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
    /// Which way calls take: [`Wanted::Auto`] unless set.
    pub way: Wanted,
    /// The order of sums that the program needs. Unless set, any: then NCCL may add, whose order is its own.
    pub order: Option<SumOrder>,
    /// An error that tests plant.
    #[doc(hidden)]
    pub planted: Option<Planted>,
}

/// Which way the calls of a device group take.
///
/// ```
/// use drumline_accel::{DeviceOptions, Wanted};
///
/// assert_eq!(DeviceOptions::default().way, Wanted::Auto);
/// assert_eq!("nccl".parse(), Ok(Wanted::Nccl));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Wanted {
    /// NCCL, where all ranks have it, each has a device of its own, and it was faster when the group was made. Else
    /// through memory of the host.
    #[default]
    Auto,
    /// Through memory of the host.
    Host,
    /// NCCL, or an error. What it does not have goes through the host, but for sums that it lacks: they are refused.
    Nccl,
}

impl FromStr for Wanted {
    type Err = String;

    fn from_str(text: &str) -> Result<Wanted, String> {
        match text {
            "auto" => Ok(Wanted::Auto),
            "host" => Ok(Wanted::Host),
            "nccl" => Ok(Wanted::Nccl),
            _ => Err(format!("there is no way {text:?}: write auto, host or nccl")),
        }
    }
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
        DeviceOptions {
            window_bytes: 4 << 20,
            slots: 4,
            lag: 2,
            way: Wanted::Auto,
            order: None,
            planted: None,
        }
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

    /// Sets [`way`](DeviceOptions#structfield.way).
    #[must_use]
    pub fn way(mut self, way: Wanted) -> Self {
        self.way = way;
        self
    }

    /// Sets [`order`](DeviceOptions#structfield.order).
    #[must_use]
    pub fn order(mut self, order: SumOrder) -> Self {
        self.order = Some(order);
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
        let invalid = |problem| Err(Error::argument("DeviceGroup::new", problem));
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
