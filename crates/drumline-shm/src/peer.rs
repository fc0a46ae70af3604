//! A peer's segment, as this process maps it.

use std::cell::Cell;
use std::marker::PhantomData;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use drumline_kernels::{Element, Source, Target};
use rustix::fs::SealFlags;
use rustix::io::Errno;

use crate::cores::Core;
use crate::doorbell::EventFd;
use crate::error::{Error, Result};
use crate::flag::{Announcement, DESCRIPTION_BYTES, Flags};
use crate::handover::Handles;
use crate::layout::{HEADER_BYTES, Layout};
use crate::mapping::Mapping;
use crate::parity::Parity;
use crate::window::PeerWindow;

/// The segment of another rank, mapped here, and that rank's doorbell.
///
/// It can move to another thread, but threads cannot share it.
#[derive(Debug)]
pub struct PeerSegment {
    mapping: Arc<Mapping>,
    doorbell: EventFd,
    one_thread_at_a_time: PhantomData<Cell<()>>,
}

impl PeerSegment {
    /// Checks and maps what a peer handed over: the memory must be a memfd that can neither shrink
    /// nor grow, its size must be what its header says, and ringing the doorbell must not block.
    ///
    /// # Errors
    ///
    /// [`Error::Refused`] says what is wrong; [`Error::Os`] when there is no address space left.
    pub fn map(handles: Handles) -> Result<PeerSegment> {
        let Handles { memory, doorbell } = handles;
        let doorbell = EventFd::from_peer(doorbell)?;
        let layout = check(memory.as_fd())?;
        let mapping = Arc::new(Mapping::new(memory.as_fd(), layout)?);
        Ok(PeerSegment { mapping, doorbell, one_thread_at_a_time: PhantomData })
    }

    /// Has the kernel map all pages of the peer's slots now. Without this it maps each when it is first used. That
    /// delays the first calls, but costs nothing for peers and pages that are never used.
    pub fn populate(&self) {
        let layout = self.mapping.layout();
        self.mapping.populate_made(layout.slot(0).start..layout.slot(1).end);
    }

    /// The peer's count of posts at its last post in its line of a parity. The caller may then read
    /// everything that the peer wrote before that post.
    #[inline]
    pub fn posted(&self, parity: Parity) -> u64 {
        self.mapping.flags().posted(parity.index())
    }

    /// The peer's count of posts, in both lines together. The caller may then read everything that
    /// the peer wrote before its last post.
    pub fn last_posted(&self) -> u64 {
        self.posted(Parity::Even).max(self.posted(Parity::Odd))
    }

    /// Whether the peer has [failed](crate::Segment::fail), and does not complete the call with this number. Ask after a post of this rank: then a peer that fails later
    /// sees that post.
    #[inline]
    pub fn has_failed(&self, call: u64) -> bool {
        self.mapping.flags().has_failed(call)
    }

    /// Whether the peer ran on that core at its last [`stand_here`](crate::Segment::stand_here).
    #[inline]
    pub fn stands_on(&self, core: Core) -> bool {
        self.mapping.flags().core() == core.number()
    }

    /// The peer's announcement of a parity. It may mix an old and a new announcement, unless the
    /// protocol of the callers keeps the peer from announcing meanwhile.
    #[inline]
    pub fn announcement(&self, parity: Parity) -> Announcement {
        self.mapping.flags().announcement(parity.index())
    }

    /// A copy of the description that belongs to that announcement. It may be a mixture, too.
    pub fn description(&self, parity: Parity) -> [u8; DESCRIPTION_BYTES] {
        self.mapping.flags().description(parity.index())
    }

    /// Some elements of the payload in the peer's line of a parity.
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
        self.mapping.payload(parity.index(), elements)
    }

    /// Bytes of each staging slot of the peer.
    pub fn slot_bytes(&self) -> usize {
        self.mapping.layout().slot(0).len()
    }

    /// Some elements of the peer's staging slot of a parity, for reading.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] when the elements do not lie within the slot.
    pub fn slot<T: Element>(
        &self,
        parity: Parity,
        elements: Range<usize>,
    ) -> Result<Source<'_, T>> {
        Ok(self.slot_mut(parity, elements)?.as_source())
    }

    /// Some elements of the peer's staging slot of a parity, for writing.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] when the elements do not lie within the slot.
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
    /// The peer lends a registered buffer by telling its offset. The loan ends when the peer has
    /// been told that all ranks are done. At no other time may the buffer be written.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] and [`Error::Misaligned`] when the offset or the length that the peer
    /// told is wrong.
    pub fn arena<T: Element>(&self, byte_offset: usize, len: usize) -> Result<Target<'_, T>> {
        self.mapping.target("arena", self.mapping.layout().arena(), byte_offset, len)
    }

    /// Bytes of the peer's arena, for a device that copies them. The window keeps them mapped.
    ///
    /// # Errors
    ///
    /// [`Error::OutOfRange`] when the arena has no such bytes.
    pub fn window(&self, byte_offset: usize, bytes: usize) -> Result<PeerWindow> {
        PeerWindow::new(self.mapping.clone(), byte_offset, bytes)
    }

    #[inline]
    pub(crate) fn flags_and_doorbell(&self) -> (&Flags, &EventFd) {
        (self.mapping.flags(), &self.doorbell)
    }
}

/// Checks that a descriptor from a peer is the memory of a segment, and returns its layout. The
/// header is checked in a copy, and the seals keep the size from changing afterwards.
fn check(memory: BorrowedFd<'_>) -> Result<Layout> {
    const WHAT: &str = "a segment";
    const TMPFS_MAGIC: u64 = 0x0102_1994;

    let seals = match rustix::fs::fcntl_get_seals(memory) {
        Ok(seals) => seals,
        Err(Errno::INVAL | Errno::BADF) => return Err(Error::refused(WHAT, "it is not a memfd")),
        Err(error) => return Err(Error::os("read the seals of a segment (fcntl)")(error)),
    };
    let needed = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
    if !seals.contains(needed) {
        let why = "it is not sealed against changes of its size and of its seals";
        return Err(Error::refused(WHAT, why));
    }
    // Memory of huge pages is on another file system. If the host had no huge page left, using the
    // memory would be a fatal signal.
    let filesystem =
        rustix::fs::fstatfs(memory).map_err(Error::os("look at a segment (fstatfs)"))?;
    if filesystem.f_type as u64 != TMPFS_MAGIC {
        return Err(Error::refused(WHAT, "it is not made of ordinary pages"));
    }
    let file = rustix::fs::fstat(memory).map_err(Error::os("look at a segment (fstat)"))?;
    let mut header = [0; HEADER_BYTES];
    let read = rustix::io::pread(memory, &mut header, 0)
        .map_err(Error::os("read the header of a segment (pread64)"))?;
    if read < HEADER_BYTES {
        return Err(Error::refused(WHAT, format!("it has only {read} bytes")));
    }
    Layout::from_header(&header, u64::try_from(file.st_size).unwrap_or(0))
}
