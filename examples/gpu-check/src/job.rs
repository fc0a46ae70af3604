//! Jobs whose ranks end on their own: processes of this program that go on if one of them is killed, and that each have
//! an environment of their own.

use std::env;
use std::process::{Child, ExitStatus, id};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use anyhow::{Context, anyhow};
use drumline::auth::Secret;
use drumline::store::{Store, tcp::TcpStore};
use drumline::{Config, ProcessGroup, rendezvous::Endpoint};
use drumline_cuda::nccl::{Nccl, same_gpu_hint};
use drumline_cuda::{CudaDevice, Driver};
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::Options;
use crate::part::{Part, again};

/// How a rank tells why it cannot be tried here.
const LEFT_OUT: &str = "left out";

/// How long a process may take to reach the store.
const PATIENCE: Duration = Duration::from_secs(60);

/// Ranks, and where they meet. Dropping it kills them.
pub(crate) struct Job {
    store: TcpStore,
    ranks: Vec<Child>,
}

/// How a job has ended.
pub(crate) struct Ended {
    /// By rank.
    pub(crate) statuses: Vec<ExitStatus>,
    /// Why the ranks have tried nothing.
    pub(crate) left_out: Option<String>,
}

impl Job {
    /// Starts the ranks.
    pub(crate) fn start(options: &Options, part: Part, ranks: usize) -> anyhow::Result<Job> {
        static JOBS: AtomicUsize = AtomicUsize::new(0);
        let secret = Secret::random()?;
        let name = format!("gpu-check-{}-{}", id(), JOBS.fetch_add(1, Ordering::Relaxed));
        let endpoint = Endpoint::Unix(name);
        let store = TcpStore::host_secured(&endpoint, &secret)?;
        let mut job = Job { store, ranks: Vec::new() };
        let secret = String::from_utf8(secret.expose().to_vec())?;
        for rank in 0..ranks {
            let mut program = again(options, part, ranks)?;
            program
                .env("RANK", rank.to_string())
                .env("DRUMLINE_STORE", endpoint.to_string())
                .env("DRUMLINE_SECRET", &secret)
                .env_remove("DRUMLINE_SECRET_FILE");
            if let Some((name, value)) = shares_gpu(options, rank, ranks) {
                program.env(name, value);
            }
            job.ranks.push(program.spawn()?);
        }
        Ok(job)
    }

    /// Waits until all ranks have ended.
    pub(crate) fn end(mut self) -> anyhow::Result<Ended> {
        let statuses = self.ranks.iter_mut().map(Child::wait).collect::<Result<_, _>>()?;
        let left_out = match self.store.check(&[LEFT_OUT])? {
            true => Some(String::from_utf8_lossy(&self.store.get(LEFT_OUT)?).into_owned()),
            false => None,
        };
        Ok(Ended { statuses, left_out })
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        for rank in &mut self.ranks {
            // Who has ended cannot be killed, and was waited for.
            let _ = rank.kill();
            let _ = rank.wait();
        }
    }
}

/// The variable that lets a rank share a GPU over NCCL, if there are fewer GPUs than ranks. What the user has set stays.
fn shares_gpu(options: &Options, rank: usize, ranks: usize) -> Option<(&'static str, String)> {
    const NAMES: [&str; 2] = ["NCCL_MULTI_RANK_GPU_ENABLE", "NCCL_HOSTID"];
    let gpus = Driver::load(options.library.as_deref()).ok()?.devices().ok()?;
    if ranks <= gpus || NAMES.iter().any(|name| env::var_os(name).is_some()) {
        return None;
    }
    let nccl = Nccl::load(Config::from_env().ok()?.nccl_library.as_deref()).ok()?;
    match same_gpu_hint(nccl.version()).contains(NAMES[0]) {
        true => Some((NAMES[0], "1".to_owned())),
        false => Some((NAMES[1], format!("gpu-check-{rank}"))),
    }
}

/// What a rank knows of its job.
pub(crate) struct Role {
    pub(crate) rank: usize,
    pub(crate) ranks: usize,
    pub(crate) store: Arc<dyn Store>,
    config: Config,
}

impl Role {
    fn of_environment(options: &Options) -> anyhow::Result<Role> {
        let variable = |name: &str| env::var(name).with_context(|| name.to_owned());
        let endpoint: Endpoint = variable("DRUMLINE_STORE")?.parse().map_err(anyhow::Error::msg)?;
        let secret = Secret::from_env()?.ok_or_else(|| anyhow!("there is no DRUMLINE_SECRET"))?;
        let store = TcpStore::connect_secured(&endpoint, &secret, PATIENCE)?;
        Ok(Role {
            rank: variable("RANK")?.parse()?,
            ranks: options.part_ranks,
            store: Arc::new(store),
            config: Config::from_env()?.secret(secret),
        })
    }

    /// A group of some ranks of the job, in this order.
    pub(crate) fn connect(&self, name: &str, ranks: &[usize]) -> anyhow::Result<ProcessGroup> {
        let own = ranks.iter().position(|rank| *rank == self.rank).context("no rank of it")?;
        Ok(drumline::rendezvous::connect(name, self.store.clone(), own, ranks.len(), &self.config)?)
    }

    /// Each rank has the next GPU, as far as they go.
    pub(crate) fn device(&self, options: &Options) -> anyhow::Result<CudaDevice> {
        let driver = Driver::load(options.library.as_deref())?;
        Ok(driver.device((options.device + self.rank) % driver.devices()?)?)
    }

    /// Says why the job tries nothing.
    pub(crate) fn leave_out(&self, why: impl std::fmt::Display) -> anyhow::Result<()> {
        Ok(self.store.set(LEFT_OUT, why.to_string().as_bytes())?)
    }
}

/// What the process of a rank does.
pub(crate) fn run(
    options: &Options,
    one: impl Fn(&Options, &Role) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    // It does not outlive the process that has started it.
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let role = Role::of_environment(options)?;
    one(options, &role).with_context(|| format!("rank {}", role.rank))
}
