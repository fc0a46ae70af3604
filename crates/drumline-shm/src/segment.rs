//! The owner's side of a segment.

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use drumline_kernels::{Element, Target};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::process::Resource;

use crate::arena::Arena;
use crate::cores::Core;
use crate::doorbell::EventFd;
use crate::error::{Error, Result};
use crate::flag::{Announcement, Asleep, DESCRIPTION_BYTES, Doorbell, Flags};
use crate::forbidden::limit_of;
use crate::handover::Handles;
use crate::layout::{Layout, SegmentSize};
use crate::mapping::Mapping;
use crate::parity::Parity;
use crate::peer::PeerSegment;

/// A rank's own segment and its doorbell.
///
/// A segment can move to another thread, but threads cannot share it, because its flag lines have
/// one writer. Threads can share its [`Arena`].
///
/// ```
/// use drumline_kernels::copy;
/// use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
/// use rustix::event::{PollFd, PollFlags, poll};
///
/// let size = SegmentSize { slot_bytes: 4096, arena_bytes: 0 };
/// let [own, other] = [Segment::create(size)?, Segment::create(size)?];
/// let peer = PeerSegment::map(other.handles()?)?; // as another process does it
///
/// copy(own.payload(Parity::Even, 0..5)?, (&[1.0_f64; 5][..]).into()); // 40 bytes
/// own.post_and_wake(Parity::Even, [&peer]); // `other` does not sleep, so nothing rings
///
/// other.post(Parity::Even);
/// while peer.posted(Parity::Even) < 1 {
///     let asleep = own.prepare_sleep();
///     if peer.posted(Parity::Even) < 1 {
///         // The list would hold sockets and the pidfds of peers, too.
///         let mut wakers = [PollFd::new(&asleep, PollFlags::IN)];
///         poll(&mut wakers, None)?;
///     }
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Segment {
    arena: Arena,
    doorbell: Arc<EventFd>,
    /// How often this rank has posted. A cell suffices: one thread at a time uses a segment.
    posted: Cell<u64>,
}

impl Segment {
    /// Creates a segment. Lines and slots take memory at once, the arena when buffers are allocated.
    ///
    /// # Errors
    ///
    /// [`Error::Size`] when `size` is beyond the caps or the process's file size limit, and
    /// [`Error::Os`] when there is no memory, address space or descriptor left.
    pub fn create(size: SegmentSize) -> Result<Segment> {
        let layout = Layout::new(size)?;
        let memory = sealed_memory(&layout)?;
        let mapping = Mapping::new(memory.as_fd(), layout)?;
        mapping.populate(layout.slot(0).start..layout.slot(1).end);
        Ok(Segment {
            arena: Arena::new(mapping, memory),
            doorbell: Arc::new(EventFd::new()?),
            posted: Cell::new(0),
        })
    }

    /// New descriptors of the memory and the doorbell.
    ///
    /// # Errors
    ///
    /// The process has no descriptor left.
    pub fn handles(&self) -> Result<Handles> {
        Ok(Handles { memory: self.arena.memory()?, doorbell: self.doorbell.try_clone()? })
    }

    /// The arena from which registered buffers are allocated. Clones may go to other threads.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Bytes of each staging slot.
    pub fn slot_bytes(&self) -> usize {
        self.arena.mapping().layout().slot(0).len()
    }

    /// Writes the announcement of a parity and its description, for peers to read after the next
    /// post.
    #[inline]
    pub fn announce(
        &self,
        parity: Parity,
        announcement: Announcement,
        description: &[u8; DESCRIPTION_BYTES],
    ) {
        self.flags().announce(parity.index(), announcement, description);
    }

    /// Posts in the line of a parity without waking any peer. Returns this rank's count of posts. A
    /// peer that sees the count sees everything that this rank wrote before.
    pub fn post(&self, parity: Parity) -> u64 {
        let count = self.count();
        self.flags().post(parity.index(), count);
        count
    }

