//! Replays beside measured runs on this host.

use std::{fmt::Write as _, time::Duration};

use drumline_inspect::replay::replay_in_a_row;
use drumline_schedule::{Algorithm, price::PriceList};

use super::{
    calibrate::calibrate,
    collectives::size,
    runs::{Found, Run, Way, measure_all},
};
use crate::{Error, Result};

const RANKS: [usize; 5] = [2, 3, 4, 6, 8];
const WAYS: [Way; 4] = [Way::Staged, Way::Registered, Way::Unix, Way::Tcp];
const BYTES: [usize; 5] = [8, 4 << 10, 64 << 10, 1 << 20, 16 << 20];

/// The error that a replay may have.
const GOAL_PERCENT: f64 = 20.0;

/// The table for up to `ranks_max` ranks, with each run measured for about `budget`. Without `prices`,
/// this host is calibrated first.
pub(super) fn table(
    prices: Option<PriceList>,
    ranks_max: usize,
    budget: Duration,
) -> Result<String> {
    let runs: Vec<Run> = runs(ranks_max).collect();
    let (prices, found) = match prices {
        Some(prices) => (prices, measure_all(&runs, budget).map_err(Error::Measure)?),
        None => calibrate(&runs, budget, &mut |_| {})?,
    };
    let mut text = format!(
        "{:>6} {:>11} {:>8}  {:<16}{:>13}{:>13}{:>9}\n",
        "ranks", "over", "bytes", "all_reduce", "measured us", "replayed us", "error"
    );
    let mut errors: Vec<f64> = Vec::new();
    for (run, Found { algorithm, time }) in runs.iter().zip(found) {
        let Run { ranks, way, elements, .. } = *run;
        let measured = time.as_secs_f64() * 1e6;
        let replayed = replayed_us(run, &algorithm, &prices)?;
        let percent = 100.0 * (replayed / measured - 1.0);
        errors.push(percent.abs());
        let _ = writeln!(
            text,
            "{ranks:>6} {:>11} {:>8}  {algorithm:<16}{measured:>13.2}{replayed:>13.2}{:>9}",
            way.name(),
            size(4 * elements),
            format!("{percent:+.0} %"),
        );
    }
    text.push_str(&summary(errors));
    Ok(text)
}

fn runs(ranks_max: usize) -> impl Iterator<Item = Run> {
    let ranks = RANKS.into_iter().filter(move |ranks| *ranks <= ranks_max);
    let ways = ranks.flat_map(|ranks| WAYS.map(|way| (ranks, way)));
    ways.flat_map(|(ranks, way)| {
        BYTES.map(|bytes| Run { ranks, way, elements: bytes / 4, algorithm: None })
    })
}

fn replayed_us(run: &Run, algorithm: &str, prices: &PriceList) -> Result<f64> {
    let problem = |error: drumline_schedule::Error| Error::Usage(error.to_string());
    let algorithm = Algorithm::find(run.collective(), algorithm).map_err(problem)?;
    let outcome =
        replay_in_a_row(&run.cluster(prices), &run.operation(algorithm)).map_err(problem)?;
    Ok(outcome.time_ps as f64 / 1e6)
}

fn summary(mut errors: Vec<f64>) -> String {
    errors.sort_by(f64::total_cmp);
    let good = errors.iter().filter(|error| **error <= GOAL_PERCENT).count();
    let median = errors.get(errors.len() / 2).copied().unwrap_or(0.0);
    let worst = errors.last().copied().unwrap_or(0.0);
    format!(
        "\n{good} of {} within {GOAL_PERCENT} %; median {median:.0} %, worst {worst:.0} %\n",
        errors.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_summary_counts_what_is_within_the_goal() {
        let text = summary(vec![50.0, 3.0, 20.0]);
        assert_eq!(text, "\n2 of 3 within 20 %; median 20 %, worst 50 %\n");
    }
}
