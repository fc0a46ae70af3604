//! The losses so far, and their picture.

use anyhow::{Result, ensure};
use drumline::checkpoint::{Checkpoint, Tensor};
use plotters::prelude::*;

/// Steps, and the loss after them in nats per character.
pub(crate) type Losses = Vec<(f64, f64)>;

#[derive(Default)]
pub(crate) struct History {
    pub(crate) training: Losses,
    pub(crate) validation: Losses,
}

const TRAINING: &str = "losses.training";
const VALIDATION: &str = "losses.validation";

impl History {
    pub(crate) fn save(&self, checkpoint: &mut Checkpoint) -> Result<()> {
        for (name, losses) in [(TRAINING, &self.training), (VALIDATION, &self.validation)] {
            let values: Vec<f64> = losses.iter().flat_map(|&(step, loss)| [step, loss]).collect();
            checkpoint.insert(Tensor::from_values(name, [losses.len(), 2], &values)?);
        }
        Ok(())
    }

    /// The losses in a checkpoint; none if it holds none.
    pub(crate) fn load(checkpoint: &Checkpoint) -> Result<Self> {
        let losses = |name| {
            let Some(tensor) = checkpoint.tensor(name) else { return Ok(Losses::new()) };
            ensure!(tensor.shape().last() == Some(&2), "{name} in the checkpoint are no losses");
            let values = tensor.values::<f64>()?;
            Ok(values.chunks_exact(2).map(|pair| (pair[0], pair[1])).collect())
        };
        Ok(Self { training: losses(TRAINING)?, validation: losses(VALIDATION)? })
    }

    /// A picture of the losses, as SVG, for light and for dark pages.
    pub(crate) fn picture(&self, title: &str) -> Result<String> {
        let steps = self.training.last().map_or(1.0, |last| last.0.max(1.0));
        let highest =
            self.training.iter().chain(&self.validation).map(|it| it.1).fold(0.1, f64::max);
        let mut text = String::new();
        {
            let area = SVGBackend::with_string(&mut text, (720, 420)).into_drawing_area();
            let mut chart = ChartBuilder::on(&area)
                .caption(title, ("sans-serif", 18))
                .margin(12)
                .x_label_area_size(40)
                .y_label_area_size(60)
                .build_cartesian_2d(0.0..steps, 0.0..1.05 * highest)?;
            chart
                .configure_mesh()
                .light_line_style(TRANSPARENT)
                .bold_line_style(RGBColor(228, 228, 228))
                .axis_style(RGBColor(153, 153, 153))
                .label_style(("sans-serif", 14))
                .axis_desc_style(("sans-serif", 16))
                .x_desc("step")
                .y_desc("loss, nats per character")
                .draw()?;
            for (name, losses, colour) in [
                ("training", &self.training, RGBColor(47, 127, 216)),
                ("validation", &self.validation, RGBColor(200, 118, 58)),
            ] {
                let last = losses.last().map_or(f64::NAN, |last| last.1);
                chart
                    .draw_series(LineSeries::new(losses.iter().copied(), colour.stroke_width(2)))?
                    .label(format!("{name}: {last:.3} at last"))
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour));
            }
            let mut legend = chart.configure_series_labels();
            legend
                .position(SeriesLabelPosition::UpperRight)
                .label_font(("sans-serif", 16))
                .draw()?;
            area.present()?;
        }
        let end_of_tag = text.find('>').map_or(0, |end| end + 1);
        text.insert_str(end_of_tag, DARK);
        Ok(text)
    }
}

/// What changes on dark pages. Both lines can be read on either.
const DARK: &str = r##"
<style>@media (prefers-color-scheme: dark) { text { fill: #e6edf3 } [stroke="#E4E4E4"] { stroke: #30363d } }</style>"##;
