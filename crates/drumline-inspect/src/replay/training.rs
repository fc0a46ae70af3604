//! A step of data-parallel training: buckets of gradients leave while backward goes on.

/// What a step computes and sends.
///
/// ```
/// use drumline_inspect::replay::Training;
///
/// let training = Training {
///     gradient_bytes: 100, forward_ps: 500, backward_ps: 1_000,
///     first_bucket_bytes: 10, bucket_bytes: 45,
/// };
/// let step = training.step(|_bytes| 0); // a network that takes no time
/// assert_eq!((step.time_ps, step.exposed_ps, step.buckets), (1_500, 0, 3));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Training {
    /// Bytes of all gradients.
    pub gradient_bytes: u64,
    /// The forward pass, and whatever else hides no communication.
    pub forward_ps: u64,
    /// The backward pass. Gradients come evenly over its time.
    pub backward_ps: u64,
    /// Bytes of the first bucket, which is to leave early.
    pub first_bucket_bytes: u64,
    /// Bytes of all other buckets.
    pub bucket_bytes: u64,
}

/// How a step goes.
///
/// ```
/// use drumline_inspect::replay::{TrainingStep, Training};
///
/// let training = Training {
///     gradient_bytes: 100, forward_ps: 500, backward_ps: 1_000,
///     first_bucket_bytes: 10, bucket_bytes: 45,
/// };
/// let TrainingStep { time_ps, exposed_ps, .. } = training.step(|bytes| 100 * bytes);
/// assert_eq!(time_ps - exposed_ps, 1_500); // what it computes
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TrainingStep {
    /// All of it.
    pub time_ps: u64,
    /// The time of all all-reduces together.
    pub communication_ps: u64,
    /// What of it is not hidden behind backward.
    pub exposed_ps: u64,
    /// How many buckets there are.
    pub buckets: usize,
}

impl TrainingStep {
    /// Which part of its time the step computes: what a single rank would need, by what this needs.
    pub fn efficiency(&self) -> f64 {
        (self.time_ps - self.exposed_ps) as f64 / self.time_ps.max(1) as f64
    }
}

impl Training {
    /// The step, where `all_reduce` says how long a bucket of so many bytes takes. Buckets go one
    /// after another, each as soon as its last gradient is there.
    pub fn step(&self, mut all_reduce: impl FnMut(u64) -> u64) -> TrainingStep {
        let mut step = TrainingStep { time_ps: 0, communication_ps: 0, exposed_ps: 0, buckets: 0 };
        let (mut done, mut free_at) = (0, 0);
        while done < self.gradient_bytes {
            let full = if done == 0 { self.first_bucket_bytes } else { self.bucket_bytes };
            let bytes = full.max(1).min(self.gradient_bytes - done);
            done += bytes;
            let ready =
                u128::from(self.backward_ps) * u128::from(done) / u128::from(self.gradient_bytes);
            let takes = all_reduce(bytes);
            free_at = takes.saturating_add(free_at.max(ready as u64));
            step.communication_ps = step.communication_ps.saturating_add(takes);
            step.buckets += 1;
        }
        step.exposed_ps = free_at.saturating_sub(self.backward_ps);
        step.time_ps = self.forward_ps + self.backward_ps + step.exposed_ps;
        step
    }
}
