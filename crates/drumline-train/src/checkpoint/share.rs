//! Rank 0 works and the other ranks learn the outcome. Whatever happens on one rank, all ranks
//! return.

use std::{fmt::Display, path::Path};

use drumline_group::ProcessGroup;

use crate::{Error, Result, failure};

/// The longest text in bytes. Rank 0 cuts longer ones, so that an error cannot fill the memory of other
/// ranks.
const PROBLEM_LENGTH_MAX: usize = 4096;

/// Does `work` on rank 0 and tells all ranks its outcome.
pub(super) fn on_root<E: From<Error> + Display>(
    group: &ProcessGroup,
    path: &Path,
    work: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    if group.rank() == 0 {
        let done = work();
        let outcome = done.as_ref().map(|()| Vec::new()).map_err(|error| without_path(path, error));
        tell(group, &outcome)?;
        return done;
    }
    match hear(group)? {
        Ok(_) => Ok(()),
        Err(problem) => Err(failure::checkpoint(path, problem).into()),
    }
}

/// The text of an error for other ranks, which add the path themselves.
pub(super) fn without_path(path: &Path, error: &impl Display) -> String {
    let text = error.to_string();
    let of_path = format!("checkpoint {}: ", path.display());
    text.strip_prefix(&of_path).map(str::to_owned).unwrap_or(text)
}

/// Does `work` on rank 0 and returns its result on all ranks. `give` turns the result into bytes, and `take`
/// turns the bytes back.
pub(super) fn share<T>(
    group: &ProcessGroup,
    path: &Path,
    work: impl FnOnce() -> Result<T>,
    give: impl FnOnce(&T) -> Result<Vec<u8>, String>,
    take: impl FnOnce(&[u8]) -> Result<T, String>,
) -> Result<T> {
    if group.world_size() == 1 {
        return work();
    }
    if group.rank() == 0 {
        let found = work();
        tell(group, &found.as_ref().map_err(|error| without_path(path, error)).and_then(give))?;
        return found;
    }
    hear(group)?
        .and_then(|bytes| take(&bytes))
        .map_err(|problem| failure::checkpoint(path, problem))
}

/// On rank 0: sends the bytes or the problem to the other ranks.
fn tell(group: &ProcessGroup, outcome: &Result<Vec<u8>, String>) -> Result<()> {
    let (is_error, bytes) = match outcome {
        Ok(bytes) => (0, &bytes[..]),
        Err(problem) => (1, &problem.as_bytes()[..problem.len().min(PROBLEM_LENGTH_MAX)]),
    };
    group.broadcast(&mut [is_error, bytes.len() as i64], 0)?;
    group.broadcast(&mut bytes.to_vec(), 0)
}

/// On other ranks: receives what rank 0 sends with [`tell`].
fn hear(group: &ProcessGroup) -> Result<Result<Vec<u8>, String>> {
    let mut head = [0_i64; 2];
    group.broadcast(&mut head, 0)?;
    let [is_error, length] = head;
    let mut bytes = Vec::new();
    let fits = usize::try_from(length).is_ok_and(|length| bytes.try_reserve_exact(length).is_ok());
    if !fits {
        return Err(Error::argument(
            "read_on_root",
            format!("rank 0 has {length} bytes to give, which do not fit in memory"),
        ));
    }
    bytes.resize(length as usize, 0);
    group.broadcast(&mut bytes, 0)?;
    Ok(match is_error {
        0 => Ok(bytes),
        _ => Err(format!("rank 0: {}", String::from_utf8_lossy(&bytes))),
    })
}

/// The problem of every rank, cut to 256 bytes; empty for a rank without one.
pub(super) fn exchange(group: &ProcessGroup, mine: Option<&String>) -> Result<Vec<String>> {
    const LENGTH: usize = 256;
    let mut line = [0_u8; LENGTH];
    let text = mine.map_or("", String::as_str).as_bytes();
    let kept = text.len().min(LENGTH);
    line[..kept].copy_from_slice(&text[..kept]);
    let mut all = vec![0; LENGTH * group.world_size()];
    group.all_gather(&line, &mut all)?;
    let lines = all.chunks_exact(LENGTH);
    Ok(lines.map(|l| String::from_utf8_lossy(l).trim_end_matches('\0').to_owned()).collect())
}
