//! How a segment gets to another process: two descriptors over a Unix socket.
//!
//! One message of 8 bytes carries both. Neither side trusts a process of another user, waits
//! beyond its deadline, or depends on whether the socket blocks.
//!
//! ```
//! use std::os::unix::net::UnixStream;
//! use std::time::{Duration, Instant};
//!
//! use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize, handover};
//!
//! let (here, there) = UnixStream::pair()?; // in truth, between two processes
//! let deadline = Instant::now() + Duration::from_secs(10);
//!
//! let own = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 0 })?;
//! handover::send(&here, &own.handles()?, deadline)?;
//!
//! let peer = PeerSegment::map(handover::receive(&there, deadline)?)?;
//! own.post(Parity::Even);
//! assert_eq!(peer.posted(Parity::Even), 1);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::Instant;

use rustix::cmsg_space;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::error::{Error, Result};
use crate::process::Credentials;
use crate::segment::Handles;

/// The message that the descriptors travel with.
const MESSAGE: [u8; 8] = *b"DRUMFDS\n";

/// Sends the descriptors of a segment, if the process at the other end may have them.
///
/// ```
/// # use std::{os::unix::net::UnixStream, time::{Duration, Instant}};
/// use drumline_shm::{PeerSegment, Segment, SegmentSize, handover};
///
/// let (to, from) = UnixStream::pair()?; // of two processes: connected
/// let deadline = Instant::now() + Duration::from_secs(5);
/// let own = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 0 })?;
/// handover::send(&to, &own.handles()?, deadline)?;
/// let peer = PeerSegment::map(handover::receive(&from, deadline)?)?;
/// assert_eq!(peer.slot_bytes(), own.slot_bytes());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::Stranger`] for a process of another user, [`Error::Timeout`], [`Error::Closed`], or
/// what the kernel says.
pub fn send(stream: &UnixStream, handles: &Handles, deadline: Instant) -> Result<()> {
    const MISSING: &str = "the descriptors of a segment were sent";
    Credentials::of_peer(stream)?.check()?;

    let descriptors = [handles.memory.as_fd(), handles.doorbell.as_fd()];
    let mut sent = 0;
    while sent < MESSAGE.len() {
        wait_for(stream, PollFlags::OUT, deadline, MISSING)?;
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        // The descriptors go with the first byte.
        if sent == 0 && !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
            return Err(Error::os("send descriptors")(Errno::NOBUFS));
        }
        let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
        match sendmsg(stream, &[IoSlice::new(&MESSAGE[sent..])], &mut control, flags) {
            Ok(bytes) => sent += bytes,
            Err(Errno::AGAIN | Errno::INTR) => {}
            Err(Errno::PIPE | Errno::CONNRESET) => return Err(Error::Closed { missing: MISSING }),
            Err(error) => return Err(Error::os("send descriptors")(error)),
        }
    }
    Ok(())
}

/// Receives the descriptors of a peer's segment, and takes nothing else out of the stream. They
/// are not checked yet: [`PeerSegment::map`](crate::PeerSegment::map) does that.
///
/// ```
/// # use std::{os::unix::net::UnixStream, time::{Duration, Instant}};
/// use drumline_shm::handover;
///
/// let (to, from) = UnixStream::pair()?; // of two processes: connected
/// let deadline = Instant::now() + Duration::from_secs(5);
/// std::io::Write::write_all(&mut &to, b"something else")?;
/// let error = handover::receive(&from, deadline).unwrap_err().to_string();
/// assert!(error.starts_with("refused a message that a peer handed over"), "{error}");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::Stranger`] for a process of another user, [`Error::Refused`] for another message or
/// number of descriptors (which are closed), [`Error::Timeout`], [`Error::Closed`], or what the
/// kernel says.
pub fn receive(stream: &UnixStream, deadline: Instant) -> Result<Handles> {
    const MISSING: &str = "the descriptors of its segment had come";
    const WHAT: &str = "a message";
    Credentials::of_peer(stream)?.check()?;

    let mut message = [0; MESSAGE.len()];
    let mut received = 0;
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    while received < message.len() {
        wait_for(stream, PollFlags::IN, deadline, MISSING)?;
        let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let rest = &mut [IoSliceMut::new(&mut message[received..])];
        let answer = match recvmsg(stream, rest, &mut control, flags) {
            Ok(answer) => answer,
            Err(Errno::AGAIN | Errno::INTR) => continue,
            Err(Errno::CONNRESET) => return Err(Error::Closed { missing: MISSING }),
            Err(error) => return Err(Error::os("receive descriptors")(error)),
        };
        for item in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = item {
                descriptors.extend(rights);
            }
        }
        // Those that found no place the kernel has closed; the others close with `descriptors`.
        if descriptors.len() > 2 || answer.flags.contains(ReturnFlags::CTRUNC) {
            return Err(Error::refused(WHAT, "it has more than two descriptors"));
        }
        if answer.bytes == 0 {
            return Err(Error::Closed { missing: MISSING });
        }
        received += answer.bytes;
        if message[..received] != MESSAGE[..received] {
            return Err(Error::refused(WHAT, "it is not one that hands over a segment"));
        }
    }
    match <[OwnedFd; 2]>::try_from(descriptors) {
        Ok([memory, doorbell]) => Ok(Handles { memory, doorbell }),
        Err(found) => {
            Err(Error::refused(WHAT, format!("it has {} descriptors instead of two", found.len())))
        }
    }
}

/// Waits until the socket can be read or written, has failed, or `deadline` has come.
fn wait_for(
    stream: &UnixStream,
    events: PollFlags,
    deadline: Instant,
    missing: &'static str,
) -> Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok(); // Too long for the kernel: no limit.
        match poll(&mut [PollFd::new(stream, events)], left.as_ref()) {
            Ok(0) => return Err(Error::Timeout { missing }),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(Error::os("wait for a socket")(error)),
        }
    }
}
