//! The owner's side of a segment.

use std::cell::Cell;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use drumline_kernels::{Element, Target};
use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};
use rustix::io::Errno;
use rustix::process::{Resource, getrlimit};

use crate::arena::Arena;
use crate::doorbell::EventFd;
use crate::error::{Error, Result};
use crate::flag::{Announcement, Asleep, DESCRIPTION_BYTES, Doorbell, Flags};
use crate::layout::{Layout, SegmentSize};
use crate::mapping::Mapping;
use crate::peer::PeerSegment;

/// Which of two places an operation uses: operations of a group take turns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parity {
    /// Operations 0, 2, 4, ...
    Even,
    /// Operations 1, 3, 5, ...
    Odd,
}

impl Parity {
    /// The parity of a sequence number.
    pub const fn of(sequence: u64) -> Parity {
        if sequence.is_multiple_of(2) { Parity::Even } else { Parity::Odd }
    }

    /// That of the operation before this one, and of the one behind it.
    pub const fn other(self) -> Parity {
        match self {
            Parity::Even => Parity::Odd,
            Parity::Odd => Parity::Even,
        }
    }

    pub(crate) const fn index(self) -> usize {
        self as usize
    }
}

/// What lets another process map a segment: two descriptors, to be given to [`handover::send`]
/// or [`PeerSegment::map`].
///
/// [`handover::send`]: crate::handover::send
#[derive(Debug)]
pub struct Handles {
    /// The memory: a sealed memfd.
    pub memory: OwnedFd,
    /// The owner's doorbell: an eventfd.
    pub doorbell: OwnedFd,
}

/// A rank's own segment and its doorbell.
///
/// There is one writer of its flag lines: a segment can move to another thread, but not be
/// shared between threads. Its [`Arena`] can.
///
/// ```compile_fail,E0277
/// fn shared_between_threads<T: Sync>() {}
/// shared_between_threads::<drumline_shm::Segment>();
/// ```
#[derive(Debug)]
pub struct Segment {
    arena: Arena,
    doorbell: Arc<EventFd>,
    /// How often it has posted. In a cell: a segment is used by one thread at a time.
    posted: Cell<u64>,
}

impl Segment {
    /// Makes a segment. Lines and slots take memory at once, the arena when it is used.
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
    /// When the process has no descriptor left.
    pub fn handles(&self) -> Result<Handles> {
        Ok(Handles { memory: self.arena.memory()?, doorbell: self.doorbell.try_clone()? })
    }

    /// Where registered buffers come from. Clones may go to other threads.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Bytes of each staging slot.
    pub fn slot_bytes(&self) -> usize {
        self.arena.mapping().layout().slot(0).len()
    }

    /// Writes the announcement of a parity and what it stands for, for peers to read after the
    /// next post.
    #[inline]
    pub fn announce(
        &self,
        parity: Parity,
        announcement: Announcement,
        description: &[u8; DESCRIPTION_BYTES],
    ) {
        self.flags().announce(parity.index(), announcement, description);
    }

    /// Counts one more post, in the line of a parity, without waking anybody, and returns the
    /// count. Peers that see it see everything that this rank wrote before.
    pub fn post(&self, parity: Parity) -> u64 {
        let count = self.count();
        self.flags().post(parity.index(), count);
        count
    }

    /// Counts one more post, in the line of a parity, wakes those of `peers` that sleep, and
    /// returns the count.
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

    /// Fetches the line of a parity for writing, ahead of time: else the next announcement there
    /// waits until peers that have read the line have let go of it.
    #[inline]
    pub fn claim(&self, parity: Parity) {
        self.arena.mapping().claim(parity.index());
    }

    #[inline]
    fn count(&self) -> u64 {
        self.posted.set(self.posted.get().wrapping_add(1));
        self.posted.get()
    }

    /// How often this rank has posted.
    pub fn posted(&self) -> u64 {
        self.posted.get()
    }

