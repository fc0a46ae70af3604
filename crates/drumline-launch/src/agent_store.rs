//! The rendezvous store, which the launcher hosts: it is up before the first worker starts and
//! outlives them all, and no port is guessed twice.

use std::{io::ErrorKind, net::TcpListener};

use crate::{Error, Result};

/// A store on 127.0.0.1, there until dropped.
///
/// It only holds the port so far: `drumline::store::TcpStore::host` takes the listener's place.
#[derive(Debug)]
pub(crate) struct AgentStore {
    listener: TcpListener,
}

impl AgentStore {
    /// Hosts a store on `port`, or on a free one if that is 0.
    pub(crate) fn host(port: u16) -> Result<AgentStore> {
        match TcpListener::bind(("127.0.0.1", port)) {
            Ok(listener) => Ok(AgentStore { listener }),
            Err(error) if error.kind() == ErrorKind::AddrInUse => Err(Error::PortInUse { port }),
            Err(error) => Err(Error::system(format!("listen on 127.0.0.1:{port}"))(error)),
        }
    }

    /// The port it listens on.
    pub(crate) fn port(&self) -> Result<u16> {
        let address = self.listener.local_addr();
        Ok(address.map_err(Error::system("ask the store for its port"))?.port())
    }
}
