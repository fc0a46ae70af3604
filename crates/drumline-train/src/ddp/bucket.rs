use drumline_group::DType;

use super::{DdpOptions, ParameterSpec};
use crate::{Error, Result};

/// Gradients that travel in one all-reduce.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Bucket {
    /// The dtype of all its members.
    pub(crate) dtype: DType,
    /// The indices of its members, in the order in which they are packed.
    pub(crate) parameters: Vec<usize>,
}

/// Divides `parameters` into buckets.
///
/// `order` is the order in which gradients are expected to become ready. It names each index of `parameters`
/// once. Without a better guess, it is the reverse of the order in which the model defines its parameters,
/// because backward runs from the last layer to the first.
///
/// The function takes one parameter after another and keeps one open bucket for each dtype. It closes a
/// bucket when the bucket's bytes reach the limit. No tensor is cut, so a bucket may exceed the limit by part
/// of its last tensor. The result is sorted by the position in `order` of each bucket's last parameter:
/// buckets become complete in this order.
///
/// # Errors
///
/// `order` is not a permutation of the indices.
pub(crate) fn plan_buckets(
    parameters: &[ParameterSpec],
    order: impl IntoIterator<Item = usize>,
    options: &DdpOptions,
) -> Result<Vec<Bucket>> {
    let mut seen = vec![false; parameters.len()];
    let mut open: Vec<Open> = Vec::new();
    let mut closed: Vec<Open> = Vec::new();
    let mut dtypes_with_buckets: Vec<DType> = Vec::new();

    for (position, index) in order.into_iter().enumerate() {
        let Some(parameter) = parameters.get(index).filter(|_| !seen[index]) else {
            return Err(not_a_permutation(parameters.len(), index));
        };
        seen[index] = true;

        let at = open.iter().position(|bucket| bucket.dtype == parameter.dtype);
        let at = at.unwrap_or_else(|| {
            open.push(Open::new(parameter.dtype));
            open.len() - 1
        });
        let bucket = &mut open[at];
        bucket.parameters.push(index);
        bucket.bytes += parameter.bytes();
        bucket.last_position = position;

        let is_first = !dtypes_with_buckets.contains(&bucket.dtype);
        let limit = if is_first { options.first_bucket_bytes } else { options.bucket_bytes };
        if bucket.bytes >= limit {
            if is_first {
                dtypes_with_buckets.push(bucket.dtype);
            }
            closed.push(open.swap_remove(at));
        }
    }
    if let Some(missing) = seen.iter().position(|seen| !seen) {
        return Err(not_a_permutation(parameters.len(), missing));
    }

    closed.append(&mut open);
    closed.sort_by_key(|bucket| bucket.last_position);
    Ok(closed
        .into_iter()
        .map(|bucket| Bucket { dtype: bucket.dtype, parameters: bucket.parameters })
        .collect())
}

struct Open {
    dtype: DType,
    parameters: Vec<usize>,
    bytes: usize,
    last_position: usize,
}

impl Open {
    fn new(dtype: DType) -> Self {
        Self { dtype, parameters: Vec::new(), bytes: 0, last_position: 0 }
    }
}

fn not_a_permutation(count: usize, index: usize) -> Error {
    Error::argument(
        "plan_buckets",
        format!(
            "the order must list each of the {count} parameters once, but number {index} is \
             missing, repeated or unknown"
        ),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parameters() -> impl Strategy<Value = (Vec<ParameterSpec>, Vec<usize>)> {
        let one = (0usize..3000, prop::bool::ANY).prop_map(|(elements, double)| {
            ParameterSpec::new("p", [elements], if double { DType::F64 } else { DType::F32 })
        });
        prop::collection::vec(one, 0..40).prop_flat_map(|parameters| {
            let order: Vec<usize> = (0..parameters.len()).collect();
            (Just(parameters), Just(order).prop_shuffle())
        })
    }

    proptest! {
        #[test]
        fn every_parameter_is_in_exactly_one_bucket_of_its_dtype(
            (parameters, order) in parameters(), first in 0usize..9000, rest in 0usize..30_000,
        ) {
            let options = DdpOptions::default().first_bucket_bytes(first).bucket_bytes(rest);
            let buckets = plan_buckets(&parameters, order.clone(), &options).unwrap();

            let mut all: Vec<usize> =
                buckets.iter().flat_map(|bucket| bucket.parameters.clone()).collect();
            all.sort_unstable();
            prop_assert_eq!(all, (0..parameters.len()).collect::<Vec<_>>());

            let position = |index: usize| order.iter().position(|&i| i == index).unwrap();
            for dtype in [DType::F32, DType::F64] {
                let mine: Vec<&Bucket> = buckets.iter().filter(|b| b.dtype == dtype).collect();
                let walked: Vec<usize> =
                    mine.iter().flat_map(|b| b.parameters.iter().map(|&i| position(i))).collect();
                prop_assert!(walked.is_sorted(), "members follow the given order");
                for (number, bucket) in mine.iter().enumerate() {
                    prop_assert!(bucket.parameters.iter().all(|&i| parameters[i].dtype == dtype));
                    let bytes: Vec<usize> =
                        bucket.parameters.iter().map(|&i| parameters[i].bytes()).collect();
                    let (last, before) = bytes.split_last().expect("no bucket is empty");
                    let before: usize = before.iter().sum();
                    let limit = if number == 0 { first } else { rest };
                    let is_last = number + 1 == mine.len();
                    prop_assert!(is_last || before + last >= limit, "closed too early");
                    prop_assert!(before < limit || bytes.len() == 1, "closed too late");
                }
            }
            let ends: Vec<usize> = buckets
                .iter()
                .map(|b| b.parameters.iter().map(|&i| position(i)).max().unwrap())
                .collect();
            prop_assert!(ends.is_sorted(), "buckets come in the order in which they are complete");
        }
    }

    #[test]
    fn an_order_that_is_no_permutation_is_refused() {
        let parameters =
            [ParameterSpec::new("a", [1], DType::F32), ParameterSpec::new("b", [1], DType::F32)];
        for order in [vec![0], vec![0, 0], vec![0, 2], vec![1, 0, 1]] {
            let error = plan_buckets(&parameters, order, &DdpOptions::default()).unwrap_err();
            assert!(error.to_string().contains("each of the 2 parameters once"), "{error}");
        }
    }
}
