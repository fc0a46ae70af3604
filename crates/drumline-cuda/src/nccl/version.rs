//! Numbers of versions: 2.18.1 is 21801.

use std::fmt;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version(pub(crate) i32);

impl Version {
    /// The first with `ncclCommSplit`.
    pub(crate) const OLDEST: Version = Version(21_800);
    pub(crate) const WITH_FLOATS_OF_8_BITS: Version = Version(22_400);
    const WITH_SHARED_GPUS: Version = Version(23_000);
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Until 2.8 the major version was counted in thousands.
        let (unit, code) = (if self.0 < 10_000 { 1_000 } else { 10_000 }, self.0);
        write!(f, "{}.{}.{}", code / unit, code % unit / 100, code % 100)
    }
}

/// What lets two ranks share a GPU, for NCCL of a version such as 21801 (2.18.1).
pub fn same_gpu_hint(version: i32) -> &'static str {
    if Version(version) < Version::WITH_SHARED_GPUS {
        "give each rank a GPU of its own, or, to share one over NCCL's network, set another NCCL_HOSTID for each"
    } else {
        "give each rank a GPU of its own, or, to share one, set NCCL_MULTI_RANK_GPU_ENABLE=1"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn old_and_new_numbers_read_alike() {
        let texts = [2_804, 21_801, 23_007].map(|code| Version(code).to_string());
        assert_eq!(texts, ["2.8.4", "2.18.1", "2.30.7"]);
    }
}
