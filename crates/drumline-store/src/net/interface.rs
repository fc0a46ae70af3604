//! Addresses of this machine's network interfaces, and the choice of those that peers use.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use if_addrs::Interface;

use crate::{Error, Result};

/// Which interfaces a text selects, as in `DRUMLINE_SOCKET_IFNAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Pattern<'a> {
    /// Whether the named interfaces are the ones that are not selected.
    excludes: bool,
    names: Vec<Name<'a>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Name<'a> {
    Exactly(&'a str),
    BeginsWith(&'a str),
}

impl Name<'_> {
    fn matches(self, name: &str) -> bool {
        match self {
            Name::Exactly(exact) => name == exact,
            Name::BeginsWith(front) => name.starts_with(front),
        }
    }
}

impl Pattern<'_> {
    fn parse(text: &str) -> Option<Pattern<'_>> {
        let (excludes, list) = match text.strip_prefix('^') {
            Some(list) => (true, list),
            None => (false, text),
        };
        let names = list.split(',').map(|name| match name.trim().strip_prefix('=') {
            Some(name) => Name::Exactly(name),
            None => Name::BeginsWith(name.trim()),
        });
        let names: Vec<Name<'_>> = names.collect();
        let is_empty = |name: &Name<'_>| matches!(name, Name::Exactly("") | Name::BeginsWith(""));
        (!names.iter().any(is_empty)).then_some(Pattern { excludes, names })
    }

    /// The selected interfaces, in the order of the names.
    fn choose<'i>(&self, all: &[&'i str]) -> Vec<&'i str> {
        let named = |name: &&str| self.names.iter().position(|it| it.matches(name));
        let mut chosen: Vec<&str> =
            all.iter().copied().filter(|name| named(name).is_some() != self.excludes).collect();
        chosen.sort_by_key(named);
        chosen
    }
}

/// The addresses to listen on, for the interfaces that the user selects: `eth,ib` for those whose names begin
/// so, `=eth1` for exactly that one, `^docker,lo` for all others.
///
/// All named interfaces are used. Each is used with its first address of the family of `towards`, or without
/// one with its first address that needs no zone. If the text excludes interfaces, only one of the others is
/// used: the one on the way to `towards`, or else the first.
pub fn addresses_of(text: &str, towards: Option<SocketAddr>) -> Result<Vec<IpAddr>> {
    let all = if_addrs::get_if_addrs()
        .map_err(|source| Error::io("cannot list the network interfaces", source))?;
    let usable: Vec<&Interface> = all.iter().filter(|one| !one.is_link_local()).collect();
    let mut names: Vec<&str> = usable.iter().map(|one| one.name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    let invalid = |problem: String| Error::setting(SETTING, problem);
    let pattern = Pattern::parse(text).ok_or_else(|| {
        invalid(format!(
            "{text:?} should be names of interfaces, such as eth,ib or =eth1 or ^docker"
        ))
    })?;
    let mut chosen = pattern.choose(&names);
    if pattern.excludes {
        // Other hosts cannot reach loopback, and users do not want to exclude it every time.
        let is_loopback =
            |name: &&str| usable.iter().any(|one| one.name == *name && one.is_loopback());
        chosen.retain(|name| !is_loopback(name));
        let route = outward(towards).ok().map(|(address, _)| address);
        let on_the_way = usable.iter().find(|one| Some(one.ip()) == route);
        let on_the_way = on_the_way.and_then(|one| chosen.iter().position(|it| *it == one.name));
        let one = on_the_way.unwrap_or(0);
        chosen = chosen.into_iter().skip(one).take(1).collect();
    }
    if chosen.is_empty() {
        return Err(invalid(format!(
            "{text:?} leaves no network interface of this machine with an address; there are {}",
            names.join(", ")
        )));
    }
    let other_family = |ip: &IpAddr| match towards {
        Some(place) => ip.is_ipv6() != place.is_ipv6(),
        None => ip.is_ipv6(),
    };
    let address = |name: &str| {
        let of_it = usable.iter().filter(|one| one.name == name).map(|one| one.ip());
        of_it.min_by_key(other_family)
    };
    Ok(chosen.into_iter().filter_map(address).collect())
}

const SETTING: &str = "DRUMLINE_SOCKET_IFNAME, GLOO_SOCKET_IFNAME";

/// The address at which other hosts probably reach this one, and the reason. It is the one on the route to `towards`.
/// If that is not known, it is the one on the default route, and in a closed network, without a default route, that of
/// the only interface. A host that has nothing but loopback gets that.
///
/// # Errors
///
/// [`Io`](drumline_error::ErrorKind::Io) if no route leads to `towards`;
/// [`Setting`](drumline_error::ErrorKind::Setting) if several interfaces are left, lists them.
pub fn outward(towards: Option<SocketAddr>) -> Result<(IpAddr, String)> {
    if let Some(place) = towards {
        let address = address_towards(place)?;
        return Ok((address, format!("it is on the way to the master at {place}")));
    }
    let by_default = ELSEWHERE.iter().find_map(|place| address_towards(*place).ok());
    if let Some(address) = by_default.filter(|address| !needs_zone(address)) {
        return Ok((address, "it is on the default route".to_owned()));
    }
    let all = if_addrs::get_if_addrs()
        .map_err(|source| Error::io("cannot list the network interfaces", source))?;
    let up = all.iter().filter(|one| one.is_oper_up()).map(|one| (one.name.as_str(), one.ip()));
    only_one(&up.collect::<Vec<_>>())
}

/// Addresses that no network uses (RFC 5737, RFC 3849). Only default routes lead there.
const ELSEWHERE: [SocketAddr; 2] = [
    SocketAddr::new(IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)), 1),
    SocketAddr::new(IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1)), 1),
];

