//! A picture of the training, as SVG, for light and for dark pages.

use anyhow::Result;
use plotters::{coord::Shift, prelude::*};

use crate::history::Epoch;

/// Epochs since the start, and the value.
type Point = (f64, f64);

const FONT: &str = "sans-serif";

/// What changes on dark pages. Both curves can be read on either.
const DARK: &str = r##"
<style>
  @media (prefers-color-scheme: dark) {
    rect[fill="#FFFFFF"] { fill: #0d1117 }
    text { fill: #e6edf3 }
    [stroke="#E4E4E4"] { stroke: #30363d }
  }
</style>"##;

/// Draws the loss and the accuracy over the epochs, one above the other.
pub fn svg(title: &str, epochs: &[Epoch]) -> Result<String> {
    let last = epochs.len().max(1) as f64;
    let losses = (0..).zip(epochs).flat_map(|(start, epoch)| {
        let points = epoch.losses.len() as f64;
        let middle = move |i: usize| f64::from(start) + (i as f64 + 0.5) / points;
        epoch.losses.iter().enumerate().map(move |(i, &loss)| (middle(i), loss))
    });
    let accuracies = (1..).zip(epochs).map(|(end, it)| (f64::from(end), it.accuracy * 100.0));

    let mut text = String::new();
    {
        let area = SVGBackend::with_string(&mut text, (760, 560)).into_drawing_area();
        area.fill(&WHITE)?;
        let parts = area.titled(title, (FONT, 18))?.split_evenly((2, 1));
        let (blue, red) = (RGBColor(47, 111, 176), RGBColor(196, 87, 43));
        let names = [("training loss", "nats per image"), ("test accuracy", "%")];
        curve(&parts[0], names[0], blue, 0, losses.collect(), last)?;
        curve(&parts[1], names[1], red, 4, accuracies.collect(), last)?;
        area.present()?;
    }
    if let Some(end_of_tag) = text.find('>') {
        text.insert_str(end_of_tag + 1, DARK);
    }
    Ok(text)
}

/// `dots`: the size of the mark at each point. `last`: where the horizontal axis ends.
fn curve(
    area: &DrawingArea<SVGBackend<'_>, Shift>,
    (name, unit): (&str, &str),
    colour: RGBColor,
    dots: u32,
    mut points: Vec<Point>,
    last: f64,
) -> Result<()> {
    points.retain(|(_, value)| value.abs() <= f64::from(f32::MAX)); // Not NaN.
    let low = points.iter().map(|it| it.1).fold(f64::INFINITY, f64::min);
    let high = points.iter().map(|it| it.1).fold(f64::NEG_INFINITY, f64::max);
    let values = match high - low {
        range if range > f64::EPSILON * high.abs() => low - 0.05 * range..high + 0.05 * range,
        _ if low.is_finite() => low - 0.5..high + 0.5,
        _ => 0.0..1.0, // There are no points.
    };
    let latest =
        points.last().map(|it| format!(": {:.2} {unit} at last", it.1)).unwrap_or_default();
    let mut chart = ChartBuilder::on(area)
        .caption(format!("{name}{latest}"), (FONT, 14))
        .margin(12)
        .x_label_area_size(40)
        .y_label_area_size(76)
        .build_cartesian_2d(0.0..last, values)?;
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(RGBColor(228, 228, 228))
        .axis_style(RGBColor(153, 153, 153))
        .label_style((FONT, 12))
        .axis_desc_style((FONT, 14))
        .x_desc("epoch")
        .y_desc(unit)
        .y_labels(6)
        .draw()?;
    let line = colour.filled().stroke_width(2);
    chart.draw_series(LineSeries::new(points, line).point_size(dots))?;
    Ok(())
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

    /// The points of each curve; axes are thinner.
    fn curves(svg: &str) -> Vec<Vec<(i32, i32)>> {
        let lines = svg.lines().filter(|line| line.contains(r#"stroke-width="2" points"#));
        lines.flat_map(|line| attributes(line, "points")).map(places).collect()
    }

    fn places(points: &str) -> Vec<(i32, i32)> {
        let pairs = points.split_whitespace().map(|pair| pair.split_once(',').unwrap());
        pairs.map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap())).collect()
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
            let svg = svg("a < b & c", &epochs).unwrap();
            assert_well_formed(&svg);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
            for (x, y) in curves(&svg).into_iter().flatten() {
                assert!((0..=760).contains(&x) && (0..=560).contains(&y), "{x},{y}");
            }
        }
    }

    #[test]
    fn curves_go_where_the_numbers_are() {
        let svg = svg("t", &[epoch(&[2.0, 1.0], 0.5), epoch(&[1.0, 0.0], 1.0)]).unwrap();
        let [loss, accuracy] = &curves(&svg)[..] else { panic!("{svg}") };
        let is_near = |a: i32, b: i32| a.abs_diff(b) <= 1;
        // Loss from 2 (top) to 0 (bottom), at the middle of each half epoch.
        let [(a, two), (b, one), (c, also_one), (d, zero)] = loss[..] else { panic!("{svg}") };
        assert!(two < one && one == also_one && is_near(one - two, zero - one), "{loss:?}");
        assert!(is_near(b - a, c - b) && is_near(c - b, d - c), "{loss:?}");
        // Accuracy at the end of each epoch.
        let [(first, half), (second, all)] = accuracy[..] else { panic!("{svg}") };
        assert!(all < half && is_near(second - first, 2 * (b - a)), "{accuracy:?}");
        assert_eq!(attributes(&svg, "cx"), [first.to_string(), second.to_string()]);
    }
}
