//! How much was communicated, and when.

use std::{
    fmt,
    time::{Duration, Instant},
};

/// How much a [`GradientReducer`](super::GradientReducer) has done so far.
///
/// ```
/// use drumline::ddp::ReducerStats;
///
/// /// How much of the communication training had to wait for.
/// fn exposed(stats: &ReducerStats) -> f64 {
///     stats.exposed.as_secs_f64() / stats.communication.as_secs_f64().max(f64::MIN_POSITIVE)
/// }
/// assert_eq!(exposed(&ReducerStats::default()), 0.0);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ReducerStats {
    /// The number of finished steps.
    pub steps: u64,
    /// The number of launched buckets.
    pub buckets_launched: u64,
    /// The number of buckets that were launched before `finish`, while backward was still running.
    pub buckets_launched_early: u64,
    /// The number of bytes of gradients that were averaged.
    pub bytes: u64,
    /// The number of bytes of gradients that were copied into buckets: once for each gradient that was handed in.
    pub bytes_copied: u64,
    /// The number of bytes of parameters whose new values all ranks got from their owners, if they have owners.
    pub bytes_gathered: u64,
    /// How long buckets were being averaged, and new values gathered.
    pub communication: Duration,
    /// How long `finish` waited for the averages, the part of the communication that backward did not hide, and how long
    /// new values were gathered.
    pub exposed: Duration,
}

/// When the buckets of one step were reduced, in microseconds since backward began.
///
/// It prints as a table with a drawing: `.` while gradients of the bucket come in, `|` while the bucket waits
/// for the buckets before it, `#` from its launch to its return.
///
/// ```
/// # use drumline::{DType, ProcessGroup, ddp::{DdpOptions, GradientReducer, ParameterSpec}};
/// use drumline::ddp::Timeline;
///
/// let layers = ["first", "last"].map(|name| ParameterSpec::new(name, [256], DType::F32));
/// let options = DdpOptions::default().first_bucket_bytes(1).bucket_bytes(1);
/// let reducer = GradientReducer::new(layers.into(), &options, &ProcessGroup::alone())?;
/// for layer in [1, 0] {
///     reducer.submit(layer, [1.0_f32; 256][..].into()); // backward
/// }
/// drop(reducer.finish()?);
/// let Timeline { buckets, backward_us, done_us, .. } = reducer.timeline();
/// assert_eq!(buckets.iter().map(|bucket| bucket.bytes).collect::<Vec<_>>(), [1024, 1024]);
/// assert!(buckets[0].launched_us <= buckets[1].launched_us && backward_us <= done_us);
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Timeline {
    /// The step, counted from 1.
    pub step: u64,
    /// The buckets, in launch order.
    pub buckets: Vec<BucketTimes>,
    /// When backward had ended and [`finish`](super::GradientReducer::finish) began to wait.
    pub backward_us: u64,
    /// When all averages were complete.
    pub done_us: u64,
}

/// When one bucket was reduced, in microseconds since backward began.
///
/// ```
/// use drumline::ddp::BucketTimes;
///
/// /// How long a bucket waited, full, for those before it.
/// fn held_up_us(times: &BucketTimes) -> u64 {
///     times.launched_us - times.ready_us
/// }
/// # use drumline::{DType, ProcessGroup, ddp::{DdpOptions, GradientReducer, ParameterSpec}};
/// # let bias = ParameterSpec::new("bias", [1], DType::F32);
/// # let group = ProcessGroup::alone();
/// # let reducer = GradientReducer::new(vec![bias], &DdpOptions::default(), &group)?;
/// # reducer.submit(0, [1.0_f32][..].into());
/// # drop(reducer.finish()?);
/// let times = reducer.timeline().buckets[0];
/// assert!(held_up_us(&times) <= times.done_us);
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct BucketTimes {
    /// The number of bytes of gradients.
    pub bytes: usize,
    /// When its first gradient came in.
    pub first_us: u64,
    /// When its last gradient came in.
    pub ready_us: u64,
    /// When it was launched, after all buckets before it.
    pub launched_us: u64,
    /// When its averages were complete.
    pub done_us: u64,
}

