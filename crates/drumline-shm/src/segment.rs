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
use crate::cores::Core;
use crate::doorbell::EventFd;
use crate::error::{Error, Result};
use crate::flag::{Announcement, Asleep, DESCRIPTION_BYTES, Doorbell, Flags};
use crate::layout::{Layout, SegmentSize};
use crate::mapping::Mapping;
use crate::peer::PeerSegment;

/// Which of two places an operation uses: operations of a group take turns.
///
/// ```
/// use drumline_shm::Parity;
///
/// assert_eq!([0, 1, 2].map(Parity::of), [Parity::Even, Parity::Odd, Parity::Even]);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Parity {
    /// Operations 0, 2, 4, ...
    Even,
    /// Operations 1, 3, 5, ...
    Odd,
}

impl Parity {
    /// The parity of a sequence number.
    ///
    /// ```
    /// use drumline_shm::Parity;
    ///
    /// assert_eq!(Parity::of(7), Parity::Odd);
    /// ```
    pub const fn of(sequence: u64) -> Parity {
        if sequence.is_multiple_of(2) { Parity::Even } else { Parity::Odd }
    }

    /// That of the operation before this one, and of the one behind it.
    ///
    /// ```
    /// use drumline_shm::Parity;
    ///
    /// assert_eq!(Parity::of(7).other(), Parity::of(8));
    /// ```
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
///
/// ```
/// use drumline_shm::{Handles, PeerSegment, Segment, SegmentSize};
///
/// let own = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 0 })?;
/// let Handles { memory, doorbell } = own.handles()?; // two descriptors, for another process
/// assert_eq!(PeerSegment::map(Handles { memory, doorbell })?.last_posted(), 0);
/// # Ok::<(), drumline_shm::Error>(())
/// ```
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
    /// ```
    /// use drumline_shm::{Segment, SegmentSize};
    ///
    /// let own = Segment::create(SegmentSize { slot_bytes: 1 << 16, arena_bytes: 1 << 32 })?;
    /// assert_eq!(own.arena().bytes(), 1 << 32); // which takes no memory yet
    /// assert!(Segment::create(SegmentSize { slot_bytes: 2 << 30, arena_bytes: 0 }).is_err());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
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
    /// ```
    /// use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    ///
    /// let own = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 0 })?;
    /// let peers = [PeerSegment::map(own.handles()?)?, PeerSegment::map(own.handles()?)?];
    /// own.post(Parity::Even);
    /// assert!(peers.iter().all(|peer| peer.last_posted() == 1));
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// When the process has no descriptor left.
    pub fn handles(&self) -> Result<Handles> {
        Ok(Handles { memory: self.arena.memory()?, doorbell: self.doorbell.try_clone()? })
    }

