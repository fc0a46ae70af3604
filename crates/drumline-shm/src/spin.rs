//! How long a rank polls before it sleeps.

use std::hint::spin_loop;
use std::thread::{available_parallelism, yield_now};

/// How often a rank polls before it sleeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpinLimit {
    /// How often the rank polls in a row. After the first few polls it pauses between two.
    pub looks: u32,
    /// How often the rank then yields its core to another thread and polls `looks` times again.
    pub yields: u32,
}

/// Polls `is_there` until it is true, at most as often as `limit` says. Returns whether it became
/// true.
///
/// The awaited rank may need the core of the polling rank: where ranks outnumber cores, or where the kernel
/// put two of them on one core. `needs_core` tells whether this is so. If it is, this function yields the
/// core at once, a few times more often than `limit` says. If it is not, polling again is cheaper than
/// yielding.
#[inline]
pub fn spin(
    limit: SpinLimit,
    mut is_there: impl FnMut() -> bool,
    mut needs_core: impl FnMut() -> bool,
) -> bool {
    let SpinLimit { looks, mut yields } = limit;
    let mut extra_yields = EXTRA_YIELDS;
    // If every rank has a core of its own, a short call ends before `needs_core` is called.
    let ask_at = if yields > 0 { 0 } else { EAGER };
    loop {
        let mut is_needed = false;
        for look in 0..looks {
            if is_there() {
                return true;
            }
            if look == ask_at && extra_yields > 0 && needs_core() {
                is_needed = true;
                break;
            }
            if look >= EAGER {
                spin_loop();
            }
        }
        match is_needed {
            true => extra_yields -= 1,
            false if yields == 0 => return is_there(),
            false => yields -= 1,
        }
        yield_now();
    }
}

/// Polls without a pause: about as long as a short call, less than a microsecond.
const EAGER: u32 = 100;

/// In one [`spin()`], the number of yields because the awaited rank needs the core. If no thread takes the core,
/// a yield returns in less than a microsecond.
const EXTRA_YIELDS: u32 = 20;

/// The limit for a rank that shares this host with `local_ranks - 1` others.
///
/// With a core for every rank, some 30 us of spinning are cheap, since a sleep costs 20 us.
///
/// With fewer cores, the awaited rank may need the core that spins: a limit that is a hundred times too high
/// makes calls fifty times slower. So the rank yields. A yield costs about 2 us, less than a sleep and a
/// wake-up, as long as the other threads are ranks that will soon wait, too. If the awaited rank runs on
/// another core, it is worth polling first.
///
/// The number of cores follows from the affinity mask of this process and the quotas of its control
/// groups. Finding it takes some system calls, so keep the answer.
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
    fn a_core_that_the_awaited_rank_needs_is_yielded_at_once() {
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
        assert_eq!(looks(crowded, true), EXTRA_YIELDS + 4 * 10 + 1);
        let alone = SpinLimit { looks: 200, yields: 0 };
        assert_eq!(looks(alone, false), 200 + 1);
        assert_eq!(looks(alone, true), EXTRA_YIELDS * (EAGER + 1) + 200 + 1);
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
