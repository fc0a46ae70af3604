use std::ops::Range;

use super::Bucket;

/// Decides which buckets can be launched when a gradient becomes ready. It holds no data and does no I/O.
///
/// Every rank must launch the same buckets in the same order, whatever the order of its gradients. So a
/// bucket is launched when all its members are ready *and* all buckets before it were launched.
#[derive(Clone, Debug)]
pub(super) struct Reducer {
    /// The size of each bucket.
    sizes: Vec<usize>,
    /// How many members of each bucket are not ready yet.
    pending: Vec<usize>,
    /// The bucket of each parameter.
    bucket_of: Vec<usize>,
    is_ready: Vec<bool>,
    /// The first bucket that was not launched.
    next_launch: usize,
}

/// The error for a parameter that was already ready in this step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct AlreadyReady;

/// What was not complete at the end of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Unfinished {
    /// The parameters that never became ready, by index.
    pub(super) missing: Vec<usize>,
    /// The buckets that were not launched.
    pub(super) buckets: Range<usize>,
}

impl Reducer {
    /// A reducer at the start of a step. `buckets` hold each parameter exactly once, as
    /// [`plan_buckets`](super::plan_buckets) makes them.
    pub(super) fn new(buckets: &[Bucket]) -> Self {
        let sizes: Vec<usize> = buckets.iter().map(|bucket| bucket.parameters.len()).collect();
        let mut bucket_of = vec![0; sizes.iter().sum()];
        for (number, bucket) in buckets.iter().enumerate() {
            for &parameter in &bucket.parameters {
                bucket_of[parameter] = number;
            }
        }
        let is_ready = vec![false; bucket_of.len()];
        Self { pending: sizes.clone(), sizes, bucket_of, is_ready, next_launch: 0 }
    }

    /// The gradient of `parameter` is final. Returns the buckets to launch now, in this order.
    pub(super) fn ready(&mut self, parameter: usize) -> Result<Range<usize>, AlreadyReady> {
        if std::mem::replace(&mut self.is_ready[parameter], true) {
            return Err(AlreadyReady);
        }
        self.pending[self.bucket_of[parameter]] -= 1;
        let first = self.next_launch;
        while self.pending.get(self.next_launch) == Some(&0) {
            self.next_launch += 1;
        }
        Ok(first..self.next_launch)
    }

    /// Whether the gradient of `parameter` is final.
    pub(super) fn is_ready(&self, parameter: usize) -> bool {
        self.is_ready[parameter]
    }

    /// The parameters that are not ready yet, by index.
    pub(super) fn missing(&self) -> Vec<usize> {
        (0..self.is_ready.len()).filter(|&parameter| !self.is_ready[parameter]).collect()
    }

    /// Ends the step and starts the next one. Returns what was not complete.
    pub(super) fn finish(&mut self) -> Unfinished {
        let missing = self.missing();
        let buckets = self.next_launch..self.sizes.len();
        self.pending.clone_from(&self.sizes);
        self.is_ready.fill(false);
        self.next_launch = 0;
        Unfinished { missing, buckets }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use drumline_group::DType;

    /// Buckets, and an order in which some of their members become ready.
    fn step() -> impl Strategy<Value = (Vec<Bucket>, Vec<usize>)> {
        (prop::collection::vec(1usize..5, 1..8), any::<prop::sample::Index>()).prop_flat_map(
            |(sizes, cut)| {
                let count: usize = sizes.iter().sum();
                let mut indices = 0..count;
                let buckets: Vec<Bucket> = sizes
                    .iter()
                    .map(|&size| Bucket {
                        dtype: DType::F32,
                        parameters: indices.by_ref().take(size).collect(),
                    })
                    .collect();
                let keep = cut.index(count + 1);
                let order = Just((0..count).collect::<Vec<_>>()).prop_shuffle();
                (Just(buckets), order.prop_map(move |order| order[..keep].to_vec()))
            },
        )
    }

    proptest! {
        /// Compared with the definition, for every prefix of the order: exactly the full buckets at the front
        /// were launched.
        #[test]
        fn launches_the_full_leading_buckets_once_and_in_order((buckets, order) in step()) {
            let mut reducer = Reducer::new(&buckets);
            for _step in 0..2 {
                let mut launched = Vec::new();
                for (done, &parameter) in order.iter().enumerate() {
                    launched.extend(reducer.ready(parameter).unwrap());
                    let is_ready = |p: &usize| order[..=done].contains(p);
                    let full =
                        buckets.iter().take_while(|b| b.parameters.iter().all(is_ready)).count();
                    prop_assert_eq!(&launched, &(0..full).collect::<Vec<_>>());
                    prop_assert_eq!(reducer.ready(parameter), Err(AlreadyReady));
                }
                let count: usize = buckets.iter().map(|bucket| bucket.parameters.len()).sum();
                let missing: Vec<usize> = (0..count).filter(|p| !order.contains(p)).collect();
                let unfinished = reducer.finish();
                prop_assert_eq!(unfinished.missing, missing);
                prop_assert_eq!(unfinished.buckets, launched.len()..buckets.len());
            }
        }
    }
}
