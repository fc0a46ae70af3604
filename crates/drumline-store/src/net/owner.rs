//! Finds the user at the other end of a TCP connection that does not leave this host.
//!
//! It asks the kernel (`sock_diag`) for the one socket with the connection's two addresses, in reverse order.
//! So it takes no longer when there are many sockets, unlike reading `/proc/net/tcp`. No other socket can be
//! found under this pair: as long as this end is open, the kernel lets no other socket establish a connection
//! between the two addresses.
//!
//! Three answers mean that a caller has gone: no socket; a socket that is not established (someone tries
//! to connect from a port that was just given up); and a socket that no process holds any more. A stranger
//! that closes its end at once leaves the last one, and the kernel then names root as its user.
//!
//! The same answers come for an end that its listener has not accepted yet. So who has called asks for the listener
//! then: whoever holds it is the one who can accept.

use std::{
    io,
    net::{IpAddr, SocketAddr, TcpStream},
    os::fd::OwnedFd,
};

use rustix::{
    io::{Errno, retry_on_intr},
    net::{
        AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink, recv, send,
        socket_with,
    },
    process::geteuid,
};

/// SOCK_DIAG_BY_FAMILY in `linux/sock_diag.h`.
const BY_FAMILY: u16 = 20;
const NLM_F_REQUEST: u16 = 1;
const TCP: u8 = 6;
const ESTABLISHED: u8 = 1;
const LISTEN: u8 = 10;

/// Lengths and offsets in `struct nlmsghdr` and `struct inet_diag_msg`.
const HEADER_BYTES: usize = 16;
const REQUEST_BYTES: usize = HEADER_BYTES + 56;
const STATE_AT: usize = HEADER_BYTES + 1;
const UID_AT: usize = HEADER_BYTES + 64;
const INODE_AT: usize = HEADER_BYTES + 68;

/// Why the caller at the other end of `stream` is not accepted: a process of another user holds it.
pub(super) fn objection(stream: &TcpStream) -> Option<String> {
    let own = geteuid().as_raw();
    match owner(stream) {
        Ok(Some(uid)) if uid == own || uid == 0 => None,
        Ok(Some(uid)) => Some(format!(
            "it belongs to user {uid}, this process to user {own}; to let everybody on this host \
             in: `drumline run --torch-store=anyone`, or host_exposed in code"
        )),
        Ok(None) => Some("it had gone before it was asked who it is".to_owned()),
        Err(error) => Some(format!(
            "the kernel does not say whose it is ({error}); to let everybody on this host in: \
             `drumline run --torch-store=anyone`, or host_exposed in code"
        )),
    }
}

/// Why this process does not talk to whoever has answered its call `stream`: a process of another user holds the port.
/// `Ok(false)`: nobody holds it any more.
pub(super) fn check_answerer(stream: &TcpStream) -> Result<bool, String> {
    let own = geteuid().as_raw();
    let port = stream.peer_addr().map_or(0, |address| address.port());
    const WAY_OUT: &str = "give all processes of the job one DRUMLINE_SECRET or DRUMLINE_SECRET_FILE, or use another \
                           port; or, if you trust everybody on this host, set DRUMLINE_TRUST_STORE=1";
    match answerer(stream) {
        Ok(Some(uid)) if uid == own || uid == 0 => Ok(true),
        Ok(Some(uid)) => Err(format!(
            "port {port} of this host belongs to a process of user {uid}, this process to user {own}, and without a \
             secret it could be anybody's: {WAY_OUT}"
        )),
        Ok(None) => Ok(false),
        Err(error) => Err(format!(
            "the kernel does not say which user holds port {port} of this host ({error}), and without a secret it \
             could be anybody: {WAY_OUT}"
        )),
    }
}

/// The user of the process that has called. `None` if no process holds the other end any more.
fn owner(stream: &TcpStream) -> io::Result<Option<u32>> {
    Ok(ask(stream.peer_addr()?, stream.local_addr()?)?.and_then(|it| it.holder(ESTABLISHED)))
}

/// The user of the process that has accepted this process's call or, before that, can accept it. `None` if there is none
/// any more.
fn answerer(stream: &TcpStream) -> io::Result<Option<u32>> {
    let (own, theirs) = (stream.local_addr()?, stream.peer_addr()?);
    if let Some(uid) = ask(theirs, own)?.and_then(|it| it.holder(ESTABLISHED)) {
        return Ok(Some(uid));
    }
    // No connection has port 0, so this finds the listener.
    let nobody = SocketAddr::new(own.ip(), 0);
    if let Some(uid) = ask(theirs, nobody)?.and_then(|it| it.holder(LISTEN)) {
        return Ok(Some(uid));
    }
    // It may have been accepted, and its listener closed, between the two questions.
    Ok(ask(theirs, own)?.and_then(|it| it.holder(ESTABLISHED)))
}

/// What the kernel says of a socket.
struct Socket {
    state: u8,
    uid: u32,
    inode: u32,
}

impl Socket {
    /// The user of the process that holds it, if its state is `state`.
    fn holder(&self, state: u8) -> Option<u32> {
        (self.state == state && self.inode != 0).then_some(self.uid)
    }
}

/// Asks for the socket at `own`, which is connected to `peer`. `None`: there is none.
fn ask(own: SocketAddr, peer: SocketAddr) -> io::Result<Option<Socket>> {
    let request = request(own, peer);
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let protocol = Some(netlink::SOCK_DIAG);
    let socket: OwnedFd = socket_with(AddressFamily::NETLINK, SocketType::RAW, flags, protocol)?;
    let mut asked = 1;
    loop {
        match say(&socket, &request) {
            Err(Errno::AGAIN) if asked < ASKED_MAX => asked += 1,
            answer => return read(&answer?),
        }
    }
}

