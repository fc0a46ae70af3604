//! How large buckets are.
//!
//! A bucket leaves when it is full, and the last one only when backward has ended. So a model that fits into one bucket
//! would hide none of its communication. But each bucket costs a fixed time, so it must not be small.

use drumline_group::{DType, ProcessGroup, algorithms::explain, backend::Collective};

use super::super::{DdpOptions, ParameterSpec};
use crate::Result;

/// A model has about this many buckets, unless they get too small or too large.
const BUCKETS: usize = 8;

/// In the memory of a host, an all-reduce of this many bytes takes many times its fixed costs.
pub(super) const LEAST_BYTES: usize = 1 << 20;

/// The limits of the buckets of a model. A bucket that is fitted to it has at least `least_bytes`.
pub(super) fn limits(
    parameters: &[ParameterSpec],
    least_bytes: usize,
    options: &DdpOptions,
) -> DdpOptions {
    if !options.fits_buckets_to_model {
        return options.clone();
    }
    let total: usize = parameters.iter().map(ParameterSpec::bytes).sum();
    let fitted = (total / BUCKETS).max(least_bytes);
    DdpOptions {
        first_bucket_bytes: options.first_bucket_bytes.min(fitted),
        bucket_bytes: options.bucket_bytes.min(fitted),
        ..options.clone()
    }
}

/// The least size at which an all-reduce costs at most a quarter more than its bytes do, by the prices of the group's
/// links. On one host: [`LEAST_BYTES`].
pub(super) fn least_bytes_by_price(group: &ProcessGroup) -> Result<usize> {
    const LARGEST: usize = 32 << 20;
    const FIXED_SHARE: f64 = 0.2;
    if group.world_size() == 1 {
        return Ok(LEAST_BYTES);
    }
    let price = |bytes: usize| -> Result<Option<f64>> {
        let elements = bytes / DType::F32.size();
        let answer = explain(group, Collective::AllReduce, elements, DType::F32, true)?;
        let chosen = answer.candidates.iter().find(|it| it.algorithm == answer.algorithm);
        Ok(chosen.and_then(|it| it.price).map(|price| price.as_secs_f64()))
    };
    let Some(fixed) = price(DType::F32.size())? else { return Ok(LEAST_BYTES) };
    let mut bytes = LEAST_BYTES;
    while bytes < LARGEST && price(bytes)?.is_some_and(|price| fixed > FIXED_SHARE * price) {
        bytes *= 2;
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits_of(mebibytes: usize, least: usize, options: &DdpOptions) -> (usize, usize) {
        let model = [ParameterSpec::new("p", [mebibytes << 18], DType::F32)];
        let limits = limits(&model, least << 20, options);
        (limits.first_bucket_bytes >> 20, limits.bucket_bytes >> 20)
    }

    #[test]
    fn buckets_fit_the_model_unless_they_are_set() {
        let unset = DdpOptions::default();
        for (mebibytes, wanted) in [(1, (1, 1)), (8, (1, 1)), (24, (1, 3)), (4000, (1, 25))] {
            assert_eq!(limits_of(mebibytes, 1, &unset), wanted, "a model of {mebibytes} MiB");
        }
        assert_eq!(limits_of(24, 16, &unset), (1, 16), "expensive links");
        assert_eq!(limits_of(24, 32, &unset), (1, 25));
        let set = DdpOptions::default().bucket_bytes(2 << 20);
        assert_eq!(limits_of(400, 16, &set), (1, 2));
        let set = DdpOptions::default().first_bucket_bytes(3 << 20);
        assert_eq!(limits_of(8, 1, &set), (3, 25));
    }

    #[test]
    fn over_links_the_fixed_cost_is_at_most_a_fifth_of_the_price() {
        let config = drumline_group::Config::default().shared_memory(false);
        let groups = drumline_group::rendezvous::local_world_with(2, &config).unwrap();
        let price = |bytes: usize| {
            let elements = bytes / 4;
            let answer =
                explain(&groups[0], Collective::AllReduce, elements, DType::F32, true).unwrap();
            let chosen = answer.candidates.iter().find(|it| it.algorithm == answer.algorithm);
            chosen.unwrap().price.expect("it goes over links").as_secs_f64()
        };
        let least = least_bytes_by_price(&groups[0]).unwrap();
        assert_eq!(least_bytes_by_price(&groups[1]).unwrap(), least);
        assert!(least == 32 << 20 || price(4) <= 0.2 * price(least));
        assert!(least == LEAST_BYTES || price(4) > 0.2 * price(least / 2));
    }

    #[test]
    fn ranks_of_one_host_have_no_prices() {
        for group in drumline_group::rendezvous::local_world(2).unwrap() {
            assert_eq!(least_bytes_by_price(&group).unwrap(), LEAST_BYTES);
        }
    }
}
