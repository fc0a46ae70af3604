//! Makes the group of the whole job from a URL or a store.

use std::{borrow::Cow, env, net::SocketAddr, sync::Arc, time::Instant};

use drumline_engine::{
    membership::GlobalRanks,
    recorder::{Category, What},
};
use drumline_store::{
    net::{Endpoint, interface::describe},
    store::Store,
};

use super::{ProcessGroup, default_group, family::Family};
use crate::{
    Config, Result,
    addresses::addresses,
    backend::mpi::MPI,
    rendezvous::{DRUMLINE_STORE, Rendezvous, is_launched, rendezvous},
    start_up::WHY_COMES,
};

impl ProcessGroup {
    /// The group of the whole job, as the environment describes it: [`init_process_group`] with `env://` and
    /// [`Config::from_env`]. `drumline run`, torchrun, and [`spawn`](https://docs.rs/drumline) set that environment.
    ///
    /// # Errors
    ///
    /// As for [`init_process_group`] and [`Config::from_env`].
    pub fn from_env() -> Result<ProcessGroup> {
        init_process_group("env://", &Config::from_env()?)
    }

    /// For programs that run with and without a launcher: [`ProcessGroup::from_env`] if [`is_launched`], otherwise
    /// [`ProcessGroup::alone`].
    ///
    /// ```
    /// # use drumline_group as drumline;
    /// use drumline::{ProcessGroup, rendezvous::is_launched};
    ///
    /// let group = ProcessGroup::init_or_alone()?;
    /// assert!(is_launched() || group.world_size() == 1);
    /// # Ok::<_, drumline::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// As for [`ProcessGroup::from_env`]; none without a launcher.
    pub fn init_or_alone() -> Result<ProcessGroup> {
        match is_launched() {
            true => ProcessGroup::from_env(),
            false => Ok(ProcessGroup::alone()),
        }
    }
}

/// Connects all processes of the job to one group, named `world`.
///
/// `url` says how the processes meet. `env://` reads the variables that a launcher sets;
/// `tcp://host:port?rank=R&world_size=W` needs no variables. See [`crate::rendezvous`]. Once the group and
/// all groups made from it are destroyed, the processes may meet at the same URL again.
///
/// # Errors
///
/// [`Setting`](crate::ErrorKind::Setting) names the part of the URL or the variable that is missing
/// or wrong. [`Store`](crate::ErrorKind::Store) and [`Connect`](crate::ErrorKind::Connect) name the ranks that could
/// not be reached or never came. A failed call leaves nothing behind and may be repeated.
pub fn init_process_group(url: &str, config: &Config) -> Result<ProcessGroup> {
    let started = Instant::now();
    let is_placed = ["RANK", "MASTER_ADDR"].iter().any(|name| env::var_os(name).is_some());
    let (url, config) = with_mpi(url, config, is_placed);
    let place = rendezvous(&url, &config)?;
    let met = Instant::now();
    let group = form_world(place, &config)?;
    let open = group.inner.recorder.begin_at(started, || What {
        category: Category::StartUp,
        name: "rendezvous",
        ..What::default()
    });
    open.end_at(met);
    Ok(group)
}

/// Ranks that meet by MPI use it, unless the settings name another backend. Ranks that use MPI meet by it, unless a
/// launcher or the user says where they meet.
fn with_mpi<'a>(url: &'a str, config: &Config, is_placed: bool) -> (Cow<'a, str>, Config) {
    let mut config = config.clone();
    if url.starts_with("mpi://") && config.backend.is_none() {
        config.backend = Some(MPI.to_owned());
    }
    let uses_mpi = config.backend.as_deref().is_some_and(|it| it.trim().eq_ignore_ascii_case(MPI));
    match url.strip_prefix("env://").filter(|_| uses_mpi && !is_placed) {
        Some(rest) => (format!("mpi://{rest}").into(), config),
        None => (url.into(), config),
    }
}

/// [`init_process_group`] for processes that share a store already.
///
/// # Errors
///
/// As for [`Rendezvous::with_store`] and [`crate::rendezvous::connect`].
pub fn init_with_store(
    store: Arc<dyn Store>,
    rank: usize,
    world_size: usize,
    config: &Config,
) -> Result<ProcessGroup> {
    form_world(Rendezvous::with_store(store, rank, world_size, config)?, config)
}

