//! Connections that do not leave this host are not paced.
//!
//! The congestion control that the administrator chose is for lines. Where there is none, one that
//! paces what it sends by what it has measured (bbr) only costs: its timers, and what they hold back.
//! A socket that has been paced once is so until it is closed, whatever controls it later. So all begin
//! without, and those which leave the host get the administrator's choice when they are connected.

use std::{io, net::TcpStream, os::fd::AsFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};

/// It does not pace, is in every kernel, and open to every user.
const UNPACED: &str = "reno";

/// For a socket that is going to connect, or whose connections are going to be accepted.
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

/// For a socket that has begun without, and is connected.
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
    let [own, peer] = [stream.local_addr()?.ip(), stream.peer_addr()?.ip()];
    Ok(own != peer && !peer.is_loopback())
}

/// A route may have a choice of its own, which counts more than ours, and stays.
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

    /// Both ends of a connection to a listener that has begun without.
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
