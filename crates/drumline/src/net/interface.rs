//! Addresses of this machine's network interfaces.

use std::net::{IpAddr, SocketAddr, UdpSocket};

use crate::{Error, Result};

/// The address to listen on when the user names an interface, such as `eth1`: its first IPv4
/// address, else its first IPv6 address that works without a zone.
pub(crate) fn address_of(interface: &str) -> Result<IpAddr> {
    let all = if_addrs::get_if_addrs()
        .map_err(|source| Error::io("cannot list the network interfaces", source))?;
    let named = all.iter().filter(|one| one.name == interface);
    let usable = named.filter(|one| !one.is_link_local()).map(if_addrs::Interface::ip);
    usable.min_by_key(IpAddr::is_ipv6).ok_or_else(|| {
        let mut names: Vec<_> = all.iter().map(|one| one.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        Error::InvalidSetting {
            setting: "DRUMLINE_INTERFACE".to_owned(),
            problem: format!(
                "{interface:?} is no network interface of this machine with an address; there \
                 are {}",
                names.join(", ")
            ),
        }
    })
}

/// The address of this host on the route to `place`: other hosts on the way can reach it there,
/// and on one host it is loopback. (A host's own name often resolves to something useless.)
pub(crate) fn address_towards(place: SocketAddr) -> Result<IpAddr> {
    let any: IpAddr = match place {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    // Connecting a datagram socket sends nothing; it only asks the routing table.
    UdpSocket::bind((any, 0))
        .and_then(|socket| socket.connect(place).and_then(|()| socket.local_addr()))
        .map(|address| address.ip())
        .map_err(|source| Error::io(format!("cannot find a route to {place}"), source))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_found_by_name_and_others_are_listed() {
        assert!(address_of("lo").unwrap().is_loopback());
        let error = address_of("no-such-0").unwrap_err().to_string();
        assert!(error.contains("DRUMLINE_INTERFACE") && error.contains("lo"), "{error}");
    }

    #[test]
    fn the_way_to_this_host_is_loopback() {
        assert!(address_towards(([127, 0, 0, 1], 1).into()).unwrap().is_loopback());
    }
}
