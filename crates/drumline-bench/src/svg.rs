//! Charts as SVG.

// Pixels. A panel is `HEIGHT` high, or higher if its curves need more room for their names.
const WIDTH: f64 = 860.0;
const HEIGHT: f64 = 520.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = WIDTH - 250.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = HEIGHT - 60.0;

const COLOURS: [&str; 8] =
    ["#2f6fb0", "#c4572b", "#3a8f4d", "#8a4fb0", "#b08a1e", "#2a9d9d", "#b03a6f", "#666666"];

/// Curves over a logarithmic axis.
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x_title: &'static str,
    /// The name of a power of two on the horizontal axis, by its exponent.
    pub(crate) x_name: fn(i32) -> String,
    pub(crate) y_title: String,
    /// Whether the vertical axis goes from 0 to 100; else it is logarithmic.
    pub(crate) is_percent: bool,
    /// Names and points.
    pub(crate) curves: Vec<(String, Vec<(f64, f64)>)>,
}

/// Draws panels below each other.
pub(crate) fn page(panels: Vec<Panel>) -> String {
    let (mut drawn, mut height) = (Vec::new(), 0.0);
    for panel in panels {
        height += panel.draw(height, &mut drawn);
    }
    format!(
        r##"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="system-ui, sans-serif" font-size="12" fill="#333">
<rect width="{WIDTH}" height="{height}" fill="#fff"/>
{}
</svg>
"##,
        drawn.join("\n")
    )
}

impl Panel {
    /// Draws the panel below `offset`, and returns its height.
    fn draw(mut self, offset: f64, elements: &mut Vec<String>) -> f64 {
        for (_, points) in &mut self.curves {
            points.retain(|(x, y)| *x > 0.0 && (self.is_percent || y.is_normal()));
        }
        self.curves.retain(|(_, points)| !points.is_empty());
        let (top, bottom) = (offset + TOP, offset + BOTTOM);
        let points = || self.curves.iter().flat_map(|(_, points)| points);
        let xs = Axis::over(points().map(|(x, _)| *x), 2.0, (LEFT, RIGHT));
        let ys = match self.is_percent {
            true => Axis { base: None, low: 0, high: 100, ends: (bottom, top) },
            false => Axis::over(points().map(|(_, y)| *y), 10.0, (bottom, top)),
        };
        let (centre, middle) = ((LEFT + RIGHT) / 2.0, r#"text-anchor="middle""#);
        elements.extend([
            text(LEFT, offset + 28.0, r#"font-size="16" font-weight="600""#, &self.title),
            text(LEFT, top - 8.0, "", &self.y_title),
            text(centre, offset + HEIGHT - 16.0, middle, self.x_title),
        ]);
        let rule = |x1: f64, y1: f64, x2: f64, y2: f64| {
            format!(r##"<path d="M{x1:.1} {y1:.1}L{x2:.1} {y2:.1}" stroke="#ddd"/>"##)
        };
        for mark in xs.marks() {
            let x = xs.at(xs.value(mark));
            elements.push(rule(x, top, x, bottom));
            elements.push(text(x, bottom + 18.0, middle, &(self.x_name)(mark)));
        }
        for mark in ys.marks() {
            let y = ys.at(ys.value(mark));
            elements.push(rule(LEFT, y, RIGHT, y));
            let name = ys.value(mark).to_string();
            elements.push(text(LEFT - 8.0, y + 4.0, r#"text-anchor="end""#, &name));
        }
        for (number, (name, points)) in self.curves.iter().enumerate() {
            let colour = COLOURS[number % COLOURS.len()];
            let places: Vec<(f64, f64)> =
                points.iter().map(|(x, y)| (xs.at(*x), ys.at(*y))).collect();
            let path: Vec<String> = places.iter().map(|(x, y)| format!("{x:.1} {y:.1}")).collect();
            elements.push(format!(
                r#"<path d="M{}" fill="none" stroke="{colour}" stroke-width="2"/>"#,
                path.join("L")
            ));
            let dot = |(x, y): &(f64, f64)| {
                format!(r#"<circle cx="{x:.1}" cy="{y:.1}" r="3" fill="{colour}"/>"#)
            };
            elements.extend(places.iter().map(dot));
            let y = top + 12.0 + 20.0 * number as f64;
            elements.push(format!(
                r#"<path d="M{:.1} {:.1}h18" stroke="{colour}" stroke-width="3"/>"#,
                RIGHT + 14.0,
                y - 4.0
            ));
            elements.push(text(RIGHT + 38.0, y, "", name));
        }
        HEIGHT.max(TOP + 20.0 * (self.curves.len() + 1) as f64)
    }
}

struct Axis {
    /// The axis goes between whole powers of this base; `None`: it is linear.
    base: Option<f64>,
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
        Axis { base: Some(base), low, high: ((high - 1e-9).ceil() as i32).max(low + 1), ends }
    }

    /// At most eleven.
    fn marks(&self) -> impl Iterator<Item = i32> + use<> {
        let step = match self.base {
            Some(_) => self.low.abs_diff(self.high).div_ceil(10).max(1),
            None => 20,
        };
        (self.low..=self.high).step_by(step as usize)
    }

    fn value(&self, mark: i32) -> f64 {
        self.base.map_or(f64::from(mark), |base| base.powi(mark))
    }

    fn at(&self, value: f64) -> f64 {
        let value = self.base.map_or(value, |base| value.log(base));
        let share = (value - f64::from(self.low)) / f64::from(self.high - self.low);
        self.ends.0 + share * (self.ends.1 - self.ends.0)
    }
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

fn text(x: f64, y: f64, attributes: &str, content: &str) -> String {
    let content = content.replace('&', "&amp;").replace('<', "&lt;");
    format!(r#"<text x="{x:.1}" y="{y:.1}" {attributes}>{content}</text>"#)
}
