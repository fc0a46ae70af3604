//! What all worlds of a job have in common on this host.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    path::PathBuf,
};

use drumline::{
    Config, Endpoint,
    steps::keys,
    store::{
        Store as _,
        tcp::{Door, TcpStore, TcpStoreServer},
    },
};

use crate::{
    Result,
    environment::{Inherited, Rendezvous},
    job::Job,
    limits,
    monitor::Monitor,
    program,
    secret::JobSecret,
    world::World,
};

/// A job that can start on this host: its program exists, and its secret is there.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) job: &'a Job,
    /// The file of the program.
    pub(crate) program: PathBuf,
    /// The keeper, and through it every worker, inherits the file with the secret.
    pub(crate) secret: JobSecret,
    pub(crate) config: Config,
    pub(crate) inherited: Inherited,
    pub(crate) monitor: Monitor,
    run_id: String,
}

/// The stores of a world. The workers meet there.
#[derive(Debug)]
pub(crate) struct Stores {
    pub(crate) own: TcpStore,
    _torch: Option<TcpStoreServer>,
    pub(crate) rendezvous: Rendezvous,
}

impl<'a> Launch<'a> {
    pub(crate) fn of(job: &'a Job) -> Result<Launch<'a>> {
        job.is_possible()?;
        let program = program::resolve(&job.program, std::env::var_os("PATH"))?;
        limits::raise();
        let run_id = job.run_id.clone().unwrap_or_else(new_run_id);
        let launch = Launch {
            job,
            program,
            secret: JobSecret::for_workers()?,
            config: Config::from_env()?,
            inherited: Inherited::here(),
            monitor: Monitor::open(&job.monitoring, &run_id)?,
            run_id,
        };
        if launch.inherited.limits_omp(job) {
            let ranks = job.nproc_per_node;
            tracing::info!("OMP_NUM_THREADS is not set: {ranks} ranks get 1 thread each");
        }
        Ok(launch)
    }

    /// Empty stores for the workers of `world`. They start before the first worker and end after the last. So
    /// the launcher has their actual ports and need not guess.
    pub(crate) fn stores(&self, world: &World) -> Result<Stores> {
        let level = self.job.security.unwrap_or(self.config.security);
        let serve = |door| TcpStoreServer::open(&[door], self.config.store_bytes_max);
        let endpoint = Endpoint::Unix(format!("drumline-run-{}-{}", new_run_id(), world.restart));
        let secret = self.secret.secret().clone();
        let own = serve(Door::Secured { endpoint: endpoint.clone(), secret, level })?;
        let own = TcpStore::to_own(own)?;
        let torch = self.job.torch_store.map(|port| {
            let host = "127.0.0.1".to_owned();
            serve(match self.job.torch_store_takes_anyone {
                true => Door::Exposed { host, port },
                false => Door::Loopback { host, port },
            })
        });
        let torch = torch.transpose()?;
        let rendezvous = Rendezvous {
            store: endpoint,
            secret_file: self.secret.path(),
            master_port: torch.as_ref().and_then(|store| Some(store.address()?.port())),
            run_id: self.run_id.clone(),
        };
        Ok(Stores { own, _torch: torch, rendezvous })
    }
}

impl Stores {
    /// Whether one of these ranks has begun a [step](drumline::step).
    pub(crate) fn has_stepped(&self, local_ranks: usize) -> bool {
        let key = |rank| format!("{}{rank}", keys::FIRST);
        (0..local_ranks).any(|rank| self.own.check(&[&key(rank)]).unwrap_or(false))
    }
}

/// 64 random bits. They come from the operating system, through the hasher's keys.
fn new_run_id() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}
