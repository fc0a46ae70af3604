/// The seed of the random numbers of a rank, or of a shard, in one step. Two parts or two steps have different seeds,
/// almost surely.
///
/// SplitMix64 (Steele, Lea, Flood 2014), fed with one number after the other.
pub(crate) fn step_seed(seed: u64, part: usize, step: u64) -> u64 {
    [seed, part as u64, step].into_iter().fold(0, |state, number| mix(state ^ mix(number)))
}

fn mix(number: u64) -> u64 {
    let mut z = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[test]
fn every_step_of_every_rank_has_another_seed() {
    let mut seeds = std::collections::HashSet::new();
    for seed in 0..4 {
        for rank in 0..8 {
            seeds.extend((0..100).map(|step| step_seed(seed, rank, step)));
        }
    }
    assert_eq!(seeds.len(), 4 * 8 * 100);
}
