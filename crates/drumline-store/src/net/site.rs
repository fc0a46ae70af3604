//! Where a process listens that others call by a name.
//!
//! A host may know its own name by another address than others do. Debian's `/etc/hosts` has `127.0.1.1` for it, and in
//! a container it may have none. So what the resolver says of this host's own name only tells that it is this host.

use std::{
    io::{self, ErrorKind},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, ToSocketAddrs as _, UdpSocket},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use rustix::{io::Errno, system::uname};

use super::{Endpoint, call::time_left};
use crate::{Error, Result};

/// Where to listen, for those who call a host by some name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Site {
    /// At exactly this address of this host.
    At(SocketAddr),
    /// At all addresses of this host.
    Everywhere,
    /// On another host, which has these addresses.
    Elsewhere(Vec<IpAddr>),
}

/// The addresses to which `host` resolves, and loopback for the own name of a host that nobody knows. The system's
/// resolver has no time limit, so it runs on a thread of its own, which is left behind at the deadline.
pub fn resolve(host: &str, port: u16, deadline: Instant) -> io::Result<Vec<SocketAddr>> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(vec![(ip, port).into()]);
    }
    let (sender, receiver) = mpsc::channel();
    let name = host.to_owned();
    thread::Builder::new().name("drumline-resolve".into()).spawn(move || {
        let addresses = (name.as_str(), port).to_socket_addrs().map(Iterator::collect);
        let addresses = addresses.or_else(|error| own(&name, port).map_err(|_| error));
        // If it took too long, nobody receives the result.
        let _ = sender.send(addresses);
    })?;
    match receiver.recv_timeout(time_left(deadline)?) {
        Ok(addresses) => addresses,
        Err(_) => Err(io::Error::new(
            ErrorKind::TimedOut,
            format!("the name {host} could not be resolved in time"),
        )),
    }
}

/// Asks for the addresses of `host` before a server listens there, which has no time limit.
///
/// # Errors
///
/// [`Store`](drumline_error::ErrorKind::Store) if it is not known, or not within `timeout`.
pub fn reach_resolver(host: &str, port: u16, timeout: Duration) -> Result<()> {
    resolve(host, port, Instant::now() + timeout.min(HOUR)).map(drop).map_err(|error| {
        Error::store(
            &Endpoint::Tcp { host: host.to_owned(), port }.to_string(),
            "listen",
            format!("the name {host} cannot be resolved: {error}"),
        )
    })
}

/// Longer than any resolver takes.
const HOUR: Duration = Duration::from_secs(3600);

/// Whether `host` resolves to addresses of this machine only. False for an unknown name.
pub fn is_loopback(host: &str, timeout: Duration) -> bool {
    resolve(host, 0, Instant::now() + timeout.min(RESOLVE_MAX)).is_ok_and(|addresses| {
        !addresses.is_empty() && addresses.iter().all(|address| address.ip().is_loopback())
    })
}

/// The time limit for resolving a name.
const RESOLVE_MAX: Duration = Duration::from_secs(5);

/// Whether a name or an address means the host of whoever uses it, so that no other host is meant to come.
pub fn is_loopback_name(host: &str) -> bool {
    let loopback = |name: &str| {
        ["localhost", "localhost4", "localhost6", "ip6-localhost", "ip6-loopback"]
            .iter()
            .any(|known| name.eq_ignore_ascii_case(known))
    };
    match host.parse::<IpAddr>() {
        Ok(address) => address.to_canonical().is_loopback(),
        Err(_) => {
            let mut labels = host.trim_end_matches('.').split('.');
            labels.next().is_some_and(loopback)
                || labels.next_back().is_some_and(|last| last.eq_ignore_ascii_case("localhost"))
        }
    }
}

/// Whether this host has that name.
fn is_own_name(host: &str) -> bool {
    let uname = uname();
    let own = uname.nodename().to_string_lossy();
    let short = own.split('.').next().unwrap_or_default();
    [&*own, short].iter().any(|own| !own.is_empty() && host.eq_ignore_ascii_case(own))
}

/// Where a process of this host listens for `host`, which the system has resolved to `addresses`.
pub fn of(host: &str, addresses: &[SocketAddr]) -> Site {
    choose(host, addresses, is_here)
}