/// Connects some ranks of a job to a group. The job was formed elsewhere, and its processes share `store`.
///
/// `rank` is this process's number in the group. `ranks` has the numbers of the members in the whole job;
/// errors then name both numbers. `master` is an address that all hosts can reach, if one is known: this rank
/// listens on the address from which it reaches the master.
///
/// Otherwise like [`crate::rendezvous::connect`].
///
/// # Errors
///
/// As for [`Rendezvous::with_store`] and [`crate::rendezvous::connect`].
pub fn connect_members(
    name: &str,
    store: Arc<dyn Store>,
    rank: usize,
    ranks: &[usize],
    master: Option<SocketAddr>,
    config: &Config,
) -> Result<ProcessGroup> {
    let place = Rendezvous::with_store(store, rank, ranks.len(), config)?;
    let mut config = Config { secret: Some(place.secret.clone()), ..config.clone() };
    choose_addresses(&mut config, master)?;
    let are_all = ranks.iter().enumerate().all(|(rank, global)| rank == *global);
    let global = if are_all { GlobalRanks::default() } else { GlobalRanks::new(ranks.to_vec()) };
    let family = Family::of_one(name, place, global.of(rank));
    ProcessGroup::join_first(family, name, (rank, ranks.len()), global, &config)
}

fn form_world(place: Rendezvous, config: &Config) -> Result<ProcessGroup> {
    let mut config = Config { secret: Some(place.secret.clone()), ..config.clone() };
    let (name, at, master) = ("world", (place.rank, place.world_size), place.master());
    let family = Family::of(name, place);
    let formed = choose_addresses(&mut config, master).and_then(|()| {
        ProcessGroup::join(family.clone(), name, at, GlobalRanks::default(), &config, None)
    });
    match formed {
        Ok(group) => {
            default_group::remember(&group);
            Ok(group)
        }
        Err(error) => {
            family.leave(WHY_COMES);
            Err(error)
        }
    }
}

/// Chooses the addresses at which peers of other hosts reach this rank, and logs why. No way leads on from loopback,
/// where a launcher may carry a store of torch's; but the store of `drumline run` is on the first host.
fn choose_addresses(config: &mut Config, master: Option<SocketAddr>) -> Result<()> {
    let of_launcher = || match env::var(DRUMLINE_STORE).ok()?.parse() {
        Ok(Endpoint::Tcp { host, port }) => Some(SocketAddr::new(host.parse().ok()?, port)),
        _ => None,
    };
    let mut masters = master.into_iter().chain(of_launcher());
    let Some(master) = masters.find(|it| !it.ip().is_loopback()) else { return Ok(()) };
    // If both are set, the code that listens reports the conflict.
    if config.socket_ifname.is_some() && !config.bind_addresses.is_empty() {
        return Ok(());
    }
    let (addresses, why) = addresses(config, Some(master))?;
    (config.bind_addresses, config.socket_ifname) = (addresses, None);
    let addresses = describe(&config.bind_addresses);
    tracing::info!("ranks of other hosts reach this one at {addresses}: {why}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mpi_and_its_url_go_together() {
        let on = |backend: Option<&str>| Config {
            backend: backend.map(str::to_owned),
            ..Config::default()
        };
        let chosen = |url: &'static str, backend, is_placed| {
            let (url, config) = with_mpi(url, &on(backend), is_placed);
            (url, config.backend)
        };
        let expect = |url: &str, backend: Option<&str>| {
            (Cow::from(url.to_owned()), backend.map(str::to_owned))
        };
        assert_eq!(chosen("mpi://", None, false), expect("mpi://", Some("mpi")));
        assert_eq!(chosen("mpi://", Some("drumline"), false), expect("mpi://", Some("drumline")));
        assert_eq!(chosen("env://", Some("mpi"), false), expect("mpi://", Some("mpi")));
        assert_eq!(
            chosen("env://?rank=1", Some("MPI"), false),
            expect("mpi://?rank=1", Some("MPI"))
        );
        assert_eq!(chosen("env://", Some("mpi"), true), expect("env://", Some("mpi")));
        assert_eq!(chosen("env://", None, false), expect("env://", None));
    }
}
