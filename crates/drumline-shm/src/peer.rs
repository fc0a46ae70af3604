//! A peer's side of a segment.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};

use drumline_kernels::{Element, Source, Target};
use rustix::fs::SealFlags;
use rustix::io::Errno;

use crate::cores::Core;
use crate::doorbell::EventFd;
use crate::error::{Error, Result};
use crate::flag::{Announcement, DESCRIPTION_BYTES, Flags};
use crate::layout::{HEADER_BYTES, Layout};
use crate::mapping::Mapping;
use crate::segment::{Handles, Parity};

/// The segment of another rank, mapped here, and that rank's doorbell.
///
/// It can move to another thread, but not be shared between threads.
///
/// ```
/// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
/// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
/// # let own = Segment::create(size)?;
/// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
/// own.post(Parity::Even);
/// assert_eq!(peer.last_posted(), 1);
/// # Ok::<(), drumline_shm::Error>(())
/// ```
#[derive(Debug)]
pub struct PeerSegment {
    mapping: Mapping,
    doorbell: EventFd,
    one_thread_at_a_time: PhantomData<Cell<()>>,
}

impl PeerSegment {
    /// Maps what a peer handed over, once it has been checked: the memory is a memfd that can
    /// neither shrink nor grow, its size is what its header says, and ringing cannot block.
    ///
    /// ```
    /// use drumline_shm::{Handles, PeerSegment, Segment, SegmentSize};
    ///
    /// let own = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 0 })?;
    /// assert!(PeerSegment::map(own.handles()?).is_ok());
    ///
    /// let Handles { memory, doorbell } = own.handles()?; // mixed up
    /// assert!(PeerSegment::map(Handles { memory: doorbell, doorbell: memory }).is_err());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] says what is wrong; [`Error::Os`] when there is no address space left.
    pub fn map(handles: Handles) -> Result<PeerSegment> {
        let Handles { memory, doorbell } = handles;
        let doorbell = EventFd::from_peer(doorbell)?;
        let layout = check(memory.as_fd())?;
        let mapping = Mapping::new(memory.as_fd(), layout)?;
        mapping.populate(layout.slot(0).start..layout.slot(1).end);
        Ok(PeerSegment { mapping, doorbell, one_thread_at_a_time: PhantomData })
    }

    /// The peer's count of posts in its line of a parity. What it wrote before that post may be
    /// read now.
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// own.post(Parity::Even);
    /// own.post(Parity::Odd);
    /// assert_eq!((peer.posted(Parity::Even), peer.posted(Parity::Odd)), (1, 2));
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    #[inline]
    pub fn posted(&self, parity: Parity) -> u64 {
        self.mapping.flags().posted(parity.index())
    }

