//! `drumline bench`: how fast collectives are on this machine, or between these.
//!
//! | module | what it holds |
//! |---|---|
//! | `options`, `choice` | the command line, and what options choose from |
//! | `operation` | the operations: buffers, results, bus factors; the calls are in `trial` |
//! | `answers` | inputs whose results are known, and the count of wrong elements |
//! | `session` | what is called, and the order in which everything takes turns |
//! | `way` | a group for each transport |
//! | `measure` | the times of one turn, and what operations cost beside time |
//! | `bound`, `line` | what they are measured against: a copy, or a plain stream |
//! | `probe` | near or far: how long a word takes from core to core |
//! | `row`, `table`, `plot` | a figure, and all of them as text, JSON and SVG |
//! | `explain` | which algorithm was taken, and what the others would have cost |

mod answers;
mod bound;
mod choice;
mod explain;
mod line;
mod measure;
mod operation;
mod options;
mod plot;
mod probe;
mod row;
mod session;
mod table;
mod trial;
mod way;

use std::{ffi::OsString, fs::File};

use drumline::is_launched;

pub(crate) use self::options::Options;
use crate::{Error, Job, Result, run};

/// Measures what `options` ask for, and prints it. Under a launcher this process is one of the
/// ranks; else it starts them: itself, with the `arguments` that it was started with.
///
/// The exit code is 1 if a result was wrong, and otherwise that of the first rank that failed.
///
/// # Errors
///
/// [`Error::Bench`] says what cannot be measured, or which file cannot be written.
pub(crate) fn bench(options: &Options, arguments: Vec<OsString>) -> Result<u8> {
    if is_launched() {
        return session::measure(options);
    }
    options.check(options.nproc_per_node.get())?;
    create_files(options)?;
    let job = Job {
        arguments,
        torch_store: None,
        labels_stdout: false,
        ..Job::new("/proc/self/exe", options.nproc_per_node)
    };
    run(&job)
}

/// Before minutes are spent on what cannot be kept.
fn create_files(options: &Options) -> Result<()> {
    options.json.iter().chain(&options.svg).try_for_each(|path| {
        let problem = |error| Error::Bench(format!("cannot write {}: {error}", path.display()));
        File::create(path).map(drop).map_err(problem)
    })
}
