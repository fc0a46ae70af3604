//! The figure of one case.

use drumline::{DType, ReduceOp, algorithms::Explanation};
use serde_json::{Value, json};

use super::{
    choice::{Buffers, CallStyle},
    measure::Bill,
    operation::{Operation, Place},
};

#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) operation: Operation,
    /// The size of the longest buffer of a rank.
    pub(super) bytes: usize,
    /// The elements of a block.
    pub(super) count: usize,
    pub(super) dtype: DType,
    pub(super) op: Option<ReduceOp>,
    pub(super) root: Option<usize>,
    /// `shm`, `tcp` and so on.
    pub(super) transport: String,
    pub(super) buffers: Buffers,
    pub(super) style: CallStyle,
    pub(super) place: Place,
    pub(super) ranks: usize,
    /// The samples of each round, in microseconds.
    pub(super) rounds_us: Vec<Vec<f64>>,
    pub(super) wrong: u64,
    pub(super) bill: Bill,
    /// How long the bound took to move the same bytes, in microseconds, and its name.
    pub(super) bound_us: f64,
    pub(super) bound: &'static str,
    /// How many times the operation moves the bytes that the bound moves once.
    pub(super) bound_factor: f64,
    /// The hand-over time of a word between two cores, in nanoseconds, before the first round and after
    /// each round.
    pub(super) hand_over_ns: Vec<f64>,
    /// Which algorithm was taken, with `--explain`.
    pub(super) explanation: Option<Explanation>,
}

impl Row {
    fn means(&self) -> Vec<f64> {
        let mean = |round: &Vec<f64>| round.iter().sum::<f64>() / round.len().max(1) as f64;
        self.rounds_us.iter().map(mean).collect()
    }

    /// The median over the rounds of each round's mean, in microseconds.
    pub(super) fn time_us(&self) -> f64 {
        quantile(&self.means(), 0.5)
    }

    /// A quantile of all samples.
    pub(super) fn quantile_us(&self, share: f64) -> f64 {
        quantile(&self.rounds_us.concat(), share)
    }

    /// The difference of the slowest and the fastest round, in percent of the median.
    pub(super) fn spread_percent(&self) -> f64 {
        let means = self.means();
        let (low, high) = (quantile(&means, 0.0), quantile(&means, 1.0));
        100.0 * (high - low) / self.time_us()
    }

    /// Size divided by time, in GB/s.
    pub(super) fn algbw(&self) -> f64 {
        self.bytes as f64 / self.time_us() / 1e3
    }

    pub(super) fn busbw(&self) -> f64 {
        self.algbw() * self.operation.bus_factor(self.ranks)
    }

    /// The share of the bound that was reached, in percent; `None` if nothing was moved.
    pub(super) fn bound_percent(&self) -> Option<f64> {
        let share = 100.0 * self.bound_factor * self.bound_us / self.time_us();
        (self.bytes > 0 && self.bound_us > 0.0).then_some(share)
    }

    /// CPU seconds of all ranks for each GB.
    pub(super) fn cpu_s_per_gb(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.bill.cpu_s * 1e9 / self.bytes as f64)
    }

    /// The fastest and the slowest hand-over.
    pub(super) fn hand_over(&self) -> Option<(f64, f64)> {
        let known = !self.hand_over_ns.is_empty();
        known.then(|| (quantile(&self.hand_over_ns, 0.0), quantile(&self.hand_over_ns, 1.0)))
    }

    /// Transport, buffers and style: `shm/staged`, `tcp/async`.
    pub(super) fn way(&self) -> String {
        let mut way = self.transport.clone();
        // Over links, registered memory makes no difference.
        if way.starts_with("shm") {
            way += &format!("/{}", self.buffers);
        }
        if self.style == CallStyle::Async {
            way += &format!("/{}", self.style);
        }
        way
    }

    pub(super) fn json(&self) -> Value {
        let minima: Vec<f64> = self.rounds_us.iter().map(|round| quantile(round, 0.0)).collect();
        let medians: Vec<f64> = self.rounds_us.iter().map(|round| quantile(round, 0.5)).collect();
        json!({
            "operation": self.operation.to_string(),
            "size": self.bytes,
            "count": self.count,
            "type": self.dtype.name(),
            "redop": self.op.map(ReduceOp::name),
            "root": self.root,
            "transport": self.transport,
            "buffers": self.buffers.to_string(),
            "calls": self.style.to_string(),
            "place": self.place.to_string(),
            "time_us": self.time_us(),
            "algbw_gb_s": self.algbw(),
            "busbw_gb_s": self.busbw(),
            "wrong": self.wrong,
            "p50_us": self.quantile_us(0.5),
            "p99_us": self.quantile_us(0.99),
            "min_us": self.quantile_us(0.0),
            "samples": self.rounds_us.iter().map(Vec::len).sum::<usize>(),
            "rounds": { "mean_us": self.means(), "median_us": medians, "min_us": minima },
            "bound": self.bound,
            "bound_us": self.bound_us,
            "bound_percent": self.bound_percent(),
            "cpu_s_per_gb": self.cpu_s_per_gb(),
            "switches_per_operation": self.bill.switches,
            "hand_over_ns": self.hand_over_ns,
            "algorithm": self.explanation.as_ref().map(|it| &it.algorithm),
        })
    }
}

/// The value below which `share` of all values lie; NaN without values.
pub(super) fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (share * sorted.len().saturating_sub(1) as f64).round() as usize;
    sorted.get(at).copied().unwrap_or(f64::NAN)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// An all_reduce between four ranks.
    pub(in super::super) fn row(bytes: usize, rounds_us: &[&[f64]]) -> Row {
        Row {
            operation: Operation::AllReduce,
            bytes,
            count: bytes / 4,
            dtype: DType::F32,
            op: Some(ReduceOp::Sum),
            root: None,
            transport: "shm".to_owned(),
            buffers: Buffers::Staged,
            style: CallStyle::Blocking,
            place: Place::In,
            ranks: 4,
            rounds_us: rounds_us.iter().map(|round| round.to_vec()).collect(),
            wrong: 0,
            bill: Bill { cpu_s: 0.002, switches: 1.5 },
            bound_us: 50.0,
            bound: "copy by all ranks at once",
            bound_factor: 1.5,
            hand_over_ns: vec![45.0, 220.0, 46.0],
            explanation: None,
        }
    }

    #[test]
    fn time_is_the_median_of_the_rounds_means() {
        let row = row(1_000_000, &[&[90.0, 110.0], &[100.0, 300.0], &[10.0, 20.0]]);
        assert_eq!(row.time_us(), 100.0);
        assert_eq!((row.algbw(), row.busbw()), (10.0, 15.0));
        assert_eq!(row.spread_percent(), 185.0);
        assert_eq!((row.quantile_us(0.5), row.quantile_us(0.99)), (100.0, 300.0));
        assert_eq!(row.bound_percent(), Some(75.0));
        assert_eq!(row.cpu_s_per_gb(), Some(2.0));
        assert_eq!(row.hand_over(), Some((45.0, 220.0)));
    }

    #[test]
    fn what_moves_nothing_has_no_share_of_a_bound() {
        let row = row(0, &[&[1.0]]);
        assert_eq!((row.bound_percent(), row.cpu_s_per_gb()), (None, None));
    }
}
