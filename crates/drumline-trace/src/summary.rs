//! Sums up a trace: how long calls took, and for which ranks the others waited.

use std::{collections::BTreeMap, fmt, path::Path, time::Duration};

use drumline_schedule::step::Rank;

use crate::{
    Result,
    histogram::Histogram,
    join::{Arrival, Join},
    read::{Event, Run},
};

/// What all ranks did. It prints as two tables.
///
/// ```
/// # use drumline::{Config, ProcessGroup, trace::Trace};
/// # let directory = tempfile::tempdir().unwrap();
/// # let dir = directory.path().join("trace");
/// # let config = Config::default().trace(Trace::to(&dir));
/// # for group in drumline::rendezvous::local_world_with(1, &config)? {
/// #     for _ in 0..3 {
/// #         group.broadcast(&mut [0_u8; 100], 0)?;
/// #     }
/// #     group.destroy()?;
/// # }
/// use drumline::trace::{Summary, summarize};
///
/// let summary: Summary = summarize(&dir)?;
/// assert_eq!(summary.ranks.len(), 1);
/// assert!(summary.to_string().contains("broadcast")); // two tables
/// # Ok::<_, drumline::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Summary {
    /// The calls, by name.
    pub operations: Vec<OperationSummary>,
    /// The ranks, in order.
    pub ranks: Vec<RankSummary>,
    /// The number of collectives on two ranks or more that all of their ranks have recorded.
    pub collectives: u64,
    /// The number of these collectives in which the last rank is unknown, because two ranks began closer
    /// together than the error of their clocks.
    pub undecided: u64,
    /// Problems that do not prevent the summary.
    pub notes: Vec<String>,
}

/// All calls with one name.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct OperationSummary {
    /// `all_reduce`, `send`, `bucket` and so on.
    pub name: String,
    /// The number of calls, on all ranks together.
    pub calls: u64,
    /// The bytes of the buffers (not of the messages), on all ranks together.
    pub bytes: u64,
    /// The median time of a call, to within 2 %.
    pub median: Duration,
    /// The longest time of a call.
    pub max: Duration,
    /// The time of all calls together.
    pub total: Duration,
    /// The part of `total` before the last rank had begun. `None` for calls in which no rank waits for all
    /// others.
    pub waiting: Option<Duration>,
}

/// What one rank did.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RankSummary {
    /// The rank's number in the job.
    pub rank: Rank,
    /// The number of collectives that it was the last to begin.
    pub last: u64,
    /// How long the other ranks waited for it in these, all together.
    pub awaited: Duration,
    /// How long it waited for other ranks.
    pub waiting: Duration,
}

/// Sums up what the ranks in `dir` did.
///
/// # Errors
///
/// As for [`merge`](crate::merge()).
pub fn summarize(dir: &Path) -> Result<Summary> {
    let run = Run::open(dir)?;
    let mut operations = BTreeMap::<String, Operation>::new();
    let mut ranks = BTreeMap::<Rank, RankSummary>::new();
    for file in &run.files {
        let (rank, zero) = (file.rank, Duration::ZERO);
        ranks.insert(rank, RankSummary { rank, last: 0, awaited: zero, waiting: zero });
    }
    let (mut join, mut collectives, mut undecided) = (Join::default(), 0, 0);
    let mut pairs = BTreeMap::<(Rank, String), Event>::new();
    for event in run.events()? {
        let event = event?;
        match event.text("ph") {
            "X" => {
                let operation = operations.entry(event.text("name").to_owned()).or_default();
                operation.add(&event, event.duration_ns);
                let Some(arrivals) = join.add(&run, &event) else { continue };
                let shares = waits(&arrivals);
                let waiting = shares.iter().fold(0_u64, |sum, (_, ns)| sum.saturating_add(*ns));
                let total = operation.waiting_ns.get_or_insert(0);
                *total = total.saturating_add(waiting);
                for (rank, ns) in &shares {
                    if let Some(it) = ranks.get_mut(rank) {
                        it.waiting = it.waiting.saturating_add(Duration::from_nanos(*ns));
                    }
                }
                if arrivals.len() < 2 {
                    continue;
                }
                collectives += 1;
                match last(&run, &arrivals).and_then(|rank| ranks.get_mut(&rank)) {
                    Some(it) => {
                        it.last += 1;
                        it.awaited = it.awaited.saturating_add(Duration::from_nanos(waiting));
                    }
                    None => undecided += 1,
                }
            }
            "b" => {
                if let Some(key) = pair(&event) {
                    pairs.insert(key, event);
                }
            }
            "e" => {
                if let Some(begin) = pair(&event).and_then(|key| pairs.remove(&key)) {
                    let took = event.end_ns().saturating_sub(begin.end_ns());
                    operations.entry(begin.text("name").to_owned()).or_default().add(&begin, took);
                }
            }
            _ => {}
        }
    }
    let operations = operations.into_iter().map(|(name, it)| it.summary(name)).collect();
    let ranks = ranks.into_values().collect();
    Ok(Summary { operations, ranks, collectives, undecided, notes: run.notes })
}

/// How long each rank waited until the last rank had begun, in nanoseconds.
fn waits(arrivals: &[Arrival]) -> Vec<(Rank, u64)> {
    let last = arrivals.iter().map(|it| it.start_ns).max().unwrap_or_default();
    let wait = |it: &Arrival| last.min(it.end_ns).saturating_sub(it.start_ns).max(0).unsigned_abs();
    arrivals.iter().map(|it| (it.rank, wait(it))).collect()
}

