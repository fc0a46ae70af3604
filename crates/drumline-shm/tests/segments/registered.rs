//! Registered buffers, and peers that read and write them.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use drumline_kernels::copy;
use drumline_shm::{Arena, Error, PeerSegment, Registered, Segment, SegmentSize, Waker};
use proptest::prelude::*;

use crate::{PAGE, pair};

/// The elements of a buffer, as a peer sees them.
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

/// Bytes of memory that the kernel has allocated to a segment.
fn memory_taken(segment: &Segment) -> u64 {
    rustix::fs::fstat(segment.handles().unwrap().memory).unwrap().st_blocks as u64 * 512
}

#[test]
fn an_arena_takes_memory_only_while_buffers_live() {
    let (own, peer) = pair(1 << 40);
    let without = memory_taken(&own);
    assert!(without < 8 << 20, "{without} bytes for two small slots");
    let mut buffer = own.arena().allocate::<i64>(1 << 20).unwrap();
    assert!(memory_taken(&own) >= without + (8 << 20));
    assert!(buffer.iter().all(|value| *value == 0));
    buffer.fill(7);
    let first = offset(&buffer);
    assert_eq!(read(&peer, first + 8, 2), [7, 7]);
    drop(buffer);
    assert_eq!(memory_taken(&own), without);
    write(&peer, first, &[8; 5]); // the peer does not know that the buffer is gone
    let again = own.arena().allocate::<i64>(1 << 20).unwrap();
    assert_eq!(offset(&again), first);
    assert!(again.iter().all(|value| *value == 0), "the buffer is not zeroed");
}