/// How often the kernel is asked if it has no room for the question or no answer to it.
const ASKED_MAX: usize = 3;

fn say(socket: &OwnedFd, request: &[u8]) -> Result<Vec<u8>, Errno> {
    retry_on_intr(|| send(socket, request, SendFlags::empty()))?;
    // The kernel has answered before it returns from `send`.
    let mut answer = vec![0; 512];
    let (length, _) = retry_on_intr(|| recv(socket, &mut answer[..], RecvFlags::empty()))?;
    answer.truncate(length);
    Ok(answer)
}

/// Asks for the socket at `own`, which is connected to `peer`.
fn request(own: SocketAddr, peer: SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(REQUEST_BYTES);
    bytes.extend((REQUEST_BYTES as u32).to_ne_bytes());
    bytes.extend(BY_FAMILY.to_ne_bytes());
    bytes.extend(NLM_F_REQUEST.to_ne_bytes());
    bytes.extend([0; 8]); // number and sender
    let family = if own.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    bytes.extend([family.as_raw() as u8, TCP, 0, 0]);
    bytes.extend(u32::MAX.to_ne_bytes()); // all states
    bytes.extend(own.port().to_be_bytes());
    bytes.extend(peer.port().to_be_bytes());
    for address in [own.ip(), peer.ip()] {
        let mut field = [0; 16];
        match address {
            IpAddr::V4(ip) => field[..4].copy_from_slice(&ip.octets()),
            IpAddr::V6(ip) => field.copy_from_slice(&ip.octets()),
        }
        bytes.extend(field);
    }
    bytes.extend([0; 4]); // any interface
    bytes.extend([u8::MAX; 8]); // no cookie
    bytes
}

fn read(answer: &[u8]) -> io::Result<Option<Socket>> {
    let short = || io::Error::other("its answer is too short");
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    if kind.ok_or_else(short)? != BY_FAMILY {
        let code = number(answer, HEADER_BYTES).ok_or_else(short)? as i32;
        return match Errno::from_raw_os_error(code.saturating_neg()) {
            Errno::NOENT => Ok(None),
            error => Err(error.into()),
        };
    }
    let state = *answer.get(STATE_AT).ok_or_else(short)?;
    let uid = number(answer, UID_AT).ok_or_else(short)?;
    let inode = number(answer, INODE_AT).ok_or_else(short)?;
    Ok(Some(Socket { state, uid, inode }))
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4)?.try_into().ok().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use std::net::{Ipv4Addr, Ipv6Addr, Shutdown, TcpListener};

    use super::*;

    fn connected(ip: IpAddr) -> io::Result<[TcpStream; 2]> {
        let listener = TcpListener::bind((ip, 0))?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        Ok([near, listener.accept()?.0])
    }

    #[test]
    fn the_kernel_knows_whose_the_other_end_is() {
        for ip in [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()] {
            // Some hosts have no IPv6.
            let Ok([near, accepted]) = connected(ip) else { continue };
            assert_eq!(owner(&accepted).unwrap(), Some(geteuid().as_raw()));
            assert_eq!(objection(&accepted), None);
            drop(near);
        }
    }

    /// The listener takes calls for all addresses, of both families where the system has both.
    #[test]
    fn the_kernel_knows_whose_the_listener_is_before_it_accepts() {
        let own = Some(geteuid().as_raw());
        let all: [(IpAddr, &[IpAddr]); 3] = [
            (Ipv4Addr::LOCALHOST.into(), &[Ipv4Addr::LOCALHOST.into()]),
            (Ipv4Addr::UNSPECIFIED.into(), &[Ipv4Addr::LOCALHOST.into()]),
            (
                Ipv6Addr::UNSPECIFIED.into(),
                &[
                    Ipv4Addr::LOCALHOST.into(),
                    Ipv6Addr::LOCALHOST.into(),
                    Ipv4Addr::LOCALHOST.to_ipv6_mapped().into(),
                ],
            ),
        ];
        for (at, called) in all {
            let Ok(listener) = TcpListener::bind((at, 0)) else { continue };
            let port = listener.local_addr().unwrap().port();
            for ip in called {
                let waits = TcpStream::connect((*ip, port)).unwrap();
                assert_eq!(answerer(&waits).unwrap(), own, "{at} called at {ip}");
                let accepted = listener.accept().unwrap().0;
                assert_eq!(answerer(&waits).unwrap(), own, "{at} called at {ip}, accepted");
                assert_eq!(check_answerer(&waits), Ok(true));
                drop(accepted);
            }
        }
    }

    #[test]
    fn who_has_stopped_listening_is_nobody() {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let near = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().unwrap().0;
        drop(listener);
        assert_eq!(check_answerer(&near), Ok(true), "it is accepted");
        drop(accepted);
        assert_eq!(answerer(&near).unwrap(), None);
    }

    /// For the kernel, such a socket belongs to root.
    #[test]
    fn who_has_closed_is_nobody() {
        let [near, accepted] = connected(Ipv4Addr::LOCALHOST.into()).unwrap();
        drop(near);
        assert_eq!(owner(&accepted).unwrap(), None);
        assert!(objection(&accepted).unwrap().contains("had gone"));
        let [near, accepted] = connected(Ipv4Addr::LOCALHOST.into()).unwrap();
        near.shutdown(Shutdown::Both).unwrap();
        assert_eq!(owner(&accepted).unwrap(), None);
    }
}
