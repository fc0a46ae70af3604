//! A picture of bus bandwidth over size, as SVG.

use std::collections::BTreeMap;

use super::row::Row;

// Pixels.
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 250.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = HEIGHT - 60.0;

const COLOURS: [&str; 8] =
    ["#2f6fb0", "#c4572b", "#3a8f4d", "#8a4fb0", "#b08a1e", "#2a9d9d", "#b03a6f", "#666666"];

/// Draws a curve for every case over its sizes. Both axes are logarithmic: bytes across, GB/s upwards.
pub(super) fn svg(title: &str, rows: &[Row]) -> String {
    let mut curves: BTreeMap<String, Vec<(f64, f64)>> = BTreeMap::new();
    for row in rows {
        let point = (row.bytes as f64, row.busbw());
        if point.0 > 0.0 && point.1.is_normal() {
            curves.entry(label(row)).or_default().push(point);
        }
    }
    let points = || curves.values().flatten();
    let sizes = Axis::over(points().map(|(size, _)| *size), 2.0, (LEFT, RIGHT));
    let speeds = Axis::over(points().map(|(_, speed)| *speed), 10.0, (BOTTOM, TOP));

    let names = TOP + 20.0 * (curves.len() + 1) as f64;
    let height = names.max(HEIGHT);
    let mut elements = vec![
        format!(r##"<rect width="{WIDTH}" height="{height}" fill="#fff"/>"##),
        text(LEFT, 28.0, r#"font-size="16" font-weight="600""#, title),
        text(LEFT, TOP - 8.0, "", "bus bandwidth, GB/s"),
        text((LEFT + RIGHT) / 2.0, HEIGHT - 16.0, r#"text-anchor="middle""#, "size, bytes"),
    ];
    let rule = |x1: f64, y1: f64, x2: f64, y2: f64| {
        format!(r##"<path d="M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}" stroke="#ddd"/>"##)
    };
    // At most ten marks.
    let step = sizes.low.abs_diff(sizes.high).div_ceil(10).max(1) as usize;
    for exponent in (sizes.low..=sizes.high).step_by(step) {
        let x = sizes.at(2_f64.powi(exponent));
        elements.push(rule(x, TOP, x, BOTTOM));
        elements.push(text(x, BOTTOM + 18.0, r#"text-anchor="middle""#, &size_name(exponent)));
    }
    for exponent in speeds.low..=speeds.high {
        let y = speeds.at(10_f64.powi(exponent));
        elements.push(rule(LEFT, y, RIGHT, y));
        let name = 10_f64.powi(exponent).to_string();
        elements.push(text(LEFT - 8.0, y + 4.0, r#"text-anchor="end""#, &name));
    }
    for (number, (label, points)) in curves.iter().enumerate() {
        let colour = COLOURS[number % COLOURS.len()];
        let places: Vec<(f64, f64)> =
            points.iter().map(|(size, speed)| (sizes.at(*size), speeds.at(*speed))).collect();
        let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
        elements.push(format!(
            r#"<path d="M{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
            path.join("L")
        ));
        let dot = |(x, y): &(f64, f64)| {
            format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#)
        };
        elements.extend(places.iter().map(dot));
        let y = TOP + 12.0 + 20.0 * number as f64;
        elements.push(format!(
            r#"<path d="M{:.1} {:.1}h18" stroke="{colour}" stroke-width="3"/>"#,
            RIGHT + 14.0,
            y - 4.0
        ));
        elements.push(text(RIGHT + 38.0, y, "", label));
    }
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="12" fill="#333">
{}
</svg>
"##,
        elements.join("\n")
    )
}

/// The name of a row's curve. Rows of one name are one curve.
fn label(row: &Row) -> String {
    let op = row.op.map(|op| format!(" {op}")).unwrap_or_default();
    format!("{}{op} {} {} {}", row.operation, row.dtype, row.way(), row.place)
}

/// A logarithmic axis, between whole powers of its base.
struct Axis {
    base: f64,
    low: i32,
    high: i32,
    ends: (f64, f64),
}

impl Axis {
    fn over(values: impl Iterator<Item = f64>, base: f64, ends: (f64, f64)) -> Axis {
        let logarithms: Vec<f64> = values.map(|value| value.log(base)).collect();
        let low = logarithms.iter().copied().fold(f64::INFINITY, f64::min);
        let high = logarithms.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let (low, high) = if low <= high { (low, high) } else { (0.0, 1.0) };
        // Rounding errors must not lead to the next power.
        let low = (low + 1e-9).floor() as i32;
        Axis { base, low, high: ((high - 1e-9).ceil() as i32).max(low + 1), ends }
    }

    fn at(&self, value: f64) -> f64 {
        let share = (value.log(self.base) - f64::from(self.low)) / f64::from(self.high - self.low);
        self.ends.0 + share * (self.ends.1 - self.ends.0)
    }
}

fn size_name(log2: i32) -> String {
    let (unit, power) = match log2 {
        30.. => (" GiB", 30),
        20.. => (" MiB", 20),
        10.. => (" KiB", 10),
        _ => ("", 0),
    };
    format!("{}{unit}", 2_f64.powi(log2 - power))
}

fn text(x: f64, y: f64, attributes: &str, content: &str) -> String {
    let content = content.replace('&', "&amp;").replace('<', "&lt;");
    format!(r#"<text x="{x:.1}" y="{y:.1}" {attributes}>{content}</text>"#)
}

#[cfg(test)]
mod tests {
    use super::{super::row::tests::row, *};

    #[test]
    fn a_picture_has_a_curve_for_each_way() {
        let mut rows = vec![row(8, &[&[0.25]]), row(1 << 20, &[&[50.0]])];
        rows.push(Row { transport: "tcp".to_owned(), ..row(1 << 20, &[&[400.0]]) });
        let picture = svg("speed of <this>", &rows);
        assert_eq!(picture, include_str!("golden/plot.svg"), "{picture}");
    }

    #[test]
    fn nothing_to_draw_is_drawn() {
        assert!(svg("nothing", &[]).ends_with("</svg>\n"));
    }
}