    /// The peer's count of posts, in whichever line. What it wrote before that post may be read now.
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// own.post(Parity::Even);
    /// own.post(Parity::Odd);
    /// assert_eq!(peer.last_posted(), 2);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn last_posted(&self) -> u64 {
        self.posted(Parity::Even).max(self.posted(Parity::Odd))
    }

    /// Whether the peer ran on that core when it last [said](crate::Segment::stand_here) where it does.
    ///
    /// ```
    /// # use drumline_shm::{PeerSegment, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let [own, other] = [Segment::create(size)?, Segment::create(size)?];
    /// # let peer = PeerSegment::map(other.handles()?)?;
    /// let core = own.stand_here();
    /// assert!(!peer.stands_on(core)); // it has not said anything
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    #[inline]
    pub fn stands_on(&self, core: Core) -> bool {
        self.mapping.flags().core() == core.number()
    }

    /// What the peer announced for a parity. It is whole if the protocol of the callers says that
    /// the peer does not announce meanwhile; else it may be a mixture.
    ///
    /// ```
    /// # use drumline_shm::{Announcement, Parity, PeerSegment, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// own.announce(Parity::Even, Announcement { digest: 7, place: 0 }, &[0; 64]);
    /// own.post(Parity::Even);
    /// assert_eq!(peer.announcement(Parity::Even).digest, 7);
    /// assert_eq!(peer.announcement(Parity::Odd), Announcement::default());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    #[inline]
    pub fn announcement(&self, parity: Parity) -> Announcement {
        self.mapping.flags().announcement(parity.index())
    }

    /// A copy of what that announcement stands for.
    ///
    /// ```
    /// # use drumline_shm::{Announcement, Parity, PeerSegment, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// own.announce(Parity::Even, Announcement::default(), &[b'x'; 64]);
    /// own.post(Parity::Even);
    /// assert_eq!(peer.description(Parity::Even), [b'x'; 64]);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn description(&self, parity: Parity) -> [u8; DESCRIPTION_BYTES] {
        self.mapping.flags().description(parity.index())
    }

    /// Elements `elements` of the payload in the peer's line of a parity.
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// # use drumline_kernels::copy;
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// copy(own.payload(Parity::Even, 0..2)?, (&[3_i64, 4][..]).into());
    /// own.post(Parity::Even);
    /// let mut received = [0_i64; 2];
    /// copy((&mut received[..]).into(), peer.payload(Parity::Even, 0..2)?.as_source());
    /// assert_eq!(received, [3, 4]);
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
        self.mapping.payload(parity.index(), elements)
    }

    /// Bytes of each staging slot of the peer.
    ///
    /// ```
    /// # use drumline_shm::{PeerSegment, Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// assert_eq!(peer.slot_bytes(), own.slot_bytes());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn slot_bytes(&self) -> usize {
        self.mapping.layout().slot(0).len()
    }

    /// Elements `elements` of the peer's staging slot of a parity, to be read.
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// # use drumline_kernels::copy;
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// copy(own.slot(Parity::Even, 0..2)?, (&[3.0_f32, 4.0][..]).into());
    /// own.post(Parity::Even);
    /// let mut received = [0.0_f32; 2];
    /// copy((&mut received[..]).into(), peer.slot(Parity::Even, 0..2)?);
    /// assert_eq!(received, [3.0, 4.0]);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] when they do not lie within the slot.
    pub fn slot<T: Element>(
        &self,
        parity: Parity,
        elements: Range<usize>,
    ) -> Result<Source<'_, T>> {
        self.mapping.slot_source(parity.index(), elements)
    }

    /// Elements `elements` of the peer's staging slot of a parity, to be written.
    ///
    /// ```
    /// # use drumline_shm::{Parity, PeerSegment, Segment, SegmentSize};
    /// # use drumline_kernels::copy;
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// copy(peer.slot_mut(Parity::Even, 1..2)?, (&[5_u8][..]).into());
    /// let mut mine = [9_u8; 2];
    /// copy((&mut mine[..]).into(), own.slot(Parity::Even, 0..2)?.as_source());
    /// assert_eq!(mine, [0, 5]);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] when they do not lie within the slot.
    #[inline]
    pub fn slot_mut<T: Element>(
        &self,
        parity: Parity,
        elements: Range<usize>,
    ) -> Result<Target<'_, T>> {
        self.mapping.slot(parity.index(), elements)
    }

    /// `len` elements of the peer's arena, from its byte `byte_offset` on.
    ///
    /// The peer tells the offset of a registered buffer, and with it lends the buffer until it
    /// has been told that all are done. Outside that time it must not be written.
    ///
    /// ```
    /// # use drumline_shm::{PeerSegment, Segment, SegmentSize};
    /// # use drumline_kernels::copy;
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// let buffer = own.arena().allocate::<f32>(2)?;
    /// let offset = own.arena().offset_of(&buffer).unwrap(); // told to the peer
    /// copy(peer.arena(offset, 2)?, (&[3.0_f32, 4.0][..]).into());
    /// assert_eq!(*buffer, [3.0, 4.0]);
    /// assert!(peer.arena::<f32>(offset + 1, 1).is_err()); // no place for an f32
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] and [`Error::Misaligned`] when the offset or the length that the peer
    /// told are wrong.
    pub fn arena<T: Element>(&self, byte_offset: usize, len: usize) -> Result<Target<'_, T>> {
        self.mapping.target("arena", self.mapping.layout().arena(), byte_offset, len)
    }

    #[inline]
    pub(crate) fn flags_and_doorbell(&self) -> (&Flags, &EventFd) {
        (self.mapping.flags(), &self.doorbell)
    }
}

/// Whether what a peer handed over is the memory of a segment. The header is copied out before
/// it is looked at, and nothing of what is checked can change afterwards.
fn check(memory: BorrowedFd<'_>) -> Result<Layout> {
    const WHAT: &str = "a segment";
    const TMPFS_MAGIC: u64 = 0x0102_1994;

    let seals = match rustix::fs::fcntl_get_seals(memory) {
        Ok(seals) => seals,
        Err(Errno::INVAL | Errno::BADF) => return Err(Error::refused(WHAT, "it is not a memfd")),
        Err(error) => return Err(Error::os("read the seals of a segment")(error)),
    };
    let needed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    if !seals.contains(needed) {
        let why = "it is not sealed against changes of its size and of its seals";
        return Err(Error::refused(WHAT, why));
    }
    // A huge page that cannot be had is a fatal signal.
    let filesystem = rustix::fs::fstatfs(memory).map_err(Error::os("look at a segment"))?;
    if filesystem.f_type as u64 != TMPFS_MAGIC {
        return Err(Error::refused(WHAT, "it is not made of ordinary pages"));
    }
    let file = rustix::fs::fstat(memory).map_err(Error::os("look at a segment"))?;
    let mut header = [0; HEADER_BYTES];
    let read = rustix::io::pread(memory, &mut header, 0)
        .map_err(Error::os("read the header of a segment"))?;
    if read < HEADER_BYTES {
        return Err(Error::refused(WHAT, format!("it has only {read} bytes")));
    }
    Layout::from_header(&header, u64::try_from(file.st_size).unwrap_or(0))
}
