//! Segments, mapped twice in one process and shared between processes.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

use drumline_shm::{PeerSegment, Segment, SegmentSize};
use rustix::event::Timespec;

mod forked_threads;
mod forks;
mod handover;
mod processes;
mod registered;
mod segment;

/// A page of the host, or several.
const PAGE: usize = 64 << 10;

/// Only a hang takes this long.
const LONG: Timespec = Timespec { tv_sec: 60, tv_nsec: 0 };

/// A segment, and a second mapping of its memory as a peer has it.
fn pair(arena_bytes: usize) -> (Segment, PeerSegment) {
    let own = Segment::create(SegmentSize { slot_bytes: 100, arena_bytes }).unwrap();
    let peer = PeerSegment::map(own.handles().unwrap()).unwrap();
    (own, peer)
}
