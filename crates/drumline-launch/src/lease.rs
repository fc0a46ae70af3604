//! How long workers may run without a word from the store in which the hosts of a job meet.
//!
//! A host that the others do not hear must have ended its workers before the others start new ones. So its keeper
//! kills them when the lease has run out, even if the launcher itself is stopped.

use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// A time of the clock that goes on while the machine is suspended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct BootTime(Duration);

impl BootTime {
    pub(crate) fn now() -> BootTime {
        let now = clock_gettime(ClockId::Boottime);
        let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
        BootTime(Duration::new(seconds, u32::try_from(now.tv_nsec).unwrap_or(0)))
    }

    pub(crate) fn after(self, time: Duration) -> BootTime {
        BootTime(self.0.saturating_add(time))
    }

    /// The time from `earlier` until then.
    pub(crate) fn since(self, earlier: BootTime) -> Duration {
        self.0.saturating_sub(earlier.0)
    }

    /// The time from now until then; zero if that is past.
    pub(crate) fn left(self) -> Duration {
        self.0.saturating_sub(BootTime::now().0)
    }

    /// For a message between two processes of this machine.
    pub(crate) fn to_nanoseconds(self) -> String {
        self.0.as_nanos().to_string()
    }

    pub(crate) fn from_nanoseconds(text: &[u8]) -> Option<BootTime> {
        let nanoseconds = std::str::from_utf8(text).ok()?.parse().ok()?;
        Some(BootTime(Duration::from_nanos(nanoseconds)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_survives_a_message_and_passes() {
        let now = BootTime::now();
        let later = now.after(Duration::from_secs(3600));
        assert_eq!(BootTime::from_nanoseconds(later.to_nanoseconds().as_bytes()), Some(later));
        assert!(later > now && !later.left().is_zero() && now.left().is_zero());
        assert_eq!(BootTime::from_nanoseconds(b"soon"), None);
    }
}
