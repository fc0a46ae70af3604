//! A histogram of durations that takes little memory.

use std::collections::BTreeMap;

/// Durations in bins: 32 bins for every power of two, each about 3 % wide.
#[derive(Debug, Default)]
pub(crate) struct Histogram {
    count: u64,
    bins: BTreeMap<u32, u64>,
}

impl Histogram {
    pub(crate) fn add(&mut self, ns: u64) {
        self.count += 1;
        *self.bins.entry(bin(ns)).or_default() += 1;
    }

    /// The median, to within 2 %.
    pub(crate) fn median_ns(&self) -> u64 {
        let mut counted = 0;
        let median = self.bins.iter().find(|(_, count)| {
            counted += **count;
            counted * 2 >= self.count
        });
        median.map_or(0, |(bin, _)| middle(*bin))
    }
}

fn bin(ns: u64) -> u32 {
    match ns {
        0..64 => ns as u32,
        _ => {
            let shift = 58 - ns.leading_zeros();
            shift * 32 + (ns >> shift) as u32
        }
    }
}

/// The duration in the middle of a bin.
fn middle(bin: u32) -> u64 {
    match bin {
        0..64 => bin.into(),
        _ => {
            let shift = bin / 32 - 1;
            (u64::from(bin - shift * 32) << shift) + (1 << shift) / 2
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn bins_are_narrow_and_in_order(ns in 0_u64..1 << 60, more in 0_u64..1 << 60) {
            let error = middle(bin(ns)).abs_diff(ns);
            prop_assert!(error * 50 <= ns, "{ns} becomes {}", middle(bin(ns)));
            prop_assert!(bin(ns) <= bin(ns + more));
        }
    }
}
