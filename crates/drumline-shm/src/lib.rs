//! Memory that the ranks of one host share, and how those ranks wake each other.
//!
//! This crate knows no schedules, transports or groups. A rank creates a [`Segment`], hands it over
//! to the other ranks of its host ([`handover`]) and maps theirs ([`PeerSegment`]). From then on a
//! rank writes data, posts that it has done so, and sleeps until the others have posted.
//!
//! A *peer* is any other rank of the same host. A *call* is one collective of a group. If a group runs a long
//! collective in several pieces, each piece counts as a call here.
//!
//! The crate serves `drumline`, which offers registered buffers as
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
//! Each rank has one memfd. Seals keep its size, and the seals themselves, from changing. Numbers
//! are in the byte order of the host.
//!
//! ```text
//!     0  "DRUMSHM\n"  version u32  0 u32  slot bytes u64  arena bytes u64  zeros    line 0
//!    64  sleeping: not 0 while the owner sleeps or is about to, u32  core u32
//!        failed u64: one more than the number of the first call that the owner,
//!        which has failed, does not complete                                        line 1
//!   128  posted u64  digest u64  place u64  payload 40 bytes, of even calls         line 2
//!   192  the same of odd calls                                                      line 3
//!   256  description of even calls, 64 bytes that the caller chooses                line 4
//!   320  description of odd calls                                                   line 5
//! 64 Ki  staging slot of even calls    ┐ of equal size,
//!   ...  staging slot of odd calls     ┘ a multiple of 64 KiB
//!   ...  arena, from a multiple of 2 MiB on: registered buffers, page by page
//! ```
//!
//! `posted` is the owner's count of posts at its last post in that line. A peer that polls `posted`
//! thus finds in the same cache line which call the post belongs to and, if the call is short, its
//! data. A peer reads the description only if the digest is not the one it expected.
//!
//! Only the owner writes to the lines. The arena is large and sparse: its pages take no memory
//! before the owner allocates them. So peers map everything once and need not hear of new buffers.
//!
//! # Sleeping and waking
//!
//! A rank spins a little ([`spin()`], [`spin_limit`]) and then sleeps in one `poll` of its doorbell,
//! its sockets and the [`PidFd`]s of its peers. The doorbell is an eventfd and not a futex because a
//! futex cannot be polled together with sockets.
//!
//! No post is missed. The sleeper first writes that it sleeps and then checks for posts once more
//! ([`Segment::prepare_sleep`]). The poster first posts and then checks for sleepers
//! ([`Segment::post_and_wake`]). Both have a full fence between the two steps. loom tries all
//! interleavings of that protocol in `drumline-loom`. A peer that drains another rank's doorbell can
//! delay that rank, so sleep with a deadline.
//!
//! # What a peer can and cannot do
//!
//! All functions are safe to call, whatever a peer writes and whenever it writes:
//!
//! - The functions here check every offset and length that a peer tells.
//! - The flag lines are atomics.
//! - Sizes cannot change after they were checked.
//! - Kernels read and write slots and the arenas of peers through raw pointers, and any bytes are a
//!   value of an [`Element`](drumline_kernels::Element).
//!
//! No check can catch a peer that writes to a registered buffer while its owner has not lent it, or
//! has lent it for reading only. The owner holds ordinary slices of its buffers, and their values
//! would change behind its back. An owner lends a buffer by telling its offset, and the loan ends
//! when all peers have posted that they are done. Peers must keep to that. A peer that does not is a
//! process of the same user, which could as well write to `/proc/PID/mem`. So sharing memory does
//! not extend the circle of processes that a rank trusts; [`handover`] refuses other users.
//!
//! # After a failure: detach
//!
//! A peer may be slow, not dead, and use a buffer long after the call has failed. Before the caller
//! gets the buffer back, [`Arena::detach`] makes it private:
//!
//! - The kernel replaces the owner's mapping of those pages, in one step, by a private mapping of
//!   the same memory, and copies every page as if it had been written. Addresses and values stay, so
//!   slices stay valid, shared slices too. If a thread of the owner uses another part of the first
//!   or last page meanwhile, none of its writes is lost.
//! - From then on the owner and its peers have different memory behind those pages. Late writes of a
//!   peer end in the memfd, where nobody reads them. Late reads of a peer find the values that the
//!   failed call started with. The range is never allocated again, and [`Arena::offset_of`] no
//!   longer finds it, so no later call lends it.
//! - A device that copies to pages which its driver has pinned would go on to copy to the shared ones. So the
//!   driver unpins them first ([`Registered::before_detach`]).
//! - A peer may write a page while the kernel copies it. The copy then mixes old and new values of
//!   the failed call, and a failed call promises no values.

//! # Forks
//!
//! A rank's death shows in the end of its connections, so a process that it has forked must not keep them
//! open: [`Unforked`] sockets stay with the process that opened them.
//!
//! # Files
//!
//! [`files`] opens those whose place others know: never a pipe, a device, or through a link of another user.

#![cfg(target_os = "linux")]

mod arena;
mod binding;
mod cache;
mod cores;
mod detach;
mod doorbell;
mod error;
pub mod files;
mod flag;
mod forbidden;
pub mod handover;
mod inherited;
mod layout;
mod mapping;
mod nodes;
mod own_thread;
mod parity;
mod peer;
mod per_process;
mod placement;
mod process;
mod ranges;
mod segment;
mod spin;
mod this_host;
mod unforked;
mod window;

pub use arena::{Arena, BeforeDetach, Registered};
pub use binding::{NumaBinding, bind_to_cores};
pub use cache::cache_bytes;
pub use cores::{Core, Cores};
pub use error::{Error, Result};
pub use flag::{Announcement, PAYLOAD_BYTES};
#[doc(hidden)]
pub use forbidden::{limit_of, named};
pub use handover::Handles;
pub use inherited::{inherited, take_signals};
pub use layout::SegmentSize;
#[doc(hidden)]
pub use layout::header_again;
pub use nodes::Common;
pub use own_thread::OwnThread;
pub use parity::Parity;
pub use peer::PeerSegment;
pub use per_process::PerProcess;
pub use placement::{MemoryNode, memory_nodes};
pub use process::{
    Credentials, LEASE_VARIABLE, PidFd, dumps_core, end_with_lease, kill_with_parent,
};
pub use segment::{Segment, SleepGuard, Waker};
pub use spin::{SpinLimit, spin, spin_limit};
pub use this_host::this_host;
pub use unforked::Unforked;
#[doc(hidden)]
pub use unforked::fork_idle;
pub use window::PeerWindow;
