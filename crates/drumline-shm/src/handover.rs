//! Hands a segment or two more connections over to another process: two descriptors over a Unix socket.
//!
//! One message of 8 bytes carries both. Each side refuses processes of other users, waits no longer
//! than its deadline, and works whether or not the socket is blocking.
//!
//! The stream behind the message belongs to other code. So after a failed system call, a side still sends its
//! message, without descriptors, and still takes the other side's message out of the stream.
//!
//! ```
//! use std::os::unix::net::UnixStream;
//! use std::time::{Duration, Instant};
//!
//! use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize, handover};
//!
//! let (here, there) = UnixStream::pair()?; // in practice, between two processes
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
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
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

/// The two descriptors with which another process maps a segment: for [`send`] or
/// [`PeerSegment::map`](crate::PeerSegment::map).
///
/// ```
/// use drumline_shm::{Handles, PeerSegment, Segment, SegmentSize};
///
/// let own = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 0 })?;
/// let Handles { memory, doorbell } = own.handles()?;
/// assert_eq!(PeerSegment::map(Handles { memory, doorbell })?.last_posted(), 0);
/// # Ok::<(), drumline_shm::Error>(())
/// ```
#[derive(Debug)]
pub struct Handles {
    /// The memory: a sealed memfd.
    pub memory: OwnedFd,
    /// The owner's doorbell: an eventfd.
    pub doorbell: OwnedFd,
}

/// What two descriptors are, as the message says that carries them.
struct What {
    message: [u8; 8],
    /// For errors.
    name: &'static str,
    sent: &'static str,
    arrived: &'static str,
}

const SEGMENT: What = What {
    message: *b"DRUMFDS\n",
    name: "a segment",
    sent: "this process had sent the descriptors of its segment",
    arrived: "the descriptors of the peer's segment had arrived",
};

const STREAMS: What = What {
    message: *b"DRUMSKT\n",
    name: "streams",
    sent: "this process had sent the descriptors of streams",
    arrived: "the descriptors of the peer's streams had arrived",
};

/// Sends the descriptors of a segment to the process at the other end of `stream`.
///
/// # Errors
///
/// [`Error::Stranger`] for a process of another user, [`Error::Timeout`], [`Error::Closed`], or
/// [`Error::Os`]. After a failed system call, the other end has been told as by [`decline`].
pub fn send(stream: &UnixStream, handles: &Handles, deadline: Instant) -> Result<()> {
    let descriptors = [handles.memory.as_fd(), handles.doorbell.as_fd()];
    match Credentials::of_peer(stream).and_then(|peer| peer.check()) {
        Ok(()) => send_message(stream, &SEGMENT, &descriptors, deadline),
        Err(failure @ Error::Os { .. }) => decline(stream, deadline).and(Err(failure)),
        Err(stranger) => Err(stranger),
    }
}

