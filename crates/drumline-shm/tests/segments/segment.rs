//! Slots, lines and doorbells, and the checks of what a peer hands over.

use std::os::fd::{AsFd, OwnedFd};
use std::thread;

use drumline_kernels::copy;
use drumline_shm::{Announcement, Error, Handles, Parity, PeerSegment, Waker};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags};

use crate::{LONG, PAGE, pair};

fn announcement(byte: u8) -> Announcement {
    Announcement { digest: u64::from(byte) << 32, place: u64::MAX - u64::from(byte) }
}

#[test]
fn what_one_side_writes_the_other_reads() {
    let (own, peer) = pair(0);
    for (parity, byte) in [(Parity::of(6), 1_u8), (Parity::of(7), 2)] {
        own.announce(parity, announcement(byte), &[byte; 64]);
        copy(own.payload(parity, 0..40).unwrap(), (&[byte + 30; 40][..]).into());
        copy(own.slot(parity, 3..5).unwrap(), (&[byte, byte + 10][..]).into());
        copy(peer.slot_mut(parity, 5..6).unwrap(), (&[byte + 20][..]).into());
    }
    assert_eq!([own.post(Parity::Even), own.post_and_wake(Parity::Odd, [])], [1, 2]);
    assert_eq!((own.posted(), peer.last_posted()), (2, 2));
    for (parity, byte) in [(Parity::Even, 1_u8), (Parity::Odd, 2)] {
        assert_eq!(peer.posted(parity), u64::from(byte));
        assert_eq!(peer.announcement(parity), announcement(byte));
        assert_eq!(peer.description(parity), [byte; 64]);
        let mut payload = [0; 40];
        copy(payload[..].as_mut().into(), peer.payload(parity, 0..40).unwrap().as_source());
        assert_eq!(payload, [byte + 30; 40]);
        let mut slot = [9; 5];
        copy(slot[..].as_mut().into(), peer.slot(parity, 2..7).unwrap());
        assert_eq!(slot, [0, byte, byte + 10, byte + 20, 0]);
    }
}

#[test]
fn places_outside_a_part_are_refused() {
    let (own, peer) = pair(PAGE);
    let elements = peer.slot_bytes() / 8;
    assert!(peer.slot::<u8>(Parity::Odd, 0..8 * elements).is_ok());
    assert!(own.slot::<f64>(Parity::Odd, elements..elements).is_ok());
    #[expect(clippy::reversed_empty_ranges)]
    let outside =
        [0..elements + 1, elements + 1..elements + 1, 2..1, 1..usize::MAX, 1 << 61..1 << 61];
    for range in outside {
        for refused in [
            own.slot::<f64>(Parity::Even, range.clone()).err(),
            peer.slot::<f64>(Parity::Even, range.clone()).err(),
            peer.slot_mut::<f64>(Parity::Even, range.clone()).err(),
            own.payload::<f64>(Parity::Odd, range.clone()).err(),
            peer.payload::<f64>(Parity::Odd, range.clone()).err(),
        ] {
            assert!(matches!(refused, Some(Error::OutOfRange { .. })), "{range:?}: {refused:?}");
        }
    }
    assert!(peer.arena::<f32>(PAGE - 4, 1).is_ok());
    for (offset, len) in [(PAGE - 4, 2), (PAGE + 4, 0), (0, usize::MAX), (usize::MAX - 3, 1)] {
        let refused = peer.arena::<f32>(offset, len).unwrap_err();
        assert!(matches!(refused, Error::OutOfRange { .. }), "{offset} {len}: {refused}");
    }
    let refused = peer.arena::<f32>(2, 1).unwrap_err();
    assert!(matches!(refused, Error::Misaligned { offset: 2, align: 4 }), "{refused}");
}

