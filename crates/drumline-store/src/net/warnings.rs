//! Limits how often strangers make this process write to its log.

use std::time::{Duration, Instant};

/// The number of warnings that are written at once.
const FIRST: u32 = 3;

/// After that, the least time between two warnings. A warning says how many were held back.
const PAUSE: Duration = Duration::from_secs(20);

/// Limits warnings of one kind.
#[derive(Debug, Default)]
pub(crate) struct Warnings {
    written: u32,
    held_back: u64,
    next_at: Option<Instant>,
}

impl Warnings {
    /// Whether to write a warning now. If so, returns how many were held back since the last one.
    pub(crate) fn admit(&mut self, now: Instant) -> Option<u64> {
        if self.written >= FIRST && self.next_at.is_some_and(|at| now < at) {
            self.held_back += 1;
            return None;
        }
        self.written = self.written.saturating_add(1);
        self.next_at = Some(now + PAUSE);
        Some(std::mem::take(&mut self.held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_minute_of_strangers_takes_six_lines_and_all_are_counted() {
        let (start, mut warnings) = (Instant::now(), Warnings::default());
        let written: Vec<u64> = (0..60_000)
            .filter_map(|ms| warnings.admit(start + Duration::from_millis(ms)))
            .collect();
        assert!(written.len() <= 6, "{written:?}");
        let counted = written.iter().sum::<u64>() + written.len() as u64;
        assert_eq!(counted + warnings.held_back, 60_000);
    }
}
