//! The streams beside the control stream of two ranks of one host.
//!
//! The rank that calls makes them as pairs of connected sockets, and hands one end of each over on the control
//! stream, right after the handshake there. So a pair of ranks goes through one handshake, not three. If that fails
//! for want of descriptors, the rank says so and calls for each stream.

use std::{
    io::{self, ErrorKind},
    os::{fd::AsFd as _, unix::net::UnixStream},
    time::Instant,
};

use drumline_engine::transport::Channel;
use drumline_shm::{Error, Unforked, handover};
use drumline_store::net::{call::CallError, stream::Stream};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

/// What the streams are for, in the order in which they are handed over.
pub(super) const CHANNELS: [Channel; 2] = [Channel::Points, Channel::Data(0)];

/// Hands streams over to the rank at the other end of `control`, and returns the ends that stay here: none if this
/// process cannot make or send them.
pub(super) fn hand_over(control: &UnixStream, deadline: Instant) -> Result<Vec<Stream>, CallError> {
    let handed = match ends() {
        Ok((here, there)) => {
            let [points, data] = &there;
            let streams = [points.as_fd(), data.as_fd()];
            handover::send_streams(control, streams, deadline).map(|()| here.into())
        }
        Err(error) => {
            tracing::debug!(%error, "calls for each stream");
            handover::decline_streams(control, deadline).map(|()| Vec::new())
        }
    };
    match handed {
        Ok(streams) => Ok(streams.into_iter().map(Stream::Unix).collect()),
        // The other rank has been told.
        Err(error @ Error::Os { .. }) => {
            tracing::debug!(%error, "calls for each stream");
            Ok(Vec::new())
        }
        Err(Error::Closed { .. }) => Err(CallError::HungUp),
        Err(error) => Err(CallError::Io(io::Error::other(error))),
    }
}

type Ends = [Unforked<UnixStream>; 2];

/// The ends of two connections: those that stay here, and those that go.
fn ends() -> io::Result<(Ends, Ends)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let pair = || socketpair(AddressFamily::UNIX, SocketType::STREAM, flags, None);
    let ends = Unforked::open_all(|| {
        let ((a, b), (c, d)) = (pair()?, pair()?);
        Ok([a, c, b, d].map(UnixStream::from).into())
    })?;
    let mut ends = ends.into_iter();
    let mut two = || Some([ends.next()?, ends.next()?]);
    two().zip(two()).ok_or_else(|| unreachable!("two connections have four ends"))
}

/// Takes the streams over that the rank at the other end of `control` has handed over: none if it calls for each.
/// Call this when `control` can be read.
///
/// # Errors
///
/// [`ErrorKind::UnexpectedEof`] if the rank has hung up; other errors if the streams were sent and are lost.
pub(super) fn take_over(control: &UnixStream) -> io::Result<Vec<Stream>> {
    let taken = Unforked::open_all(|| match handover::receive_streams(control, Instant::now()) {
        Ok(streams) => Ok(streams.into_iter().flatten().map(UnixStream::from).collect()),
        Err(Error::Closed { .. }) => Err(ErrorKind::UnexpectedEof.into()),
        Err(Error::Os { error, .. }) if error.kind() == ErrorKind::ConnectionReset => {
            Err(ErrorKind::UnexpectedEof.into())
        }
        Err(error) => Err(io::Error::other(error)),
    })?;
    Ok(taken.into_iter().map(Stream::Unix).collect())
}

#[cfg(test)]
mod tests {
    use std::{
        io::{Read as _, Write as _},
        time::Duration,
    };

    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(60)
    }

    #[test]
    fn each_stream_leads_to_its_counterpart() {
        let (calls, is_called) = UnixStream::pair().unwrap();
        let mut here = hand_over(&calls, soon()).unwrap();
        let mut there = take_over(&is_called).unwrap();
        assert_eq!((here.len(), there.len()), (CHANNELS.len(), CHANNELS.len()));
        for (number, (here, there)) in here.iter_mut().zip(&mut there).enumerate() {
            let mut byte = [0];
            there.write_all(&[number as u8]).unwrap();
            here.read_exact(&mut byte).unwrap();
            assert_eq!(byte, [number as u8]);
            assert_eq!(here.read(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert_eq!(there.read(&mut byte).unwrap_err().kind(), ErrorKind::WouldBlock);
        }
        // No copy of the ends that went is left here.
        drop(there);
        for mut stream in here {
            assert_eq!(stream.read(&mut [0]).unwrap(), 0);
        }
    }

    #[test]
    fn a_rank_that_declines_calls_for_each_stream() {
        let (calls, is_called) = UnixStream::pair().unwrap();
        handover::decline_streams(&calls, soon()).unwrap();
        assert!(take_over(&is_called).unwrap().is_empty());
    }

    #[test]
    fn the_end_of_a_caller_is_told_from_lost_streams() {
        let (calls, is_called) = UnixStream::pair().unwrap();
        drop(calls);
        assert_eq!(take_over(&is_called).unwrap_err().kind(), ErrorKind::UnexpectedEof);
        let (mut calls, is_called) = UnixStream::pair().unwrap();
        calls.write_all(b"DRUMFDS\n").unwrap();
        let error = take_over(&is_called).unwrap_err();
        assert!(error.to_string().contains("does not hand over streams"), "{error}");
        assert_ne!(error.kind(), ErrorKind::UnexpectedEof);
    }

    #[test]
    fn a_caller_whose_peer_is_gone_is_told_so() {
        let (calls, is_called) = UnixStream::pair().unwrap();
        drop(is_called);
        assert!(matches!(hand_over(&calls, soon()), Err(CallError::HungUp)));
    }
}