    /// Elements `elements` of the payload in this rank's line of a parity, which has room for
    /// [`PAYLOAD_BYTES`](crate::PAYLOAD_BYTES).
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] when they do not lie within the line.
    #[inline]
    pub fn payload<T: Element>(
        &self,
        parity: Parity,
        elements: Range<usize>,
    ) -> Result<Target<'_, T>> {
        self.arena.mapping().payload(parity.index(), elements)
    }

    /// Elements `elements` of this rank's staging slot of a parity.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] when they do not lie within the slot.
    #[inline]
    pub fn slot<T: Element>(
        &self,
        parity: Parity,
        elements: Range<usize>,
    ) -> Result<Target<'_, T>> {
        self.arena.mapping().slot(parity.index(), elements)
    }

    /// Begins to sleep. Then look *again* at everything that is awaited; if there is nothing
    /// yet, poll the guard's doorbell together with whatever else should wake this rank. When the
    /// guard is dropped the rank is awake.
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// use rustix::event::{PollFd, PollFlags, poll};
    ///
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 0 };
    /// # let own = Segment::create(size)?;
    /// # let other = Segment::create(size)?;
    /// # let peer = PeerSegment::map(other.handles()?)?;
    /// # other.post(Parity::Even);
    /// while peer.posted(Parity::Even) < 1 {
    ///     let asleep = own.prepare_sleep();
    ///     if peer.posted(Parity::Even) < 1 {
    ///         // Sockets and the pidfds of peers would stand in the same list.
    ///         let mut wakers = [PollFd::new(&asleep, PollFlags::IN)];
    ///         poll(&mut wakers, None)?;
    ///     }
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn prepare_sleep(&self) -> SleepGuard<'_> {
        let bell = &*self.doorbell;
        SleepGuard { doorbell: bell.as_fd(), _asleep: self.flags().prepare_sleep(bell) }
    }

    /// From now on, posts of peers ring the doorbell: for a sleep that no guard can stand around,
    /// because another thread sleeps. See [`Segment::prepare_sleep`] for what to do then.
    pub fn begin_sleep(&self) {
        std::mem::forget(self.flags().prepare_sleep(&*self.doorbell));
    }

    /// Undoes one [`Segment::begin_sleep`].
    pub fn end_sleep(&self) {
        self.flags().end_sleep(&*self.doorbell);
    }

    /// Readable when it was rung.
    pub fn doorbell(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    /// Something that wakes this rank from other threads of its process.
    pub fn waker(&self) -> Waker {
        Waker(Arc::clone(&self.doorbell))
    }

    #[inline]
    fn flags(&self) -> &Flags {
        self.arena.mapping().flags()
    }
}

/// While it lives, posts of peers ring this rank's doorbell. Its descriptor is the doorbell, to
/// be polled for reading.
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

/// Wakes a rank from any thread of its own process: store what the rank should find when it
/// looks (say, that it is to abort), then [`wake`](Waker::wake).
#[derive(Clone, Debug)]
pub struct Waker(Arc<EventFd>);

impl Waker {
    /// Ends the rank's sleep, or its next one if it is awake.
    pub fn wake(&self) {
        self.0.ring();
    }
}

/// A memfd of the size of `layout` with its header, which can change neither its size nor its
/// seals.
fn sealed_memory(layout: &Layout) -> Result<OwnedFd> {
    let bytes = layout.total_bytes() as u64;
    // Beyond this limit the kernel does not return an error, it sends a signal that kills.
    if let Some(limit) = getrlimit(Resource::Fsize).current
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
        .map_err(Error::os("create the memory of a segment (memfd)"))?;
    rustix::fs::ftruncate(&memory, bytes).map_err(Error::os("size the memory of a segment"))?;
    // A page that cannot be had is an error here. Later it would be a fatal signal.
    let used = layout.slot(1).end as u64;
    rustix::io::retry_on_intr(|| {
        rustix::fs::fallocate(&memory, FallocateFlags::KEEP_SIZE, 0, used)
    })
    .map_err(Error::os("find memory for the slots of a segment"))?;
    rustix::io::pwrite(&memory, &layout.header(), 0)
        .map_err(Error::os("write the header of a segment"))?;
    rustix::fs::fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)
        .map_err(Error::os("seal the memory of a segment"))?;
    Ok(memory)
}
