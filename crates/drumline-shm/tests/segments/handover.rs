//! Sockets that deliver no segment: other messages, other users, nothing.

use std::io::{Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::thread;
use std::time::{Duration, Instant};

use drumline_shm::{Credentials, Error, Parity, PeerSegment, Segment, SegmentSize, handover};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};

use crate::LONG;

const SIZE: SegmentSize = SegmentSize { slot_bytes: 4096, arena_bytes: 0 };

fn deadline() -> Instant {
    Instant::now() + Duration::from_secs(60)
}

/// Sends `message` with `count` descriptors of `fd`, as a process with another protocol might.
fn send_raw(stream: &UnixStream, message: &[u8], fd: BorrowedFd<'_>, count: usize) {
    let descriptors = vec![fd; count];
    let mut space = vec![std::mem::MaybeUninit::uninit(); 4096];
    let mut control = SendAncillaryBuffer::new(&mut space);
    assert!(count == 0 || control.push(SendAncillaryMessage::ScmRights(&descriptors)));
    let message = [std::io::IoSlice::new(message)];
    rustix::net::sendmsg(stream, &message, &mut control, SendFlags::empty()).unwrap();
}

#[test]
fn other_messages_are_refused_and_their_descriptors_closed() {
    const MESSAGE: &[u8] = b"DRUMFDS\n";
    for (message, count, why) in [
        (MESSAGE, 0, "0 descriptors instead of two"),
        (MESSAGE, 1, "1 descriptors instead of two"),
        (MESSAGE, 3, "more than two"),
        (MESSAGE, 4, "more than two"),
        (MESSAGE, 100, "more than two"),
        (b"GET / HTTP/1.1\r\n", 2, "does not hand over"),
        (b"D+", 2, "does not hand over"),
    ] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let (pipe_read, pipe_write) = std::io::pipe().unwrap();
        send_raw(&theirs, message, pipe_write.as_fd(), count);
        drop(pipe_write);
        let refused = handover::receive(&ours, deadline()).unwrap_err();
        assert!(matches!(refused, Error::Refused { .. }), "{refused}");
        assert!(refused.to_string().contains(why), "{refused}: expected {why:?}");
        // The pipe ends when no descriptor of its other end is left.
        assert_eq!(poll(&mut [PollFd::new(&pipe_read, PollFlags::IN)], Some(&LONG)).unwrap(), 1);
        assert_eq!(rustix::io::read(&pipe_read, &mut [0; 1]).unwrap(), 0, "{why}");
    }
}

#[test]
fn a_handover_in_pieces_takes_nothing_but_itself() {
    let own = Segment::create(SIZE).unwrap();
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    let sender = thread::spawn(move || {
        let handles = own.handles().unwrap();
        let (first, second) = (handles.memory.as_fd(), handles.doorbell.as_fd());
        send_raw(&theirs, b"DRU", first, 1);
        thread::yield_now();
        send_raw(&theirs, b"M", second, 1);
        theirs.write_all(b"FDS\nnext").unwrap();
        own
    });
    // A deadline so far away that the kernel must cap the time limit.
    let never = Instant::now() + Duration::from_secs(1 << 60);
    let peer = PeerSegment::map(handover::receive(&ours, never).unwrap()).unwrap();
    sender.join().unwrap().post(Parity::Even);
    assert_eq!(peer.posted(Parity::Even), 1);
    let mut rest = Vec::new();
    ours.set_nonblocking(false).unwrap();
    (&ours).read_to_end(&mut rest).unwrap();
    assert_eq!(rest, b"next");
}

/// Both sides then go on over the same stream: nothing of the hand-over may be left in it.
#[test]
fn after_a_hand_over_that_failed_the_stream_goes_on() {
    let own = Segment::create(SIZE).unwrap();
    let handles = own.handles().unwrap();
    let no_descriptors = |from: &UnixStream| handover::decline(from, deadline()).unwrap();
    let too_many = |from: &UnixStream| send_raw(from, b"DRUMFDS\n", handles.memory.as_fd(), 3);
    for failing in [&no_descriptors as &dyn Fn(&UnixStream), &too_many] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        failing(&theirs);
        theirs.write_all(b"next").unwrap();
        handover::receive(&ours, deadline()).unwrap_err();
        drop(theirs);
        let mut rest = Vec::new();
        (&ours).read_to_end(&mut rest).unwrap();
        assert_eq!(rest, b"next");
    }
}

#[test]
fn a_silent_or_gone_peer_is_no_hang() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    let soon = || Instant::now() + Duration::from_millis(20);
    assert!(matches!(handover::receive(&ours, soon()), Err(Error::Timeout { .. })));
    theirs.write_all(b"DRUM").unwrap();
    assert!(matches!(handover::receive(&ours, soon()), Err(Error::Timeout { .. })));

    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(b"DRUM").unwrap();
    drop(theirs);
    assert!(matches!(handover::receive(&ours, deadline()), Err(Error::Closed { .. })));
    let handles = Segment::create(SIZE).unwrap().handles().unwrap();
    assert!(matches!(handover::send(&ours, &handles, deadline()), Err(Error::Closed { .. })));

    // The socket is full, and the peer reads nothing.
    let (ours, _theirs) = UnixStream::pair().unwrap();
    ours.set_nonblocking(true).unwrap();
    while (&ours).write(&[0; 4096]).is_ok() {}
    while (&ours).write(&[0; 1]).is_ok() {}
    assert!(matches!(handover::send(&ours, &handles, soon()), Err(Error::Timeout { .. })));
}

#[test]
fn a_process_of_another_user_is_refused() {
    if !rustix::process::geteuid().is_root() {
        println!("only root can play another user: not tested here");
        return;
    }
    const OTHER: u32 = 54_321;
    let name = format!("drumline-shm-test-{}-user", std::process::id());
    let address = SocketAddr::from_abstract_name(name).unwrap();
    let listener = UnixListener::bind_addr(&address).unwrap();
    // For the kernel, each thread has a user of its own.
    let connected = thread::spawn(move || {
        rustix::thread::set_thread_uid(rustix::process::Uid::from_raw(OTHER)).unwrap();
        let stream = UnixStream::connect_addr(&address).unwrap();
        // The listener is root, with whom every user shares memory.
        Credentials::of_peer(&stream).unwrap().check().unwrap();
        stream
    })
    .join()
    .unwrap();
    let (stream, _) = listener.accept().unwrap();
    let handles = Segment::create(SIZE).unwrap().handles().unwrap();
    for refused in [
        handover::receive(&stream, deadline()).unwrap_err(),
        handover::send(&stream, &handles, deadline()).unwrap_err(),
    ] {
        assert!(matches!(refused, Error::Stranger { theirs: OTHER, ours: 0, .. }), "{refused}");
        assert!(refused.to_string().contains("user 54321"), "{refused}");
    }
    drop(connected);
}
