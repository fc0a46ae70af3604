//! The same for all ranks of a group. Whatever happens on one rank, all return, and all with the
//! same outcome.

use std::{fmt::Display, path::Path};

use drumline_group::ProcessGroup;

use super::{Checkpoint, CheckpointDirectory, Found};
use crate::{Error, Result};

impl Checkpoint {
    /// [`Checkpoint::read`] on rank 0, whose disk alone needs to have the file. All ranks get the
    /// same checkpoint or the same error.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::read`], and what the group says when a rank fails.
    pub fn read_on_root(group: &ProcessGroup, path: &Path) -> Result<Self> {
        let read = || Checkpoint::read(path);
        let parse = |bytes: &[u8]| Checkpoint::from_bytes(bytes);
        share(group, path, read, |checkpoint| checkpoint.to_bytes(), parse)
    }

    /// [`Checkpoint::write`] on rank 0, which alone calls `make`. All ranks learn whether it
    /// is done.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::write`], what `make` says, and what the group says when a rank fails.
    pub fn write_on_root<E: From<Error> + Display>(
        group: &ProcessGroup,
        path: &Path,
        make: impl FnOnce() -> Result<Self, E>,
    ) -> Result<(), E> {
        on_root(group, path, || Ok(make()?.write(path)?))
    }
}

impl CheckpointDirectory {
    /// [`prepare`](Self::prepare) on rank 0. All ranks learn whether files can be written.
    ///
    /// # Errors
    ///
    /// As [`prepare`](Self::prepare), and what the group says when a rank fails.
    pub fn prepare_on_root(&self, group: &ProcessGroup) -> Result<()> {
        on_root(group, self.path(), || self.prepare())
    }

    /// [`save`](Self::save) on rank 0, which alone calls `make`. All ranks learn whether it is
    /// done.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save), what `make` says, and what the group says when a rank fails.
    pub fn save_on_root<E: From<Error> + Display>(
        &self,
        group: &ProcessGroup,
        step: u64,
        make: impl FnOnce() -> Result<Checkpoint, E>,
    ) -> Result<(), E> {
        on_root(group, &self.path_of(step), || Ok(self.save(step, &make()?).map(drop)?))
    }

    /// [`newest`](Self::newest) on rank 0, whose disk alone needs to have the files. All ranks get
    /// the same checkpoint or the same error; only rank 0's says which files it skipped.
    ///
    /// # Errors
    ///
    /// As [`newest`](Self::newest), and what the group says when a rank fails.
    pub fn newest_on_root(&self, group: &ProcessGroup) -> Result<Option<Found>> {
        // Nothing, or the step and the file.
        let give = |found: &Option<Found>| match found {
            None => Ok(Vec::new()),
            Some(Found { step, checkpoint, .. }) => {
                Ok([&step.to_le_bytes(), &checkpoint.to_bytes()?[..]].concat())
            }
        };
        let take = |bytes: &[u8]| {
            let Some((step, file)) = bytes.split_first_chunk() else { return Ok(None) };
            let (step, checkpoint) = (u64::from_le_bytes(*step), Checkpoint::from_bytes(file)?);
            Ok(Some(Found { step, path: self.path_of(step), checkpoint, skipped: Vec::new() }))
        };
        share(group, self.path(), || self.newest(), give, take)
    }

    /// The checkpoint that [`newest`](Self::newest) finds on rank 0, which each rank reads by
    /// itself. For files too large to be sent around, where all ranks see one directory.
    ///
    /// # Errors
    ///
    /// As [`newest`](Self::newest). When a rank cannot read that file, or finds another content
    /// under its name, all ranks get one error, which names those ranks.
    pub fn newest_on_all(&self, group: &ProcessGroup) -> Result<Option<Found>> {
        let mut found = None;
        let mut choose = || -> Result<Vec<u8>> {
            found = self.newest()?;
            Ok(found.as_ref().map_or(Vec::new(), |Found { step, checkpoint, .. }| {
                [&step.to_le_bytes()[..], &checkpoint.digest().to_le_bytes()].concat()
            }))
        };
        let chosen = share(group, self.path(), &mut choose, |b| Ok(b.clone()), |b| Ok(b.to_vec()))?;
        let Some((step, digest)) = chosen.split_first_chunk() else { return Ok(None) };
        let path = self.path_of(u64::from_le_bytes(*step));

        let mine = match found {
            Some(found) => Ok(found),
            None => Checkpoint::read(&path).map_err(|error| problem_of(&error)).and_then(|read| {
                if read.digest().to_le_bytes() != digest {
                    return Err("it has another content than rank 0's".to_owned());
                }
                let (step, path) = (u64::from_le_bytes(*step), path.clone());
                Ok(Found { step, path, checkpoint: read, skipped: Vec::new() })
            }),
        };
        let problems: Vec<String> = exchange(group, mine.as_ref().err())?
            .into_iter()
            .enumerate()
            .filter(|(_, problem)| !problem.is_empty())
            .map(|(rank, problem)| format!("on rank {rank}: {problem}"))
            .collect();
        match mine {
            Ok(found) if problems.is_empty() => Ok(Some(found)),
            _ => Err(Error::Checkpoint {
                path,
                problem: format!(
                    "{}; give all ranks one directory, or let rank 0 read for all",
                    problems.join("; ")
                ),
            }),
        }
    }
}

