//! Which ranks of MPI's world the members of a group are.

use std::{collections::BTreeMap, process, time::Instant};

use drumline_mpi::World;
use xxhash_rust::xxh3::xxh3_64;

use crate::{Result, backend::BackendOptions};

/// What a member tells the others of itself.
#[derive(Debug, PartialEq, Eq)]
struct Word {
    /// Its number in MPI's world, and the size of that world.
    rank: usize,
    size: usize,
    /// The name of the host, and the process there.
    process: String,
}

/// The ranks of MPI's world that the members are, in order of rank in the group.
///
/// # Errors
///
/// Names the members that MPI cannot connect: two in one process, or in worlds of their own.
pub(super) fn agree(options: &BackendOptions, world: World) -> Result<Vec<usize>> {
    let key = |rank: usize| format!("member/{rank}");
    let host = rustix::system::uname();
    let process = format!("{}/{}", host.nodename().to_string_lossy(), process::id());
    let own = Word { rank: world.rank(), size: world.size(), process };
    options.store.set(&key(options.rank), own.to_text().as_bytes())?;
    let keys: Vec<String> = (0..options.world_size).map(key).collect();
    let keys: Vec<&str> = keys.iter().map(String::as_str).collect();
    options.store.wait(&keys, options.deadline.saturating_duration_since(Instant::now()))?;
    let words = options.store.multi_get(&keys)?;
    let words = words.iter().enumerate().map(|(rank, text)| {
        let text = String::from_utf8_lossy(text);
        Word::parse(&text).ok_or_else(|| format!("rank {rank} says of itself: {text:.80}"))
    });
    let words: std::result::Result<Vec<Word>, String> = words.collect();
    let library = &world.mpi().about().path;
    let checked = words.and_then(|words| {
        check(&words).map_err(|problem| format!("{problem} (MPI here: {})", library.display()))?;
        Ok(words.iter().map(|word| word.rank).collect())
    });
    checked.map_err(|problem| options.error(problem))
}

/// A number for `MPI_Comm_create_group`, which tells groups apart that are made at the same time.
pub(super) fn tag_of(group: &str) -> u16 {
    (xxh3_64(group.as_bytes()) & 0x7fff) as u16
}

fn check(words: &[Word]) -> std::result::Result<(), String> {
    if let Some((rank, word)) = words.iter().enumerate().find(|(_, word)| word.size < words.len()) {
        let started = match std::env::var_os("TORCHELASTIC_RUN_ID") {
            Some(_) => "`drumline run` and torchrun do not start MPI",
            None => "the launcher that started the job does not know this MPI library",
        };
        return Err(format!(
            "MPI's world has {} ranks on rank {rank}, and this group has {}: {started}; start the job with \
             the mpiexec of the same MPI, or leave the backend to Drumline",
            word.size,
            words.len()
        ));
    }
    let mut seen = BTreeMap::new();
    for (rank, word) in words.iter().enumerate() {
        let Some((other, first)) = seen.insert(word.rank, (rank, word)) else { continue };
        return Err(match first.process == word.process {
            true => format!(
                "ranks {other} and {rank} are one process ({}), and MPI knows only one rank of a process",
                word.process
            ),
            false => format!(
                "ranks {other} and {rank} are both rank {} of MPI, in {} and {}: two mpiexec have started them",
                word.rank, first.process, word.process
            ),
        });
    }
    Ok(())
}

impl Word {
    fn to_text(&self) -> String {
        format!("{} {} {}", self.rank, self.size, self.process)
    }

    fn parse(text: &str) -> Option<Word> {
        let mut parts = text.splitn(3, ' ');
        Some(Word {
            rank: parts.next()?.parse().ok()?,
            size: parts.next()?.parse().ok()?,
            process: parts.next()?.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn word(rank: usize, size: usize, process: &str) -> Word {
        Word { rank, size, process: process.to_owned() }
    }

    #[test]
    fn members_that_mpi_cannot_connect_are_named() {
        assert_eq!(check(&[word(3, 4, "a/1"), word(0, 4, "b/1")]), Ok(()));
        let problem = |words: &[Word]| check(words).unwrap_err();
        let alone = problem(&[word(0, 1, "a/1"), word(0, 1, "a/2")]);
        assert!(alone.contains("has 1 ranks on rank 0, and this group has 2"), "{alone}");
        let one = problem(&[word(1, 4, "a/1"), word(0, 4, "a/2"), word(1, 4, "a/1")]);
        assert!(one.contains("ranks 0 and 2 are one process (a/1)"), "{one}");
        let two = problem(&[word(1, 2, "a/1"), word(1, 2, "a/2")]);
        assert!(two.contains("ranks 0 and 1 are both rank 1 of MPI"), "{two}");
    }

    #[test]
    fn a_word_survives_its_text() {
        let own = word(2, 9, "host name/77");
        assert_eq!(Word::parse(&own.to_text()), Some(own));
        for broken in ["", "1", "1 2", "x 2 a", "1 -2 a"] {
            assert_eq!(Word::parse(broken), None, "{broken}");
        }
    }
}
