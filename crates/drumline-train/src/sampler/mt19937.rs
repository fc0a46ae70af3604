/// The Mersenne Twister of M. Matsumoto and T. Nishimura (ACM TOMACS 8(1), 1998): torch's generator
/// for CPUs.
#[derive(Clone, Debug)]
pub(super) struct Mt19937 {
    state: [u32; N],
    /// Index of the next word to give out. `N` means that all are used.
    next: usize,
}

/// Words of state.
const N: usize = 624;
/// Distance of the words that are mixed.
const M: usize = 397;

impl Mt19937 {
    /// The generator after the reference's `init_genrand(seed)`.
    pub(super) fn new(seed: u32) -> Self {
        let mut state = [seed; N];
        for i in 1..N {
            let last = state[i - 1];
            state[i] = (last ^ (last >> 30)).wrapping_mul(1_812_433_253).wrapping_add(i as u32);
        }
        Self { state, next: N }
    }

    /// A number from all of `u32`.
    pub(super) fn next_u32(&mut self) -> u32 {
        if self.next == N {
            self.refill();
        }
        let mut word = self.state[self.next];
        self.next += 1;
        word ^= word >> 11;
        word ^= (word << 7) & 0x9d2c_5680;
        word ^= (word << 15) & 0xefc6_0000;
        word ^ (word >> 18)
    }

    fn refill(&mut self) {
        for i in 0..N {
            let joined = (self.state[i] & 0x8000_0000) | (self.state[(i + 1) % N] & 0x7fff_ffff);
            let twisted = (joined >> 1) ^ (joined & 1).wrapping_mul(0x9908_b0df);
            self.state[i] = self.state[(i + M) % N] ^ twisted;
        }
        self.next = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The C++ standard ([rand.predef]) fixes the 10,000th number; the first one is the
    /// reference implementation's.
    #[test]
    fn numbers_are_those_of_the_reference() {
        let mut generator = Mt19937::new(5489);
        assert_eq!(generator.next_u32(), 3_499_211_612);
        assert_eq!((2..=10_000).map(|_| generator.next_u32()).last(), Some(4_123_659_995));
    }
}
