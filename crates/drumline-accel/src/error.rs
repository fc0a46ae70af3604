//! The failures of calls on a device: their texts.

use std::sync::Arc;

use drumline_device as device;
use drumline_error::{Error, ErrorKind, Section};
use drumline_group::Rank;

/// For `map_err`: what a device says of a call. That is the detail, too.
pub(crate) fn of(operation: &str) -> impl Fn(device::Error) -> Error {
    move |error| {
        let text = format!("{operation}: {error}");
        Error::quoting(ErrorKind::Device, Section::Device, text).with(Arc::new(error))
    }
}

/// Rank `peer` has another value of what must be the same for all.
pub(crate) fn differs(operation: &str, peer: Rank, theirs: &str, ours: &str) -> Error {
    let text = format!(
        "{operation}: rank {peer} has {theirs}, this rank has {ours}; they must be the same on all ranks"
    );
    Error::new(ErrorKind::Mismatch, Section::Mismatch, text).blaming(Some(peer))
}

/// `attempted` did not happen, because the group of this device has failed. Whom that failure blames, this blames.
pub(crate) fn poisoned(attempted: &str, by: &Error) -> Error {
    let text = format!(
        "{attempted} did not happen, because an earlier call on this device has failed: {by}"
    );
    by.told_as(ErrorKind::Poisoned, text)
}

#[cfg(test)]
mod tests {
    use drumline_error::ErrorOrigin;

    use super::*;

    #[test]
    fn a_poisoned_group_blames_what_its_first_failure_blames() {
        let mistake = poisoned("barrier", &Error::argument("barrier", "no memory"));
        assert_eq!((mistake.kind(), mistake.origin()), (ErrorKind::Poisoned, ErrorOrigin::User));
        let lost = device::Error::NotFound { library: "driver", tried: Vec::new() };
        let lost = poisoned("barrier", &of("barrier")(lost));
        assert_eq!((lost.culprit(), lost.origin()), (None, ErrorOrigin::Surroundings));
        assert!(lost.detail::<device::Error>().is_some());
        let other = poisoned("barrier", &differs("nccl", 1, "2 slots", "3 slots"));
        assert_eq!((other.culprit(), other.section()), (Some(1), Section::Mismatch));
        assert_eq!(other.to_string().matches("drumline explain").count(), 1, "{other}");
    }
}
