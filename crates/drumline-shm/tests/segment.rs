//! Segments and registered buffers, with two mappings of one memory in one process.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use drumline_kernels::copy;
use drumline_shm::{
    Arena, Error, Handles, Parity, PeerSegment, Registered, Segment, SegmentSize, Waker,
};
use proptest::prelude::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{MemfdFlags, SealFlags};

const KIB: usize = 1 << 10;
const PAGE: usize = 64 * KIB; // at least one page anywhere

fn pair(arena_bytes: usize) -> (Segment, PeerSegment) {
    let own = Segment::create(SegmentSize { slot_bytes: 100, arena_bytes }).unwrap();
    let peer = PeerSegment::map(own.handles().unwrap()).unwrap();
    (own, peer)
}

/// What a peer sees of a buffer.
fn read(peer: &PeerSegment, offset: usize, len: usize) -> Vec<i64> {
    let mut values = vec![0; len];
    copy(values[..].as_mut().into(), peer.arena(offset, len).unwrap().as_source());
    values
}

fn write(peer: &PeerSegment, offset: usize, values: &[i64]) {
    copy(peer.arena(offset, values.len()).unwrap(), values.into());
}

fn offset(buffer: &Registered<i64>) -> usize {
    buffer.arena().offset_of(buffer).unwrap()
}

/// Bytes of memory that a segment really takes.
fn memory_taken(segment: &Segment) -> u64 {
    rustix::fs::fstat(segment.handles().unwrap().memory).unwrap().st_blocks as u64 * 512
}

#[test]
fn what_one_side_writes_the_other_reads() {
    let (own, peer) = pair(0);
    for (parity, byte) in [(Parity::of(6), 1_u8), (Parity::of(7), 2)] {
        own.announce(parity, &[byte; 64]);
        copy(own.slot(parity, 3..5).unwrap(), (&[byte, byte + 10][..]).into());
        copy(peer.slot_mut(parity, 5..6).unwrap(), (&[byte + 20][..]).into());
    }
    assert_eq!([own.post(), own.post_and_wake([])], [1, 2]);
    assert_eq!((own.posted(), peer.posted()), (2, 2));
    for (parity, byte) in [(Parity::Even, 1_u8), (Parity::Odd, 2)] {
        assert_eq!(peer.announcement(parity), [byte; 64]);
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

    own.post_and_wake([&seen]);
    assert!(!rung(&bell), "nobody slept");
    let outer = other.prepare_sleep();
    own.post();
    assert!(!rung(&outer), "post alone wakes nobody");
    own.post_and_wake([&seen, &seen]);
    assert!(rung(&outer));
    drop(other.prepare_sleep());
    assert!(rung(&outer), "an inner guard took the ring away");
    drop(outer);
    assert!(!rung(&bell), "the ring was not drained");
    own.post_and_wake([&seen]);
    assert!(!rung(&bell), "awake again");

    let waker: Waker = other.waker();
    let asleep = other.prepare_sleep();
    thread::spawn(move || waker.wake());
    let long = Timespec { tv_sec: 60, tv_nsec: 0 };
    assert_eq!(poll(&mut [PollFd::new(&asleep, PollFlags::IN)], Some(&long)).unwrap(), 1);
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
        (rustix::pipe::pipe().unwrap().0, "not a memfd"),
        (std::fs::File::open(std::env::current_exe().unwrap()).unwrap().into(), "not "),
        (memory(&header, whole, SealFlags::empty()), "not sealed"),
        (memory(&header, whole, SealFlags::SHRINK | SealFlags::SEAL), "not sealed"),
        (memory(&header, whole, SealFlags::SHRINK | SealFlags::GROW), "not sealed"),
        (memory(&header, 0, all_seals), "only 0 bytes"),
        (memory(&header, 63, all_seals), "only 63 bytes"),
        (memory(&header, whole / 2, all_seals), "in truth"),
        (memory(&header, whole + 1, all_seals), "in truth"),
        (memory(&garbage, whole, all_seals), "does not begin"),
        (memory(&[], whole, all_seals), "does not begin"),
        (altered(0, 1), "does not begin"),
        (altered(8, 2), "version 3"),
        (altered(12, 1), "version"),
        (altered(19, 1), "in truth"),   // slots of another size
        (altered(16, 1), "no segment"), // not in pages
        (altered(23, 0xff), "no segment"),
        (altered(26, 1), "in truth"), // an arena of another size
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
    let (_, pipe) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::NONBLOCK).unwrap();
    for bad in [
        pipe,
        own.handles().unwrap().memory,
        eventfd(0, EventfdFlags::CLOEXEC).unwrap(),
        epoll::create(epoll::CreateFlags::CLOEXEC).unwrap(),
    ] {
        let memory = own.handles().unwrap().memory;
        let refused = PeerSegment::map(Handles { memory, doorbell: bad }).unwrap_err();
        assert!(matches!(refused, Error::Refused { what: "a doorbell", .. }), "{refused}");
    }
}