    /// Posts in the line of a parity and wakes those of `peers` that sleep. Returns this rank's
    /// count of posts.
    #[inline]
    pub fn post_and_wake<'a>(
        &self,
        parity: Parity,
        peers: impl IntoIterator<Item = &'a PeerSegment>,
    ) -> u64 {
        let count = self.count();
        let peers = peers.into_iter().map(PeerSegment::flags_and_doorbell);
        self.flags().post_and_wake(parity.index(), count, peers);
        count
    }

    /// Prefetches the line of a parity for writing. Without this, the next announcement there waits
    /// until the caches of the peers that read the line have given it up.
    #[inline]
    pub fn claim(&self, parity: Parity) {
        self.arena.mapping().claim(parity.index());
    }

    #[inline]
    fn count(&self) -> u64 {
        self.posted.set(self.posted.get().wrapping_add(1));
        self.posted.get()
    }

    /// How often this rank has posted. (Its posts alternate between two cache lines; this counts both.)
    pub fn posted(&self) -> u64 {
        self.posted.get()
    }

    /// Some elements of the payload in this rank's line of a parity. The payload has
    /// [`PAYLOAD_BYTES`](crate::PAYLOAD_BYTES).
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] when the elements do not lie within the payload.
    #[inline]
    pub fn payload<T: Element>(
        &self,
        parity: Parity,
        elements: Range<usize>,
    ) -> Result<Target<'_, T>> {
        self.arena.mapping().payload(parity.index(), elements)
    }

    /// Some elements of this rank's staging slot of a parity.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] when the elements do not lie within the slot.
    #[inline]
    pub fn slot<T: Element>(
        &self,
        parity: Parity,
        elements: Range<usize>,
    ) -> Result<Target<'_, T>> {
        self.arena.mapping().slot(parity.index(), elements)
    }

    /// Announces that this rank is about to sleep. Afterwards check *again* for everything that this
    /// rank waits for. If nothing has come, poll the guard's doorbell together with all other
    /// descriptors that should wake this rank. Dropping the guard ends the sleep.
    pub fn prepare_sleep(&self) -> SleepGuard<'_> {
        let bell = &*self.doorbell;
        SleepGuard { doorbell: bell.as_fd(), _asleep: self.flags().prepare_sleep(bell) }
    }

    /// The same as [`Segment::prepare_sleep`] without a guard, for a sleep on another thread. Ends
    /// with [`Segment::end_sleep`].
    pub fn begin_sleep(&self) {
        std::mem::forget(self.flags().prepare_sleep(&*self.doorbell));
    }

    /// Undoes one [`Segment::begin_sleep`].
    pub fn end_sleep(&self) {
        self.flags().end_sleep(&*self.doorbell);
    }

    /// Tells peers that this rank has failed: it completes no call from number `call` on.
    pub fn fail(&self, call: u64) {
        self.flags().fail(call);
    }

    /// Tells peers on which core this thread runs.
    pub fn stand_here(&self) -> Core {
        let core = Core::here();
        self.flags().set_core(core.number());
        core
    }

    /// This rank's doorbell. It is readable after it was rung.
    pub fn doorbell(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    /// A handle with which other threads of this process wake this rank.
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.doorbell))
    }

    #[inline]
    fn flags(&self) -> &Flags {
        self.arena.mapping().flags()
    }
}

/// While this guard lives, posts of peers ring this rank's doorbell. The guard's descriptor is the
/// doorbell, to be polled for reading.
#[derive(Debug)]
#[must_use = "the rank is awake again when the guard is dropped"]
pub struct SleepGuard<'a> {
    doorbell: BorrowedFd<'a>,
    _asleep: Asleep<'a, EventFd>,
}

impl AsFd for SleepGuard<'_> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.doorbell
    }
}

/// Wakes a rank from any thread of its own process. First store what the rank should find when it
/// wakes (an abort, say), then call [`wake`](Waker::wake).
#[derive(Clone, Debug)]
pub struct Waker(Arc<EventFd>);

impl Waker {
    /// Ends the rank's sleep. If the rank is awake, its next sleep ends at once.
    pub fn wake(&self) {
        self.0.ring();
    }
}

/// A memfd of the size of `layout`, with its header, and sealed against changes of its size and its
/// seals.
fn sealed_memory(layout: &Layout) -> Result<OwnedFd> {
    let bytes = layout.total_bytes() as u64;
    // Beyond this limit the kernel returns no error, it kills the process by a signal.
    if let Some(limit) = limit_of(Resource::Fsize).and_then(|limit| limit.current)
        && limit < bytes
    {
        let why = format!("files of this process may have {limit} bytes: raise `ulimit -f`");
        return Err(Error::Size { what: "a total", bytes, why });
    }

    let create = |flags| rustix::fs::memfd_create("drumline", flags);
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know the flag that forbids execution.
    let memory = create(flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|error| if error == Errno::INVAL { create(flags) } else { Err(error) })
        .map_err(Error::os("create the memory of a segment (memfd_create)"))?;
    rustix::fs::ftruncate(&memory, bytes)
        .map_err(Error::os("size the memory of a segment (ftruncate)"))?;
    // If the host is out of memory, this is an error. On first use of a page it would be a fatal
    // signal.
    let used = layout.slot(1).end as u64;
    rustix::io::retry_on_intr(|| {
        rustix::fs::fallocate(&memory, FallocateFlags::KEEP_SIZE, 0, used)
    })
    .map_err(Error::os("find memory for the slots of a segment (fallocate)"))?;
    rustix::io::pwrite(&memory, &layout.header(), 0)
        .map_err(Error::os("write the header of a segment (pwrite64)"))?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(Error::os("seal the memory of a segment (fcntl)"))?;
    Ok(memory)
}
