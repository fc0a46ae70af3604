//! `drumline trace`: the files that the ranks of a job have written to `DRUMLINE_TRACE`.

use std::{fs, path::Path};

use drumline::{files, trace::Merged};

use crate::{Error, Result, output::print, page};

/// Merges the traces in `dir` to the file `out`, by default `dir/trace.json`. Prints how many ranks and events
/// that file has. Returns the exit code.
pub(crate) fn merge(dir: &Path, out: Option<&Path>) -> Result<u8> {
    let default = dir.join("trace.json");
    let out = out.unwrap_or(&default);
    tell(
        out,
        &drumline::trace::merge(dir, out).map_err(Error::Trace)?,
        "at https://ui.perfetto.dev",
    )
}

/// Writes a page for a browser to `out`, by default `dir/trace.html`, and prints what it holds.
pub(crate) fn page(dir: &Path, out: Option<&Path>) -> Result<u8> {
    let default = dir.join("trace.html");
    let out = out.unwrap_or(&default);
    let merging = out.with_added_extension("merging");
    let mut merged = drumline::trace::merge(dir, &merging).map_err(Error::Trace)?;
    let written = page::page(&merging, &mut merged.notes).and_then(|(text, events)| {
        merged.events = events;
        files::write(out, text.as_bytes())
    });
    // It is of no use any more; if it cannot be removed, the page is there all the same.
    let _ = fs::remove_file(&merging);
    written.map_err(|error| Error::Page { path: out.to_owned(), error })?;
    tell(out, &merged, "in a browser")
}

fn tell(out: &Path, merged: &Merged, place: &str) -> Result<u8> {
    let (ranks, events) = (merged.ranks.len(), merged.events);
    print(&format!("{}: {events} events of {ranks} ranks; open it {place}\n", out.display()))?;
    merged.notes.iter().try_for_each(|note| print(&format!("note: {note}\n")))?;
    Ok(0)
}

/// Prints how long everything took, and which rank the others waited for.
pub(crate) fn summary(dir: &Path) -> Result<u8> {
    let summary = drumline::trace::summarize(dir).map_err(Error::Trace)?;
    print(&summary.to_string())?;
    Ok(0)
}
