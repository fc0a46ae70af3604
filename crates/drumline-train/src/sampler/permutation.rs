use super::mt19937::Mt19937;

/// torch shuffles this many samples or more in another way, with 64-bit numbers.
pub(super) const SAMPLES_TO_SHUFFLE_MAX: usize = u32::MAX as usize / 20;

/// What `torch.randperm(n, generator=torch.Generator().manual_seed(seed))` gives on a CPU, for `n`
/// below [`SAMPLES_TO_SHUFFLE_MAX`].
pub(super) fn random_permutation(n: usize, seed: u64) -> Vec<u32> {
    let n = n as u32;
    let mut generator = Mt19937::new(seed as u32);
    let mut order: Vec<u32> = (0..n).collect();
    for i in 0..n.saturating_sub(1) {
        // The modulo favours small numbers a little. torch has the same bias, hence the same order.
        let other = i + generator.next_u32() % (n - i);
        order.swap(i as usize, other as usize);
    }
    order
}