/// Sends two sockets to the process at the other end of `stream`, which is known to belong to this user.
///
/// ```
/// use std::{os::{fd::AsFd, unix::net::UnixStream}, time::Instant};
///
/// use drumline_shm::handover;
///
/// let (here, there) = UnixStream::pair()?; // in practice, between two processes
/// let (ours, theirs) = UnixStream::pair()?;
/// handover::send_streams(&here, [theirs.as_fd(), ours.as_fd()], Instant::now())?;
/// assert!(handover::receive_streams(&there, Instant::now())?.is_some());
/// handover::decline_streams(&here, Instant::now())?;
/// assert!(handover::receive_streams(&there, Instant::now())?.is_none());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
///
/// [`Error::Timeout`], [`Error::Closed`], or [`Error::Os`]. After a failed system call, the other end has been
/// told as by [`decline_streams`].
pub fn send_streams(
    stream: &UnixStream,
    streams: [BorrowedFd<'_>; 2],
    deadline: Instant,
) -> Result<()> {
    send_message(stream, &STREAMS, &streams, deadline)
}

/// Tells the process at the other end of `stream`, which waits for two sockets, that it will not get them.
///
/// # Errors
///
/// As for [`decline`].
pub fn decline_streams(stream: &UnixStream, deadline: Instant) -> Result<()> {
    send_message(stream, &STREAMS, &[], deadline)
}

/// Receives two sockets, and takes no other bytes out of the stream. `None`: the peer has declined.
///
/// # Errors
///
/// As for [`receive`], but the user of the other process is not looked at.
pub fn receive_streams(stream: &UnixStream, deadline: Instant) -> Result<Option<[OwnedFd; 2]>> {
    let descriptors = receive_message(stream, &STREAMS, None, deadline)?;
    if descriptors.is_empty() {
        return Ok(None);
    }
    two(descriptors).map(Some)
}

/// Tells the process at the other end of `stream`, which waits for a segment, that it will not get one.
///
/// # Errors
///
/// [`Error::Timeout`], [`Error::Closed`], or [`Error::Os`].
pub fn decline(stream: &UnixStream, deadline: Instant) -> Result<()> {
    send_message(stream, &SEGMENT, &[], deadline)
}

/// After the first failed call it tries once more, without descriptors.
fn send_message(
    stream: &UnixStream,
    what: &What,
    mut descriptors: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<()> {
    let (mut sent, mut failure) = (0, None);
    while sent < what.message.len() {
        // The descriptors go with the first byte.
        let due = if sent == 0 { descriptors } else { &[] };
        match send_some(stream, what, sent, due, deadline) {
            Ok(bytes) => sent += bytes,
            Err(error @ (Error::Os { .. } | Error::Closed { .. })) if failure.is_none() => {
                failure = Some(error);
                descriptors = &[];
            }
            Err(error) => return Err(failure.unwrap_or(error)),
        }
    }
    failure.map_or(Ok(()), Err)
}

/// Returns how many bytes it has sent.
fn send_some(
    stream: &UnixStream,
    what: &What,
    sent: usize,
    descriptors: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<usize> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Error::os("send descriptors")(Errno::NOBUFS));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match sendmsg(stream, &[IoSlice::new(&what.message[sent..])], &mut control, flags) {
        Ok(bytes) => Ok(bytes),
        Err(Errno::INTR) => Ok(0),
        Err(Errno::AGAIN) => wait_for(stream, PollFlags::OUT, deadline, what.sent).map(|()| 0),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(Error::Closed { missing: what.sent }),
        Err(error) => Err(Error::os("send descriptors")(error)),
    }
}

/// Receives the descriptors of a peer's segment, and takes no other bytes out of the stream.
/// [`PeerSegment::map`](crate::PeerSegment::map) checks the descriptors.
///
/// # Errors
///
/// [`Error::Stranger`] for a process of another user, [`Error::Refused`] for another message or
/// number of descriptors (which are closed), [`Error::Timeout`], [`Error::Closed`], or
/// [`Error::Os`]. After a failed system call, or another number of descriptors, the message is out of the
/// stream nevertheless.
pub fn receive(stream: &UnixStream, deadline: Instant) -> Result<Handles> {
    // The message is to be taken out of the stream even after a failure.
    let failure = match Credentials::of_peer(stream).and_then(|peer| peer.check()) {
        Err(stranger @ Error::Stranger { .. }) => return Err(stranger),
        known => known.err(),
    };
    let [memory, doorbell] = two(receive_message(stream, &SEGMENT, failure, deadline)?)?;
    Ok(Handles { memory, doorbell })
}

const MESSAGE: &str = "a message";

fn two(descriptors: Vec<OwnedFd>) -> Result<[OwnedFd; 2]> {
    <[OwnedFd; 2]>::try_from(descriptors).map_err(|found| {
        Error::refused(MESSAGE, format!("it has {} descriptors instead of two", found.len()))
    })
}

/// At most two descriptors, and the message that carries them. `failure` is what has failed before that.
fn receive_message(
    stream: &UnixStream,
    what: &What,
    mut failure: Option<Error>,
    deadline: Instant,
) -> Result<Vec<OwnedFd>> {
    let mut message = [0; 8];
    let mut received = 0;
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    while received < message.len() {
        match receive_some(stream, what, &mut message[received..], &mut descriptors, deadline) {
            Ok((bytes, all_fit)) => {
                received += bytes;
                if !all_fit {
                    let why = "it has more than two descriptors, or this process can have no more";
                    failure.get_or_insert(Error::refused(MESSAGE, why));
                }
            }
            Err(error @ Error::Os { .. }) if failure.is_none() => failure = Some(error),
            Err(error) => return Err(failure.unwrap_or(error)),
        }
        if message[..received] != what.message[..received] {
            return Err(Error::refused(MESSAGE, format!("it does not hand over {}", what.name)));
        }
    }
    failure.map_or(Ok(descriptors), Err)
}

/// Returns how many bytes it has received, and whether their descriptors are no more than two.
fn receive_some(
    stream: &UnixStream,
    what: &What,
    message: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    deadline: Instant,
) -> Result<(usize, bool)> {
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let answer = match recvmsg(stream, &mut [IoSliceMut::new(message)], &mut control, flags) {
        Ok(answer) if answer.bytes == 0 => return Err(Error::Closed { missing: what.arrived }),
        Ok(answer) => answer,
        Err(Errno::INTR) => return Ok((0, true)),
        Err(Errno::AGAIN) => {
            wait_for(stream, PollFlags::IN, deadline, what.arrived)?;
            return Ok((0, true));
        }
        Err(error) => return Err(Error::os("receive descriptors")(error)),
    };
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = item {
            descriptors.extend(rights);
        }
    }
    // The kernel has closed the descriptors that did not fit into `control`. The caller closes the others.
    let all_fit = descriptors.len() <= 2 && !answer.flags.contains(ReturnFlags::CTRUNC);
    Ok((answer.bytes, all_fit))
}

/// Waits until the socket is ready for `events` or has failed. An error at `deadline`.
fn wait_for(
    stream: &UnixStream,
    events: PollFlags,
    deadline: Instant,
    missing: &'static str,
) -> Result<()> {
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).ok(); // `None`, no limit, if too long for the kernel
        match poll(&mut [PollFd::new(stream, events)], left.as_ref()) {
            Ok(0) => return Err(Error::Timeout { missing }),
            Ok(_) => return Ok(()),
            Err(Errno::INTR) => {}
            Err(error) => return Err(Error::os("wait for a socket")(error)),
        }
    }
}