#[test]
fn an_arena_takes_memory_only_while_buffers_live() {
    let (own, peer) = pair(1 << 40);
    let without = memory_taken(&own);
    assert!(without < 1 << 20, "{without} bytes for two small slots");
    let mut buffer = own.arena().allocate::<i64>(1 << 20).unwrap();
    assert!(memory_taken(&own) >= without + (8 << 20));
    assert!(buffer.iter().all(|value| *value == 0));
    buffer.fill(7);
    let first = offset(&buffer);
    assert_eq!(read(&peer, first + 8, 2), [7, 7]);
    drop(buffer);
    assert_eq!(memory_taken(&own), without);
    write(&peer, first, &[8; 5]); // a peer that is not told
    let again = own.arena().allocate::<i64>(1 << 20).unwrap();
    assert_eq!(offset(&again), first);
    assert!(again.iter().all(|value| *value == 0), "the buffer is not zeroed");
}

#[test]
fn a_full_arena_says_so() {
    let (own, _peer) = pair(4 * PAGE);
    let mut buffers: Vec<_> = (0..4).map(|_| own.arena().allocate::<u8>(PAGE).unwrap()).collect();
    drop(buffers.remove(2));
    drop(buffers.remove(0));
    let refused = own.arena().allocate::<u8>(PAGE + 1).unwrap_err();
    let Error::ArenaFull { asked, used, allowed, largest_free } = refused else {
        panic!("{refused}")
    };
    assert!(asked > PAGE as u128 && asked <= 2 * PAGE as u128);
    assert_eq!((used, allowed, largest_free), (2 * PAGE, 4 * PAGE, PAGE));
    assert!(matches!(own.arena().allocate::<f64>(usize::MAX), Err(Error::ArenaFull { .. })));
    own.arena().allocate::<u8>(PAGE).expect("the freed page is there");
    drop(buffers);
    own.arena().allocate::<u8>(4 * PAGE).expect("all is free again");
}

#[test]
fn only_slices_of_the_arena_have_an_offset() {
    let (own, _peer) = pair(4 * PAGE);
    let (other, _) = pair(4 * PAGE);
    let buffer = own.arena().allocate::<i64>(100).unwrap();
    let start = offset(&buffer);
    assert_eq!(own.arena().offset_of(&buffer[10..20]), Some(start + 80));
    assert_eq!(own.arena().offset_of(&[1_i64; 4]), None);
    assert_eq!(own.arena().offset_of(&vec![1_i64; 1 << 20]), None);
    assert_eq!(other.arena().offset_of(&buffer), None);
    assert!(own.arena().allocate::<f64>(0).unwrap().is_empty());
}

#[test]
fn a_buffer_outlives_its_segment_and_moves_between_threads() {
    fn is_shared_between_threads<T: Send + Sync>() {}
    is_shared_between_threads::<Registered<f32>>();
    is_shared_between_threads::<Arena>();
    is_shared_between_threads::<Waker>();

    let (own, peer) = pair(PAGE);
    let mut buffer = own.arena().allocate::<i64>(3).unwrap();
    drop(own);
    let buffer = thread::spawn(move || {
        buffer.copy_from_slice(&[1, 2, 3]);
        buffer
    })
    .join()
    .unwrap();
    assert_eq!(read(&peer, offset(&buffer), 3), [1, 2, 3]);
}

#[test]
fn a_forked_process_neither_frees_nor_allocates() {
    let (own, _peer) = pair(2 * PAGE);
    let mut buffer = own.arena().allocate::<i64>(1000).unwrap();
    buffer.fill(5);
    // SAFETY: the child drops a buffer and ends; it takes no lock that another thread may hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(buffer);
        let refused = matches!(own.arena().allocate::<i64>(1), Err(Error::Forked { .. }));
        // SAFETY: ends the child at once, without running anything of the parent's.
        unsafe { libc::_exit(if refused { 0 } else { 1 }) };
    }
    let pid = rustix::process::Pid::from_raw(child).expect("fork");
    let (_, status) = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())
        .unwrap()
        .unwrap();
    assert_eq!(status.exit_status(), Some(0));
    assert!(buffer.iter().all(|value| *value == 5), "the child freed the buffer");
}

