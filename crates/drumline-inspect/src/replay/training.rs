//! The time of a step of data-parallel training, which sends buckets of gradients during the backward pass.

/// The work of a step.
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
    /// The time of the forward pass, and of all other work that hides no communication.
    pub forward_ps: u64,
    /// The time of the backward pass, which produces gradients at a constant rate.
    pub backward_ps: u64,
    /// Bytes of the first bucket, which is small so that it leaves early.
    pub first_bucket_bytes: u64,
    /// Bytes of all other buckets.
    pub bucket_bytes: u64,
}

/// The times of a step.
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
    /// The time of the whole step.
    pub time_ps: u64,
    /// The time of all all-reduces together.
    pub communication_ps: u64,
    /// The part of that time that the backward pass does not hide.
    pub exposed_ps: u64,
    /// The number of buckets.
    pub buckets: usize,
}

impl TrainingStep {
    /// The part of its time that the step computes: the time of a single rank divided by the time of this
    /// step.
    pub fn efficiency(&self) -> f64 {
        (self.time_ps - self.exposed_ps) as f64 / self.time_ps.max(1) as f64
    }
}

impl Training {
    /// The times of a step. `all_reduce` returns the time of a bucket by its bytes. Buckets go one after
    /// another, each as soon as its last gradient is ready.
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
