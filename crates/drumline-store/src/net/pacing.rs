//! Turns off pacing for connections that do not leave this host.
//!
//! The administrator chooses the congestion control for real lines. On loopback, a congestion control that
//! paces by what it has measured (bbr) only costs time: for its timers, and for bytes that it holds back.
//! Once a socket has been paced, it is paced until it is closed, even under another congestion control. So
//! all sockets begin without pacing, and those that leave the host get the administrator's choice when they
//! are connected.

use std::{io, net::TcpStream, os::fd::AsFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};

/// A congestion control that does not pace, exists in every kernel, and is open to every user.
const UNPACED: &str = "reno";

/// Call it for a socket before it connects, and for a listener before it accepts.
pub(super) fn begin_without(socket: impl AsFd) {
    let begun = match sockopt::tcp_congestion(&socket) {
        Ok(chosen) if paces(&chosen) => sockopt::set_tcp_congestion(&socket, UNPACED),
        Ok(_) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = begun {
        tracing::debug!(%error, "connections keep their congestion control");
    }
}

/// Call it for a socket that began without pacing, once it is connected.
pub(super) fn settle(stream: &TcpStream) {
    let settled = match leaves_this_host(stream) {
        Ok(true) => as_chosen(stream),
        Ok(false) => Ok(()),
        Err(error) => Err(error),
    };
    if let Err(error) = settled {
        tracing::debug!(%error, "the connection keeps its congestion control");
    }
}

fn leaves_this_host(stream: &TcpStream) -> io::Result<bool> {
    let [own, peer] = [stream.local_addr()?, stream.peer_addr()?].map(|it| it.ip().to_canonical());
    Ok(own != peer && !peer.is_loopback())
}

/// Sets the administrator's choice. A route may have a choice of its own, which takes precedence and stays.
fn as_chosen(stream: &TcpStream) -> io::Result<()> {
    if sockopt::tcp_congestion(stream)? != UNPACED {
        return Ok(());
    }
    let fresh = socket_with(AddressFamily::INET, SocketType::STREAM, SocketFlags::CLOEXEC, None)?;
    let chosen = sockopt::tcp_congestion(&fresh)?;
    if paces(&chosen) {
        sockopt::set_tcp_congestion(stream, &chosen)?;
    }
    Ok(())
}

fn paces(name: &str) -> bool {
    name.starts_with("bbr")
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, TcpListener};

    use super::*;

    fn chosen() -> String {
        let socket = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        sockopt::tcp_congestion(&socket).unwrap()
    }

    /// Both ends of a connection to a listener that began without pacing.
    fn connected() -> [TcpStream; 2] {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        begin_without(&listener);
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [near, listener.accept().unwrap().0]
    }

    #[test]
    fn what_stays_on_the_host_is_not_paced() {
        let [_near, accepted] = connected();
        settle(&accepted);
        assert!(!leaves_this_host(&accepted).unwrap());
        let name = sockopt::tcp_congestion(&accepted).unwrap();
        assert!(!paces(&name) && (paces(&chosen()) || name == chosen()), "{name}");
    }

    #[test]
    fn what_leaves_the_host_is_as_the_administrator_chose() {
        let [_near, accepted] = connected();
        as_chosen(&accepted).unwrap();
        assert_eq!(sockopt::tcp_congestion(&accepted).unwrap(), chosen());
    }
}
