//! `drumline bench`.

use std::{ffi::OsString, num::NonZeroUsize};

use drumline::rendezvous::is_launched;
use drumline_bench::{BenchOptions, is_over_mpi};
use drumline_launch::{Job, run};

use crate::{Result, cli::Rseq, output::Stdout};

/// Measures as a rank, or starts ranks that do.
pub(crate) fn measure(
    options: &BenchOptions,
    rseq: Rseq,
    arguments: impl Iterator<Item = OsString>,
    itself: Vec<OsString>,
) -> Result<u8> {
    if is_launched() || is_over_mpi() {
        return Ok(drumline_bench::measure(options, &mut Stdout)?);
    }
    options.prepare()?;
    let disables_rseq = rseq.disable_rseq;
    let job = this_command(options.ranks(), arguments, itself);
    Ok(run(&Job { disables_rseq, torch_store: None, labels_stdout: false, ..job })?)
}

/// A job whose ranks run this same command line.
fn this_command(
    ranks: NonZeroUsize,
    arguments: impl Iterator<Item = OsString>,
    itself: Vec<OsString>,
) -> Job {
    let mut program = itself.iter().cloned();
    let first = program.next().unwrap_or_else(|| "/proc/self/exe".into());
    let arguments = program.chain(arguments).collect();
    Job { arguments, relaunch: itself, ..Job::new(first, ranks) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// In Python /proc/self/exe is the interpreter.
    #[test]
    fn ranks_run_this_command_also_in_the_process_of_another_program() {
        let arguments = || ["bench", "-b", "8"].map(OsString::from).into_iter();
        let job = this_command(NonZeroUsize::MIN, arguments(), Vec::new());
        assert_eq!((job.program, job.arguments), ("/proc/self/exe".into(), arguments().collect()));
        let python = ["python3", "-m", "drumline"].map(OsString::from);
        let job = this_command(NonZeroUsize::MIN, arguments(), python.clone().into());
        assert_eq!((job.program, &job.relaunch[..]), ("python3".into(), &python[..]));
        assert_eq!(job.arguments, ["-m", "drumline", "bench", "-b", "8"]);
    }
}
