//! A picture of the training, as SVG.

use crate::history::Epoch;

/// Draws the loss and the accuracy over the epochs, one above the other.
pub fn svg(title: &str, epochs: &[Epoch]) -> String {
    let last = epochs.len().max(1) as f64;
    let loss: Vec<Point> = epochs
        .iter()
        .zip(0..)
        .flat_map(|(epoch, start)| {
            let points = epoch.losses.len() as f64;
            let middle = move |i: usize| f64::from(start) + (i as f64 + 0.5) / points;
            epoch.losses.iter().enumerate().map(move |(i, &loss)| (middle(i), loss))
        })
        .collect();
    let accuracy: Vec<Point> = epochs
        .iter()
        .zip(1..)
        .map(|(epoch, end)| (f64::from(end), epoch.accuracy * 100.0))
        .collect();
    let panels = [
        Panel { name: "training loss", unit: "", colour: "#2f6fb0", marks: false, points: &loss },
        Panel {
            name: "test accuracy",
            unit: " %",
            colour: "#c4572b",
            marks: true,
            points: &accuracy,
        },
    ];

    let mut elements = vec![
        format!(r##"<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>"##),
        text(LEFT, 34.0, r##"font-size="17" font-weight="600" fill="#222""##, &escape(title)),
        text((LEFT + RIGHT) / 2.0, HEIGHT - 14.0, MIDDLE, "epoch"),
    ];
    for (panel, top) in panels.iter().zip([TOP, TOP + PANEL_HEIGHT + GAP]) {
        elements.extend(draw(panel, top, last));
    }
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="system-ui, sans-serif" font-size="13" fill="#444">
{}
</svg>
"##,
        elements.join("\n")
    )
}

/// x: epochs since the start; y: the value.
type Point = (f64, f64);

struct Panel<'a> {
    name: &'a str,
    unit: &'a str,
    colour: &'a str,
    /// Whether each point has a dot.
    marks: bool,
    points: &'a [Point],
}

// Pixels.
const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 560.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 30.0;
const TOP: f64 = 78.0;
const GAP: f64 = 56.0;
const PANEL_HEIGHT: f64 = 180.0;

