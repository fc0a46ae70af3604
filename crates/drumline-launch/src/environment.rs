//! The variables that tell a worker who it is: those of torchrun, so that a program which runs
//! under one launcher runs under the other, and where drumline's own ranks meet.

use drumline::Endpoint;

use crate::Job;

/// How many terminal columns a worker's line may fill, set when the launcher's stderr is a
/// terminal: a worker whose own stderr is a pipe may then still draw a progress bar, by ending
/// each update with `\r`.
pub(crate) const TERMINAL_COLUMNS: &str = "DRUMLINE_TERMINAL_COLUMNS";

/// What belongs to an outer launcher, or to the job that this one is not.
pub(crate) const NOT_INHERITED: [&str; 4] =
    [TERMINAL_COLUMNS, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"];

/// What the workers of a job have in common beside the [`Job`].
#[derive(Clone, Debug)]
pub(crate) struct Rendezvous {
    /// Where the launcher's store listens.
    pub store: Endpoint,
    /// The file with the secret that the store asks for, unless the environment tells it already.
    pub secret_file: Option<String>,
    /// Where the store for programs that run torch listens on 127.0.0.1, if there is one.
    pub master_port: Option<u16>,
    /// A name for this run that no other run has.
    pub run_id: String,
}

/// The variables of the worker with this `rank`, which replace inherited ones.
///
/// `user_set_omp` says whether the user chose `OMP_NUM_THREADS`; without a choice workers that
/// share a host get one thread each, as under torchrun, because each would otherwise start as
/// many as there are cores.
pub(crate) fn worker(
    job: &Job,
    rendezvous: &Rendezvous,
    rank: usize,
    user_set_omp: bool,
) -> Vec<(&'static str, String)> {
    let rank = rank.to_string();
    let world_size = job.nproc_per_node.to_string();
    let mut variables = vec![
        ("RANK", rank.clone()),
        ("LOCAL_RANK", rank.clone()),
        ("ROLE_RANK", rank),
        ("WORLD_SIZE", world_size.clone()),
        ("LOCAL_WORLD_SIZE", world_size.clone()),
        ("ROLE_WORLD_SIZE", world_size),
        ("GROUP_RANK", "0".into()),
        ("GROUP_WORLD_SIZE", "1".into()),
        ("ROLE_NAME", "default".into()),
        ("DRUMLINE_STORE", rendezvous.store.to_string()),
        ("TORCHELASTIC_RUN_ID", rendezvous.run_id.clone()),
        ("TORCHELASTIC_RESTART_COUNT", "0".into()),
        ("TORCHELASTIC_MAX_RESTARTS", "0".into()),
    ];
    if let Some(path) = &rendezvous.secret_file {
        variables.push(("DRUMLINE_SECRET_FILE", path.clone()));
    }
    if let Some(port) = rendezvous.master_port {
        variables.extend([
            ("MASTER_ADDR", "127.0.0.1".into()),
            ("MASTER_PORT", port.to_string()),
            // The store is the launcher's: rank 0 connects to it instead of hosting one.
            ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
        ]);
    }
    if limits_omp(job, user_set_omp) {
        variables.push(("OMP_NUM_THREADS", "1".into()));
    }
    variables
}

/// Whether [`worker`] sets `OMP_NUM_THREADS`.
pub(crate) fn limits_omp(job: &Job, user_set_omp: bool) -> bool {
    job.nproc_per_node.get() > 1 && !user_set_omp
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, num::NonZeroUsize};

    use super::*;

    fn variables(ranks: usize, rank: usize, user_set_omp: bool) -> BTreeMap<&'static str, String> {
        let job = Job::new("train", NonZeroUsize::new(ranks).unwrap());
        let rendezvous = Rendezvous {
            store: Endpoint::Unix("drumline-run-a1".into()),
            secret_file: Some("/proc/self/fd/100".into()),
            master_port: Some(4711),
            run_id: "a1".into(),
        };
        let without_torch = Rendezvous { master_port: None, ..rendezvous.clone() };
        let named = |name| {
            let list = worker(&job, &without_torch, rank, user_set_omp);
            list.iter().any(|(known, _)| *known == name)
        };
        assert!(named("DRUMLINE_STORE") && !NOT_INHERITED.into_iter().any(named));
        let list = worker(&job, &rendezvous, rank, user_set_omp);
        let map: BTreeMap<_, _> = list.iter().cloned().collect();
        assert_eq!(map.len(), list.len(), "a variable is set twice");
        map
    }

    #[test]
    fn the_variables_are_those_of_torchrun_on_one_node_and_our_own() {
        let expected = [
            ("DRUMLINE_SECRET_FILE", "/proc/self/fd/100"),
            ("DRUMLINE_STORE", "unix:@drumline-run-a1"),
            ("GROUP_RANK", "0"),
            ("GROUP_WORLD_SIZE", "1"),
            ("LOCAL_RANK", "2"),
            ("LOCAL_WORLD_SIZE", "3"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "4711"),
            ("OMP_NUM_THREADS", "1"),
            ("RANK", "2"),
            ("ROLE_NAME", "default"),
            ("ROLE_RANK", "2"),
            ("ROLE_WORLD_SIZE", "3"),
            ("TORCHELASTIC_MAX_RESTARTS", "0"),
            ("TORCHELASTIC_RESTART_COUNT", "0"),
            ("TORCHELASTIC_RUN_ID", "a1"),
            ("TORCHELASTIC_USE_AGENT_STORE", "True"),
            ("WORLD_SIZE", "3"),
        ];
        assert_eq!(variables(3, 2, false), expected.map(|(k, v)| (k, v.to_owned())).into());
    }

    #[test]
    fn omp_threads_are_the_users_choice_and_a_lone_worker_may_use_all_cores() {
        assert!(!variables(3, 0, true).contains_key("OMP_NUM_THREADS"));
        assert!(!variables(1, 0, false).contains_key("OMP_NUM_THREADS"));
    }
}
