use std::{fmt::Display, path::Path};

use super::Checkpoint;
use crate::{Error, ProcessGroup, Result};

impl Checkpoint {
    /// [`Checkpoint::read`] on rank 0, whose disk alone needs to have the file. All ranks get the
    /// same checkpoint or the same error.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::read`], and what the group says when a rank fails.
    pub fn read_on_root(group: &ProcessGroup, path: &Path) -> Result<Self> {
        if group.world_size() == 1 {
            return Self::read(path);
        }
        if group.rank() == 0 {
            let read = Self::read(path);
            let outcome = read.as_ref().map_err(problem_of).and_then(Checkpoint::to_bytes);
            tell(group, &outcome)?;
            return read;
        }
        let bytes = hear(group)?;
        bytes
            .and_then(|bytes| Self::parse(&mut &bytes[..], bytes.len() as u64))
            .map_err(|problem| Error::Checkpoint { path: path.to_owned(), problem })
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
        if group.rank() == 0 {
            let checkpoint = match make() {
                Ok(checkpoint) => checkpoint,
                Err(error) => {
                    tell(group, &Err(error.to_string()))?;
                    return Err(error);
                }
            };
            let written = checkpoint.write(path);
            tell(group, &written.as_ref().map(|()| Vec::new()).map_err(problem_of))?;
            return Ok(written?);
        }
        match hear(group)? {
            Ok(_) => Ok(()),
            Err(problem) => Err(Error::Checkpoint { path: path.to_owned(), problem }.into()),
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

/// Rank 0: gives all others the bytes or the problem.
fn tell(group: &ProcessGroup, outcome: &Result<Vec<u8>, String>) -> Result<()> {
    let (is_error, bytes) = match outcome {
        Ok(bytes) => (0, &bytes[..]),
        Err(problem) => (1, &problem.as_bytes()[..problem.len().min(PROBLEM_LENGTH_MAX)]),
    };
    group.broadcast(&mut [is_error, bytes.len() as i64], 0)?;
    group.broadcast(&mut bytes.to_vec(), 0)
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
