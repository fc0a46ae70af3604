//! The variables that tell a worker which rank it is and where the ranks meet. Those of torchrun are
//! among them, so that a program for one launcher runs under the other.

use std::net::SocketAddr;

use drumline::{error_file, outer_job, rendezvous::Endpoint, steps};

use crate::{
    ending::signal_name,
    job::{Job, OnSignal},
    world::World,
};

/// How many terminal columns a worker's line may fill. Set if the launcher's stderr is a terminal: a
/// worker, whose own stderr is a pipe, may then draw a progress bar by ending each update with `\r`.
pub(crate) const TERMINAL_COLUMNS: &str = "DRUMLINE_TERMINAL_COLUMNS";

/// Set if the keeper must bind a worker to some cores: the name of the [binding](drumline::cores::NumaBinding).
pub(crate) const NUMA_BINDING: &str = "DRUMLINE_NUMA_BINDING";

/// The number of a worker among those of its host, also if [`Job::virtual_local_rank`] hides it.
pub(crate) const LOCAL_PLACE: &str = steps::STEPS_VARIABLE;

/// The file in which a worker says why it fails; the launcher does the same if it has one.
pub(crate) const ERROR_FILE: &str = error_file::VARIABLE;

/// Variables of an outer launcher or of its job, which must not reach the workers of this one.
pub(crate) const NOT_INHERITED: [&str; 9] = [
    TERMINAL_COLUMNS,
    NUMA_BINDING,
    ERROR_FILE,
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
    // The launcher is the service, and its ranks are not.
    "NOTIFY_SOCKET",
    "WATCHDOG_USEC",
    "WATCHDOG_PID",
];

/// Where the workers of a world meet.
#[derive(Clone, Debug)]
pub(crate) struct Rendezvous {
    /// The address of the store of this host's launcher.
    pub launcher: Endpoint,
    /// The address of the store in which the ranks of all hosts meet. On one host it is the launcher's.
    pub store: Endpoint,
    /// The file with the store's secret; `None` if the environment names the secret already.
    pub secret_file: Option<String>,
    /// The address of the store for programs that use torch, if there is one.
    pub master: Option<SocketAddr>,
    /// The network interface by which other hosts reach this one, if there are any.
    pub interface: Option<String>,
    /// The name of the job.
    pub run_id: String,
}

/// Variables of the launcher's own environment that it does not overwrite.
#[derive(Clone, Debug, Default)]
pub(crate) struct Inherited {
    has_omp: bool,
    has_nccl_handling: bool,
    has_interface: bool,
    has_interface_of_gloo: bool,
    glibc_tunables: String,
    /// The devices that programs of CUDA and of HIP may use, by the variables that say so.
    visible_devices: Vec<(&'static str, String)>,
}

/// Where a program looks up its devices: the one of CUDA, which torch reads on every host, and that of HIP.
const VISIBLE_DEVICES: [&str; 2] = ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES"];

impl Inherited {
    pub(crate) fn here() -> Inherited {
        let tunables = std::env::var_os("GLIBC_TUNABLES").unwrap_or_default();
        Inherited {
            has_omp: std::env::var_os("OMP_NUM_THREADS").is_some(),
            has_nccl_handling: std::env::var_os(NCCL_HANDLING).is_some(),
            has_interface: std::env::var_os(INTERFACE).is_some(),
            has_interface_of_gloo: std::env::var_os(INTERFACE_OF_GLOO).is_some(),
            visible_devices: VISIBLE_DEVICES
                .into_iter()
                .filter_map(|name| Some((name, std::env::var(name).ok()?)))
                .collect(),
            glibc_tunables: tunables.to_string_lossy().into_owned(),
        }
    }

    /// Whether workers get `OMP_NUM_THREADS=1`, as under torchrun. Without it each of several workers
    /// on a host would start as many threads as the host has cores.
    pub(crate) fn limits_omp(&self, job: &Job) -> bool {
        job.nproc_per_node.get() > 1 && !self.has_omp
    }

