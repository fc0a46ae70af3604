//! Calls every operation on two ranks over one transport or backend.

use std::{fmt::Display, thread};

use drumline::{Config, ProcessGroup, algorithms::shares_memory};

use super::{
    operations::OPERATIONS,
    report::{CPU, Column, RANKS},
};

pub(super) fn try_out(backend: &str, transport: &'static str, config: &Config) -> Column {
    let mut column = Column {
        backend: backend.to_owned(),
        transport,
        device: CPU,
        absent: None,
        tried: Vec::new(),
    };
    column.absent = match world(config, |group| Ok::<_, drumline::Error>(shares_memory(group))) {
        Err(problem) => Some(problem),
        Ok(shared) if transport == "shm" && shared.contains(&false) => {
            Some("ranks of this host share no memory; RUST_LOG=drumline=warn says why".to_owned())
        }
        Ok(_) => None,
    };
    if column.absent.is_none() {
        // Each operation gets new groups, because a group is of no use after a failure.
        let attempts = OPERATIONS.iter().map(|(name, call)| attempt(name, world(config, call)));
        column.tried = attempts.collect();
    }
    column
}

/// Why an operation does not work; `None` if it does.
pub(super) fn attempt(name: &str, results: Result<Vec<bool>, String>) -> Option<String> {
    match results {
        Err(problem) => Some(problem),
        Ok(right) if right.contains(&false) => Some(format!("{name} gives a wrong result")),
        Ok(_) => None,
    }
}

/// Runs `rank` on a few ranks and returns their results.
pub(super) fn world<R: Send, E: Display + Send>(
    config: &Config,
    rank: impl Fn(&ProcessGroup) -> Result<R, E> + Sync,
) -> Result<Vec<R>, String> {
    let groups =
        drumline::rendezvous::local_world_with(RANKS, config).map_err(|error| error.to_string())?;
    thread::scope(|threads| {
        let running: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let rank = &rank;
                threads.spawn(move || {
                    let said = rank(&group).map_err(|error| error.to_string())?;
                    group.destroy().map_err(|error| error.to_string())?;
                    Ok(said)
                })
            })
            .collect();
        let ended = running.into_iter().map(|thread| match thread.join() {
            Ok(result) => result,
            Err(_) => Err("a rank has panicked; its message is above".to_owned()),
        });
        // Joins all ranks before it returns the first error.
        ended.collect::<Vec<_>>().into_iter().collect()
    })
}
