//! What all worlds of a job have in common on this host.

use std::{
    hash::{BuildHasher, Hasher, RandomState},
    path::PathBuf,
};

use drumline::Config;

use crate::{
    Result, environment::Inherited, files::JobFiles, job::Job, limits, monitor::Monitor, program,
    secret::JobSecret,
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
    pub(crate) files: JobFiles,
    pub(crate) run_id: String,
}

impl<'a> Launch<'a> {
    pub(crate) fn of(job: &'a Job) -> Result<Launch<'a>> {
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
            files: JobFiles::of(job, &run_id)?,
            run_id,
        };
        if launch.inherited.limits_omp(job) {
            let ranks = job.nproc_per_node;
            tracing::info!("OMP_NUM_THREADS is not set: {ranks} ranks get 1 thread each");
        }
        Ok(launch)
    }
}

/// 64 random bits. They come from the operating system, through the hasher's keys.
pub(crate) fn new_run_id() -> String {
    format!("{:016x}", RandomState::new().build_hasher().finish())
}
