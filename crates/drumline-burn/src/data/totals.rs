use drumline::{ProcessGroup, ReduceOp};

use crate::Result;

/// Sums over samples, and their number: for means over all samples of all ranks, when ranks have different numbers of
/// them, or none.
///
/// ```
/// use drumline::ProcessGroup;
/// use drumline_burn::data::Totals;
///
/// let mut totals = Totals::default();
/// for (losses, recognised, samples) in [(12.0, 7.0, 8), (3.0, 2.0, 2)] {
///     totals.add([losses, recognised], samples);
/// }
/// let totals = totals.over(&ProcessGroup::alone())?; // a call of all ranks
/// let [loss, accuracy] = totals.means();
/// assert_eq!((loss, accuracy, totals.count()), (1.5, 0.9, 10));
/// # Ok::<_, drumline_burn::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Totals<const N: usize> {
    sums: [f64; N],
    count: u64,
}

impl<const N: usize> Default for Totals<N> {
    fn default() -> Self {
        Self { sums: [0.0; N], count: 0 }
    }
}

impl<const N: usize> Totals<N> {
    /// Adds the sums over `samples` more samples.
    pub fn add(&mut self, sums: [f64; N], samples: u64) {
        self.sums.iter_mut().zip(sums).for_each(|(sum, more)| *sum += more);
        self.count += samples;
    }

    /// The totals of all ranks. All ranks make this call, also those without samples. All get the same bits.
    ///
    /// # Errors
    ///
    /// The communication failed, or the ranks have different numbers of sums.
    pub fn over(self, group: &ProcessGroup) -> Result<Self> {
        let Self { mut sums, count } = self;
        group.all_reduce(&mut sums, ReduceOp::Sum)?;
        let mut count = [count.cast_signed()];
        group.all_reduce(&mut count, ReduceOp::Sum)?;
        Ok(Self { sums, count: count[0].cast_unsigned() })
    }

    /// The sums.
    pub fn sums(&self) -> [f64; N] {
        self.sums
    }

    /// The number of samples.
    pub fn count(&self) -> u64 {
        self.count
    }

    /// Each sum, divided by the number of samples; NaN if there are none.
    pub fn means(&self) -> [f64; N] {
        self.sums.map(|sum| sum / self.count as f64)
    }
}
