//! Shows other processes whether this one lives, and sees whether they do.
//!
//! A *sign* is a listening socket that accepts nobody. The kernel completes connections to it by itself, also while the
//! process is stopped, and ends them when the process ends, however it ends. So whoever is connected needs no answer, and no
//! byte is read. Where process numbers mean nothing (other PID namespaces, no `/proc`), this works as well.
//!
//! A sign is published as text: `HOST NETWORK UNIX-NAME`, and behind that the TCP address for other networks, if it has one.

use std::{
    collections::{BTreeMap, BTreeSet},
    io::{self, ErrorKind},
    net::SocketAddr,
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use drumline_shm::{PerProcess, this_host};
use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    io::Errno,
    net::{
        connect,
        sockopt::{self, socket_error},
    },
};

use super::{
    call::{Address, open, tcp_socket},
    gate::Listener,
    stream::Stream,
};
use crate::auth::Nonce;

/// The sign of this process. It stays until the process ends.
#[derive(Debug, Default)]
struct Own {
    text: String,
    unix: Option<Listener>,
    tcp: Option<Listener>,
}

static OWN: PerProcess<Mutex<Own>> = PerProcess::new();

/// The sign of this process. `reach_out` opens a listener for processes on other networks, which must be called once only.
///
/// # Errors
///
/// The system shows which host this is, and reading that failed.
pub fn own(reach_out: Option<&dyn Fn() -> Option<Listener>>) -> io::Result<String> {
    let mut own = lock(OWN.get(Mutex::default));
    if own.unix.is_none() && own.text.is_empty() {
        let (host, network) = place()?;
        let name = format!("drumline-process-{}", random()?);
        own.unix = Listener::unix(&name)
            .inspect_err(|error| tracing::debug!(%error, "has no sign on this host"))
            .ok();
        let name = if own.unix.is_some() { &name } else { "-" };
        own.text = format!("{host} {network} {name}");
    }
    if let (Some(reach_out), None) = (reach_out, &own.tcp) {
        own.tcp = reach_out();
        let address = own.tcp.as_ref().and_then(Listener::address);
        own.text.extend(address.map(|address| format!(" {address}")));
    }
    Ok(own.text.clone())
}

/// The host and the network of this process, as text. Where the system does not show them, no other process has the same.
///
/// # Errors
///
/// The system shows them, and reading them failed.
pub fn place() -> io::Result<(String, String)> {
    static UNKNOWN: PerProcess<Mutex<String>> = PerProcess::new();
    if let Some(place) = this_host()? {
        return Ok(place);
    }
    let mut unlike_any = lock(UNKNOWN.get(Mutex::default));
    if unlike_any.is_empty() {
        tracing::warn!("/proc does not say which host this is");
        *unlike_any = format!("unknown-{}", random()?);
    }
    Ok((unlike_any.clone(), "-".to_owned()))
}

fn random() -> io::Result<String> {
    Nonce::name().map_err(io::Error::other)
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// What this process sees of the signs of others: one for all who look. A connection stays in the queue of a sign until the
/// process of the sign ends, and that queue is limited.
static SIGHTS: PerProcess<Mutex<Sights>> = PerProcess::new();

type Sights = BTreeMap<String, Sight>;

/// A connection to a sign, from the first attempt on.
#[derive(Debug)]
enum Sight {
    Apart,
    Connecting(Stream),
    Open(Stream),
    /// It was open once, on this host.
    Ended,
}

/// What can be said of a sign now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Reached,
    Closed,
    Unclear,
}

/// Looks at `signs`, without waiting. Returns those that are reached, and those that are closed or not there. What can be
/// said of the others may come out at the next look.
///
/// # Errors
///
/// The system shows which host this is, and reading that failed.
pub fn look(signs: &BTreeSet<String>) -> io::Result<[BTreeSet<String>; 2]> {
    look_by(&mut lock(SIGHTS.get(Mutex::default)), signs)
}

