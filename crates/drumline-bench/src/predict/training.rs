//! A training step on more and more hosts, with buckets of several sizes.

use std::{collections::HashMap, fmt::Write as _};

use drumline_inspect::replay::{Training, TrainingStep};
use drumline_schedule::{Collective, price::ElementKind};

use super::{cluster::Described, collectives, options::Options};
use crate::Result;

/// Steps by the number of hosts, then by the size of buckets.
#[derive(Clone, Debug)]
pub(super) struct Steps {
    pub(super) bucket_bytes: Vec<u64>,
    pub(super) rows: Vec<HostSteps>,
}

/// The steps of one number of hosts.
#[derive(Clone, Debug)]
pub(super) struct HostSteps {
    pub(super) hosts: usize,
    pub(super) ranks: usize,
    /// One step for each size of buckets, in their order.
    pub(super) steps: Vec<TrainingStep>,
    /// The algorithm that reduces a full bucket, in the same order.
    pub(super) algorithms: Vec<&'static str>,
}

pub(super) fn steps(
    described: &Described,
    options: &Options,
    training: &Training,
) -> Result<Steps> {
    let (bucket_bytes, kind) = (options.bucket_bytes()?, options.kind()?);
    let row = |hosts| row(described, hosts, training, &bucket_bytes, kind);
    let rows = host_counts(described.hosts).into_iter().map(row).collect::<Result<_>>()?;
    Ok(Steps { bucket_bytes, rows })
}

fn row(
    described: &Described,
    hosts: usize,
    training: &Training,
    bucket_bytes: &[u64],
    kind: ElementKind,
) -> Result<HostSteps> {
    let cluster = described.with_hosts(hosts);
    let mut known: HashMap<u64, (&'static str, u64)> = HashMap::new();
    let mut all_reduce = |bytes: u64| -> Result<(&'static str, u64)> {
        let whole = bytes.next_multiple_of(kind.bytes as u64);
        if let Some(time) = known.get(&whole) {
            return Ok(*time);
        }
        let row = collectives::row(&cluster, Collective::AllReduce, whole as usize, kind)?;
        let best = row.best().map_or(("none", 0), |(name, outcome)| (name, outcome.time_ps));
        known.insert(whole, best);
        Ok(best)
    };
    let mut row =
        HostSteps { hosts, ranks: cluster.topology.world_size, steps: vec![], algorithms: vec![] };
    for &bucket_bytes in bucket_bytes {
        let mut failed = Ok(());
        let with = Training { bucket_bytes, ..*training };
        let step = with.step(|bytes| match all_reduce(bytes) {
            Ok((_, ps)) => ps,
            Err(error) => {
                failed = Err(error);
                0
            }
        });
        failed?;
        row.algorithms.push(all_reduce(bucket_bytes.min(training.gradient_bytes))?.0);
        row.steps.push(step);
    }
    Ok(row)
}

/// 1, 2, 4, ... and all hosts.
pub(super) fn host_counts(hosts: usize) -> Vec<usize> {
    let doublings = std::iter::successors(Some(1), |count| Some(count * 2));
    doublings.take_while(|count| *count < hosts).chain([hosts]).collect()
}

impl Steps {
    pub(super) fn text(&self) -> String {
        let mut text = format!(
            "\ntraining step: efficiency (exposed communication, ms), by the size of buckets\n\
             {:>6}{:>8}",
            "hosts", "ranks"
        );
        for bytes in &self.bucket_bytes {
            let _ = write!(text, "{:>20}", mb(*bytes));
        }
        let _ = writeln!(text, "  best buckets, reduced by");
        for row in &self.rows {
            let _ = write!(text, "{:>6}{:>8}", row.hosts, row.ranks);
            for step in &row.steps {
                let exposed_ms = step.exposed_ps as f64 / 1e9;
                let cell = format!("{:.1} % ({exposed_ms:.2})", 100.0 * step.efficiency());
                let _ = write!(text, "{cell:>20}");
            }
            let best = (0..row.steps.len()).min_by_key(|&index| row.steps[index].time_ps);
            if let Some(index) = best {
                let (bucket, algorithm) = (mb(self.bucket_bytes[index]), row.algorithms[index]);
                let _ = write!(text, "  {bucket}, {algorithm}");
            }
            text.push('\n');
        }
        text
    }
}

pub(super) fn mb(bytes: u64) -> String {
    format!("{} MB", bytes as f64 / 1e6)
}

#[cfg(test)]
mod tests {
    use drumline_schedule::price::PriceList;

    use super::*;

    const F32: ElementKind = ElementKind { bytes: 4, sum_bytes: 4 };

    #[test]
    fn more_hosts_never_scale_better_and_one_bucket_hides_nothing() {
        let prices = PriceList { nic_byte_fs: 800_000, ..PriceList::default() };
        let described = Described {
            hosts: 6,
            nproc_per_node: 2,
            cores_per_host: None,
            prices,
            device: Default::default(),
        };
        let training = Training {
            gradient_bytes: 40_000_000,
            forward_ps: 20_000_000_000,
            backward_ps: 40_000_000_000,
            first_bucket_bytes: 1 << 20,
            bucket_bytes: 1 << 20,
        };
        assert_eq!(host_counts(6), [1, 2, 4, 6]);
        assert_eq!(host_counts(1), [1]);
        let buckets = [4_000_000, 40_000_000];
        let row = |hosts| row(&described, hosts, &training, &buckets, F32).unwrap();
        let rows = vec![row(2), row(4), row(6)];
        for pair in rows.windows(2) {
            for (fewer, more) in pair[0].steps.iter().zip(&pair[1].steps) {
                assert!(fewer.efficiency() >= more.efficiency(), "{fewer:?} {more:?}");
            }
        }
        let [small, large] = &rows[2].steps[..] else { panic!("two sizes") };
        // With one bucket, all but the first MiB is sent after the backward pass.
        assert!(large.exposed_ps * 2 > large.communication_ps);
        assert!(small.exposed_ps < large.exposed_ps);
        let text = Steps { bucket_bytes: buckets.into(), rows }.text();
        assert!(text.contains("4 MB, hierarchical"), "{text}");
    }
}
