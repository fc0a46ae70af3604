//! A client whose server sends given bytes: for `drumline-fuzz`; not part of the API.

use std::{
    io::{self, Write as _},
    net::Shutdown,
    os::unix::net::UnixStream,
};

use drumline_shm::Unforked;

use super::{
    TcpStore,
    connection::{Connection, Proof, Server},
};
use crate::net::{call::Address, stream::Stream};

/// A client whose server has sent `said` (as much as a socket's buffer holds) and then hung up. The returned
/// stream is the server's end. The client cannot connect again.
///
/// # Errors
///
/// The system provides no socket.
pub fn client(said: &[u8], is_extended: bool) -> io::Result<(TcpStore, UnixStream)> {
    let (ours, mut theirs) = UnixStream::pair()?;
    ours.set_nonblocking(true)?;
    theirs.set_nonblocking(true)?;
    let mut unsaid = said;
    while let Ok(bytes @ 1..) = theirs.write(unsaid) {
        unsaid = &unsaid[bytes..];
    }
    theirs.shutdown(Shutdown::Write)?;
    let address = Address::Unix("drumline-nobody-listens-here".to_owned());
    let target = Server::new(address, Proof::Owner);
    let ours = Unforked::open(|| Ok(ours))?;
    let connection = Connection::over(Stream::Unix(ours), is_extended);
    Ok((TcpStore::new("unix:@bytes".to_owned(), target, connection, None), theirs))
}
