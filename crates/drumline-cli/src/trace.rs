//! `drumline trace`: the files that the ranks of a job have written to `DRUMLINE_TRACE`.

use std::path::Path;

use crate::{Error, Result, output::print};

/// Merges the traces in `dir` to the file `out`, by default `dir/trace.json`. Prints how many ranks and events
/// that file has. Returns the exit code.
pub(crate) fn merge(dir: &Path, out: Option<&Path>) -> Result<u8> {
    let default = dir.join("trace.json");
    let out = out.unwrap_or(&default);
    let merged = drumline::trace::merge(dir, out).map_err(Error::Trace)?;
    let (ranks, events) = (merged.ranks.len(), merged.events);
    print(&format!(
        "{}: {events} events of {ranks} ranks; open it at https://ui.perfetto.dev\n",
        out.display()
    ))?;
    merged.notes.iter().try_for_each(|note| print(&format!("note: {note}\n")))?;
    Ok(0)
}

/// Prints how long everything took, and which rank the others waited for.
pub(crate) fn summary(dir: &Path) -> Result<u8> {
    let summary = drumline::trace::summarize(dir).map_err(Error::Trace)?;
    print(&summary.to_string())?;
    Ok(0)
}
