//! Hands a segment over to another process: two descriptors over a Unix socket.
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
#[derive(Debug)]
pub struct Handles {
    /// The memory: a sealed memfd.
    pub memory: OwnedFd,
    /// The owner's doorbell: an eventfd.
    pub doorbell: OwnedFd,
}

/// The message that carries the descriptors.
const MESSAGE: [u8; 8] = *b"DRUMFDS\n";

/// Sends the descriptors of a segment to the process at the other end of `stream`.
///
/// # Errors
///
/// [`Error::Stranger`] for a process of another user, [`Error::Timeout`], [`Error::Closed`], or
/// [`Error::Os`]. After a failed system call, the other end has been told as by [`decline`].
pub fn send(stream: &UnixStream, handles: &Handles, deadline: Instant) -> Result<()> {
    let descriptors = [handles.memory.as_fd(), handles.doorbell.as_fd()];
    match Credentials::of_peer(stream).and_then(|peer| peer.check()) {
        Ok(()) => send_message(stream, &descriptors, deadline),
        Err(failure @ Error::Os { .. }) => decline(stream, deadline).and(Err(failure)),
        Err(stranger) => Err(stranger),
    }
}

/// Tells the process at the other end of `stream`, which waits for a segment, that it will not get one.
///
/// # Errors
///
/// [`Error::Timeout`], [`Error::Closed`], or [`Error::Os`].
pub fn decline(stream: &UnixStream, deadline: Instant) -> Result<()> {
    send_message(stream, &[], deadline)
}

/// After the first failed call it tries once more, without descriptors.
fn send_message(
    stream: &UnixStream,
    mut descriptors: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<()> {
    let (mut sent, mut failure) = (0, None);
    while sent < MESSAGE.len() {
        // The descriptors go with the first byte.
        let due = if sent == 0 { descriptors } else { &[] };
        match send_some(stream, &MESSAGE[sent..], due, deadline) {
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
    message: &[u8],
    descriptors: &[BorrowedFd<'_>],
    deadline: Instant,
) -> Result<usize> {
    const MISSING: &str = "this process had sent the descriptors of its segment";
    wait_for(stream, PollFlags::OUT, deadline, MISSING)?;
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(Error::os("send descriptors")(Errno::NOBUFS));
    }
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    match sendmsg(stream, &[IoSlice::new(message)], &mut control, flags) {
        Ok(bytes) => Ok(bytes),
        Err(Errno::AGAIN | Errno::INTR) => Ok(0),
        Err(Errno::PIPE | Errno::CONNRESET) => Err(Error::Closed { missing: MISSING }),
        Err(error) => Err(Error::os("send descriptors (sendmsg)")(error)),
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
    const WHAT: &str = "a message";
    // The message is to be taken out of the stream even after a failure.
    let mut failure = match Credentials::of_peer(stream).and_then(|peer| peer.check()) {
        Err(stranger @ Error::Stranger { .. }) => return Err(stranger),
        known => known.err(),
    };
    let mut message = [0; MESSAGE.len()];
    let mut received = 0;
    let mut descriptors: Vec<OwnedFd> = Vec::new();
    while received < message.len() {
        match receive_some(stream, &mut message[received..], &mut descriptors, deadline) {
            Ok((bytes, all_fit)) => {
                received += bytes;
                if !all_fit {
                    let why = "it has more than two descriptors, or this process can have no more";
                    failure.get_or_insert(Error::refused(WHAT, why));
                }
            }
            Err(error @ Error::Os { .. }) if failure.is_none() => failure = Some(error),
            Err(error) => return Err(failure.unwrap_or(error)),
        }
        if message[..received] != MESSAGE[..received] {
            return Err(Error::refused(WHAT, "it does not hand over a segment"));
        }
    }
    if let Some(failure) = failure {
        return Err(failure);
    }
    match <[OwnedFd; 2]>::try_from(descriptors) {
        Ok([memory, doorbell]) => Ok(Handles { memory, doorbell }),
        Err(found) => {
            Err(Error::refused(WHAT, format!("it has {} descriptors instead of two", found.len())))
        }
    }
}

/// Returns how many bytes it has received, and whether their descriptors are no more than two.
fn receive_some(
    stream: &UnixStream,
    message: &mut [u8],
    descriptors: &mut Vec<OwnedFd>,
    deadline: Instant,
) -> Result<(usize, bool)> {
    const MISSING: &str = "the descriptors of the peer's segment had arrived";
    wait_for(stream, PollFlags::IN, deadline, MISSING)?;
    let mut space = [MaybeUninit::uninit(); cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let answer = match recvmsg(stream, &mut [IoSliceMut::new(message)], &mut control, flags) {
        Ok(answer) if answer.bytes == 0 => return Err(Error::Closed { missing: MISSING }),
        Ok(answer) => answer,
        Err(Errno::AGAIN | Errno::INTR) => return Ok((0, true)),
        Err(error) => return Err(Error::os("receive descriptors (recvmsg)")(error)),
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
            Err(error) => return Err(Error::os("wait for a socket (ppoll)")(error)),
        }
    }
}