#[test]
fn a_segment_of_the_usual_size_takes_little() {
    let own = Segment::create(SegmentSize::of_host()).unwrap();
    assert!(own.arena().bytes() > 64 << 20);
    assert!(own.slot_bytes() >= 64 << 10);
    assert!(memory_taken(&own) < 8 << 20);
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
fn a_buffer_is_cut_and_joined_without_a_copy() {
    const PER_PAGE: usize = PAGE / 8;
    let (own, peer) = pair(8 * PAGE);
    let mut first = own.arena().allocate::<i64>(3 * PER_PAGE + 5).unwrap();
    let (start, address) = (offset(&first), first.as_ptr());
    (0..).zip(first.iter_mut()).for_each(|(value, place)| *place = value);
    for inside in [1, PER_PAGE - 1, 3 * PER_PAGE + 5, 4 * PER_PAGE, usize::MAX] {
        assert!(first.split_off(inside).is_none(), "cut at {inside}");
    }
    let mut last = first.split_off(PER_PAGE).unwrap();
    let end = last.split_off(2 * PER_PAGE).unwrap();
    assert_eq!((first.len(), last.len(), end.len()), (PER_PAGE, 2 * PER_PAGE, 5));
    assert_eq!(end[4], 3 * PER_PAGE as i64 + 4);
    assert_eq!(offset(&last), start + PAGE);
    last.fill(-1);
    assert_eq!(read(&peer, start + PAGE - 8, 2), [PER_PAGE as i64 - 1, -1]);

    // First with a gap between the two, then in order.
    let end = first.append(end).unwrap_err();
    first.append(last).unwrap();
    first.append(end).unwrap();
    assert_eq!((first.len(), first.as_ptr()), (3 * PER_PAGE + 5, address));
    let other = own.arena().allocate::<i64>(PER_PAGE).unwrap();
    assert!(first.append(other).is_err(), "the last page is not full");

    // Each part frees its own pages.
    let rest = first.split_off(PER_PAGE).unwrap();
    drop(first);
    let again = own.arena().allocate::<i64>(PER_PAGE).unwrap();
    assert_eq!(again.as_ptr(), address);
    assert_eq!(rest[2 * PER_PAGE], 3 * PER_PAGE as i64);
    drop((rest, again));
    own.arena().allocate::<u8>(8 * PAGE).expect("all is free again");
}

#[test]
fn an_empty_part_holds_no_page() {
    let (own, _peer) = pair(2 * PAGE);
    let mut buffer = own.arena().allocate::<u8>(PAGE).unwrap();
    let all = buffer.split_off(0).unwrap();
    assert_eq!((buffer.len(), all.len()), (0, PAGE));
    drop(buffer);
    assert!(all.iter().all(|value| *value == 0));
    let mut all = all;
    let none = all.split_off(PAGE).unwrap();
    assert!(none.is_empty());
    all.append(none).unwrap();
    drop(all);
    own.arena().allocate::<u8>(2 * PAGE).expect("all is free again");
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
    // SAFETY: the child drops a buffer, tries to allocate another and ends. It allocates no heap
    // memory and takes no lock that another thread may hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        drop(buffer);
        let refused = matches!(own.arena().allocate::<i64>(1), Err(Error::Forked { .. }));
        // SAFETY: `_exit` ends the child at once and runs none of the parent's exit handlers.
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

    // The detached range begins inside one page and ends inside another.
    let middle = PAGE / 8 + 100..3 * PAGE / 8 + 7;
    own.arena().detach(&buffer[middle.clone()]).unwrap();
    assert_eq!(*buffer, values, "detaching changed values");

    write(&peer, start, &vec![-1; buffer.len()]);
    assert_eq!(buffer[middle.clone()], values[middle.clone()], "a late write came through");
    let page = rustix::param::page_size() / 8;
    let pages = middle.start / page * page..middle.end.next_multiple_of(page);
    for (at, value) in buffer.iter().enumerate() {
        let expected = if pages.contains(&at) { at as i64 } else { -1 };
        assert_eq!(*value, expected, "element {at}; private are {pages:?}");
    }

    // The owner can still write to detached pages, and they have no offset for peers.
    buffer[middle.start] = 1;
    assert_eq!(buffer[middle.start], 1);
    assert_eq!(own.arena().offset_of(&buffer), None);
    assert_eq!(own.arena().offset_of(&buffer[pages.end - 1..]), None);
    assert!(own.arena().offset_of(&buffer[..pages.start]).is_some());

    // Detaches the whole buffer. Private pages keep their values; shared ones keep those of now.
    let now = buffer.to_vec();
    own.arena().detach(&buffer).unwrap();
    write(&peer, start, &vec![3; buffer.len()]);
    assert_eq!(*buffer, now);

    // The pages are never allocated again, because late writes would reach their next owner. The
    // shared memory keeps its values, because the call may yet succeed on a peer that is about to
    // read them.
    drop(buffer);
    let left = peer.arena::<i64>(start, 5 * PAGE / 8).unwrap();
    let mut seen = vec![0; left.len()];
    drumline_kernels::copy(drumline_kernels::Target::from(&mut seen[..]), left.as_source());
    assert!(seen.iter().all(|value| *value == 3), "shared pages were wiped");
    let mut others = Vec::new();
    while let Ok(other) = own.arena().allocate::<i64>(PAGE / 8) {
        others.push(other);
    }
    assert_eq!(others.len(), 16 - 5);
    write(&peer, start, &vec![4; 5 * PAGE / 8]);
    assert!(others.iter().all(|other| other.iter().all(|value| *value == 0)));
    assert!(matches!(own.arena().detach(&[1_i64]), Err(Error::NotRegistered)));
}

/// Meanwhile another thread writes to the rest of the first and of the last page.
#[test]
fn detaching_loses_no_write_of_another_thread() {
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

    /// Every buffer keeps its values, and a peer sees them at the buffer's offset.
    #[test]
    fn buffers_never_overlap(
        script in prop::collection::vec(
            (any::<bool>(), 1..40_000_usize, any::<prop::sample::Index>()),
            1..60,
        ),
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
                let seen = read(&peer, offset(buffer), buffer.len());
                prop_assert!(seen.iter().all(|value| value == number));
            }
        }
        drop(live);
        prop_assert!(own.arena().allocate::<u8>(1 << 20).is_ok(), "the arena did not coalesce");
    }
}
