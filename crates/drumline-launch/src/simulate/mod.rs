//! `drumline simulate`: what collectives and training steps would take on a cluster that need not be
//! there, by replaying the schedules of all its ranks.

mod calibrate;
mod check;
mod cluster;
mod collectives;
mod measure;
mod options;
mod picture;
mod training;

use std::{fs, io::Write as _, path::Path, time::Duration};

pub(crate) use options::Options;

use crate::{Error, Result, print};

const AFTER_MEASURING: &str = "\
# Prices of this machine, measured by `drumline simulate --measure`. DRUMLINE_PRICES=FILE lets the
# ranks of a job choose by them, `drumline simulate --cluster FILE` replays on them. The network is
# this machine's loopback: set far.round_ps and nic_byte_fs to what yours can do.
";

/// Carries the command out.
///
/// # Errors
///
/// [`Error::Simulate`] for options and files that cannot be understood; what the library said where
/// something is measured.
pub(crate) fn simulate(options: &Options) -> Result<u8> {
    let budget = Duration::from_millis(options.measure_ms);
    if let Some(path) = &options.measure {
        let (prices, _) = calibrate::calibrate(&[], budget, &mut |line| {
            let _ = writeln!(std::io::stderr(), "{line}");
        })?;
        write(path, &format!("{AFTER_MEASURING}{prices}"))?;
        print(&format!("wrote {}\n", path.display()))?;
        return Ok(0);
    }
    if options.check {
        let prices = options.cluster.as_ref().map(|path| cluster::read(path)).transpose()?;
        let prices = prices.map(|cluster| cluster.prices);
        print(&check::check(prices, options.check_ranks_max, budget)?)?;
        return Ok(0);
    }
    let described = cluster::describe(options)?;
    print(&described.headline())?;
    let tables = collectives::tables(&described, options)?;
    for table in &tables {
        print(&table.text(&described))?;
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
        write(path, &picture::svg(&described, &tables, steps.as_ref()))?;
        print(&format!("wrote {}\n", path.display()))?;
    }
    Ok(0)
}

fn write(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).map_err(Error::system(format!("write {}", path.display())))
}
