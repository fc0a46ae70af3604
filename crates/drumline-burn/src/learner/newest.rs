use std::{collections::BTreeMap, fs, io, path::Path};

use drumline::ProcessGroup;

use crate::{Result, agreement, failure};

/// The files that burn's default checkpointers write for an epoch.
const KINDS: [&str; 3] = ["model", "optim", "scheduler"];

/// The newest epoch of which the directory of a training has a whole checkpoint, for
/// [`SupervisedTraining::checkpoint`](burn::train::SupervisedTraining::checkpoint).
///
/// Rank 0 looks into its directory, and all ranks get the answer. The files are those of
/// [`with_default_checkpointers`](burn::train::SupervisedTraining::with_default_checkpointers). If a program is killed
/// while it writes them, those of the epoch before are taken.
///
/// ```
/// # use burn::train::{LearnerModel, SupervisedTraining};
/// use drumline::ProcessGroup;
/// use drumline_burn::newest_epoch;
///
/// # fn resumed<M: LearnerModel>(
/// #     mut training: SupervisedTraining<M>,
/// #     group: &ProcessGroup,
/// # ) -> drumline_burn::Result<SupervisedTraining<M>> {
/// if let Some(epoch) = newest_epoch("runs/mine", group)? {
///     training = training.checkpoint(epoch);
/// }
/// # Ok(training)
/// # }
/// # let directory = tempfile::tempdir().unwrap();
/// assert_eq!(newest_epoch(directory.path(), &ProcessGroup::alone())?, None);
/// # Ok::<_, drumline_burn::Error>(())
/// ```
///
/// # Errors
///
/// Rank 0 cannot read the directory. Every rank gets the error. A directory that is not there has no checkpoint.
pub fn newest_epoch(directory: impl AsRef<Path>, group: &ProcessGroup) -> Result<Option<usize>> {
    let directory = directory.as_ref().join("checkpoint");
    let found = if group.rank() == 0 { look(&directory) } else { Ok(None) };
    let found = found.map_err(|error| {
        format!("cannot look for checkpoints in {}: {error}", directory.display())
    });
    let found = agreement::agree(group, found)?.map_err(failure::learner)?;
    // burn counts epochs from 1.
    let mut epoch = [found.unwrap_or(0) as u64];
    group.broadcast(&mut epoch, 0)?;
    Ok((epoch[0] > 0).then_some(epoch[0] as usize))
}

fn look(directory: &Path) -> io::Result<Option<usize>> {
    let entries = match fs::read_dir(directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        entries => entries?,
    };
    let mut files: BTreeMap<usize, usize> = BTreeMap::new();
    for entry in entries {
        let name = entry?.file_name();
        let parts = name.to_str().and_then(|it| it.strip_suffix(".bpk")?.rsplit_once('-'));
        let Some((kind, epoch)) = parts else { continue };
        if KINDS.contains(&kind)
            && let Ok(epoch) = epoch.parse()
        {
            *files.entry(epoch).or_default() += 1;
        }
    }
    Ok(files.into_iter().rev().find(|(_, files)| *files == KINDS.len()).map(|(epoch, _)| epoch))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_epoch_counts_if_all_of_its_files_are_there() {
        let directory = tempfile::tempdir().unwrap();
        let newest = || newest_epoch(directory.path(), &ProcessGroup::alone()).unwrap();
        assert_eq!(newest(), None);
        let checkpoints = directory.path().join("checkpoint");
        fs::create_dir(&checkpoints).unwrap();
        assert_eq!(newest(), None);
        let write = |name: &str| fs::write(checkpoints.join(name), "").unwrap();
        for epoch in [2, 10] {
            KINDS.iter().for_each(|kind| write(&format!("{kind}-{epoch}.bpk")));
        }
        // burn writes to a file of another name first.
        for name in ["model-11.bpk", "optim-11.bpk", ".scheduler-11.bpk.tmp", "other-11.bpk"] {
            write(name);
        }
        assert_eq!(newest(), Some(10));
    }

    #[test]
    fn a_directory_that_rank_0_cannot_read_is_an_error_on_all_ranks() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("checkpoint"), "").unwrap();
        let [seen, other] = [directory.path().to_owned(), directory.path().join("other")];
        let ranks: Vec<_> = drumline::rendezvous::local_world(2)
            .unwrap()
            .into_iter()
            .map(|group| {
                let seen = if group.rank() == 0 { seen.clone() } else { other.clone() };
                std::thread::spawn(move || newest_epoch(seen, &group).unwrap_err().to_string())
            })
            .collect();
        for rank in ranks {
            let error = rank.join().unwrap();
            assert!(error.contains("on rank 0: cannot look for checkpoints in "), "{error}");
        }
    }
}