    /// Where registered buffers come from. Clones may go to other threads.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// let arena = own.arena().clone();
    /// let buffer = std::thread::spawn(move || arena.allocate::<f32>(3)).join().unwrap()?;
    /// assert!(own.arena().offset_of(&buffer).is_some());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Bytes of each staging slot.
    ///
    /// ```
    /// # use drumline_shm::{Parity, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// assert_eq!(own.slot_bytes(), 64 << 10); // 4096 were asked for
    /// assert!(own.slot::<f32>(Parity::Even, 0..own.slot_bytes() / 4).is_ok());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn slot_bytes(&self) -> usize {
        self.arena.mapping().layout().slot(0).len()
    }

    /// Writes the announcement of a parity and what it stands for, for peers to read after the
    /// next post.
    ///
    /// ```
    /// # use drumline_shm::{Announcement, Parity, PeerSegment, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// own.announce(Parity::Even, Announcement { digest: 7, place: 0 }, &[1; 64]);
    /// own.post(Parity::Even);
    /// assert_eq!(peer.announcement(Parity::Even).digest, 7);
    /// assert_eq!(peer.description(Parity::Even), [1; 64]);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
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
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// assert_eq!([own.post(Parity::Even), own.post(Parity::Odd)], [1, 2]);
    /// assert_eq!(peer.posted(Parity::Odd), 2);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn post(&self, parity: Parity) -> u64 {
        let count = self.count();
        self.flags().post(parity.index(), count);
        count
    }

    /// Counts one more post, in the line of a parity, wakes those of `peers` that sleep, and
    /// returns the count.
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// use rustix::event::{PollFd, PollFlags, Timespec, poll};
    ///
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// # let neighbour = Segment::create(size)?;
    /// let rang = |owner: &Segment| {
    ///     let mut list = [PollFd::from_borrowed_fd(owner.doorbell(), PollFlags::IN)];
    ///     poll(&mut list, Some(&Timespec::default())).map(|ready| ready == 1)
    /// };
    /// neighbour.post_and_wake(Parity::Even, [&peer]);
    /// assert!(!rang(&own)?); // it does not sleep
    /// let asleep = own.prepare_sleep();
    /// neighbour.post_and_wake(Parity::Odd, [&peer]);
    /// assert!(rang(&own)?);
    /// # drop(asleep);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// own.claim(Parity::Even); // while nobody waits for this rank
    /// own.post(Parity::Even);
    /// assert_eq!(peer.posted(Parity::Even), 1);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
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
    ///
    /// ```
    /// # use drumline_shm::{Parity, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// own.post(Parity::Even);
    /// own.post(Parity::Odd);
    /// assert_eq!(own.posted(), 2); // in whichever line
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn posted(&self) -> u64 {
        self.posted.get()
    }

    /// Elements `elements` of the payload in this rank's line of a parity, which has room for
    /// [`PAYLOAD_BYTES`](crate::PAYLOAD_BYTES).
    ///
    /// ```
    /// # use drumline_kernels::copy;
    /// # use drumline_shm::{Parity, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// copy(own.payload(Parity::Even, 0..5)?, (&[1.0_f64; 5][..]).into()); // 40 bytes
    /// assert!(own.payload::<f64>(Parity::Even, 0..6).is_err());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
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
    /// ```
    /// # use drumline_kernels::copy;
    /// # use drumline_shm::{Parity, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// copy(own.slot(Parity::Odd, 0..3)?, (&[1.0_f32, 2.0, 3.0][..]).into());
    /// let mut staged = [0.0_f32; 2];
    /// copy((&mut staged[..]).into(), own.slot(Parity::Odd, 1..3)?.as_source());
    /// assert_eq!(staged, [2.0, 3.0]);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
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
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// use rustix::event::{PollFd, PollFlags, Timespec, poll};
    ///
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// # let neighbour = Segment::create(size)?;
    /// let rang = |owner: &Segment| {
    ///     let mut list = [PollFd::from_borrowed_fd(owner.doorbell(), PollFlags::IN)];
    ///     poll(&mut list, Some(&Timespec::default())).map(|ready| ready == 1)
    /// };
    /// own.begin_sleep(); // then look again at all that is awaited
    /// neighbour.post_and_wake(Parity::Even, [&peer]);
    /// assert!(rang(&own)?);
    /// own.end_sleep();
    /// assert!(!rang(&own)?);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn begin_sleep(&self) {
        std::mem::forget(self.flags().prepare_sleep(&*self.doorbell));
    }

    /// Undoes one [`Segment::begin_sleep`].
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// use rustix::event::{PollFd, PollFlags, Timespec, poll};
    ///
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// # let neighbour = Segment::create(size)?;
    /// let rang = |owner: &Segment| {
    ///     let mut list = [PollFd::from_borrowed_fd(owner.doorbell(), PollFlags::IN)];
    ///     poll(&mut list, Some(&Timespec::default())).map(|ready| ready == 1)
    /// };
    /// own.begin_sleep();
    /// own.end_sleep();
    /// neighbour.post_and_wake(Parity::Even, [&peer]);
    /// assert!(!rang(&own)?); // no more
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn end_sleep(&self) {
        self.flags().end_sleep(&*self.doorbell);
    }

    /// Tells peers on which core this thread runs.
    ///
    /// ```
    /// # use drumline_shm::{PeerSegment, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// let core = own.stand_here();
    /// assert!(peer.stands_on(core));
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn stand_here(&self) -> Core {
        let core = Core::here();
        self.flags().set_core(core.number());
        core
    }

    /// Readable when it was rung.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// use rustix::event::{PollFd, PollFlags, Timespec, poll};
    ///
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// let mut list = [PollFd::from_borrowed_fd(own.doorbell(), PollFlags::IN)];
    /// assert_eq!(poll(&mut list, Some(&Timespec::default()))?, 0);
    /// own.waker().wake();
    /// assert_eq!(poll(&mut list, None)?, 1);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn doorbell(&self) -> BorrowedFd<'_> {
        self.doorbell.as_fd()
    }

    /// Something that wakes this rank from other threads of its process.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// use rustix::event::{PollFd, PollFlags, Timespec, poll};
    ///
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// let waker = own.waker();
    /// std::thread::spawn(move || waker.wake());
    /// let mut list = [PollFd::from_borrowed_fd(own.doorbell(), PollFlags::IN)];
    /// poll(&mut list, None)?; // sleeps until then
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
///
/// ```
/// # use drumline_shm::{SleepGuard, Segment, SegmentSize};
/// use rustix::event::{PollFd, PollFlags, Timespec, poll};
///
/// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
/// # let own = Segment::create(size)?;
/// let asleep: SleepGuard<'_> = own.prepare_sleep();
/// own.waker().wake();
/// let mut list = [PollFd::new(&asleep, PollFlags::IN)];
/// assert_eq!(poll(&mut list, None)?, 1);
/// drop(asleep); // awake, and the ring is forgotten
/// let mut list = [PollFd::from_borrowed_fd(own.doorbell(), PollFlags::IN)];
/// assert_eq!(poll(&mut list, Some(&Timespec::default()))?, 0);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
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
///
/// ```
/// # use drumline_shm::{Waker, Segment, SegmentSize};
/// use rustix::event::{PollFd, PollFlags, Timespec, poll};
///
/// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
/// # let own = Segment::create(size)?;
/// let waker: Waker = own.waker();
/// std::thread::spawn(move || waker.wake()).join().unwrap();
/// let mut list = [PollFd::from_borrowed_fd(own.doorbell(), PollFlags::IN)];
/// assert_eq!(poll(&mut list, None)?, 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Waker(Arc<EventFd>);

impl Waker {
    /// Ends the rank's sleep, or its next one if it is awake.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// use rustix::event::{PollFd, PollFlags, Timespec, poll};
    ///
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// own.waker().wake(); // before it sleeps
    /// let mut list = [PollFd::from_borrowed_fd(own.doorbell(), PollFlags::IN)];
    /// assert_eq!(poll(&mut list, None)?, 1); // so it does not
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
