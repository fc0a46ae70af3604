//! Charts as SVG, for light and for dark pages.

use std::{io, ops::Range};

use plotters::{coord::Shift, drawing::DrawingAreaErrorKind, prelude::*};

use crate::{Error, Result};

// Pixels. A panel is `HEIGHT` high, or higher if its curves need more room for their names.
const WIDTH: u32 = 900;
const HEIGHT: u32 = 520;
/// Where the names of curves begin.
const NAMES: u32 = WIDTH - 270;
const NAME_HEIGHT: u32 = 20;

const FONT: &str = "sans-serif";
// An all-reduce on several hosts has ten algorithms to draw.
const COLOURS: [RGBColor; 12] = [
    RGBColor(47, 111, 176),
    RGBColor(196, 87, 43),
    RGBColor(58, 143, 77),
    RGBColor(138, 79, 176),
    RGBColor(176, 138, 30),
    RGBColor(42, 157, 157),
    RGBColor(176, 58, 111),
    RGBColor(102, 102, 102),
    RGBColor(110, 100, 235),
    RGBColor(141, 104, 66),
    RGBColor(214, 72, 72),
    RGBColor(110, 130, 40),
];

/// On dark pages what is neither a curve nor its swatch changes. Every curve can be read on both.
const DARK: &str = r##"
<style>
  @media (prefers-color-scheme: dark) {
    rect[fill="#FFFFFF"] { fill: #0d1117 }
    text { fill: #e6edf3 }
    [stroke="#DDDDDD"] { stroke: #30363d }
  }
</style>"##;

/// Curves over a logarithmic axis.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x_title: &'static str,
    /// The name of a power of two on the horizontal axis, by its exponent.
    pub(crate) x_name: fn(i32) -> String,
    pub(crate) y_title: &'static str,
    /// Names and points.
    pub(crate) curves: Vec<(String, Vec<(f64, f64)>)>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type Drawn = Result<(), DrawingAreaErrorKind<io::Error>>;

/// Draws panels below each other.
pub(crate) fn page(mut panels: Vec<Panel>) -> Result<String> {
    panels.iter_mut().for_each(Panel::drop_what_has_no_place);
    let mut text = String::new();
    let size = (WIDTH, panels.iter().map(Panel::height).sum());
    let drawn = draw(&SVGBackend::with_string(&mut text, size).into_drawing_area(), &panels);
    let problem = |error: DrawingAreaErrorKind<_>| io::Error::other(error.to_string());
    drawn.map_err(problem).map_err(Error::system("draw the picture"))?;
    if let Some(end_of_tag) = text.find('>') {
        text.insert_str(end_of_tag + 1, DARK);
    }
    Ok(text)
}

fn draw(area: &Area<'_>, panels: &[Panel]) -> Drawn {
    area.fill(&WHITE)?;
    let mut rest = area.clone();
    for panel in panels {
        let (area, below) = rest.split_vertically(panel.height());
        panel.draw(&area)?;
        rest = below;
    }
    area.present()
}

impl Panel {
    /// Neither 0 nor infinity is on a logarithmic axis.
    fn drop_what_has_no_place(&mut self) {
        for (_, points) in &mut self.curves {
            points.retain(|(x, y)| *x > 0.0 && y.is_normal());
        }
        self.curves.retain(|(_, points)| !points.is_empty());
    }

    fn height(&self) -> u32 {
        HEIGHT.max(NAME_HEIGHT * (self.curves.len() as u32 + 5))
    }

    fn draw(&self, area: &Area<'_>) -> Drawn {
        let area = area.titled(&self.title, (FONT, 18))?;
        let (left, names) = area.split_horizontally(NAMES);
        // Both axes are drawn as exponents: marks are whole powers.
        let points = || self.curves.iter().flat_map(|(_, points)| points);
        let xs = powers(points().map(|(x, _)| x.log2()));
        let ys = powers(points().map(|(_, y)| y.log10()));
        let labels = |range: &Range<f64>| (range.end - range.start + 1.0).min(11.0) as usize;
        let (x_labels, y_labels) = (labels(&xs), labels(&ys));
        let mut chart = ChartBuilder::on(&left)
            .margin(12)
            .x_label_area_size(44)
            .y_label_area_size(76)
            .build_cartesian_2d(xs, ys)?;
        chart
            .configure_mesh()
            .light_line_style(TRANSPARENT)
            .bold_line_style(RGBColor(221, 221, 221))
            .axis_style(RGBColor(153, 153, 153))
            .label_style((FONT, 12))
            .axis_desc_style((FONT, 13))
            .x_labels(x_labels)
            .x_desc(self.x_title)
            .x_label_formatter(&|x| (self.x_name)(x.round() as i32))
            .y_labels(y_labels)
            .y_desc(self.y_title)
            .y_label_formatter(&|y| 10_f64.powi(y.round() as i32).to_string())
            .draw()?;
        for (number, (name, points)) in (0..).zip(&self.curves) {
            let colour = COLOURS[number as usize % COLOURS.len()];
            let points = points.iter().map(|(x, y)| (x.log2(), y.log10()));
            let line = LineSeries::new(points, colour.filled().stroke_width(2)).point_size(3);
            chart.draw_series(line)?;
            let y = NAME_HEIGHT as i32 * (number + 1);
            let swatch = PathElement::new([(0, y), (18, y)], colour.stroke_width(3));
            names.draw(&swatch)?;
            names.draw(&Text::new(name.as_str(), (26, y - 6), (FONT, 13)))?;
        }
        Ok(())
    }
}

/// From one whole exponent to another.
fn powers(exponents: impl Iterator<Item = f64> + Clone) -> Range<f64> {
    // Rounding errors must not lead to the next power.
    let low = (exponents.clone().fold(f64::INFINITY, f64::min) + 1e-9).floor();
    let high = (exponents.fold(f64::NEG_INFINITY, f64::max) - 1e-9).ceil();
    if high.is_finite() { low..high.max(low + 1.0) } else { 0.0..1.0 }
}

/// `512`, `64 KiB`.
pub(crate) fn size_name(log2: i32) -> String {
    let (unit, power) = match log2 {
        30.. => (" GiB", 30),
        20.. => (" MiB", 20),
        10.. => (" KiB", 10),
        _ => ("", 0),
    };
    format!("{}{unit}", 2_f64.powi(log2 - power))
}