fn look_by(sights: &mut Sights, signs: &BTreeSet<String>) -> io::Result<[BTreeSet<String>; 2]> {
    let (host, network) = place()?;
    let [mut reached, mut closed] = [BTreeSet::new(), BTreeSet::new()];
    for sign in signs {
        let words: Vec<&str> = sign.split(' ').collect();
        let address = match words[..] {
            [theirs, net, name, ..] if (theirs, net) == (&*host, &*network) => {
                Some(Address::Unix(name.to_owned())).filter(|_| name != "-")
            }
            [_, _, _, tcp] => tcp.parse().ok().map(Address::Tcp),
            _ => None,
        };
        let Some(address) = address else { continue };
        match sights.entry(sign.clone()).or_insert(Sight::Apart).look(&address) {
            Seen::Reached => reached.insert(sign.clone()),
            Seen::Closed => closed.insert(sign.clone()),
            Seen::Unclear => false,
        };
    }
    // Others may look at the rest.
    let lasts = |sight: &Sight| match sight {
        Sight::Open(stream) => matches!(has_ended(stream), Ok(false)),
        Sight::Connecting(stream) => is_connected(stream).is_ok(),
        Sight::Apart | Sight::Ended => false,
    };
    sights.retain(|sign, sight| signs.contains(sign) || lasts(sight));
    Ok([reached, closed])
}

impl Sight {
    fn look(&mut self, address: &Address) -> Seen {
        if let Sight::Apart = self {
            match begin(address) {
                Ok(sight) => *self = sight,
                Err(error) => return of(&error),
            }
        }
        if let Sight::Connecting(stream) = self {
            match is_connected(stream) {
                Ok(false) => return Seen::Unclear,
                Ok(true) => {}
                Err(error) => {
                    *self = Sight::Apart;
                    return of(&error);
                }
            }
        }
        match std::mem::replace(self, Sight::Ended) {
            Sight::Connecting(stream) | Sight::Open(stream) => match has_ended(&stream) {
                Ok(false) => {
                    *self = Sight::Open(stream);
                    Seen::Reached
                }
                // Something between two hosts may have reset it.
                Ok(true) if matches!(address, Address::Tcp(_)) => {
                    *self = Sight::Apart;
                    self.look(address)
                }
                Ok(true) => Seen::Closed,
                Err(error) => {
                    tracing::debug!(%error, "lost sight of a process");
                    *self = Sight::Apart;
                    Seen::Unclear
                }
            },
            Sight::Apart | Sight::Ended => Seen::Closed,
        }
    }
}

/// How often the kernel of another host is asked whether it is there, and how often it may not answer.
const PROBED_EVERY: Duration = Duration::from_secs(2);
const PROBES_MAX: u32 = 3;

/// What a failed attempt to connect says.
fn of(error: &io::Error) -> Seen {
    match error.kind() {
        ErrorKind::ConnectionRefused => Seen::Closed,
        _ => Seen::Unclear,
    }
}

fn begin(address: &Address) -> io::Result<Sight> {
    let Address::Tcp(address) = address else {
        return open(address, Instant::now()).map(Sight::Open);
    };
    let socket = tcp_socket(address)?;
    // A host that has gone ends no connection.
    sockopt::set_socket_keepalive(&*socket, true)?;
    sockopt::set_tcp_keepidle(&*socket, PROBED_EVERY)?;
    sockopt::set_tcp_keepintvl(&*socket, PROBED_EVERY)?;
    sockopt::set_tcp_keepcnt(&*socket, PROBES_MAX)?;
    match connect(&*socket, address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(Sight::Connecting(Stream::Tcp(socket))),
        Err(error) => Err(error.into()),
    }
}

fn is_connected(stream: &Stream) -> io::Result<bool> {
    let Stream::Tcp(tcp) = stream else { return Ok(true) };
    socket_error(tcp)??;
    match tcp.peer_addr() {
        // If nothing listens there, a connection can connect to itself.
        Ok(peer) if own_address(tcp)? == peer => Err(ErrorKind::ConnectionRefused.into()),
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotConnected => Ok(false),
        Err(error) => Err(error),
    }
}

fn own_address(tcp: &std::net::TcpStream) -> io::Result<SocketAddr> {
    tcp.local_addr()
}

