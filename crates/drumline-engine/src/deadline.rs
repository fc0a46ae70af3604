//! Deadlines from time limits of any length.

use std::time::{Duration, Instant};

/// Longer limits count as this one: about 30 years. Sums and differences of an `Instant` and a few such
/// limits stay in range.
const LONGEST: Duration = Duration::from_secs(1 << 30);

/// The limit that the engine counts with: `limit`, but at most some 30 years. `Duration::MAX` means no
/// limit.
pub fn bounded(limit: Duration) -> Duration {
    limit.min(LONGEST)
}

/// The moment when `limit` has passed since `start`. Any limit is valid.
pub fn after(start: Instant, limit: Duration) -> Instant {
    start + bounded(limit)
}

/// A limit of `seconds`. Any number from 0 on is valid. A number too large for a [`Duration`] means no limit.
/// `None`: the number is negative or NaN.
pub fn of_seconds(seconds: f64) -> Option<Duration> {
    let is_limit = seconds >= 0.0; // Not so for NaN.
    is_limit.then(|| Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_limit_gives_a_deadline() {
        let start = Instant::now();
        assert_eq!(after(start, Duration::from_secs(3)), start + Duration::from_secs(3));
        let never = after(start, Duration::MAX);
        assert!(never > start + Duration::from_secs(20 * 365 * 24 * 3600));
        // Code that warns and looks again adds and subtracts limits.
        let limit = bounded(Duration::MAX);
        assert!(never + 2 * limit > never && never - limit / 2 > start);
    }

    #[test]
    fn any_number_of_seconds_is_a_limit_unless_it_is_nonsense() {
        assert_eq!(of_seconds(1.5), Some(Duration::from_millis(1500)));
        assert_eq!(of_seconds(-0.0), Some(Duration::ZERO));
        for endless in [1e20, 2_f64.powi(64), f64::MAX, f64::INFINITY] {
            assert_eq!(of_seconds(endless), Some(Duration::MAX), "{endless}");
        }
        for nonsense in [-1.0, -f64::MIN_POSITIVE, f64::NAN, f64::NEG_INFINITY] {
            assert_eq!(of_seconds(nonsense), None, "{nonsense}");
        }
    }
}
