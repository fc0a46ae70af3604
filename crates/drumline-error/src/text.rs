//! Parts of the texts of errors.

use std::time::Duration;

/// A time that was waited in vain: `2.0s`. `0.0ns` would look like a fault of the clock.
pub fn spent(time: Duration) -> String {
    match time.is_zero() {
        true => "no time".to_owned(),
        false => format!("{time:.1?}"),
    }
}