impl Timeline {
    /// The part of the communication that backward did not hide.
    pub fn exposed_us(&self) -> u64 {
        self.done_us.saturating_sub(self.backward_us)
    }
}

impl fmt::Display for Timeline {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const COLUMNS: u64 = 40;
        let Timeline { step, buckets, backward_us, done_us } = self;
        writeln!(
            f,
            "step {step}: backward {backward_us} us, averages after {done_us} us, exposed {} us",
            self.exposed_us()
        )?;
        writeln!(f, "bucket      bytes   ready us  launched us   done us")?;
        let column = |us: u64| us * COLUMNS / (*done_us).max(1);
        for (number, times) in buckets.iter().enumerate() {
            let BucketTimes { bytes, first_us, ready_us, launched_us, done_us } = *times;
            let drawing: String = (0..=COLUMNS)
                .map(|at| match at {
                    _ if at < column(first_us) || at > column(done_us) => ' ',
                    _ if at >= column(launched_us) => '#',
                    _ if at >= column(ready_us) => '|',
                    _ => '.',
                })
                .collect();
            let drawing = drawing.trim_end();
            writeln!(
                f,
                "{number:>6} {bytes:>10} {ready_us:>10} {launched_us:>12} {done_us:>9}  {drawing}"
            )?;
        }
        Ok(())
    }
}

/// Takes the times of the present step.
#[derive(Debug)]
pub(super) struct Clock {
    start: Option<Instant>,
    is_seen: Vec<bool>,
    timeline: Timeline,
}

impl Clock {
    /// The clock of a step. `bytes` are the lengths of the buckets.
    pub(super) fn new(step: u64, bytes: impl Iterator<Item = usize>) -> Self {
        let buckets: Vec<BucketTimes> =
            bytes.map(|bytes| BucketTimes { bytes, ..BucketTimes::default() }).collect();
        let is_seen = vec![false; buckets.len()];
        Self { start: None, is_seen, timeline: Timeline { step, buckets, ..Timeline::default() } }
    }

    /// Backward begins now. Without this call it begins with the first gradient.
    pub(super) fn start(&mut self) {
        self.start = Some(Instant::now());
    }

    /// A gradient of the bucket came in.
    pub(super) fn gradient(&mut self, bucket: usize) {
        let now = self.now_us();
        let times = &mut self.timeline.buckets[bucket];
        if !std::mem::replace(&mut self.is_seen[bucket], true) {
            times.first_us = now;
        }
        times.ready_us = now;
    }

    pub(super) fn launched(&mut self, bucket: usize) {
        let now = self.now_us();
        let times = &mut self.timeline.buckets[bucket];
        times.launched_us = now;
        times.done_us = now;
    }

    pub(super) fn done(&mut self, bucket: usize, at: Instant) {
        self.timeline.buckets[bucket].done_us = self.at_us(at);
    }

    pub(super) fn backward_ended(&mut self) {
        self.timeline.backward_us = self.now_us();
        self.timeline.done_us = self.timeline.backward_us;
    }

    /// All averages are complete.
    pub(super) fn finish(mut self) -> Timeline {
        self.timeline.done_us = self.now_us();
        self.timeline
    }

    fn now_us(&mut self) -> u64 {
        let now = Instant::now();
        self.start.get_or_insert(now);
        self.at_us(now)
    }

    fn at_us(&self, at: Instant) -> u64 {
        self.start.map_or(0, |start| at.saturating_duration_since(start).as_micros() as u64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_timeline_prints_as_a_table_with_a_drawing() {
        let times = |bytes, first_us, ready_us, launched_us, done_us| BucketTimes {
            bytes,
            first_us,
            ready_us,
            launched_us,
            done_us,
        };
        let timeline = Timeline {
            step: 3,
            buckets: vec![times(1024, 100, 200, 200, 300), times(4096, 0, 100, 200, 400)],
            backward_us: 300,
            done_us: 400,
        };
        assert_eq!(timeline.exposed_us(), 100);
        let wanted = "\
step 3: backward 300 us, averages after 400 us, exposed 100 us
bucket      bytes   ready us  launched us   done us
     0       1024        200          200       300            ..........###########
     1       4096        100          200       400  ..........||||||||||#####################
";
        assert_eq!(timeline.to_string(), wanted);
    }
}
