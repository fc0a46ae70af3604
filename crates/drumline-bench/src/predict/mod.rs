//! `drumline predict`: how long collectives and training steps would take on a cluster that need not exist.
//! It replays the schedules of all ranks of the cluster.

mod calibrate;
mod cluster;
mod collectives;
mod compare;
mod devices;
mod options;
mod picture;
mod runs;
mod training;

use std::{io::Write, path::Path, time::Duration};

use drumline::files;
pub use options::Options;

use crate::{Error, Result};

const AFTER_MEASURING: &str = "\
# Prices of this host, measured by `drumline predict --measure`. With DRUMLINE_PRICES=FILE the ranks
# of a job choose algorithms by them; `drumline predict --cluster FILE` replays on them. The network
# is this host's loopback: set far.round_ps and nic_byte_fs to the speed of yours.
";

/// Carries out `drumline predict` with `options`, and prints to `out`.
///
/// # Errors
///
/// [`Error::Usage`] for options and files that cannot be understood; [`Error::Measure`] and
/// [`Error::System`] if this host cannot be measured or a file cannot be written.
pub fn predict(options: &Options, out: &mut dyn Write) -> Result<()> {
    let mut print =
        |text: &str| out.write_all(text.as_bytes()).map_err(Error::system("write the prediction"));
    let budget = Duration::from_millis(options.measure_ms);
    check_files(options)?;
    if let Some(path) = &options.measure {
        let (prices, _) = calibrate::calibrate(&[], budget, &mut |line| {
            let _ = writeln!(std::io::stderr(), "{line}");
        })?;
        write(path, &format!("{AFTER_MEASURING}{prices}"))?;
        return print(&format!("wrote {}\n", path.display()));
    }
    if options.check {
        let prices = options.cluster.as_ref().map(|path| cluster::read(path)).transpose()?;
        let prices = prices.map(|cluster| cluster.prices);
        return print(&compare::table(prices, options.check_ranks_max, budget)?);
    }
    let described = cluster::describe(options)?;
    print(&described.headline())?;
    let tables = collectives::tables(&described, options)?;
    for table in &tables {
        print(&table.text(&described))?;
    }
    if let Some(devices) = devices::table(&described, options)? {
        print(&devices.text())?;
    }
    let steps = match options.training()? {
        Some(training) => {
            let steps = training::steps(&described, options, &training)?;
            print(&steps.text())?;
            Some(steps)
        }
        None => None,
    };
    if let Some(path) = &options.svg {
        write(path, &picture::svg(&described.headline(), &tables, steps.as_ref())?)?;
        print(&format!("wrote {}\n", path.display()))?;
    }
    Ok(())
}

/// Tells of a file that cannot be written before it takes long to know what to write.
fn check_files(options: &Options) -> Result<()> {
    options.measure.iter().chain(&options.svg).try_for_each(|path| {
        let problem = |error| Error::Usage(format!("cannot write {}: {error}", path.display()));
        files::check_place(path).map_err(problem)
    })
}

fn write(path: &Path, text: &str) -> Result<()> {
    files::write(path, text.as_bytes()).map_err(Error::system(format!("write {}", path.display())))
}
