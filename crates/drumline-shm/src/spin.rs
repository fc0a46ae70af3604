//! How long to look before sleeping.

use std::hint::spin_loop;
use std::thread::{available_parallelism, yield_now};

/// How long a rank looks before it sleeps.
///
/// ```
/// use drumline_shm::{SpinLimit, spin};
///
/// let mut looks = 0;
/// spin(SpinLimit { looks: 3, yields: 2 }, || { looks += 1; false });
/// assert_eq!(looks, 3 + 2 + 1); // and once more at the end
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinLimit {
    /// How often it looks again, after the first few times with a pause in between.
    pub looks: u32,
    /// How often it then leaves its core to somebody else before it looks again.
    pub yields: u32,
}

/// Looks at `condition` until it becomes true, but not beyond `limit`. Returns whether it did.
///
/// ```
/// use drumline_shm::{SpinLimit, spin};
///
/// let mut looks = 0;
/// let limit = SpinLimit { looks: 5, yields: 1 };
/// assert!(spin(limit, || { looks += 1; looks == 7 }));
/// assert!(!spin(limit, || false));
/// ```
#[inline]
pub fn spin(limit: SpinLimit, mut condition: impl FnMut() -> bool) -> bool {
    let SpinLimit { looks, yields } = limit;
    for _ in 0..looks.min(EAGER) {
        if condition() {
            return true;
        }
    }
    for _ in EAGER..looks {
        if condition() {
            return true;
        }
        spin_loop();
    }
    for _ in 0..yields {
        if condition() {
            return true;
        }
        yield_now();
    }
    condition()
}

/// Looks without a pause, which is as long as a short operation. They take less than a microsecond.
const EAGER: u32 = 100;

/// How long a rank should spin before it sleeps, when `local_ranks` run on this host.
///
/// With a core for every rank some 30 us of spinning are cheap, as a sleep costs 20 us. With
/// fewer cores the rank that is waited for may need the very core that spins: a limit that is a
/// hundred times too high makes operations fifty times slower. So the core is left to others, which
/// costs less than a sleep and a wake-up as long as the others are ranks that soon wait, too.
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
        false => SpinLimit { looks: 50, yields: 20 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_cores_spin_less() {
        let [alone, crowded] = [limit(1, 1), limit(2, 1)];
        assert_eq!([limit(2, 2), limit(4, 8)], [alone; 2]);
        assert_eq!([limit(3, 2), limit(usize::MAX, 8)], [crowded; 2]);
        assert!(alone.looks > crowded.looks && alone.yields < crowded.yields);
        assert_eq!([spin_limit(1), spin_limit(usize::MAX)], [alone, crowded]);
    }
}
