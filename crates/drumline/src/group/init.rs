//! From a URL to the group of the whole job.

use super::{ProcessGroup, family::Family};
use crate::{
    Config, Result, membership::GlobalRanks, net::interface::address_towards,
    rendezvous::rendezvous,
};

/// Connects all processes of the job to one group, named `world`.
///
/// `url` says how they meet: `env://` reads what a launcher has put into the environment,
/// `tcp://host:port?rank=R&world_size=W` says it all. See [`crate::rendezvous`].
///
/// ```
/// use drumline::{Config, ProcessGroup, init_process_group, is_launched};
///
/// // Runs under `drumline run` and `torchrun` as well as alone.
/// let group = match is_launched() {
///     true => init_process_group("env://", &Config::from_env()?)?,
///     false => ProcessGroup::alone(),
/// };
/// group.barrier()?;
/// group.destroy()?;
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`InvalidSetting`](crate::Error::InvalidSetting) names the part of the URL or the variable that
/// is missing or wrong; [`Store`](crate::Error::Store) and [`Connect`](crate::Error::Connect) say
/// who could not be reached, or who never came.
pub fn init_process_group(url: &str, config: &Config) -> Result<ProcessGroup> {
    let place = rendezvous(url, config)?;
    let mut config = Config { secret: Some(place.secret.clone()), ..config.clone() };
    if config.bind_address.is_none()
        && config.interface.is_none()
        && let Some(master) = place.master()
    {
        config.bind_address = Some(address_towards(master)?);
    }
    let (name, at) = ("world", (place.rank, place.world_size));
    ProcessGroup::join(Family::of(name, place), name, at, GlobalRanks::default(), &config)
}
