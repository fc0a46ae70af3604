//! How long to look before sleeping.

use std::hint::spin_loop;
use std::thread::available_parallelism;

/// Looks at `condition` up to `limit` + 1 times, after the first few with a pause in between.
/// Returns whether it became true.
///
/// ```
/// let mut looks = 0;
/// assert!(drumline_shm::spin(5, || { looks += 1; looks == 6 }));
/// assert!(!drumline_shm::spin(100, || false));
/// ```
#[inline]
pub fn spin(limit: u32, mut condition: impl FnMut() -> bool) -> bool {
    for _ in 0..limit.min(EAGER) {
        if condition() {
            return true;
        }
    }
    for _ in EAGER..limit {
        if condition() {
            return true;
        }
        spin_loop();
    }
    condition()
}

/// Looks without a pause, which is as long as a short operation. They take less than a microsecond.
const EAGER: u32 = 100;

/// How many pauses a rank should spin before it sleeps, when `local_ranks` run on this host.
///
/// With a core for every rank some 30 us of spinning are cheap, as a sleep costs 20 us. With
/// fewer cores the rank that is waited for may need the very core that spins: a limit that is a
/// hundred times too high makes operations fifty times slower.
///
/// Cores are those that this process may use: its affinity mask and the quotas of its control
/// groups count. That takes some system calls; keep the answer.
pub fn spin_limit(local_ranks: usize) -> u32 {
    limit(local_ranks, available_parallelism().map_or(1, |cores| cores.get()))
}

fn limit(local_ranks: usize, usable_cores: usize) -> u32 {
    if local_ranks <= usable_cores { 2_000 } else { 50 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_that_share_cores_spin_less() {
        assert_eq!([limit(1, 1), limit(2, 2), limit(4, 8)], [2_000; 3]);
        assert_eq!([limit(2, 1), limit(3, 2), limit(usize::MAX, 8)], [50; 3]);
        assert!(spin_limit(1) > spin_limit(usize::MAX));
    }
}