#[test]
fn a_doorbell_rings_for_sleepers_only() {
    let (own, _) = pair(0);
    let (other, seen) = pair(0);
    let rung = |fd: &dyn AsFd| {
        let now = Timespec { tv_sec: 0, tv_nsec: 0 };
        poll(&mut [PollFd::from_borrowed_fd(fd.as_fd(), PollFlags::IN)], Some(&now)).unwrap() == 1
    };
    let bell = other.handles().unwrap().doorbell;

    own.post_and_wake(Parity::Even, [&seen]);
    assert!(!rung(&bell), "no rank slept");
    let outer = other.prepare_sleep();
    own.post(Parity::Even);
    assert!(!rung(&outer), "`post` must not ring");
    own.post_and_wake(Parity::Even, [&seen, &seen]);
    assert!(rung(&outer));
    drop(other.prepare_sleep());
    assert!(rung(&outer), "an inner guard took the ring away");
    drop(outer);
    assert!(!rung(&bell), "the ring was not drained");
    own.post_and_wake(Parity::Even, [&seen]);
    assert!(!rung(&bell), "awake again");

    let waker: Waker = other.waker();
    let asleep = other.prepare_sleep();
    thread::spawn(move || waker.wake());
    assert_eq!(poll(&mut [PollFd::new(&asleep, PollFlags::IN)], Some(&LONG)).unwrap(), 1);
}

#[test]
fn only_whole_segments_are_mapped() {
    let (own, _peer) = pair(PAGE);
    let whole = rustix::fs::fstat(&own.handles().unwrap().memory).unwrap().st_size as u64;
    let mut header = [0; 64];
    rustix::io::pread(own.handles().unwrap().memory, &mut header, 0).unwrap();
    let all_seals = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    let memory = |header: &[u8], bytes: u64, seals: SealFlags| -> OwnedFd {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let memory = rustix::fs::memfd_create("test", flags).unwrap();
        rustix::fs::ftruncate(&memory, bytes).unwrap();
        rustix::io::pwrite(&memory, &header[..header.len().min(bytes as usize)], 0).unwrap();
        rustix::fs::fcntl_add_seals(&memory, seals).unwrap();
        memory
    };
    let altered = |at: usize, byte: u8| {
        let mut header = header;
        header[at] ^= byte;
        memory(&header, whole, all_seals)
    };
    let map = |memory: OwnedFd| {
        PeerSegment::map(Handles { memory, doorbell: own.handles().unwrap().doorbell })
    };
    map(memory(&header, whole, all_seals)).expect("an exact copy is a segment");

    let garbage: Vec<u8> = (0..64).map(|byte: u8| byte.wrapping_mul(151)).collect();
    for (bad, why) in [
        (std::io::pipe().unwrap().0.into(), "not a memfd"),
        (std::fs::File::open(std::env::current_exe().unwrap()).unwrap().into(), "not "),
        (memory(&header, whole, SealFlags::empty()), "not sealed"),
        (memory(&header, whole, SealFlags::SHRINK | SealFlags::SEAL), "not sealed"),
        (memory(&header, whole, SealFlags::SHRINK | SealFlags::GROW), "not sealed"),
        (memory(&header, 0, all_seals), "only 0 bytes"),
        (memory(&header, 63, all_seals), "only 63 bytes"),
        (memory(&header, whole / 2, all_seals), "but its file has"),
        (memory(&header, whole + 1, all_seals), "but its file has"),
        (memory(&garbage, whole, all_seals), "does not begin"),
        (memory(&[], whole, all_seals), "does not begin"),
        (altered(0, 1), "does not begin"),
        (altered(8, 1), "version 3"),
        (altered(12, 1), "version"),
        (altered(19, 1), "but its file has"), // slots of another size
        (altered(16, 1), "no segment"),       // not in pages
        (altered(23, 0xff), "no segment"),
        (altered(26, 1), "but its file has"), // an arena of another size
        (altered(31, 0x80), "no segment"),
    ] {
        let refused = map(bad).unwrap_err();
        assert!(matches!(refused, Error::Refused { what: "a segment", .. }), "{refused}");
        assert!(refused.to_string().contains(why), "{refused}: expected {why:?}");
    }
}

#[test]
fn only_doorbells_that_cannot_block_are_taken() {
    use rustix::event::{EventfdFlags, epoll, eventfd};

    let (own, _peer) = pair(0);
    let (_, pipe) = std::io::pipe().unwrap();
    rustix::io::ioctl_fionbio(&pipe, true).unwrap();
    for bad in [
        pipe.into(),
        own.handles().unwrap().memory,
        eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
    ] {
        let memory = own.handles().unwrap().memory;
        let refused = PeerSegment::map(Handles { memory, doorbell: bad }).unwrap_err();
        assert!(matches!(refused, Error::Refused { what: "a doorbell", .. }), "{refused}");
    }
}