#[test]
fn late_writes_do_not_reach_a_detached_buffer() {
    let (own, peer) = pair(1 << 20);
    let mut buffer = own.arena().allocate::<i64>(5 * PAGE / 8).unwrap();
    let values: Vec<i64> = (0..buffer.len() as i64).collect();
    buffer.copy_from_slice(&values);
    let start = offset(&buffer);

    // The middle, from within one page to within another.
    let middle = PAGE / 8 + 100..3 * PAGE / 8 + 7;
    own.arena().detach(&mut buffer[middle.clone()]).unwrap();
    assert_eq!(*buffer, values, "detaching changed values");

    write(&peer, start, &vec![-1; buffer.len()]);
    assert_eq!(buffer[middle.clone()], values[middle.clone()], "a late write came through");
    let page = rustix::param::page_size() / 8;
    let pages = middle.start / page * page..middle.end.next_multiple_of(page);
    for (at, value) in buffer.iter().enumerate() {
        let expected = if pages.contains(&at) { at as i64 } else { -1 };
        assert_eq!(*value, expected, "element {at}; private are {pages:?}");
    }

    // What was detached can still be written, and is not offered to peers.
    buffer[middle.start] = 1;
    assert_eq!(buffer[middle.start], 1);
    assert_eq!(own.arena().offset_of(&buffer), None);
    assert_eq!(own.arena().offset_of(&buffer[pages.end - 1..]), None);
    assert!(own.arena().offset_of(&buffer[..pages.start]).is_some());

    // Again, with more: the private values stay, the shared ones are those of now.
    let now = buffer.to_vec();
    own.arena().detach(&mut buffer).unwrap();
    write(&peer, start, &vec![3; buffer.len()]);
    assert_eq!(*buffer, now);

    // Its pages never come back: late writes would reach the next owner.
    drop(buffer);
    let mut others = Vec::new();
    while let Ok(other) = own.arena().allocate::<i64>(PAGE / 8) {
        others.push(other);
    }
    assert_eq!(others.len(), 16 - 5);
    write(&peer, start, &vec![4; 5 * PAGE / 8]);
    assert!(others.iter().all(|other| other.iter().all(|value| *value == 0)));
    assert!(matches!(own.arena().detach(&mut [1_i64]), Err(Error::NotRegistered)));
}

/// Another thread works on the rest of the first and the last page meanwhile.
#[test]
fn detaching_loses_no_write_of_a_neighbour() {
    let (own, peer) = pair(68 << 20);
    for _ in 0..200 {
        let mut buffer = own.arena().allocate::<i64>(3 * rustix::param::page_size() / 8).unwrap();
        let start = offset(&buffer);
        let third = buffer.len() / 3;
        let (left, rest) = buffer.split_at_mut(third + 10);
        let (middle, right) = rest.split_at_mut(third - 20);
        let stop = AtomicBool::new(false);
        let started = AtomicBool::new(false);
        let written = thread::scope(|scope| {
            let writer = scope.spawn(|| {
                let mut count = 0_i64;
                while !stop.load(Ordering::Relaxed) {
                    count += 1;
                    left[third + 9] = count;
                    right[0] = count;
                    assert_eq!(std::hint::black_box(&left[..])[third + 9], count);
                    assert_eq!(std::hint::black_box(&right[..])[0], count);
                    started.store(true, Ordering::Relaxed);
                }
                count
            });
            while !started.load(Ordering::Relaxed) {
                thread::yield_now();
            }
            own.arena().detach(middle).unwrap();
            stop.store(true, Ordering::Relaxed);
            writer.join().unwrap()
        });
        assert_eq!((left[third + 9], right[0]), (written, written));
        write(&peer, start, &vec![-1; 3 * third]);
        assert_eq!((left[third + 9], right[0]), (written, written), "the page is still shared");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 32, failure_persistence: None, ..Default::default() })]

    /// Every buffer keeps what was written to it, and a peer sees it at the offset that was told.
    #[test]
    fn buffers_never_overlap(
        script in prop::collection::vec((any::<bool>(), 1..40_000_usize, any::<prop::sample::Index>()), 1..60),
    ) {
        let (own, peer) = pair(1 << 20);
        let mut live: Vec<(i64, Registered<i64>)> = Vec::new();
        for (number, (free, len, which)) in (1..).zip(script) {
            if free && !live.is_empty() {
                live.swap_remove(which.index(live.len()));
            } else if let Ok(mut buffer) = own.arena().allocate::<i64>(len) {
                prop_assert!(buffer.iter().all(|value| *value == 0));
                prop_assert_eq!(buffer.as_ptr().addr() % rustix::param::page_size(), 0);
                buffer.fill(number);
                live.push((number, buffer));
            }
            for (number, buffer) in &live {
                prop_assert!(buffer.iter().all(|value| value == number));
                prop_assert!(read(&peer, offset(buffer), buffer.len()).iter().all(|value| value == number));
            }
        }
        drop(live);
        prop_assert!(own.arena().allocate::<u8>(1 << 20).is_ok(), "the arena did not coalesce");
    }
}