impl Checkpoint {
    /// What the file holds.
    fn to_bytes(&self) -> Result<Vec<u8>, String> {
        let (mut bytes, tensors) = self.to_parts()?;
        tensors.iter().for_each(|tensor| bytes.extend_from_slice(tensor.bytes()));
        Ok(bytes)
    }

    fn from_bytes(mut bytes: &[u8]) -> Result<Self, String> {
        let length = bytes.len() as u64;
        Self::parse(&mut bytes, length).map_err(|refusal| refusal.problem())
    }
}

/// What went wrong, without the file's name, which the others put in front themselves.
fn problem_of(error: &Error) -> String {
    match error {
        Error::Checkpoint { problem, .. } => problem.clone(),
        other => other.to_string(),
    }
}

/// Longer texts are cut; an error must not fill the others' memory.
const PROBLEM_LENGTH_MAX: usize = 4096;

/// Does `work` on rank 0, and lets all ranks know how it went.
fn on_root<E: From<Error> + Display>(
    group: &ProcessGroup,
    path: &Path,
    work: impl FnOnce() -> Result<(), E>,
) -> Result<(), E> {
    if group.rank() == 0 {
        let done = work();
        // The path is put in front by the others, who know it.
        let of_path = format!("checkpoint {}: ", path.display());
        let outcome = done.as_ref().map(|()| Vec::new()).map_err(|error| {
            let text = error.to_string();
            text.strip_prefix(&of_path).map(str::to_owned).unwrap_or(text)
        });
        tell(group, &outcome)?;
        return done;
    }
    match hear(group)? {
        Ok(_) => Ok(()),
        Err(problem) => Err(Error::Checkpoint { path: path.to_owned(), problem }.into()),
    }
}

/// What `work` finds on rank 0, on all ranks: it travels as the bytes that `give` makes.
fn share<T>(
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
        tell(group, &found.as_ref().map_err(problem_of).and_then(give))?;
        return found;
    }
    hear(group)?
        .and_then(|bytes| take(&bytes))
        .map_err(|problem| Error::Checkpoint { path: path.to_owned(), problem })
}

/// Rank 0: gives all others the bytes or the problem.
fn tell(group: &ProcessGroup, outcome: &Result<Vec<u8>, String>) -> Result<()> {
    let (is_error, bytes) = match outcome {
        Ok(bytes) => (0, &bytes[..]),
        Err(problem) => (1, &problem.as_bytes()[..problem.len().min(PROBLEM_LENGTH_MAX)]),
    };
    group.broadcast(&mut [is_error, bytes.len() as i64], 0)?;
    Ok(group.broadcast(&mut bytes.to_vec(), 0)?)
}

/// The others: what rank 0 [`tell`]s.
fn hear(group: &ProcessGroup) -> Result<Result<Vec<u8>, String>> {
    let mut head = [0_i64; 2];
    group.broadcast(&mut head, 0)?;
    let [is_error, length] = head;
    let mut bytes = Vec::new();
    let fits = usize::try_from(length).is_ok_and(|length| bytes.try_reserve_exact(length).is_ok());
    if !fits {
        return Err(Error::InvalidArgument {
            operation: "read_on_root",
            problem: format!("rank 0 has {length} bytes to give, which do not fit in memory"),
        });
    }
    bytes.resize(length as usize, 0);
    group.broadcast(&mut bytes, 0)?;
    Ok(match is_error {
        0 => Ok(bytes),
        _ => Err(format!("rank 0: {}", String::from_utf8_lossy(&bytes))),
    })
}

/// The problem of every rank, cut to a line; empty where there is none.
fn exchange(group: &ProcessGroup, mine: Option<&String>) -> Result<Vec<String>> {
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
