//! How long to look before sleeping.

use std::hint::spin_loop;
use std::thread::{available_parallelism, yield_now};

/// How long a rank looks before it sleeps.
///
/// ```
/// use drumline_shm::{SpinLimit, spin};
///
/// let mut looks = 0;
/// let limit = SpinLimit { looks: 3, yields: 2 };
/// spin(limit, || { looks += 1; false }, || false);
/// assert_eq!(looks, 3 * 3 + 1); // in the beginning, after each yield, and in the end
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinLimit {
    /// How often it looks again, after the first few times with a pause in between.
    pub looks: u32,
    /// How often it then leaves its core to whoever is there before it looks as often again.
    pub yields: u32,
}

/// Looks at `is_there` until it becomes true, but not beyond `limit`. Returns whether it did.
///
/// Who is awaited may need the very core that looks: where ranks share cores, or where two of them
/// have met on one. If `needs_core` says so, this leaves it at once, a few times more than the limit
/// says; else looking again is cheaper.
///
/// ```
/// use drumline_shm::{SpinLimit, spin};
///
/// let mut looks = 0;
/// let limit = SpinLimit { looks: 5, yields: 1 };
/// assert!(spin(limit, || { looks += 1; looks == 7 }, || false));
/// assert!(!spin(limit, || false, || true));
/// ```
#[inline]
pub fn spin(
    limit: SpinLimit,
    mut is_there: impl FnMut() -> bool,
    mut needs_core: impl FnMut() -> bool,
) -> bool {
    let SpinLimit { looks, mut yields } = limit;
    let mut leaves = LEAVES;
    // Where everybody has a core of its own, short operations do without the question.
    let ask_at = if yields > 0 { 0 } else { EAGER };
    loop {
        let mut is_needed = false;
        for look in 0..looks {
            if is_there() {
                return true;
            }
            if look == ask_at && leaves > 0 && needs_core() {
                is_needed = true;
                break;
            }
            if look >= EAGER {
                spin_loop();
            }
        }
        match is_needed {
            true => leaves -= 1,
            false if yields == 0 => return is_there(),
            false => yields -= 1,
        }
        yield_now();
    }
}

/// Looks without a pause, which is as long as a short operation. They take less than a microsecond.
const EAGER: u32 = 100;

/// How often a rank leaves its core to one that it waits for. A core that nobody takes comes back in
/// less than a microsecond.
const LEAVES: u32 = 20;

/// How long a rank should spin before it sleeps, when `local_ranks` run on this host.
///
/// With a core for every rank some 30 us of spinning are cheap, as a sleep costs 20 us. With
/// fewer cores the rank that is waited for may need the very core that spins: a limit that is a
/// hundred times too high makes operations fifty times slower. So the core is left to others, which
/// costs less than a sleep and a wake-up as long as the others are ranks that soon wait, too: some
/// 2 us, for which it is worth looking first if whoever is waited for runs on another core.
///
/// Cores are those that this process may use: its affinity mask and the quotas of its control
/// groups count. That takes some system calls; keep the answer.
///
/// ```
/// use drumline_shm::spin_limit;
///
/// let (alone, crowded) = (spin_limit(1), spin_limit(1_000_000));
/// assert!(alone.looks > crowded.looks && crowded.yields > alone.yields);
/// ```
pub fn spin_limit(local_ranks: usize) -> SpinLimit {
    limit(local_ranks, available_parallelism().map_or(1, |cores| cores.get()))
}

fn limit(local_ranks: usize, usable_cores: usize) -> SpinLimit {
    match local_ranks <= usable_cores {
        true => SpinLimit { looks: 2_000, yields: 0 },
        false => SpinLimit { looks: 200, yields: 20 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_somebody_needs_is_left_at_once() {
        let looks = |limit: SpinLimit, needs_core: bool| {
            let mut looks = 0;
            let is_there = || {
                looks += 1;
                false
            };
            assert!(!spin(limit, is_there, || needs_core));
            looks
        };
        let crowded = SpinLimit { looks: 10, yields: 3 };
        assert_eq!(looks(crowded, false), 4 * 10 + 1);
        assert_eq!(looks(crowded, true), LEAVES + 4 * 10 + 1);
        let alone = SpinLimit { looks: 200, yields: 0 };
        assert_eq!(looks(alone, false), 200 + 1);
        assert_eq!(looks(alone, true), LEAVES * (EAGER + 1) + 200 + 1);
    }

    #[test]
    fn ranks_that_share_cores_spin_less() {
        let [alone, crowded] = [limit(1, 1), limit(2, 1)];
        assert_eq!([limit(2, 2), limit(4, 8)], [alone; 2]);
        assert_eq!([limit(3, 2), limit(usize::MAX, 8)], [crowded; 2]);
        assert!(alone.looks > crowded.looks && alone.yields < crowded.yields);
        assert_eq!([spin_limit(1), spin_limit(usize::MAX)], [alone, crowded]);
    }
}
