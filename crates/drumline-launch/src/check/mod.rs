//! `drumline check`: what works on this machine, tried out.
//!
//! Every operation is called by two ranks over every transport, and its result is looked at. The
//! rest of the report is what decides how fast that is.

mod host;
mod operations;
mod show;

use std::{collections::BTreeMap, thread, time::Duration};

use drumline::{Config, ProcessGroup, Result as Outcome, backend};

use self::{host::Host, operations::OPERATIONS};
use crate::{Error, Result, print};

/// What the report says.
#[derive(Debug)]
struct Report {
    host: Host,
    columns: Vec<Column>,
    /// Backends of torch's, and of other programs.
    available: BTreeMap<String, bool>,
}

/// What was tried over one transport or backend.
#[derive(Debug)]
struct Column {
    backend: String,
    transport: &'static str,
    device: &'static str,
    /// What kept it from being tried.
    absent: Option<String>,
    /// By operation, in their order: why it failed, if it did.
    tried: Vec<Option<String>>,
}

/// Two ranks on one host that answer at all do so in milliseconds.
const TIMEOUT: Duration = Duration::from_secs(20);

const RANKS: usize = 2;

const CPU: &str = "cpu";

/// Tries everything out and prints it, as JSON if asked for. The exit code: 1 if something of the
/// library's own does not work.
///
/// ```
/// // A program that has registered a backend of its own has a column for it.
/// assert_eq!(drumline_launch::check(false)?, 0);
/// # Ok::<_, drumline_launch::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::Check`] when a setting in the environment is wrong.
pub fn check(as_json: bool) -> Result<u8> {
    let config = Config { timeout: TIMEOUT, ..Config::from_env().map_err(Error::Check)? };
    let config = Config { trace: None, backend: None, all_reduce: None, ..config };
    let over = |transport, shared_memory, unix_sockets| {
        let config = Config { shared_memory, unix_sockets, ..config.clone() };
        try_out(backend::BUILT_IN, transport, &config)
    };
    let mut columns =
        vec![over("shm", true, true), over("unix", false, true), over("tcp", false, false)];
    columns.push(Column::without_cuda());
    for name in backend::backends().iter().filter(|name| *name != backend::BUILT_IN) {
        columns.push(try_out(name, "", &Config { backend: Some(name.clone()), ..config.clone() }));
    }
    let torch = [
        ("gloo", drumline::is_gloo_available()),
        ("mpi", drumline::is_mpi_available()),
        ("nccl", drumline::is_nccl_available()),
    ];
    let available = torch.map(|(name, is)| (name.to_owned(), is)).into();
    let report = Report { host: Host::look(&config), columns, available };
    match as_json {
        true => print(&format!("{:#}\n", report.json()))?,
        false => print(&report.to_string())?,
    }
    Ok(report.failed().into())
}

impl Report {
    /// Whether ranks of this host do.
    fn shares_memory(&self) -> bool {
        self.columns.iter().any(|column| column.transport == "shm" && column.absent.is_none())
    }

    /// Whether something of the library's own does not work. Hosts without shared memory are fine.
    fn failed(&self) -> bool {
        let own = |column: &&Column| column.backend == backend::BUILT_IN && column.device == CPU;
        self.columns.iter().filter(own).any(|column| {
            let broken = column.tried.iter().any(Option::is_some);
            broken || (column.absent.is_some() && column.transport != "shm")
        })
    }
}

impl Column {
    /// Where torch's table of backends has a column for GPUs.
    fn without_cuda() -> Column {
        let why = "not built in: operations take buffers in the memory of the host, so copy \
                   tensors there first";
        Column {
            backend: backend::BUILT_IN.to_owned(),
            transport: "",
            device: "cuda",
            absent: Some(why.to_owned()),
            tried: Vec::new(),
        }
    }
}

fn try_out(backend: &str, transport: &'static str, config: &Config) -> Column {
    let mut column = Column {
        backend: backend.to_owned(),
        transport,
        device: CPU,
        absent: None,
        tried: Vec::new(),
    };
    column.absent = match world(config, |group| Ok(group.shares_memory())) {
        Err(problem) => Some(problem),
        Ok(shared) if transport == "shm" && shared.contains(&false) => {
            Some("ranks of this host share no memory; RUST_LOG=drumline=warn says why".to_owned())
        }
        Ok(_) => None,
    };
    if column.absent.is_none() {
        // Each in a world of its own: after a failure a group is of no use.
        let attempts = OPERATIONS.iter().map(|(name, call)| match world(config, call) {
            Err(problem) => Some(problem),
            Ok(right) if right.contains(&false) => Some(format!("{name} gives a wrong result")),
            Ok(_) => None,
        });
        column.tried = attempts.collect();
    }
    column
}

/// What each rank of a small world says.
fn world<R: Send>(
    config: &Config,
    rank: impl Fn(&ProcessGroup) -> Outcome<R> + Sync,
) -> std::result::Result<Vec<R>, String> {
    let groups =
        ProcessGroup::local_world_with(RANKS, config).map_err(|error| error.to_string())?;
    thread::scope(|threads| {
        let running: Vec<_> = groups
            .into_iter()
            .map(|group| {
                let rank = &rank;
                threads.spawn(move || {
                    let said = rank(&group)?;
                    group.destroy()?;
                    Ok::<_, drumline::Error>(said)
                })
            })
            .collect();
        let ended = running.into_iter().map(|thread| match thread.join() {
            Ok(result) => result.map_err(|error| error.to_string()),
            Err(_) => Err("a rank has panicked; its message stands above".to_owned()),
        });
        // All of them, before the first that failed is told.
        ended.collect::<Vec<_>>().into_iter().collect()
    })
}