/// Whether this host has that address.
pub(crate) fn is_here(ip: IpAddr) -> bool {
    // Without a free descriptor nobody knows. Then listening there fails for that reason.
    let is_unknown = |error: io::Error| {
        [Errno::MFILE, Errno::NFILE]
            .map(Errno::raw_os_error)
            .map(Some)
            .contains(&error.raw_os_error())
    };
    UdpSocket::bind((ip, 0)).map_or_else(is_unknown, |_| true)
}

fn choose(host: &str, addresses: &[SocketAddr], is_here: impl Fn(IpAddr) -> bool) -> Site {
    let here: Vec<SocketAddr> =
        addresses.iter().copied().filter(|address| is_here(address.ip())).collect();
    let is_exact = host.parse::<IpAddr>().is_ok() || is_loopback_name(host);
    match here[..] {
        [] => Site::Elsewhere(addresses.iter().map(SocketAddr::ip).collect()),
        [first, ..] if first.ip().is_unspecified() => Site::Everywhere,
        [first, ..] if is_exact => Site::At(first),
        [only] if !only.ip().is_loopback() => Site::At(only),
        // Others may know the name by any address, also by one that is not among these.
        _ => Site::Everywhere,
    }
}

/// The address at which processes of this host reach a listener.
pub(crate) fn called_here(mut bound: SocketAddr) -> SocketAddr {
    if bound.ip().is_unspecified() {
        let v4 = IpAddr::from(Ipv4Addr::LOCALHOST);
        bound.set_ip(if is_here(v4) { v4 } else { Ipv6Addr::LOCALHOST.into() });
    }
    bound
}

/// What this host's own name stands for if the resolver does not know it.
fn own(host: &str, port: u16) -> io::Result<Vec<SocketAddr>> {
    match is_own_name(host) {
        true => Ok(vec![called_here((Ipv6Addr::UNSPECIFIED, port).into())]),
        false => Err(ErrorKind::NotFound.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choice(host: &str, addresses: &[&str]) -> Site {
        let at = |ip: &&str| SocketAddr::new(ip.parse().unwrap(), 1);
        let addresses: Vec<SocketAddr> = addresses.iter().map(at).collect();
        choose(host, &addresses, |ip| ip.to_string() != "10.88.0.9")
    }

    #[test]
    fn the_resolver_is_not_asked_by_which_address_others_know_this_host() {
        let at = |ip: &str| Site::At(SocketAddr::new(ip.parse().unwrap(), 1));
        for (host, addresses, expected) in [
            ("bh1", &["127.0.1.1"][..], Site::Everywhere),
            ("bh1", &["127.0.0.1"], Site::Everywhere),
            ("bh1", &["::1"], Site::Everywhere),
            ("bh1", &["127.0.1.1", "10.88.0.1"], Site::Everywhere),
            ("bh1", &["10.88.0.1", "fd88::1"], Site::Everywhere),
            ("bh1", &["10.88.0.1"], at("10.88.0.1")),
            ("bh1", &["10.88.0.9", "10.88.0.1"], at("10.88.0.1")),
            ("bh1", &["10.88.0.9"], Site::Elsewhere(vec!["10.88.0.9".parse().unwrap()])),
            ("bh1", &[], Site::Elsewhere(Vec::new())),
            ("localhost", &["::1", "127.0.0.1"], at("::1")),
            ("127.0.1.1", &["127.0.1.1"], at("127.0.1.1")),
            ("10.88.0.1", &["10.88.0.1"], at("10.88.0.1")),
            ("0.0.0.0", &["0.0.0.0"], Site::Everywhere),
            ("::", &["::"], Site::Everywhere),
        ] {
            assert_eq!(choice(host, addresses), expected, "{host} {addresses:?}");
        }
    }

    #[test]
    fn names_of_loopback_are_known() {
        for name in ["localhost", "LocalHost.", "localhost.localdomain", "ip6-localhost"] {
            assert!(is_loopback_name(name), "{name}");
        }
        for name in ["127.0.1.1", "::1", "::ffff:127.0.0.1", "db.localhost", "localhost6"] {
            assert!(is_loopback_name(name), "{name}");
        }
        for name in ["bh1", "10.0.0.1", "0.0.0.0", "localhost7", "my-localhost.example"] {
            assert!(!is_loopback_name(name), "{name}");
        }
    }
}