/// The elements of a panel. `last_epoch`: where the horizontal axis ends.
fn draw(panel: &Panel<'_>, top: f64, last_epoch: f64) -> Vec<String> {
    let Panel { name, unit, colour, .. } = panel;
    let bottom = top + PANEL_HEIGHT;
    let points: Vec<Point> = panel.points.iter().copied().filter(|(_, y)| y.is_finite()).collect();
    let (low, high, step) = scale(points.iter().map(|(_, y)| *y));
    let x = |epoch: f64| LEFT + epoch / last_epoch * (RIGHT - LEFT);
    let y = |value: f64| bottom - (value - low) / (high - low) * PANEL_HEIGHT;
    let decimals = (-step.log10().floor()).max(0.0) as usize;

    let mut elements = Vec::new();
    for line in 0..=((high - low) / step).round() as i32 {
        let value = low + f64::from(line) * step;
        elements.push(rule(y(value), "#e4e4e4"));
        let label = format!("{value:.decimals$}{unit}");
        elements.push(text(LEFT - 8.0, y(value) + 4.5, END, &label));
    }
    let epochs_step = scale([0.0, last_epoch].into_iter()).2.max(1.0);
    for tick in 0..=(last_epoch / epochs_step) as i32 {
        let epoch = f64::from(tick) * epochs_step;
        elements.push(text(x(epoch), bottom + 18.0, MIDDLE, &epoch.to_string()));
    }
    elements.push(rule(bottom, "#999"));

    let heading = format!(r#"font-weight="600" fill="{colour}""#);
    elements.push(text(LEFT, top - 12.0, &heading, name));
    if let Some((_, value)) = points.last() {
        let latest = format!("{value:.0$}{unit} at last", decimals.max(2));
        elements.push(text(RIGHT, top - 12.0, &format!(r#"{END} fill="{colour}""#), &latest));
    }

    let at = |&(epoch, value): &Point| (x(epoch), y(value));
    let line: Vec<String> = points.iter().map(at).map(|(x, y)| format!("{x:.1},{y:.1}")).collect();
    elements.push(format!(
        r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="2" stroke-linejoin="round"/>"#,
        line.join(" ")
    ));
    for (x, y) in points.iter().filter(|_| panel.marks).map(at) {
        elements.push(format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="4" fill="{colour}"/>"#));
    }
    elements
}

const MIDDLE: &str = r#"text-anchor="middle""#;
const END: &str = r#"text-anchor="end""#;

fn text(x: f64, y: f64, attributes: &str, content: &str) -> String {
    format!(r#"<text x="{x:.1}" y="{y:.1}" {attributes}>{content}</text>"#)
}

/// A horizontal line across a panel.
fn rule(y: f64, colour: &str) -> String {
    format!(r#"<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1}" y2="{y:.1}" stroke="{colour}"/>"#)
}

/// Lowest and highest line of a grid around the values, and the distance of its lines: 1, 2 or 5
/// times a power of ten, so that there are three to seven lines.
fn scale(values: impl Iterator<Item = f64> + Clone) -> (f64, f64, f64) {
    let low = values.clone().fold(f64::INFINITY, f64::min);
    let high = values.fold(f64::NEG_INFINITY, f64::max);
    let (low, high) = match high - low {
        range if range > f64::EPSILON * high.abs() => (low, high),
        _ if low.is_finite() => (low - 0.5, low + 0.5),
        _ => (0.0, 1.0), // No values.
    };
    let rough = (high - low) / 4.0;
    let power = 10_f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough);
    let step = step.unwrap_or(10.0 * power);
    ((low / step).floor() * step, (high / step).ceil() * step, step)
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(losses: &[f64], accuracy: f64) -> Epoch {
        Epoch { losses: losses.to_vec(), accuracy }
    }

    /// The values of an attribute wherever it appears.
    fn attributes<'a>(svg: &'a str, name: &str) -> Vec<&'a str> {
        let start = format!(" {name}=\"");
        svg.split(&start).skip(1).filter_map(|rest| rest.split('"').next()).collect()
    }

    /// Every tag is closed, in order, and what is between tags has no `<` or bare `&`.
    fn assert_well_formed(svg: &str) {
        let mut open = Vec::new();
        for part in svg.split('<').skip(1) {
            let (tag, text) = part.split_once('>').unwrap();
            assert_eq!(tag.matches('"').count() % 2, 0, "{tag}");
            assert!(!text.replace("&amp;", "").replace("&lt;", "").contains(['&', '>']), "{text}");
            match tag.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name)),
                None if tag.ends_with('/') => {}
                None => open.push(tag.split(' ').next().unwrap()),
            }
        }
        assert!(open.is_empty(), "{open:?}");
    }

    #[test]
    fn any_history_makes_a_picture_without_surprises() {
        for epochs in [
            vec![],
            vec![epoch(&[0.5], 0.9)],
            vec![epoch(&[0.5, 0.5], 0.9), epoch(&[0.5, 0.5], 0.9)],
            vec![epoch(&[1e-9, 2e-9], 1.0), epoch(&[1e9, f64::NAN], 0.0)],
            (1..=40).map(|n| epoch(&[1.0 / f64::from(n); 50], 1.0 - 0.1 / f64::from(n))).collect(),
        ] {
            let svg = svg("a < b & c", &epochs);
            assert_well_formed(&svg);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            for points in attributes(&svg, "points") {
                for pair in points.split_whitespace() {
                    let (x, y) = pair.split_once(',').unwrap();
                    let (x, y): (f64, f64) = (x.parse().unwrap(), y.parse().unwrap());
                    assert!((LEFT..=RIGHT).contains(&x) && (TOP..=HEIGHT).contains(&y), "{pair}");
                }
            }
        }
    }

    #[test]
    fn curves_go_where_the_numbers_are() {
        let svg = svg("t", &[epoch(&[2.0, 1.0], 0.5), epoch(&[1.0, 0.0], 1.0)]);
        let [loss, accuracy] = attributes(&svg, "points")[..] else { panic!("{svg}") };
        // Loss from 2 (top) to 0 (bottom), at the middle of each half epoch.
        assert_eq!(loss, "152.5,78.0 317.5,168.0 482.5,168.0 647.5,258.0");
        // Accuracy at the end of each epoch, in a grid from 40 % to 100 %.
        assert_eq!(accuracy, "400.0,464.0 730.0,314.0");
        assert_eq!(attributes(&svg, "cx"), ["400.0", "730.0"]);
    }

    #[test]
    fn grids_have_round_numbers() {
        let close = |a: (f64, f64, f64), b: (f64, f64, f64)| {
            [a.0 - b.0, a.1 - b.1, a.2 - b.2].iter().all(|d| d.abs() < 1e-9)
        };
        for (values, expected) in [
            (vec![0.21, 1.53], (0.0, 2.0, 0.5)),
            (vec![87.59, 90.5], (87.0, 91.0, 1.0)),
            (vec![3.0], (2.5, 3.5, 0.5)),
            (vec![], (0.0, 1.0, 0.5)),
        ] {
            let scale = scale(values.iter().copied());
            assert!(close(scale, expected), "{values:?}: {scale:?}");
        }
    }
}
