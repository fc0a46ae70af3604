//! Worlds of threads, over every kind of connection.

#![allow(dead_code, clippy::unwrap_used, clippy::panic)]

pub(crate) mod log;
pub(crate) mod tacit;

use drumline_group::{CollectiveError, Config, Error, ProcessGroup};

/// Runs `rank` on a thread for every rank of a world and collects what they return.
pub(crate) fn world_with<R: Send>(
    world_size: usize,
    config: &Config,
    rank: impl Fn(ProcessGroup) -> R + Sync,
) -> Vec<R> {
    on_threads(ProcessGroup::local_world_with(world_size, config).unwrap(), rank)
}

/// Runs `rank` on a thread for each of `ranks`.
pub(crate) fn on_threads<T: Send, R: Send>(ranks: Vec<T>, rank: impl Fn(T) -> R + Sync) -> Vec<R> {
    std::thread::scope(|threads| {
        let rank = &rank;
        let running: Vec<_> = ranks.into_iter().map(|it| threads.spawn(move || rank(it))).collect();
        running.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Over shared memory, over Unix sockets alone, over TCP.
pub(crate) fn everywhere(test: impl Fn(&Config)) {
    everywhere_with(&Config::default(), test);
}

pub(crate) fn everywhere_with(config: &Config, test: impl Fn(&Config)) {
    for (shared_memory, unix_sockets) in [(true, true), (false, true), (false, false)] {
        // What a failing test shows of its setting.
        println!("shared memory: {shared_memory}, Unix sockets: {unix_sockets}");
        test(&config.clone().shared_memory(shared_memory).unix_sockets(unix_sockets));
    }
}

/// The canonical tree, as it is defined.
pub(crate) fn tree<T: Copy>(values: &[T], combine: &impl Fn(T, T) -> T) -> T {
    match values {
        [value] => *value,
        _ => {
            let half = 1 << (values.len() - 1).ilog2();
            combine(tree(&values[..half], combine), tree(&values[half..], combine))
        }
    }
}

/// The failure behind an error, whether this call or another one failed.
pub(crate) fn failure(error: impl Into<Error>) -> CollectiveError {
    match error.into() {
        Error::Collective(failure) | Error::Poisoned { by: failure, .. } => (*failure).clone(),
        other => panic!("not a failed operation: {other}"),
    }
}