/// Whether an address means nothing without the name of an interface.
fn needs_zone(address: &IpAddr) -> bool {
    matches!(address, IpAddr::V6(v6) if v6.is_unicast_link_local())
}

/// What the interfaces of containers and virtual machines begin with. Other hosts are not behind them.
const VIRTUAL: [&str; 7] = ["docker", "br-", "virbr", "veth", "cni", "flannel", "cali"];

/// The address of the only interface that may lead to other hosts, of these interfaces, which are up.
fn only_one(up: &[(&str, IpAddr)]) -> Result<(IpAddr, String)> {
    let (own, mut outside): (Vec<_>, Vec<_>) = up
        .iter()
        .filter(|(_, address)| !needs_zone(address))
        .partition(|(_, address)| address.is_loopback());
    // No network with a router has addresses of 169.254.
    let is_likely = |(name, address): &(&str, IpAddr)| {
        let is_alone = matches!(address, IpAddr::V4(v4) if v4.is_link_local());
        !is_alone && !VIRTUAL.iter().any(|it| name.starts_with(it))
    };
    if outside.iter().any(is_likely) {
        outside.retain(|one| is_likely(one));
    }
    // An interface of several addresses is used with its first one of IPv4.
    outside.sort_by_key(|(_, address)| address.is_ipv6());
    let Some((name, address)) = outside.first() else {
        let loopback = own.first().map_or(Ipv4Addr::LOCALHOST.into(), |(_, address)| *address);
        return Ok((loopback, "this host has no other network".to_owned()));
    };
    if outside.iter().all(|(other, _)| other == name) {
        return Ok((*address, format!("{name} is the only network of this host")));
    }
    let listed: Vec<_> = outside.iter().map(|(name, it)| format!("{it} ({name})")).collect();
    Err(Error::setting(
        "DRUMLINE_SOCKET_IFNAME, DRUMLINE_BIND_ADDRESS",
        format!(
            "not set, and this host has several networks and no default route: {}; name the interface that leads to \
             the other hosts (a launcher: or --local-addr)",
            listed.join(", ")
        ),
    ))
}

/// The address of this host on the route to `place`. Other hosts on the way can reach it; if `place` is on
/// this host, it is loopback. (A host's own name often resolves to a useless address.)
pub fn address_towards(place: SocketAddr) -> Result<IpAddr> {
    let any: IpAddr = match place {
        SocketAddr::V4(_) => std::net::Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => std::net::Ipv6Addr::UNSPECIFIED.into(),
    };
    // Connecting a datagram socket sends nothing. It only looks up the route.
    UdpSocket::bind((any, 0))
        .and_then(|socket| socket.connect(place).and_then(|()| socket.local_addr()))
        .map(|address| address.ip())
        .map_err(|source| Error::io(format!("cannot find a route to {place}"), source))
}