/// The rank that began last. `None` if the clocks are not exact enough to tell.
fn last(run: &Run, arrivals: &[Arrival]) -> Option<Rank> {
    let [.., before, last] = arrivals else { return None };
    let uncertainty = |rank: Rank| {
        let file = run.files.iter().find(|file| file.rank == rank);
        file.map_or(u64::MAX, |file| file.offset.uncertainty_ns)
    };
    let doubt = uncertainty(before.rank).saturating_add(uncertainty(last.rank));
    let gap = last.start_ns.abs_diff(before.start_ns);
    (gap > doubt).then_some(last.rank)
}

/// The rank and the number that the two events of a pair have in common.
fn pair(event: &Event) -> Option<(Rank, String)> {
    let id = event.fields.get("id2")?.get("local")?.as_str()?;
    Some((event.rank, id.to_owned()))
}

#[derive(Debug, Default)]
struct Operation {
    calls: u64,
    bytes: u64,
    total_ns: u64,
    max_ns: u64,
    waiting_ns: Option<u64>,
    histogram: Histogram,
}

impl Operation {
    fn add(&mut self, event: &Event, duration_ns: i64) {
        let ns = duration_ns.max(0).unsigned_abs();
        let bytes = event.argument("bytes").and_then(serde_json::Value::as_u64);
        self.calls += 1;
        self.bytes = self.bytes.saturating_add(bytes.unwrap_or(0));
        self.total_ns = self.total_ns.saturating_add(ns);
        self.max_ns = self.max_ns.max(ns);
        self.histogram.add(ns);
    }

    fn summary(self, name: String) -> OperationSummary {
        OperationSummary {
            name,
            calls: self.calls,
            bytes: self.bytes,
            median: Duration::from_nanos(self.histogram.median_ns().min(self.max_ns)),
            max: Duration::from_nanos(self.max_ns),
            total: Duration::from_nanos(self.total_ns),
            waiting: self.waiting_ns.map(Duration::from_nanos),
        }
    }
}

impl Summary {
    /// The summary of the calls with this name.
    pub fn operation(&self, name: &str) -> Option<&OperationSummary> {
        self.operations.iter().find(|operation| operation.name == name)
    }
}

impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = self.operations.iter().map(|it| it.name.len()).max().unwrap_or(0).max(9);
        writeln!(
            f,
            "{:name$} {:>9} {:>10} {:>9} {:>9} {:>9} {:>8}",
            "operation", "calls", "bytes", "median", "max", "total", "waiting"
        )?;
        for it in &self.operations {
            let waiting = it.waiting.map_or("-".to_owned(), |waiting| percent(waiting, it.total));
            writeln!(
                f,
                "{:name$} {:>9} {:>10} {:>9} {:>9} {:>9} {waiting:>8}",
                it.name,
                it.calls,
                size(it.bytes),
                time(it.median),
                time(it.max),
                time(it.total)
            )?;
        }
        if self.collectives > 0 {
            writeln!(
                f,
                "\n{:>9} {:>17} {:>14} {:>9}",
                "rank", "came last", "others waited", "waited"
            )?;
            for it in &self.ranks {
                let share = 100.0 * it.last as f64 / self.collectives as f64;
                writeln!(
                    f,
                    "{:>9} {:>10} {share:>4.0} % {:>14} {:>9}",
                    it.rank,
                    it.last,
                    time(it.awaited),
                    time(it.waiting)
                )?;
            }
            if self.undecided > 0 {
                writeln!(f, "{:>9} {:>10}", "undecided", self.undecided)?;
            }
        }
        self.notes.iter().try_for_each(|note| writeln!(f, "note: {note}"))
    }
}

fn percent(part: Duration, whole: Duration) -> String {
    match whole.is_zero() {
        true => "-".to_owned(),
        false => format!("{:.0} %", 100.0 * part.as_secs_f64() / whole.as_secs_f64()),
    }
}

/// A time with three digits and a unit.
fn time(time: Duration) -> String {
    scaled(time.as_secs_f64() * 1e9, 1e3, &["ns", "us", "ms", "s"])
}

fn size(bytes: u64) -> String {
    scaled(bytes as f64, 1024.0, &["B", "KiB", "MiB", "GiB", "TiB"])
}

fn scaled(mut value: f64, step: f64, units: &[&str]) -> String {
    let mut unit = 0;
    while value >= step * 0.9995 && unit + 1 < units.len() {
        value /= step;
        unit += 1;
    }
    let decimals = match value {
        _ if unit == 0 => 0,
        value if value < 9.995 => 2,
        value if value < 99.95 => 1,
        _ => 0,
    };
    format!("{value:.decimals$} {}", units[unit])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_have_three_digits() {
        let us = |us: f64| time(Duration::from_secs_f64(us * 1e-6));
        assert_eq!(
            [us(0.25), us(1.0), us(12.34), us(999.9)],
            ["250 ns", "1.00 us", "12.3 us", "1.00 ms"]
        );
        assert_eq!(
            [size(0), size(8), size(1536), size(3 << 30)],
            ["0 B", "8 B", "1.50 KiB", "3.00 GiB"]
        );
        assert_eq!(time(Duration::from_secs(86_400)), "86400 s");
    }
}
