//! A picture of the times, as SVG.

use super::{
    collectives::Table,
    training::{Steps, mb},
};
use crate::{
    Result,
    svg::{Panel, page, size_name},
};

/// The times of each collective by size, and the efficiency of training by hosts.
pub(super) fn svg(headline: &str, tables: &[Table], steps: Option<&Steps>) -> Result<String> {
    let mut panels: Vec<Panel> = tables.iter().map(|table| times(headline, table)).collect();
    panels.extend(steps.map(efficiencies));
    page(panels)
}

fn times(headline: &str, table: &Table) -> Panel {
    let mut curves: Vec<(String, Vec<(f64, f64)>)> = vec![];
    for row in &table.rows {
        for (name, outcome) in &row.times {
            let point = (row.bytes as f64, outcome.time_ps as f64 / 1e6);
            match curves.iter_mut().find(|(known, _)| known == name) {
                Some((_, points)) => points.push(point),
                None => curves.push(((*name).to_owned(), vec![point])),
            }
        }
    }
    Panel {
        title: table.collective.to_string(),
        note: headline.trim_end().to_owned(),
        x_title: "bytes of each rank",
        x_name: size_name,
        y_title: "microseconds",
        is_percent: false,
        curves,
    }
}

fn efficiencies(steps: &Steps) -> Panel {
    let curve = |(index, bytes): (usize, &u64)| {
        let point = |hosts: usize, efficiency: f64| (hosts as f64, 100.0 * efficiency);
        let points = steps.rows.iter().map(|row| point(row.hosts, row.steps[index].efficiency()));
        (format!("buckets of {}", mb(*bytes)), points.collect())
    };
    Panel {
        title: "training: scaling efficiency".to_owned(),
        note: String::new(),
        x_title: "hosts",
        x_name: |log2| 2_f64.powi(log2).to_string(),
        y_title: "%",
        is_percent: true,
        curves: steps.bucket_bytes.iter().enumerate().map(curve).collect(),
    }
}

#[cfg(test)]
mod tests {
    use drumline_schedule::{
        Collective,
        price::{ElementKind, PriceList},
    };

    use super::*;
    use crate::predict::{cluster::Described, collectives::row};

    #[test]
    fn every_algorithm_has_a_curve() {
        let prices = PriceList::default();
        let described = Described {
            hosts: 4,
            nproc_per_node: 2,
            cores_per_host: None,
            prices,
            device: Default::default(),
        };
        let kind = ElementKind { bytes: 4, sum_bytes: 4 };
        let rows = [1 << 10, 1 << 20]
            .map(|bytes| row(&described.cluster(), Collective::AllReduce, bytes, kind).unwrap());
        let table = Table { collective: Collective::AllReduce, rows: rows.into() };
        let curves = table.rows[0].times.len();
        let text = svg(&described.headline(), &[table], None).unwrap();
        assert_eq!(text.matches(r#"stroke-width="2" points"#).count(), curves);
        for part in ["4 hosts of 2 ranks", "halving", "1 KiB", "1 MiB", "</svg>"] {
            assert!(text.contains(part), "{part}");
        }
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }
}
