//! Ranks that a foreign launcher has started (mpirun, mpiexec, srun), and programs that know torchrun's variables only.
//!
//! ```text
//! variables, ancestors ─► launchers: the place ─► host or pmi: what all ranks must know alike ─► variables
//! ```
//!
//! The ranks of one host meet at a Unix socket, and leave the launcher's channel alone. Those of several hosts use the
//! launcher's key-value space.

mod agreed;
mod ancestors;
mod host;
mod launchers;
mod mapping;
mod patience;
mod pmi;

use std::{
    ffi::{OsStr, OsString},
    net::{IpAddr, Ipv4Addr},
    os::unix::{net::UnixStream, process::CommandExt},
    path::PathBuf,
    process::Command,
    time::Duration,
};

use drumline::{Config, auth::Secret, free_port, inherited, outer_job, rendezvous::own_addresses};

use rustix::net::sockopt::socket_peercred;

use self::{
    agreed::{Agreed, Given},
    host::MeetingPoint,
    launchers::{Launcher, Place, Variables},
    patience::Patience,
    pmi::Pmi,
};
use crate::{Error, Result, environment::NOT_INHERITED, program, secret::JobSecret};

/// What a rank of a foreign launcher lacks: the variables of torchrun, and the job's secret.
#[derive(Debug, Default)]
pub struct Entry {
    set: Vec<(&'static str, String)>,
    unset: Vec<String>,
    secret: Option<JobSecret>,
}

/// Agrees with the other ranks of the launcher's job, for at most `timeout`.
///
/// # Errors
///
/// No launcher has started this process, launchers contradict each other, or the ranks do not come together.
pub fn enter(timeout: Duration) -> Result<Entry> {
    let own: Variables = std::env::vars_os()
        .filter_map(|(k, v)| k.into_string().ok().zip(v.into_string().ok()))
        .collect();
    let place = launchers::place(&own, ancestors::variables)?;
    tracing::info!("started by {place}");
    if place.launcher == Launcher::Torchrun {
        return Ok(Entry::default());
    }
    let unset = of_outer_launcher(&own);
    let given = given(&own, &unset)?;
    let (place, agreed) = agree(place, &own, &given, Patience::new(timeout))?;
    let secret = agreed.secret.clone().map(JobSecret::of_job).transpose()?;
    Ok(Entry { set: variables(&place, &agreed), unset, secret })
}

impl Entry {
    /// The variables that the program gets beside those of this process, but for the secret.
    pub fn variables(&self) -> &[(&'static str, String)] {
        &self.set
    }

    /// Replaces this process by the program. Returns only if that fails.
    pub fn exec(self, program: &Program) -> Error {
        let mut command = Command::new(&program.file);
        command.arg0(&program.name).args(&program.arguments);
        for name in self.unset {
            command.env_remove(name);
        }
        command.envs(self.set);
        if let Some(path) = self.secret.as_ref().and_then(JobSecret::path) {
            command.env("DRUMLINE_SECRET_FILE", path);
        }
        let error = command.exec();
        Error::ProgramNotExecutable { program: program.file.clone(), hint: error.to_string() }
    }
}

/// A program that is there.
#[derive(Clone, Debug)]
pub struct Program {
    file: PathBuf,
    name: OsString,
    arguments: Vec<OsString>,
}

impl Program {
    /// The program `name`, found as by a shell.
    ///
    /// # Errors
    ///
    /// It is not there, or cannot be executed.
    pub fn find(name: &OsStr, arguments: Vec<OsString>) -> Result<Program> {
        let file = program::resolve(name, std::env::var_os("PATH"))?;
        Ok(Program { file, name: name.into(), arguments })
    }
}

/// What an outer launcher has set for its own rank, which is not this one.
fn of_outer_launcher(own: &Variables) -> Vec<String> {
    let mut outer = outer_job::among(own);
    if !outer.is_empty() {
        outer.extend(NOT_INHERITED.map(str::to_owned));
    }
    outer
}

const SECRET_FILE: &str = "DRUMLINE_SECRET_FILE";

fn given(own: &Variables, unset: &[String]) -> Result<Given> {
    let of = |name: &str| {
        let value = own.get(name).filter(|value| !value.is_empty());
        value.filter(|_| !unset.iter().any(|it| it == name))
    };
    let port = of("MASTER_PORT").map(|text| {
        let why = || Error::foreign(format!("MASTER_PORT={text}: not a port from 1 to 65535"));
        text.parse().ok().filter(|&port| port > 0).ok_or_else(why)
    });
    let has_secret = match unset.iter().any(|it| it == SECRET_FILE) {
        true => false,
        false => Secret::from_env()?.is_some(),
    };
    Ok(Given { address: of("MASTER_ADDR").cloned(), port: port.transpose()?, has_secret })
}

/// What all ranks know in the end, and what the launcher tells about the hosts.
fn agree(
    place: Place,
    own: &Variables,
    given: &Given,
    patience: Patience,
) -> Result<(Place, Agreed)> {
    let is_first = place.rank == 0;
    if place.size == 1 {
        return Ok((place, decide(given, true)?));
    }
    let socket = match (place.launcher, own.get("PMI_FD")) {
        (Launcher::OpenMpi | Launcher::Torchrun, _) | (_, None) => None,
        (Launcher::Slurm | Launcher::Hydra, Some(number)) => Some(pmi_socket(number)?),
    };
    let begins = place.launcher == Launcher::Slurm;
    if place.is_on_one_host() {
        let job = match (job_name(place.launcher, own), socket) {
            (Some(name), _) => name,
            // Hydra's proxy has made a pair of sockets for each rank of this host.
            (None, Some(socket)) => {
                let proxy = socket_peercred(&socket);
                let proxy = proxy.map_err(Error::system("see who holds PMI_FD"))?;
                format!("hydra-{}", proxy.pid.as_raw_pid())
            }
            (None, None) => return Err(nowhere(&place)),
        };
        let point = MeetingPoint::of(&job);
        let agreed = match is_first {
            true => {
                let agreed = decide(given, true)?;
                point.tell(&agreed.word()?, place.size, patience)?;
                agreed
            }
            false => understood(&point.hear(place.rank, patience)?)?.with(given, place.rank)?,
        };
        return Ok((place, agreed));
    }
    if let Given { address: Some(address), port: Some(port), .. } = given {
        return Ok((place, Agreed { address: address.clone(), port: *port, secret: None }));
    }
    let socket = socket.ok_or_else(|| nowhere(&place))?;
    let mut pmi = Pmi::open(socket, begins, patience)?;
    let place = match pmi.mapping()? {
        None => place,
        Some(mapping) => mapping::complete(place, &mapping).unwrap_or(place),
    };
    let word = if is_first { Some(decide(given, false)?.word()?) } else { None };
    let agreed = understood(&pmi.share(word.as_deref())?)?;
    Ok((place, agreed.with(given, place.rank)?))
}

/// What the first rank decides.
fn decide(given: &Given, is_on_one_host: bool) -> Result<Agreed> {
    let own = match is_on_one_host {
        true => IpAddr::from(Ipv4Addr::LOCALHOST),
        false => {
            let addresses = own_addresses(&Config::from_env()?, None)?;
            let none = || Error::foreign("this host has no network: set MASTER_ADDR");
            *addresses.iter().find(|address| !address.is_loopback()).ok_or_else(none)?
        }
    };
    let port = match given.port {
        Some(port) => port,
        None => free_port(own, 0).map_err(Error::system(format!("find a free port of {own}")))?,
    };
    let secret = if given.has_secret { None } else { Some(Secret::random()?) };
    Ok(Agreed { address: given.address.clone().unwrap_or_else(|| own.to_string()), port, secret })
}

fn understood(word: &str) -> Result<Agreed> {
    let why = "the first rank has another version of drumline: install the same on all hosts";
    Agreed::parse(word).ok_or_else(|| Error::not_agreed(why))
}

/// What tells this job from others on the host, if variables say it.
fn job_name(launcher: Launcher, own: &Variables) -> Option<String> {
    let names: &[&str] = match launcher {
        Launcher::OpenMpi => &["PMIX_NAMESPACE"],
        Launcher::Slurm => &["SLURM_JOB_ID", "SLURM_STEP_ID"],
        Launcher::Hydra | Launcher::Torchrun => return None,
    };
    let parts = names.iter().map(|name| own.get(*name).cloned()).collect::<Option<Vec<_>>>()?;
    Some(parts.join("."))
}

fn pmi_socket(number: &str) -> Result<UnixStream> {
    let descriptor =
        number.parse().map_err(|_| std::io::Error::other("not a number")).and_then(inherited);
    descriptor.map(UnixStream::from).map_err(|error| {
        Error::foreign(format!(
            "PMI_FD={number}: {error}; a program between the launcher and this one has closed the descriptor: let it pass \
             descriptors on (in Python: close_fds=False)"
        ))
    })
}

fn nowhere(place: &Place) -> Error {
    let remedy = match place.launcher {
        Launcher::OpenMpi => {
            "mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=29500, with the host of rank 0"
        }
        Launcher::Slurm => "write srun --mpi=pmi2, or set MASTER_ADDR and MASTER_PORT",
        Launcher::Hydra | Launcher::Torchrun => "set MASTER_ADDR and MASTER_PORT",
    };
    Error::foreign(format!(
        "{place} offers no way to agree on the address of the first rank: {remedy}"
    ))
}

fn variables(place: &Place, agreed: &Agreed) -> Vec<(&'static str, String)> {
    let mut set = vec![
        ("RANK", place.rank.to_string()),
        ("WORLD_SIZE", place.size.to_string()),
        ("MASTER_ADDR", agreed.address.clone()),
        ("MASTER_PORT", agreed.port.to_string()),
    ];
    if let Some(local) = place.local {
        set.extend([
            ("LOCAL_RANK", local.number.to_string()),
            ("LOCAL_WORLD_SIZE", local.of.to_string()),
        ]);
    }
    let host = match place.is_on_one_host() {
        true => Some((0, 1)),
        false => place.host.map(|host| (host.number, host.of)),
    };
    if let Some((number, of)) = host {
        set.extend([("GROUP_RANK", number.to_string()), ("GROUP_WORLD_SIZE", of.to_string())]);
    }
    set.sort_unstable();
    set
}
