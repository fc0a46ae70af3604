//! The variables that tell a worker who it is: those of torchrun, so that a program which runs
//! under one launcher runs under the other, and where drumline's own ranks meet.

use std::{num::NonZeroUsize, thread::available_parallelism};

use drumline::Endpoint;

use crate::Job;

/// How many terminal columns a worker's line may fill, set when the launcher's stderr is a
/// terminal: a worker whose own stderr is a pipe may then still draw a progress bar, by ending
/// each update with `\r`.
pub(crate) const TERMINAL_COLUMNS: &str = "DRUMLINE_TERMINAL_COLUMNS";

/// That a worker is to be bound to a memory node before it becomes the program.
pub(crate) const NUMA_BINDING: &str = "DRUMLINE_NUMA_BINDING";

/// What belongs to an outer launcher, or to the job that this one is not.
pub(crate) const NOT_INHERITED: [&str; 5] =
    [TERMINAL_COLUMNS, NUMA_BINDING, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"];

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

/// What the user has chosen for the workers, and how many cores there are for them: by that the launcher
/// chooses the rest.
#[derive(Clone, Debug, Default)]
pub(crate) struct Chosen {
    /// Whether `OMP_NUM_THREADS` is set. Without a choice workers that share a host get one thread
    /// each, as under torchrun, because each would otherwise start as many as there are cores.
    omp: bool,
    /// `GLIBC_TUNABLES`.
    tunables: String,
    /// How many cores the workers may use.
    cores: usize,
}

impl Chosen {
    /// In the launcher's own environment.
    pub(crate) fn here() -> Chosen {
        let tunables = std::env::var_os("GLIBC_TUNABLES").unwrap_or_default();
        Chosen {
            omp: std::env::var_os("OMP_NUM_THREADS").is_some(),
            tunables: tunables.to_string_lossy().into_owned(),
            cores: available_parallelism().map_or(1, NonZeroUsize::get),
        }
    }

    /// Whether workers get `OMP_NUM_THREADS`.
    pub(crate) fn limits_omp(&self, job: &Job) -> bool {
        job.nproc_per_node.get() > 1 && !self.omp
    }

    /// The tunables with one more, where workers outnumber the cores and the user has not chosen.
    ///
    /// Restartable sequences, which glibc registers for every thread, make each switch from one
    /// process to another a tenth dearer: the kernel writes to the memory of the one that
    /// comes. Ranks that share cores switch in every short operation.
    fn without_sequences(&self, job: &Job) -> Option<String> {
        let Chosen { tunables, cores, .. } = self;
        let is_crowded = job.nproc_per_node.get() > *cores;
        match tunables.contains(SEQUENCES) {
            false if is_crowded && tunables.is_empty() => Some(format!("{SEQUENCES}=0")),
            false if is_crowded => Some(format!("{tunables}:{SEQUENCES}=0")),
            _ => None,
        }
    }
}

const SEQUENCES: &str = "glibc.pthread.rseq";

/// The variables of the worker with this `rank`, which replace inherited ones.
pub(crate) fn worker(
    job: &Job,
    rendezvous: &Rendezvous,
    rank: usize,
    chosen: &Chosen,
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
    if job.binds_to_nodes {
        variables.push((NUMA_BINDING, "node".into()));
    }
    if chosen.limits_omp(job) {
        variables.push(("OMP_NUM_THREADS", "1".into()));
    }
    if let Some(tunables) = chosen.without_sequences(job) {
        variables.push(("GLIBC_TUNABLES", tunables));
    }
    variables
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    fn variables(ranks: usize, rank: usize, chosen: &Chosen) -> BTreeMap<&'static str, String> {
        let job = Job::new("train", NonZeroUsize::new(ranks).unwrap());
        let rendezvous = Rendezvous {
            store: Endpoint::Unix("drumline-run-a1".into()),
            secret_file: Some("/proc/self/fd/100".into()),
            master_port: Some(4711),
            run_id: "a1".into(),
        };
        let without_torch = Rendezvous { master_port: None, ..rendezvous.clone() };
        let named = |name| {
            let list = worker(&job, &without_torch, rank, chosen);
            list.iter().any(|(known, _)| *known == name)
        };
        assert!(named("DRUMLINE_STORE") && !NOT_INHERITED.into_iter().any(named));
        let list = worker(&job, &rendezvous, rank, chosen);
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
        let chosen = Chosen { cores: 3, ..Chosen::default() };
        assert_eq!(variables(3, 2, &chosen), expected.map(|(k, v)| (k, v.to_owned())).into());
    }

    #[test]
    fn omp_threads_are_the_users_choice_and_a_lone_worker_may_use_all_cores() {
        let (none, omp) = (Chosen::default(), Chosen { omp: true, ..Chosen::default() });
        assert!(variables(3, 0, &none).contains_key("OMP_NUM_THREADS"));
        assert!(!variables(3, 0, &omp).contains_key("OMP_NUM_THREADS"));
        assert!(!variables(1, 0, &none).contains_key("OMP_NUM_THREADS"));
    }

    #[test]
    fn ranks_that_share_cores_do_without_restartable_sequences_unless_the_user_says_otherwise() {
        let of = |ranks, tunables: &str| {
            let chosen = Chosen { tunables: tunables.to_owned(), cores: 2, ..Chosen::default() };
            variables(ranks, 0, &chosen).remove("GLIBC_TUNABLES")
        };
        assert_eq!(of(2, ""), None);
        assert_eq!(of(3, "").as_deref(), Some("glibc.pthread.rseq=0"));
        let both = "glibc.malloc.check=3:glibc.pthread.rseq=0";
        assert_eq!(of(3, "glibc.malloc.check=3").as_deref(), Some(both));
        assert_eq!(of(3, "glibc.pthread.rseq=1"), None);
    }
}