/// Whether the other end has ended an open connection. An error: only the way to it is lost.
fn has_ended(stream: &Stream) -> io::Result<bool> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut list = [PollFd::new(stream, PollFlags::RDHUP)];
    if poll(&mut list, Some(&now)).unwrap_or(0) == 0 {
        return Ok(false);
    }
    match socket_error(stream)? {
        Ok(()) | Err(Errno::CONNRESET | Errno::PIPE) => Ok(true),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;

    const HANG: Duration = Duration::from_secs(60);

    /// Looks until the sign is seen so.
    fn see(sights: &mut Sights, sign: &str, wanted: Seen) {
        let end = Instant::now() + HANG;
        loop {
            let [reached, closed] = look_by(sights, &[sign.to_owned()].into()).unwrap();
            let seen = match (reached.contains(sign), closed.contains(sign)) {
                (true, false) => Seen::Reached,
                (false, true) => Seen::Closed,
                _ => Seen::Unclear,
            };
            if seen == wanted {
                return;
            }
            assert!(Instant::now() < end, "{sign} is {seen:?}, not {wanted:?}");
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    #[test]
    fn a_sign_is_reached_until_its_process_ends() {
        let (host, network) = place().unwrap();
        let name = format!("drumline-process-{}", random().unwrap());
        let unix = Listener::unix(&name).unwrap();
        let tcp = Listener::tcp((Ipv4Addr::LOCALHOST, 0).into()).unwrap();
        let near = format!("{host} {network} {name}");
        let far = format!("elsewhere net {name} {}", tcp.address().unwrap());
        let (mut early, mut late) = (Sights::default(), Sights::default());
        see(&mut early, &near, Seen::Reached);
        drop(unix);
        for sights in [&mut early, &mut late] {
            see(sights, &near, Seen::Closed);
            see(sights, &near, Seen::Closed);
        }
        see(&mut early, &far, Seen::Reached);
        see(&mut early, &far, Seen::Reached);
        drop(tcp);
        for sights in [&mut early, &mut late] {
            see(sights, &far, Seen::Closed);
        }
    }

    #[test]
    fn a_sign_whose_connection_is_reset_is_looked_at_again() {
        let listener = std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let sign = format!("elsewhere net name {}", listener.local_addr().unwrap());
        let mut sights = Sights::default();
        see(&mut sights, &sign, Seen::Reached);
        let (stream, _) = listener.accept().unwrap();
        sockopt::set_socket_linger(&stream, Some(Duration::ZERO)).unwrap();
        drop(stream);
        let [_, closed] = look_by(&mut sights, &[sign.clone()].into()).unwrap();
        assert!(closed.is_empty(), "it listens");
        see(&mut sights, &sign, Seen::Reached);
        drop(listener);
        see(&mut sights, &sign, Seen::Closed);
    }

    #[test]
    fn what_cannot_be_reached_is_unclear() {
        let mut sights = Sights::default();
        let (host, network) = place().unwrap();
        let all = ["", "x", "elsewhere net name", "elsewhere net name no-address"];
        for sign in all.map(str::to_owned).into_iter().chain([format!("{host} {network} -")]) {
            let [reached, closed] = look_by(&mut sights, &[sign.clone()].into()).unwrap();
            assert!(reached.is_empty() && closed.is_empty(), "{sign}");
        }
    }

    #[test]
    fn this_process_shows_one_sign() {
        let sign = own(None).unwrap();
        assert_eq!(own(None).unwrap(), sign);
        see(&mut Sights::default(), &sign, Seen::Reached);
        let listener = || Listener::tcp((Ipv4Addr::LOCALHOST, 0).into()).ok();
        let extended = own(Some(&listener)).unwrap();
        assert!(extended.starts_with(&format!("{sign} 127.0.0.1:")), "{extended}");
        assert_eq!(
            [own(Some(&listener)).unwrap(), own(None).unwrap()],
            [extended.clone(), extended]
        );
    }

    /// As many as groups that a process makes in its life.
    #[test]
    fn a_sign_is_reached_however_often_somebody_begins_to_look() {
        let (host, network) = place().unwrap();
        let name = format!("drumline-process-{}", random().unwrap());
        let unix = Listener::unix(&name).unwrap();
        let (sign, far) = (format!("{host} {network} {name}"), "elsewhere net name".to_owned());
        for _ in 0..5000 {
            let [reached, _] = look(&[sign.clone()].into()).unwrap();
            assert!(reached.contains(&sign));
            look(&[far.clone()].into()).unwrap();
        }
        drop(unix);
        let [_, closed] = look(&[sign.clone()].into()).unwrap();
        assert!(closed.contains(&sign));
    }
}
