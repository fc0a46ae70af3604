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
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use super::settings::ServiceManager;

/// A service manager that does not take a message in this time does not get it.
const PATIENCE: Duration = Duration::from_secs(1);

/// The service manager at the other end of `NOTIFY_SOCKET`.
#[derive(Debug)]
pub(crate) struct Service {
    socket: UnixDatagram,
    address: SocketAddr,
    /// Whether the ranks have run.
    is_ready: AtomicBool,
    has_warned: AtomicBool,
}

impl Service {
    /// `None`, with a warning, if there can be no such socket. The job does not depend on it.
    pub(crate) fn of(manager: &ServiceManager) -> Option<Service> {
        let opened = address(manager.socket.as_bytes()).and_then(|address| {
            let socket = UnixDatagram::unbound()?;
            socket.set_write_timeout(Some(PATIENCE))?;
            Ok((socket, address))
        });
        let opened = opened.inspect_err(|error| {
            tracing::warn!("cannot use NOTIFY_SOCKET={}: {error}", manager.socket.display());
        });
        let (socket, address) = opened.ok()?;
        Some(Service {
            socket,
            address,
            is_ready: AtomicBool::new(false),
            has_warned: AtomicBool::new(false),
        })
    }

    /// The ranks run. The service is ready, then and from then on.
    pub(crate) fn runs(&self, status: &str) {
        let ready = if self.is_ready.swap(true, Ordering::Relaxed) { "" } else { "READY=1\n" };
        self.say(&format!("{ready}STATUS={status}"));
    }

    /// Something else has happened.
    pub(crate) fn is(&self, status: &str) {
        self.say(&format!("STATUS={status}"));
    }

    /// The job is about to end.
    pub(crate) fn stops(&self, status: &str) {
        self.say(&format!("STOPPING=1\nSTATUS={status}"));
    }

    /// The launcher lives.
    pub(crate) fn lives(&self) {
        self.say("WATCHDOG=1");
    }

    fn say(&self, text: &str) {
        if let Err(error) = self.socket.send_to_addr(text.as_bytes(), &self.address)
            && !self.has_warned.swap(true, Ordering::Relaxed)
        {
            tracing::warn!("cannot tell the service manager (NOTIFY_SOCKET): {error}");
        }
    }
}

/// A path, or a name of the abstract namespace behind `@`.
fn address(socket: &[u8]) -> io::Result<SocketAddr> {
    match socket {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name),
        [b'/', ..] => SocketAddr::from_pathname(std::ffi::OsStr::from_bytes(socket)),
        _ => Err(io::Error::other("neither a path nor a name behind @")),
    }
}