    /// The one device of a worker that believes to be alone: the one with its number, among those that the launcher
    /// may use.
    fn only_device(&self, local_rank: usize) -> Vec<(&'static str, String)> {
        let nth = |(name, devices): &(&'static str, String)| {
            let device = devices.split(',').filter(|it| !it.is_empty()).nth(local_rank);
            (*name, device.unwrap_or_default().to_owned())
        };
        match self.visible_devices.is_empty() {
            true => vec![(VISIBLE_DEVICES[0], local_rank.to_string())],
            false => self.visible_devices.iter().map(nth).collect(),
        }
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

/// What NCCL of torch does after an error. torchrun sets it.
const NCCL_HANDLING: &str = "TORCH_NCCL_ASYNC_ERROR_HANDLING";

/// The interface by which gloo of torch is reached. It would ask the resolver for the host's own name, which on many hosts
/// is a name of loopback.
const INTERFACE_OF_GLOO: &str = "GLOO_SOCKET_IFNAME";

/// The same for drumline, which also reads gloo's.
const INTERFACE: &str = "DRUMLINE_SOCKET_IFNAME";

/// The variables of this host's worker number `local_rank`. They replace inherited ones.
pub(crate) fn worker(
    job: &Job,
    world: &World,
    rendezvous: &Rendezvous,
    local_rank: usize,
    inherited: &Inherited,
) -> Vec<(&'static str, String)> {
    let rank = (world.first_rank + local_rank).to_string();
    let world_size = world.size.to_string();
    let visible = if job.virtual_local_rank { 0 } else { local_rank };
    let mut variables = vec![
        ("RANK", rank.clone()),
        ("LOCAL_RANK", visible.to_string()),
        ("ROLE_RANK", rank),
        ("WORLD_SIZE", world_size.clone()),
        ("LOCAL_WORLD_SIZE", world.local_size.to_string()),
        ("ROLE_WORLD_SIZE", world_size),
        ("GROUP_RANK", world.host.to_string()),
        ("GROUP_WORLD_SIZE", world.hosts.to_string()),
        ("ROLE_NAME", job.role.clone()),
        ("DRUMLINE_STORE", rendezvous.store.to_string()),
        (steps::LAUNCHER_VARIABLE, rendezvous.launcher.to_string()),
        (LOCAL_PLACE, local_rank.to_string()),
        (outer_job::RUN_VARIABLE, rendezvous.run_id.clone()),
        ("TORCHELASTIC_RESTART_COUNT", world.restart.to_string()),
        ("TORCHELASTIC_MAX_RESTARTS", job.restarts.max.to_string()),
        ("TORCHELASTIC_SIGNALS_TO_HANDLE", signals(job)),
    ];
    if job.virtual_local_rank {
        variables.extend(inherited.only_device(local_rank));
    }
    if !inherited.has_nccl_handling {
        variables.push((NCCL_HANDLING, "1".into()));
    }
    // Tells the programs of torch where the pipe is.
    let timer_file = job.hangs.timer_file.iter().map(|it| it.to_string_lossy().into_owned());
    variables.extend(timer_file.map(|path| ("TORCHELASTIC_TIMER_FILE", path)));
    if let Some(path) = &rendezvous.secret_file {
        variables.push(("DRUMLINE_SECRET_FILE", path.clone()));
    }
    if let Some(interface) =
        rendezvous.interface.clone().filter(|_| !inherited.has_interface_of_gloo)
    {
        variables.push((INTERFACE_OF_GLOO, interface));
        if !inherited.has_interface {
            // None: a rank of drumline finds the way to the first host by itself.
            variables.push((INTERFACE, String::new()));
        }
    }
    if let Some(master) = &rendezvous.master {
        variables.extend([
            ("MASTER_ADDR", master.ip().to_string()),
            ("MASTER_PORT", master.port().to_string()),
            // The launcher hosts the store: rank 0 connects to it instead of hosting one.
            ("TORCHELASTIC_USE_AGENT_STORE", "True".into()),
        ]);
    }
    // What the user might have set, too.
    let mut given = Vec::new();
    given.extend(job.security.map(|level| ("DRUMLINE_SECURITY", level.to_string())));
    given.extend(job.min_ranks.map(|ranks| ("DRUMLINE_MIN_RANKS", ranks.to_string())));
    if inherited.limits_omp(job) {
        given.push(("OMP_NUM_THREADS", "1".into()));
    }
    let told: String = given.iter().map(|(name, value)| format!("{name}={value} ")).collect();
    variables.push((
        outer_job::GIVEN_VARIABLE,
        format!("{told}{}={}", outer_job::RUN_VARIABLE, rendezvous.run_id),
    ));
    variables.extend(given);
    if let Some(binding) = job.numa_binding {
        variables.push((NUMA_BINDING, binding.to_string()));
    }
    if let Some(tunables) = inherited.tunables_without_rseq(job) {
        variables.push(("GLIBC_TUNABLES", tunables));
    }
    variables
}

/// The signals that end the job, as torchrun spells them.
fn signals(job: &Job) -> String {
    let ending = job.signals.iter().filter(|(_, meaning)| *meaning == OnSignal::EndsJob);
    ending.map(|(signal, _)| signal_name(signal.as_raw())).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests;
