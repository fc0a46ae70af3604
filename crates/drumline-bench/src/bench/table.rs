//! All figures as text, and as JSON.

use std::fmt::Write;

use serde_json::{Value, json};

use super::row::Row;

/// The columns: names to the left, numbers to the right.
const TITLES: &str = "# operation,size,count,type,redop,root,way,place,time,algbw,busbw,#wrong,p50,p99,\
                      spread,bound,cpu,switches,hand-over";
const UNITS: &str =
    "#,(B),(elements),,,,,,(us),(GB/s),(GB/s),,(us),(us),(%),(%),(s/GB),(each),(ns)";

/// What all figures have in common.
#[derive(Clone, Debug)]
pub(super) struct Heading {
    pub(super) ranks: usize,
    pub(super) hosts: usize,
    pub(super) cores: usize,
    pub(super) untouched: bool,
    pub(super) rounds: usize,
}

impl Heading {
    /// The lines above the table, and the titles of its columns.
    pub(super) fn text(&self) -> String {
        let plural =
            |count: usize, what| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let manner = if self.untouched { "untouched" } else { "rewritten before each operation" };
        format!(
            "# drumline bench {}: {} on {}, {}; buffers {manner}; {}\n#\n{}\n{}\n",
            env!("CARGO_PKG_VERSION"),
            plural(self.ranks, "rank"),
            plural(self.hosts, "host"),
            plural(self.cores, "usable core"),
            plural(self.rounds, "round"),
            line(TITLES.split(',')),
            line(UNITS.split(',')),
        )
    }

    /// Lines below the table.
    pub(super) fn summary(rows: &[Row]) -> String {
        let wrong: u64 = rows.iter().map(|row| row.wrong).sum();
        let buses: Vec<f64> = rows.iter().filter(|row| row.bytes > 0).map(Row::busbw).collect();
        let verdict = if wrong == 0 { "OK" } else { "FAILED" };
        let mean = buses.iter().sum::<f64>() / buses.len().max(1) as f64;
        let mut bounds: Vec<&str> = rows.iter().map(|row| row.bound).collect();
        bounds.sort_unstable();
        bounds.dedup();
        let mut text = format!("#\n# wrong elements: {wrong} {verdict}\n");
        let _ =
            writeln!(text, "# average bus bandwidth: {mean:.3} GB/s; bound: {}", bounds.join(", "));
        text
    }

    pub(super) fn json(&self, rows: &[Row]) -> Value {
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "ranks": self.ranks,
            "hosts": self.hosts,
            "cores": self.cores,
            "untouched": self.untouched,
            "wrong": rows.iter().map(|row| row.wrong).sum::<u64>(),
            "rows": rows.iter().map(Row::json).collect::<Vec<_>>(),
        })
    }
}

impl Row {
    /// A line of the table.
    pub(super) fn text(&self) -> String {
        let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        let hand_over = self.hand_over().map(|(low, high)| match high < 1.2 * low {
            true => format!("{:.0}", (low + high) / 2.0),
            false => format!("{low:.0}-{high:.0}"),
        });
        let cells: [&str; 19] = [
            &self.operation.to_string(),
            &self.bytes.to_string(),
            &self.count.to_string(),
            self.dtype.name(),
            self.op.map_or("-", |op| op.name()),
            &or_none(self.root.map(|root| root.to_string())),
            &self.way(),
            &self.place.to_string(),
            &micros(self.time_us()),
            &format!("{:.3}", self.algbw()),
            &format!("{:.3}", self.busbw()),
            &self.wrong.to_string(),
            &micros(self.quantile_us(0.5)),
            &micros(self.quantile_us(0.99)),
            &format!("{:.0}", self.spread_percent()),
            &or_none(self.bound_percent().map(|share| format!("{share:.0}"))),
            &or_none(self.cpu_s_per_gb().map(short)),
            &format!("{:.1}", self.bill.switches),
            &or_none(hand_over),
        ];
        let mut text = line(cells) + "\n";
        let explanation = self.explanation.as_ref().map(ToString::to_string).unwrap_or_default();
        for line in explanation.lines() {
            let _ = writeln!(text, "#   {line}");
        }
        text
    }
}

fn line<'a>(cells: impl IntoIterator<Item = &'a str>) -> String {
    const WIDTHS: [usize; 19] = [14, 11, 10, 10, 7, 4, 16, 5, 9, 8, 8, 6, 9, 9, 6, 5, 7, 8, 9];
    let mut text = String::new();
    for (at, (cell, width)) in cells.into_iter().zip(WIDTHS).enumerate() {
        // Names on the left, numbers on the right.
        let _ = match at {
            0 | 6 => write!(text, "{cell:<width$} "),
            _ => write!(text, "{cell:>width$} "),
        };
    }
    text.trim_end().to_owned()
}

fn micros(time: f64) -> String {
    let decimals = if time < 10.0 { 3 } else { 1 };
    format!("{time:.decimals$}")
}

/// Three significant digits.
fn short(value: f64) -> String {
    let decimals = (2 - value.abs().max(1e-9).log10().floor() as i32).clamp(0, 3) as usize;
    format!("{value:.decimals$}")
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use drumline::algorithms::{Candidate, Explanation};

    use super::{super::row::tests::row, *};

    const HEADING: Heading = Heading { ranks: 4, hosts: 1, cores: 2, untouched: false, rounds: 3 };

    #[test]
    fn the_table_has_a_column_for_everything() {
        let mut wrong = row(8, &[&[0.25, 0.35]]);
        (wrong.wrong, wrong.bound_us, wrong.hand_over_ns) = (3, 0.0, vec![45.0]);
        let of_links =
            Candidate { algorithm: "direct", price: Some(Duration::from_micros(7)), problem: None };
        wrong.explanation = Some(Explanation {
            algorithm: "shm-oneshot".to_owned(),
            why: "it is short".to_owned(),
            candidates: vec![of_links],
        });
        let rows = [wrong, row(1 << 20, &[&[90.0, 110.0], &[100.0, 104.0]])];
        let text = HEADING.text() + &rows[0].text() + &rows[1].text() + &Heading::summary(&rows);
        assert_eq!(text, include_str!("golden/table.txt"), "{text}");
    }

    #[test]
    fn json_has_what_the_table_has() {
        let rows = [row(1 << 20, &[&[90.0, 110.0], &[100.0, 104.0]])];
        let text = format!("{:#}\n", HEADING.json(&rows));
        assert_eq!(text, include_str!("golden/rows.json"), "{text}");
    }
}
