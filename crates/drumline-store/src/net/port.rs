//! A free port for somebody who opens it a little later.

use std::{
    io::{self, Read},
    net::{IpAddr, TcpListener, TcpStream},
};

/// A port of `address` that is free, `wanted` or any if that is 0, and that the system gives to nobody else for a minute.
///
/// A short connection to itself leaves the port in the state TIME_WAIT. While it lasts, the system chooses the port for
/// nobody, and a program that names the port may still listen there, because servers set SO_REUSEADDR.
///
/// # Errors
///
/// The address is not one of this host, or the port is in use.
pub fn free_port(address: IpAddr, wanted: u16) -> io::Result<u16> {
    let listener = TcpListener::bind((address, wanted))?;
    let here = listener.local_addr()?;
    let mut client = TcpStream::connect(here)?;
    // The side that closes first is left in this state.
    drop(listener.accept()?);
    client.read_exact(&mut [0]).or_else(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => Ok(()),
        _ => Err(error),
    })?;
    Ok(here.port())
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, net::Ipv4Addr};

    use super::*;

    #[test]
    fn the_port_is_free_and_given_to_nobody_else() {
        let loopback = IpAddr::from(Ipv4Addr::LOCALHOST);
        let ports: BTreeSet<u16> = (0..200).map(|_| free_port(loopback, 0).unwrap()).collect();
        assert_eq!(ports.len(), 200);
        for port in ports {
            let any = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
            drop(any);
            TcpListener::bind((loopback, port)).unwrap();
        }
    }
}
