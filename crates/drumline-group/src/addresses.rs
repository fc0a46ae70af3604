//! The addresses at which ranks of other hosts reach this rank.

use std::net::{IpAddr, SocketAddr};

use drumline_store::net::interface::{addresses_of, describe, outward};

use crate::{Config, Result};

/// The addresses at which ranks of other hosts would reach this one, and the reason: `10.0.0.1 (eth0): it is on the way
/// to the master at 10.0.0.9:29500`. Without a master, the default route decides, and without one the only interface.
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Config, describe_addresses};
///
/// let config = Config::default().bind_addresses(vec![[127, 0, 0, 1].into()]);
/// assert!(describe_addresses(&config, None)?.contains("DRUMLINE_BIND_ADDRESS"));
/// # Ok::<_, drumline::Error>(())
/// ```
///
/// # Errors
///
/// [`Error::InvalidSetting`](crate::Error::InvalidSetting) when no interface has the name in the settings, or none is
/// named and several come into question; [`Error::Io`](crate::Error::Io) when there is no route to the master.
pub fn describe_addresses(config: &Config, master: Option<SocketAddr>) -> Result<String> {
    let (addresses, why) = addresses(config, master)?;
    Ok(format!("{}: {why}", describe(&addresses)))
}

/// The addresses of [`describe_addresses`].
///
/// ```
/// # use drumline_group as drumline;
/// use drumline::{Config, own_addresses};
///
/// let config = Config::default().bind_addresses(vec![[127, 0, 0, 1].into()]);
/// assert_eq!(own_addresses(&config, None)?, config.bind_addresses);
/// # Ok::<_, drumline::Error>(())
/// ```
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