/// The interfaces with these addresses, as text: `198.18.0.1 (eth0)`.
pub fn describe(addresses: &[IpAddr]) -> String {
    let one = |address: &IpAddr| match interface_with(*address) {
        Some(name) => format!("{address} ({name})"),
        None => address.to_string(),
    };
    addresses.iter().map(one).collect::<Vec<_>>().join(" and ")
}

/// The name of the interface with this address.
pub fn interface_with(address: IpAddr) -> Option<String> {
    let all = if_addrs::get_if_addrs().unwrap_or_default();
    all.into_iter().find(|one| one.ip() == address).map(|one| one.name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_chosen_by_name() {
        let all = ["docker0", "eth0", "eth1", "eth10", "ib0", "lo"];
        for (text, expected) in [
            ("eth", &["eth0", "eth1", "eth10"][..]),
            ("eth1", &["eth1", "eth10"]),
            ("=eth1", &["eth1"]),
            ("ib,=eth0", &["ib0", "eth0"]),
            ("=ib", &[]),
            ("^docker,lo", &["eth0", "eth1", "eth10", "ib0"]),
            ("^=eth1,docker, lo", &["eth0", "eth10", "ib0"]),
        ] {
            assert_eq!(Pattern::parse(text).unwrap().choose(&all), expected, "{text}");
        }
        for bad in ["", "^", "=", "eth0,", ",eth0"] {
            assert_eq!(Pattern::parse(bad), None);
            let error = addresses_of(bad, None).unwrap_err().to_string();
            assert!(error.contains("DRUMLINE_SOCKET_IFNAME"), "{error}");
        }
    }

    #[test]
    fn interfaces_have_addresses_and_others_are_listed() {
        for text in ["lo", "=lo"] {
            assert!(addresses_of(text, None).unwrap()[0].is_loopback());
        }
        let error = addresses_of("no-such-0", None).unwrap_err().to_string();
        assert!(error.contains("DRUMLINE_SOCKET_IFNAME") && error.contains("lo"), "{error}");
    }

    #[test]
    fn without_a_default_route_the_only_network_is_taken() {
        let of = |up: &[(&'static str, &str)]| {
            let up: Vec<_> = up.iter().map(|(name, it)| (*name, it.parse().unwrap())).collect();
            only_one(&up).map(|(address, _)| address.to_string()).map_err(|it| it.to_string())
        };
        let lo = [("lo", "127.0.0.1"), ("lo", "::1")];
        for (others, expected) in [
            (&[("eth0", "10.88.0.1")][..], "10.88.0.1"),
            (&[("eth0", "fd88::1"), ("eth0", "fe80::1"), ("eth0", "10.88.0.1")], "10.88.0.1"),
            (&[("eth0", "fe80::1"), ("eth0", "fd88::1")], "fd88::1"),
            (&[("eth0", "10.88.0.1"), ("eth0", "10.88.1.1")], "10.88.0.1"),
            (&[("docker0", "172.17.0.1"), ("ib0", "10.0.0.1"), ("br-1", "172.18.0.1")], "10.0.0.1"),
            (&[("docker0", "172.17.0.1")], "172.17.0.1"),
            (&[("usb0", "169.254.3.1"), ("eth0", "10.88.0.1")], "10.88.0.1"),
            (&[("eth0", "fe80::1")], "127.0.0.1"),
            (&[], "127.0.0.1"),
        ] {
            assert_eq!(of(&[&lo[..], others].concat()), Ok(expected.to_owned()), "{others:?}");
        }
        assert_eq!(of(&lo[1..]), Ok("::1".to_owned()));
        let several = [("eth0", "10.88.0.1"), ("eth1", "fd99::1"), ("docker0", "172.17.0.1")];
        let error = of(&several).unwrap_err();
        let told = ["10.88.0.1 (eth0), fd99::1 (eth1)", "DRUMLINE_SOCKET_IFNAME", "--local-addr"];
        assert!(told.iter().all(|part| error.contains(part)), "{error}");
        assert!(!error.contains("docker0"), "{error}");
    }

    #[test]
    fn the_way_to_this_host_is_loopback() {
        let way = address_towards(([127, 0, 0, 1], 1).into()).unwrap();
        assert!(way.is_loopback());
        assert!(describe(&[way]).contains("(lo)"));
    }
}
