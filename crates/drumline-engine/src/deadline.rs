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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_limit_gives_a_deadline() {
        let start = Instant::now();
        assert_eq!(after(start, Duration::from_secs(3)), start + Duration::from_secs(3));
        let never = after(start, Duration::MAX);
        assert!(never > start + Duration::from_secs(20 * 365 * 24 * 3600));
        // Warnings and second looks count with sums and differences.
        let limit = bounded(Duration::MAX);
        assert!(never + 2 * limit > never && never - limit / 2 > start);
    }
}
