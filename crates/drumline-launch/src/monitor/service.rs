//! Tells a service manager, such as systemd, how its service is: `sd_notify(3)`.

use std::{
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
};

use super::settings::ServiceManager;

/// The service manager at the other end of `NOTIFY_SOCKET`.
#[derive(Debug)]
pub(crate) struct Service {
    socket: UnixDatagram,
    address: SocketAddr,
    /// What the service manager had no room for. It gets that with the next message.
    late: Mutex<Vec<String>>,
    /// Whether the ranks have run.
    is_ready: AtomicBool,
    has_warned: AtomicBool,
}

impl Service {
    /// `None`, with a warning, if there can be no such socket. The job does not depend on it.
    pub(crate) fn of(manager: &ServiceManager) -> Option<Service> {
        let opened = address(manager.socket.as_bytes()).and_then(|address| {
            let socket = UnixDatagram::unbound()?;
            socket.set_nonblocking(true)?;
            Ok((socket, address))
        });
        let opened = opened.inspect_err(|error| {
            tracing::warn!("cannot use NOTIFY_SOCKET={}: {error}", manager.socket.display());
        });
        let (socket, address) = opened.ok()?;
        Some(Service {
            socket,
            address,
            late: Mutex::default(),
            is_ready: AtomicBool::new(false),
            has_warned: AtomicBool::new(false),
        })
    }

    /// What is said besides, once, when the ranks run.
    pub(crate) fn ready(&self) -> &'static str {
        if self.is_ready.swap(true, Ordering::Relaxed) { "" } else { "READY=1\n" }
    }

    /// Says these lines.
    pub(crate) fn say(&self, text: &str) {
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        let lines = with_late(std::mem::take(&mut *late), text);
        let sent = self.socket.send_to_addr(lines.join("\n").as_bytes(), &self.address);
        if sent.as_ref().is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            *late = lines;
        } else if let Err(error) = sent
            && !self.has_warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("cannot tell the service manager (NOTIFY_SOCKET): {error}");
        }
    }
}

/// The lines of a message, and those late ones that it does not replace.
fn with_late(late: Vec<String>, text: &str) -> Vec<String> {
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    let name = |line: &str| line.split('=').next().map(str::to_owned);
    let is_news = |line: &String| lines.iter().all(|it| name(it) != name(line));
    let kept: Vec<String> = late.into_iter().filter(is_news).collect();
    lines.extend(kept);
    lines
}

/// A path, or a name of the abstract namespace behind `@`.
fn address(socket: &[u8]) -> io::Result<SocketAddr> {
    match socket {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(socket)),
        _ => Err(io::Error::other("neither a path nor a name behind @")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_message_comes_with_the_next_one_unless_that_is_newer() {
        let late = vec!["READY=1".to_owned(), "STATUS=a".to_owned()];
        assert_eq!(with_late(late.clone(), "WATCHDOG=1"), ["WATCHDOG=1", "READY=1", "STATUS=a"]);
        assert_eq!(with_late(late, "STATUS=b"), ["STATUS=b", "READY=1"]);
    }
}
