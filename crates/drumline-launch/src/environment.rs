//! The variables that tell a worker which rank it is and where the ranks meet. Those of torchrun are
//! among them, so that a program for one launcher runs under the other.

use drumline::Endpoint;

use crate::job::Job;

/// How many terminal columns a worker's line may fill. Set if the launcher's stderr is a terminal: a
/// worker, whose own stderr is a pipe, may then draw a progress bar by ending each update with `\r`.
pub(crate) const TERMINAL_COLUMNS: &str = "DRUMLINE_TERMINAL_COLUMNS";

/// Set if the keeper must bind a worker to a memory node.
pub(crate) const NUMA_BINDING: &str = "DRUMLINE_NUMA_BINDING";

/// Variables of an outer launcher or of its job, which must not reach the workers of this one.
pub(crate) const NOT_INHERITED: [&str; 5] =
    [TERMINAL_COLUMNS, NUMA_BINDING, "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"];

/// What the workers of a job have in common besides the [`Job`].
#[derive(Clone, Debug)]
pub(crate) struct Rendezvous {
    /// The address of the launcher's store.
    pub store: Endpoint,
    /// The file with the store's secret; `None` if the environment names the secret already.
    pub secret_file: Option<String>,
    /// The port on 127.0.0.1 of the store for programs that use torch, if there is one.
    pub master_port: Option<u16>,
    /// A number that is different for every run.
    pub run_id: String,
}

/// Variables of the launcher's own environment that it does not overwrite.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inherited {
    has_omp: bool,
    glibc_tunables: String,
}

impl Inherited {
    pub(crate) fn here() -> Inherited {
        let tunables = std::env::var_os("GLIBC_TUNABLES").unwrap_or_default();
        Inherited {
            has_omp: std::env::var_os("OMP_NUM_THREADS").is_some(),
            glibc_tunables: tunables.to_string_lossy().into_owned(),
        }
    }

    /// Whether workers get `OMP_NUM_THREADS=1`, as under torchrun. Without it each of several workers
    /// on a host would start as many threads as the host has cores.
    pub(crate) fn limits_omp(&self, job: &Job) -> bool {
        job.nproc_per_node.get() > 1 && !self.has_omp
    }

    /// `GLIBC_TUNABLES` without restartable sequences, if the job asks for that and the user has not set this
    /// tunable.
    ///
    /// glibc registers restartable sequences for every thread. Then the kernel writes to the memory of each
    /// thread to which it switches, and a switch between processes takes about a tenth longer. Ranks that
    /// share cores switch in every short call.
    fn tunables_without_rseq(&self, job: &Job) -> Option<String> {
        let inherited = &self.glibc_tunables;
        match inherited.contains(RSEQ) {
            false if !job.disables_rseq => None,
            false if inherited.is_empty() => Some(format!("{RSEQ}=0")),
            false => Some(format!("{inherited}:{RSEQ}=0")),
            true => None,
        }
    }
}

const RSEQ: &str = "glibc.pthread.rseq";

/// The variables of the worker with this `rank`. They replace inherited ones.
pub(crate) fn worker(
    job: &Job,
    rendezvous: &Rendezvous,
    rank: usize,
    inherited: &Inherited,
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
            // The launcher hosts the store: rank 0 connects to it instead of hosting one.
            ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
        ]);
    }
    if let Some(level) = job.security {
        variables.push(("DRUMLINE_SECURITY", level.to_string()));
    }
    if job.binds_to_nodes {
        variables.push((NUMA_BINDING, "node".into()));
    }
    if inherited.limits_omp(job) {
        variables.push(("OMP_NUM_THREADS", "1".into()));
    }
    if let Some(tunables) = inherited.tunables_without_rseq(job) {
        variables.push(("GLIBC_TUNABLES", tunables));
    }
    variables
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, num::NonZeroUsize};

    use super::*;

    fn job(ranks: usize) -> Job {
        Job::new("train", NonZeroUsize::new(ranks).unwrap())
    }

    fn variables(job: &Job, rank: usize, inherited: &Inherited) -> BTreeMap<&'static str, String> {
        let rendezvous = Rendezvous {
            store: Endpoint::Unix("drumline-run-a1".into()),
            secret_file: Some("/proc/self/fd/100".into()),
            master_port: Some(4711),
            run_id: "a1".into(),
        };
        let without_torch = Rendezvous { master_port: None, ..rendezvous.clone() };
        let named = |name| {
            let list = worker(job, &without_torch, rank, inherited);
            list.iter().any(|(known, _)| *known == name)
        };
        assert!(named("DRUMLINE_STORE") && !NOT_INHERITED.into_iter().any(named));
        let list = worker(job, &rendezvous, rank, inherited);
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
        let variables = variables(&job(3), 2, &Inherited::default());
        assert_eq!(variables, expected.map(|(k, v)| (k, v.to_owned())).into());
    }

    #[test]
    fn the_security_level_is_set_only_where_the_job_has_one() {
        let of = |security| {
            let job = Job { security, ..job(1) };
            variables(&job, 0, &Inherited::default()).remove("DRUMLINE_SECURITY")
        };
        assert_eq!(of(None), None);
        assert_eq!(of(Some(drumline::auth::Level::Integrity)).as_deref(), Some("integrity"));
    }

    #[test]
    fn omp_threads_are_the_users_choice_and_a_lone_worker_may_use_all_cores() {
        let limited = |ranks, has_omp| {
            let inherited = Inherited { has_omp, ..Inherited::default() };
            variables(&job(ranks), 0, &inherited).contains_key("OMP_NUM_THREADS")
        };
        assert!(limited(3, false) && !limited(3, true) && !limited(1, false));
    }

    #[test]
    fn restartable_sequences_stay_unless_the_job_disables_them_and_the_user_has_not_named_them() {
        let of = |disables_rseq, tunables: &str| {
            let inherited =
                Inherited { glibc_tunables: tunables.to_owned(), ..Inherited::default() };
            let job = Job { disables_rseq, ..job(3) };
            variables(&job, 0, &inherited).remove("GLIBC_TUNABLES")
        };
        assert_eq!(of(false, ""), None);
        assert_eq!(of(true, "").as_deref(), Some("glibc.pthread.rseq=0"));
        let both = "glibc.malloc.check=3:glibc.pthread.rseq=0";
        assert_eq!(of(true, "glibc.malloc.check=3").as_deref(), Some(both));
        assert_eq!(of(true, "glibc.pthread.rseq=1"), None);
    }
}
