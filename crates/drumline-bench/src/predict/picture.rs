//! A picture of the times, as SVG.

use std::fmt::Write as _;

use super::{cluster::Described, collectives::Table, training::Steps, training::mb};

/// The times of each collective by size, and the efficiency of training by hosts.
pub(super) fn svg(described: &Described, tables: &[Table], steps: Option<&Steps>) -> String {
    let mut panels: Vec<Panel> = tables.iter().map(times).collect();
    panels.extend(steps.map(efficiencies));
    let height = TOP + panels.len() as f64 * (HEIGHT + GAP);
    let mut text = format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="13" fill="#444">
<rect width="{WIDTH}" height="{height}" fill="#fff"/>
"##
    );
    label(&mut text, LEFT, 28.0, "start", described.headline().trim_end());
    for (index, panel) in panels.iter().enumerate() {
        panel.draw(&mut text, TOP + index as f64 * (HEIGHT + GAP));
    }
    text.push_str("</svg>\n");
    text
}

// Pixels.
const WIDTH: f64 = 860.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 170.0;
const TOP: f64 = 76.0;
const HEIGHT: f64 = 260.0;
const GAP: f64 = 80.0;

const COLOURS: [&str; 8] =
    ["#2f6fb0", "#c4572b", "#3d8f5a", "#8a5aa8", "#b08a2f", "#4a9aa8", "#a84a6b", "#666666"];

/// Curves over a logarithmic axis.
struct Panel {
    title: String,
    x_title: &'static str,
    /// Whether the vertical axis is logarithmic; else it goes from 0 to 100.
    logarithmic: bool,
    curves: Vec<Curve>,
}

struct Curve {
    name: String,
    points: Vec<(f64, f64)>,
}

fn times(table: &Table) -> Panel {
    let mut curves: Vec<Curve> = vec![];
    for row in &table.rows {
        for (name, outcome) in &row.times {
            let point = (row.bytes as f64, outcome.time_ps as f64 / 1e6);
            match curves.iter_mut().find(|curve| curve.name == *name) {
                Some(curve) => curve.points.push(point),
                None => curves.push(Curve { name: (*name).to_owned(), points: vec![point] }),
            }
        }
    }
    Panel {
        title: format!("{}: microseconds", table.collective),
        x_title: "bytes of each rank",
        logarithmic: true,
        curves,
    }
}

fn efficiencies(steps: &Steps) -> Panel {
    let curve = |(index, bytes): (usize, &u64)| Curve {
        name: format!("buckets of {}", mb(*bytes)),
        points: steps
            .rows
            .iter()
            .map(|row| (row.hosts as f64, 100.0 * row.steps[index].efficiency()))
            .collect(),
    };
    Panel {
        title: "training: scaling efficiency, %".to_owned(),
        x_title: "hosts",
        logarithmic: false,
        curves: steps.bucket_bytes.iter().enumerate().map(curve).collect(),
    }
}

/// From the first to the last mark of an axis.
struct Axis {
    low: f64,
    high: f64,
    logarithmic: bool,
}

impl Axis {
    fn over(values: impl Iterator<Item = f64> + Clone, logarithmic: bool) -> Axis {
        if !logarithmic {
            return Axis { low: 0.0, high: 100.0, logarithmic };
        }
        let values = values.filter(|value| *value > 0.0);
        let low = values.clone().fold(f64::INFINITY, f64::min);
        let high = values.fold(0.0, f64::max);
        let (low, high) = if low <= high { (low, high) } else { (1.0, 10.0) };
        Axis { low, high: if low < high { high } else { low * 10.0 }, logarithmic }
    }

    /// The place of `value` on the axis, from 0 to 1.
    fn place(&self, value: f64) -> f64 {
        match self.logarithmic {
            true => (value.max(self.low) / self.low).ln() / (self.high / self.low).ln(),
            false => (value - self.low) / (self.high - self.low),
        }
    }
}

