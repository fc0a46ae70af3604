//! Memory that the ranks of one host share, and how they wake each other.
//!
//! Nothing here knows of schedules, transports or groups. A rank makes a [`Segment`], hands it
//! over to its peers ([`handover`]), and maps theirs ([`PeerSegment`]). Then each writes where
//! it may, posts, and sleeps until the others have posted.
//!
//! It serves `drumline` alone, whose users meet it as
//! `ProcessGroup::alloc_registered`.
//!
//! ```
//! use drumline_kernels::copy;
//! use drumline_shm::{Announcement, Parity, PeerSegment, Segment, SegmentSize};
//!
//! let own = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 })?;
//! let seen_by_a_peer = PeerSegment::map(own.handles()?)?;
//!
//! // Staged: the rank copies into its slot, the peer reads there.
//! copy(own.slot(Parity::Even, 0..3)?, (&[1.0_f32, 2.0, 3.0][..]).into());
//! let announcement = Announcement { digest: 7, place: 0 };
//! own.announce(Parity::Even, announcement, &[7; 64]);
//! own.post_and_wake(Parity::Even, []);
//! assert_eq!(seen_by_a_peer.posted(Parity::Even), 1);
//! assert_eq!(seen_by_a_peer.announcement(Parity::Even), announcement);
//! let mut copied = [0.0_f32; 3];
//! copy(copied[..].as_mut().into(), seen_by_a_peer.slot(Parity::Even, 0..3)?);
//! assert_eq!(copied, [1.0, 2.0, 3.0]);
//!
//! // Registered: the peer writes straight into the rank's buffer.
//! let buffer = own.arena().allocate::<f32>(3)?;
//! let offset = own.arena().offset_of(&buffer).expect("it is in the arena");
//! copy(seen_by_a_peer.arena(offset, 3)?, copied[..].into());
//! assert_eq!(*buffer, [1.0, 2.0, 3.0]);
//! # Ok::<(), drumline_shm::Error>(())
//! ```
//!
//! # What is in a segment
//!
//! One memfd per rank, sealed so that neither its size nor its seals can change. Numbers are in
//! the byte order of the host.
//!
//! ```text
//!     0  "DRUMSHM\n"  version u32  0 u32  slot bytes u64  arena bytes u64  zeros    line 0
//!    64  sleeping: not 0 while the owner sleeps or is about to, u32  core u32       line 1
//!   128  posted u64  digest u64  place u64  payload 40 bytes, of even operations    line 2
//!   192  the same of odd operations                                                 line 3
//!   256  description of even operations, 64 bytes of the caller's                   line 4
//!   320  description of odd operations                                              line 5
//! 64 Ki  staging slot of even operations    ┐ of equal size,
//!   ...  staging slot of odd operations     ┘ a multiple of 64 KiB
//!   ...  arena, from a multiple of 2 MiB on: registered buffers, page by page
//! ```
//!
//! `posted` is how often the owner had posted when it last did so in that line; with it a peer has
//! seen, in one line of the cache, which operation that was and, if it is short, what it brings.
//! Descriptions are there for peers that find a digest which they did not expect.
//!
//! Every line has one writer, the owner. The arena is large and sparse: its pages take no memory
//! before the owner allocates them, so peers map everything once and are never told of buffers.
//!
//! # Sleeping and waking
//!
//! A rank spins a little ([`spin()`], [`spin_limit`]) and then sleeps in one `poll` of its doorbell,
//! its sockets and the [`PidFd`]s of its peers: that is why the doorbell is an eventfd and not a
//! futex. No post is missed, because the sleeper looks again after it has said that it sleeps
//! ([`Segment::prepare_sleep`]), and the poster looks for sleepers after it has posted
//! ([`Segment::post_and_wake`]), with a full fence on both sides. loom tries all interleavings of
//! that protocol in `tests/loom.rs`. A peer that drains a doorbell which is not its own can
//! delay a rank; so sleep with a deadline.
//!
//! # What a peer can and cannot do
//!
//! All functions are safe to call. Whatever a peer writes, whenever: offsets and lengths that it
//! told are checked here; its flag lines are atomics; sizes cannot change after they were checked;
//! kernels read and write slots and arenas of peers through raw pointers, and any bytes are a
//! value of an [`Element`](drumline_kernels::Element).
//!
//! One thing no check can catch: a peer that writes to a registered buffer at a time when its owner
//! has not lent it, or has lent it to be read. The owner holds ordinary slices of its buffers, so their values would change
//! behind its back. An owner lends a buffer by telling its offset, and has it back when all peers
//! have posted that they are done; a peer keeps to that. Who does not is a process of the same
//! user that could as well write to `/proc/PID/mem`: sharing memory changes nothing about
//! whom to trust, and [`handover`] refuses other users.
//!
//! # After a failure: detach
//!
//! A peer may be slow, not dead, and use a buffer long after the operation has failed. Before
//! the buffer goes back to its owner, [`Arena::detach`] makes it private:
//!
//! - The owner's mapping of those pages is replaced, in one step of the kernel's, by a private
//!   mapping of the same memory, and the kernel copies every page as if it had been written. Addresses
//!   and values stay, so slices stay valid, also those that are only lent to be read. A thread of the owner
//!   that uses another part of the first or last page loses no write.
//! - From then on the owner's pages and those of its peers are different memory. Late writes end
//!   in the memfd, where nobody looks; late reads find there what the operation was called with; the range
//!   is never allocated again, and [`Arena::offset_of`] no longer finds it, so no later operation lends it.
//! - While a page is copied a peer may write it: the copy then has old and new values of the
//!   failed operation, which promises none.

#![cfg(all(target_os = "linux", not(loom)))]

mod arena;
mod cache;
mod cores;
mod detach;
mod doorbell;
mod error;
mod flag;
pub mod handover;
mod layout;
mod mapping;
mod nodes;
mod peer;
mod process;
mod ranges;
mod segment;
mod spin;

pub use arena::{Arena, Registered};
pub use cache::cache_bytes;
pub use cores::{Core, Cores};
pub use error::{Error, Result};
pub use flag::{Announcement, PAYLOAD_BYTES};
pub use layout::SegmentSize;
pub use peer::PeerSegment;
pub use process::{Credentials, PidFd};
pub use segment::{Handles, Parity, Segment, SleepGuard, Waker};
pub use spin::{SpinLimit, spin, spin_limit};
