//! How long requests to the store take, and which are lost.

use fastrand::Rng;

use crate::time::{MS, Nanos};

/// How long requests to the store take, and which are lost.
#[derive(Clone, Copy, Debug)]
pub(super) struct Network {
    usual: Nanos,
    slow_percent: u32,
    slow: Nanos,
    lost_percent: u32,
    /// Whether what a poll asks for is read at several moments.
    pub(super) splits: bool,
}

/// What becomes of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    Arrives(Nanos),
    Lost,
}

impl Network {
    pub(super) fn draw(rng: &mut Rng) -> Network {
        let is_bad = rng.u8(0..3) == 0;
        Network {
            usual: rng.u64(100_000..3 * MS),
            slow_percent: if is_bad { [2, 5, 30][rng.usize(0..3)] } else { 0 },
            slow: [50, 900, 2_500][rng.usize(0..3)] * MS,
            lost_percent: if is_bad { rng.u32(0..=3) } else { 0 },
            splits: rng.u8(0..4) == 0,
        }
    }

    /// Whether no message is lost or slow.
    pub(super) fn is_good(&self) -> bool {
        self.slow_percent == 0 && self.lost_percent == 0
    }

    /// A message that is sent now.
    pub(super) fn message(&self, rng: &mut Rng, is_quiet: bool) -> Fate {
        let usual = self.usual / 2 + rng.u64(0..self.usual);
        match rng.u32(0..100) {
            _ if is_quiet => Fate::Arrives(usual),
            it if it < self.lost_percent => Fate::Lost,
            it if it < self.lost_percent + self.slow_percent => {
                Fate::Arrives(usual + rng.u64(0..self.slow))
            }
            _ => Fate::Arrives(usual),
        }
    }
}
