//! The addresses at which ranks of other hosts reach this rank.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use drumline_schedule::step::Rank;
use drumline_store::net::{
    gate::Listener,
    interface::{addresses_of, describe, outward},
};

use crate::{Config, Error, Result};

/// The addresses at which ranks of other hosts would reach this one, and the reason: `10.0.0.1 (eth0): it is on the way
/// to the master at 10.0.0.9:29500`. Without a master, the default route decides, and without one the only interface.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Config, rendezvous::describe_addresses};
///
/// let config = Config::default().bind_addresses(vec![[127, 0, 0, 1].into()]);
/// assert!(describe_addresses(&config, None)?.contains("DRUMLINE_BIND_ADDRESS"));
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`Setting`](crate::ErrorKind::Setting) when no interface has the name in the settings, or none is
/// named and several come into question; [`Io`](crate::ErrorKind::Io) when there is no route to the master.
pub fn describe_addresses(config: &Config, master: Option<SocketAddr>) -> Result<String> {
    let (addresses, why) = addresses(config, master)?;
    Ok(format!("{}: {why}", describe(&addresses)))
}

/// The addresses of [`describe_addresses`].
///
/// # Errors
///
/// Those of [`describe_addresses`].
pub fn own_addresses(config: &Config, master: Option<SocketAddr>) -> Result<Vec<IpAddr>> {
    Ok(addresses(config, master)?.0)
}

pub(crate) fn addresses(
    config: &Config,
    master: Option<SocketAddr>,
) -> Result<(Vec<IpAddr>, String)> {
    Ok(match (&config.bind_addresses[..], &config.socket_ifname) {
        ([], None) => {
            let (address, why) = outward(master)?;
            (vec![address], why)
        }
        ([], Some(names)) => (
            addresses_of(names, master)?,
            format!("DRUMLINE_SOCKET_IFNAME or GLOO_SOCKET_IFNAME says {names}"),
        ),
        (set, _) => (set.to_vec(), "DRUMLINE_BIND_ADDRESS says so".to_owned()),
    })
}

/// The addresses on which to listen for peers that are not near. Of these, `elsewhere` are on other hosts.
pub(crate) fn addresses_for_peers(config: &Config, elsewhere: &[Rank]) -> Result<Vec<IpAddr>> {
    let invalid = |setting: &str, problem: String| Err(Error::setting(setting, problem));
    let chosen = match (&config.socket_ifname, &config.bind_addresses[..]) {
        (Some(names), []) => addresses_of(names, None)?,
        (None, []) if elsewhere.is_empty() => vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
        // The ranks have met in a file, or at a name that is loopback on this host: none has told the way.
        (None, []) => own_addresses(config, None)?,
        (None, addresses) => addresses.to_vec(),
        (Some(names), addresses) => {
            let problem = format!("both are set, to {names} and {addresses:?}; which is meant?");
            return invalid("DRUMLINE_SOCKET_IFNAME, DRUMLINE_BIND_ADDRESS", problem);
        }
    };
    if let Some(bind) = chosen.iter().find(|address| address.is_unspecified()) {
        let problem = format!(
            "{bind} is every address of this host, and peers need one; name it, or name the \
             interface with DRUMLINE_SOCKET_IFNAME"
        );
        return invalid("DRUMLINE_BIND_ADDRESS", problem);
    }
    if let (Some(bind), false) = (chosen.iter().find(|it| it.is_loopback()), elsewhere.is_empty()) {
        let problem = format!(
            "rank(s) {elsewhere:?} are on other hosts, or in containers with a network of their \
             own, and cannot reach this rank at {bind}: name the interface between them"
        );
        return invalid("DRUMLINE_SOCKET_IFNAME, DRUMLINE_BIND_ADDRESS", problem);
    }
    let open = chosen.iter().find(|address| !address.is_loopback());
    if let (Some(bind), None) = (open, &config.secret) {
        let problem = format!(
            "not set, and whoever reaches {bind} could join the job: give all its processes one \
             secret of 16 bytes or more, or the name of a file with it in DRUMLINE_SECRET_FILE"
        );
        return invalid("DRUMLINE_SECRET", problem);
    }
    Ok(chosen)
}

/// Listens for processes that are on other networks, if the settings say where.
pub(crate) fn listen_for_others(config: &Config) -> Option<Listener> {
    let addresses = addresses_for_peers(config, &[0]).ok()?;
    Listener::for_peers(*addresses.first()?, config.port_range.clone(), 0).ok()
}
