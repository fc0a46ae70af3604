//! `drumline trace`: what the ranks of a job have written under `DRUMLINE_TRACE`.

use std::path::Path;

use crate::{Error, Result, print};

/// Merges the traces in `dir` to one file, `dir/trace.json` unless told otherwise, and says what
/// it holds.
///
/// # Errors
///
/// [`Error::Trace`] when a file cannot be read or written.
pub(crate) fn merge(dir: &Path, out: Option<&Path>) -> Result<()> {
    let default = dir.join("trace.json");
    let out = out.unwrap_or(&default);
    let merged = drumline::trace::merge(dir, out).map_err(Error::Trace)?;
    let (ranks, events) = (merged.ranks.len(), merged.events);
    print(&format!(
        "{}: {events} events of {ranks} ranks; open it at https://ui.perfetto.dev\n",
        out.display()
    ))?;
    merged.notes.iter().try_for_each(|note| print(&format!("note: {note}\n")))
}

/// Prints what took how long, and whom the others waited for.
///
/// # Errors
///
/// As [`merge`].
pub(crate) fn summary(dir: &Path) -> Result<()> {
    let summary = drumline::trace::summarize(dir).map_err(Error::Trace)?;
    print(&summary.to_string())
}
