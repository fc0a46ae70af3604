//! Reading and writing by all ranks of a group together. All ranks get the same outcome.

use std::{fmt::Display, path::Path};

use drumline_group::ProcessGroup;

use super::{
    content::Checkpoint,
    directory::{CheckpointDirectory, Found},
    share::{exchange, on_root, share, without_path},
};
use crate::{Error, Result, failure};

impl Checkpoint {
    /// [`Checkpoint::read`] on rank 0; the other ranks need not see the file. All ranks get the same
    /// checkpoint or the same error.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::read`], or the error of the group when a rank fails.
    pub fn read_on_root(group: &ProcessGroup, path: &Path) -> Result<Self> {
        let read = || Checkpoint::read(path);
        let parse = |bytes: &[u8]| Checkpoint::from_bytes(bytes);
        share(group, path, read, |checkpoint| checkpoint.to_bytes(), parse)
    }

    /// Brings the tensors and the metadata of every rank's `part` to rank 0: for state that is shared out between the
    /// ranks. Rank 0 gets all of it, the others nothing. `path`, that of the file to be written, is for errors.
    ///
    /// ```
    /// use drumline::checkpoint::{Checkpoint, Tensor};
    ///
    /// drumline::local(2, |group| {
    ///     let mut part = Checkpoint::default();
    ///     let name = format!("of rank {}", group.rank());
    ///     part.insert(Tensor::from_values(name, [1], &[0.5_f32])?);
    ///     let part: Result<_, drumline::Error> = Ok(part);
    ///     let all = Checkpoint::gather_on_root(&group, "file".as_ref(), part)?;
    ///     assert_eq!(all.tensors().len(), [2, 0][group.rank()]);
    ///     Ok(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The part of some rank is an error, or two parts have a tensor of the same name: every rank gets an error, which
    /// names the rank. the error of the group when a rank fails.
    pub fn gather_on_root<E: From<Error> + Display>(
        group: &ProcessGroup,
        path: &Path,
        part: Result<Self, E>,
    ) -> Result<Self, E> {
        if group.world_size() == 1 {
            return part;
        }
        let is_root = group.rank() == 0;
        let sent = match &part {
            Ok(_) if is_root => Ok(Vec::new()), // stays as it is
            Ok(part) => part.to_bytes(),
            Err(error) => Err(without_path(path, error)),
        };
        let failed = |problem| E::from(failure::checkpoint(path, problem));
        let problems = of_ranks(exchange(group, sent.as_ref().err())?);
        let (mut all, sent) = match (part, sent) {
            (Err(own), _) => return Err(own),
            (Ok(part), Ok(sent)) if problems.is_empty() => (part, sent),
            _ => return Err(failed(problems)),
        };
        let mut lengths = vec![0; group.world_size()];
        group.all_gather(&[sent.len() as u64], &mut lengths)?;
        let mut gathered = Ok(());
        // One rank after the other, so that rank 0 holds one file beside what it has.
        for (rank, &length) in lengths.iter().enumerate().skip(1) {
            let mut counts = vec![0; group.world_size()];
            counts[rank] = length as usize;
            let own = if rank == group.rank() { &sent[..] } else { &[] };
            let mut bytes = vec![0_u8; if is_root { counts[rank] } else { 0 }];
            group.in_blocks(&counts).gather(own, &mut bytes, 0)?;
            if is_root && gathered.is_ok() {
                let taken = Checkpoint::from_bytes(&bytes).and_then(|part| all.take_in(part));
                gathered = taken.map_err(|problem| format!("the part of rank {rank}: {problem}"));
            }
        }
        on_root(group, path, || gathered.map_err(failed))?;
        Ok(if is_root { all } else { Checkpoint::default() })
    }

    /// Adds what another rank has.
    fn take_in(&mut self, part: Checkpoint) -> Result<(), String> {
        for tensor in part.tensors() {
            if self.insert(tensor.clone()).is_some() {
                return Err(format!("{} came from an earlier rank, too", tensor.name()));
            }
        }
        self.metadata.extend(part.metadata);
        Ok(())
    }

    /// [`Checkpoint::write`] on rank 0; only rank 0 calls `make`. All ranks learn whether the file
    /// was written.
    ///
    /// # Errors
    ///
    /// As [`Checkpoint::write`], the error of `make`, or the error of the group when a rank fails.
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
    /// As [`prepare`](Self::prepare), or the error of the group when a rank fails.
    pub fn prepare_on_root(&self, group: &ProcessGroup) -> Result<()> {
        on_root(group, self.path(), || self.prepare())
    }

    /// [`save`](Self::save) on rank 0; only rank 0 calls `make`. All ranks learn whether the file
    /// was written.
    ///
    /// # Errors
    ///
    /// As [`save`](Self::save), the error of `make`, or the error of the group when a rank fails.
    pub fn save_on_root<E: From<Error> + Display>(
        &self,
        group: &ProcessGroup,
        step: u64,
        make: impl FnOnce() -> Result<Checkpoint, E>,
    ) -> Result<(), E> {
        on_root(group, &self.path_of(step), || Ok(self.save(step, &make()?).map(drop)?))
    }

    /// [`newest`](Self::newest) on rank 0; the other ranks need not see the files. All ranks get the
    /// same checkpoint or the same error. Only rank 0 gets [`Found::skipped`].
    ///
    /// # Errors
    ///
    /// As [`newest`](Self::newest), or the error of the group when a rank fails.
    pub fn newest_on_root(&self, group: &ProcessGroup) -> Result<Option<Found>> {
        // No bytes, or the step and the file.
        let give = |found: &Option<Found>| match found {
            None => Ok(Vec::new()),
            Some(Found { step, checkpoint, .. }) => {
                Ok([&step.to_le_bytes(), &checkpoint.to_bytes()?[..]].concat())
            }
        };
        let take = |bytes: &[u8]| {
            let Some((step, file)) = split_step(bytes)? else { return Ok(None) };
            let checkpoint = Checkpoint::from_bytes(file)?;
            Ok(Some(Found { step, path: self.path_of(step), checkpoint, skipped: Vec::new() }))
        };
        share(group, self.path(), || self.newest(), give, take)
    }
}

/// The problems of all ranks in one text, by rank; an empty problem is none.
fn of_ranks(problems: Vec<String>) -> String {
    let named = problems.into_iter().enumerate().filter(|(_, problem)| !problem.is_empty());
    let named: Vec<String> =
        named.map(|(rank, problem)| format!("on rank {rank}: {problem}")).collect();
    named.join("; ")
}

/// The step at the beginning of what rank 0 sent; `None` if rank 0 sent nothing.
fn split_step(bytes: &[u8]) -> Result<Option<(u64, &[u8])>, String> {
    match bytes.split_first_chunk() {
        Some((step, rest)) => Ok(Some((u64::from_le_bytes(*step), rest))),
        None if bytes.is_empty() => Ok(None),
        None => Err(format!("rank 0 sent {} bytes, too few for a step", bytes.len())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_without_a_whole_step_are_an_error_and_not_the_absence_of_a_checkpoint() {
        assert_eq!(split_step(&[]), Ok(None));
        assert_eq!(split_step(&[7, 0, 0, 0, 0, 0, 0, 0, 9]), Ok(Some((7, &[9][..]))));
        assert!(split_step(&[7; 5]).unwrap_err().contains("5 bytes, too few for a step"));
    }
}