impl Panel {
    fn draw(&self, text: &mut String, top: f64) {
        let values = |of: fn(&(f64, f64)) -> f64| {
            self.curves.iter().flat_map(|curve| &curve.points).map(of).collect::<Vec<f64>>()
        };
        let (xs, ys) = (values(|point| point.0), values(|point| point.1));
        let x_axis = Axis::over(xs.iter().copied(), true);
        let y_axis = Axis::over(ys.iter().copied(), self.logarithmic);
        let x = |value: f64| LEFT + x_axis.place(value) * (RIGHT - LEFT);
        let y = |value: f64| top + HEIGHT - y_axis.place(value) * HEIGHT;
        label(text, LEFT, top - 12.0, "start", &self.title);
        label(text, (LEFT + RIGHT) / 2.0, top + HEIGHT + 38.0, "middle", self.x_title);
        for mark in self.marks(&y_axis) {
            rule(text, y(mark));
            label(text, LEFT - 8.0, y(mark) + 4.0, "end", &short(mark));
        }
        let mut marks = xs.clone();
        marks.sort_by(f64::total_cmp);
        marks.dedup();
        let every = marks.len().div_ceil(12).max(1);
        for mark in marks.into_iter().step_by(every) {
            label(text, x(mark), top + HEIGHT + 18.0, "middle", &short(mark));
        }
        for (index, curve) in self.curves.iter().enumerate() {
            let colour = COLOURS[index % COLOURS.len()];
            let points = curve.points.iter().map(|(px, py)| format!("{:.1},{:.1}", x(*px), y(*py)));
            let points: Vec<String> = points.collect();
            let _ = writeln!(
                text,
                r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
                points.join(" ")
            );
            let at = top + 14.0 + 19.0 * index as f64;
            let _ = writeln!(
                text,
                r#"<rect x="{}" y="{}" width="12" height="12" fill="{colour}"/>"#,
                RIGHT + 14.0,
                at - 10.0
            );
            label(text, RIGHT + 32.0, at, "start", &curve.name);
        }
    }

    fn marks(&self, axis: &Axis) -> Vec<f64> {
        if !self.logarithmic {
            return (0..=5).map(|step| f64::from(step) * 20.0).collect();
        }
        let powers = axis.low.log10().ceil() as i32..=axis.high.log10().floor() as i32;
        powers.map(|power| 10_f64.powi(power)).collect()
    }
}

fn rule(text: &mut String, y: f64) {
    let _ = writeln!(
        text,
        r##"<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1}" y2="{y:.1}" stroke="#ddd"/>"##
    );
}

fn label(text: &mut String, x: f64, y: f64, anchor: &str, words: &str) {
    let words = words.replace('&', "&amp;").replace('<', "&lt;");
    let _ = writeln!(text, r#"<text x="{x:.1}" y="{y:.1}" text-anchor="{anchor}">{words}</text>"#);
}

/// `16Ki`, `3k`: with a power of 1,024 if it divides the value, else with a power of 1,000.
fn short(value: f64) -> String {
    for (unit, name) in [(1_073_741_824.0, "Gi"), (1_048_576.0, "Mi"), (1_024.0, "Ki")] {
        if value >= unit && value % unit == 0.0 {
            return format!("{}{name}", value / unit);
        }
    }
    match value {
        value if value >= 1e6 => format!("{}M", value / 1e6),
        value if value >= 1e3 => format!("{}k", value / 1e3),
        value => format!("{value}"),
    }
}

#[cfg(test)]
mod tests {
    use drumline_schedule::{Collective, price::ElementKind, price::PriceList};

    use super::*;
    use crate::predict::collectives::row;

    #[test]
    fn every_algorithm_has_a_curve() {
        let prices = PriceList::default();
        let described = Described { hosts: 4, nproc_per_node: 2, cores_per_host: None, prices };
        let kind = ElementKind { bytes: 4, sum_bytes: 4 };
        let rows = [1 << 10, 1 << 20]
            .map(|bytes| row(&described.cluster(), Collective::AllReduce, bytes, kind).unwrap());
        let table = Table { collective: Collective::AllReduce, rows: rows.into() };
        let lines = table.rows[0].times.len();
        let text = svg(&described, &[table], None);
        assert_eq!(text.matches("<polyline").count(), lines);
        for part in ["4 hosts of 2 ranks", "halving", "1Ki", "1Mi", "</svg>"] {
            assert!(text.contains(part), "{part}");
        }
        assert!(!text.contains("NaN") && !text.contains("inf"), "{text}");
    }

    #[test]
    fn axes_hold_what_is_drawn() {
        let axis = Axis::over([2.0, 200.0].into_iter(), true);
        assert_eq!([2.0, 20.0, 200.0].map(|value| axis.place(value)), [0.0, 0.5, 1.0]);
        assert_eq!(Axis::over([7.0].into_iter(), true).place(7.0), 0.0);
        assert_eq!([1024.0, 1e6, 10.0, 3e3].map(short), ["1Ki", "1M", "10", "3k"]);
    }
}
