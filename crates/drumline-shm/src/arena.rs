//! Registered buffers: memory of this process that peers reduce into.

use std::fmt;
use std::marker::PhantomData;
use std::ops::{Deref, DerefMut, Range};
use std::os::fd::{AsFd, OwnedFd};
use std::ptr;
use std::slice;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use drumline_kernels::Element;
use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::retry_on_intr;
use rustix::mm::{Advice, madvise};

use crate::detach::{copy_pages, map_privately};
use crate::error::{Error, Result};
use crate::mapping::Mapping;
use crate::ranges::Ranges;

/// The part of a rank's segment that registered buffers are allocated from.
///
/// Clones are the same arena. It stays mapped until the segment, all clones and all buffers are
/// dropped.
///
/// ```
/// # use drumline_shm::{Arena, Segment, SegmentSize};
/// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
/// # let own = Segment::create(size)?;
/// let arena: &Arena = own.arena();
/// let buffer = arena.allocate::<f32>(1000)?;
/// assert_eq!(arena.offset_of(&buffer[1..]), arena.offset_of(&buffer).map(|start| start + 4));
/// assert_eq!(arena.offset_of(&[0.0_f32]), None); // it lies elsewhere
/// # Ok::<(), drumline_shm::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Arena(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    mapping: Mapping,
    memory: OwnedFd,
    /// Ranges are bytes of the arena, in whole pages.
    pages: Mutex<Pages>,
    /// Whether anything was detached: spares `offset_of` the lock.
    any_detached: AtomicBool,
    page_bytes: usize,
    /// The process that may allocate and free. One that was forked has the same memory, but its
    /// own idea of what is free.
    process: u32,
}

#[derive(Debug)]
struct Pages {
    free: Ranges,
    /// Private to this process, and never given out again: late peers may still write there.
    detached: Ranges,
}

impl Arena {
    pub(crate) fn new(mapping: Mapping, memory: OwnedFd) -> Arena {
        let mut free = Ranges::default();
        free.insert(0..mapping.layout().arena().len());
        Arena(Arc::new(Shared {
            mapping,
            memory,
            pages: Mutex::new(Pages { free, detached: Ranges::default() }),
            any_detached: AtomicBool::new(false),
            page_bytes: rustix::param::page_size(),
            process: std::process::id(),
        }))
    }

    /// A buffer of `len` zeros, whose memory is there. It begins on a page and shares no page
    /// with another buffer.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// let mut buffer = own.arena().allocate::<u64>(3)?;
    /// assert_eq!(*buffer, [0; 3]);
    /// buffer[1] = 7; // it is a slice
    /// let error = own.arena().allocate::<u64>(1 << 20).unwrap_err().to_string();
    /// assert!(error.contains("no room for a registered buffer of 8388608 bytes"), "{error}");
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::ArenaFull`] says how much was asked for, used and allowed; [`Error::Os`] when
    /// the host has no memory left; [`Error::Forked`] in a process forked from the owner.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<Registered<T>> {
        let shared = &*self.0;
        if std::process::id() != shared.process {
            return Err(Error::Forked { owner: shared.process });
        }
        let range = shared.take_pages(len as u128 * size_of::<T>() as u128)?;
        // From here on the pages go back when the buffer is dropped, also after an error.
        let buffer = Registered { arena: self.clone(), range, len, elements: PhantomData };
        shared.find_memory(&buffer.range)?;
        let start = shared.address(buffer.range.start);
        // SAFETY: the range was free, so no reference of this process points there, and it is
        // ours now. It lies within the arena, which is mapped for writing. Detached pages are
        // never free, so this is shared memory that peers see too.
        unsafe { ptr::write_bytes(start, 0, buffer.range.len()) };
        Ok(buffer)
    }

    /// Where `data` begins, in bytes from the start of the arena: what peers pass to
    /// [`PeerSegment::arena`](crate::PeerSegment::arena). `None` when it lies elsewhere, or when
    /// a part of it was detached.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// let (one, other) = (own.arena().allocate::<u8>(1)?, own.arena().allocate::<u8>(1)?);
    /// let [one, other] = [&one, &other].map(|it| own.arena().offset_of(it).unwrap());
    /// assert!(one.abs_diff(other) >= own.arena().page_bytes());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn offset_of<T: Element>(&self, data: &[T]) -> Option<usize> {
        let shared = &*self.0;
        let bytes = shared.bytes_of(data)?;
        let is_detached = shared.any_detached.load(Ordering::Relaxed) && shared.is_detached(&bytes);
        (!is_detached).then_some(bytes.start)
    }

    /// Takes `data` back from peers that may still write to it, or read it: for buffers of an operation
    /// that failed while a slow peer was alive. To be called once the group is poisoned, before the
    /// buffer goes back to its owner.
    ///
    /// The values stay where they are, and the whole pages that hold them become private to this
    /// process. What peers write to these pages from now on, nobody sees; what its owner writes, peers do not
    /// see; and the pages are never given out again. That includes what else the buffer has on the first and
    /// the last page: it is not to be lent to peers at that time. See the crate's documentation for why this
    /// is sound.
    ///
    /// ```
    /// # use drumline_shm::{PeerSegment, Segment, SegmentSize};
    /// # use drumline_kernels::copy;
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
    /// let mut buffer = own.arena().allocate::<i32>(2)?;
    /// let offset = own.arena().offset_of(&buffer).unwrap();
    /// own.arena().detach(&buffer)?;
    /// copy(peer.arena(offset, 2)?, (&[7, 7][..]).into()); // a late write
    /// assert_eq!(*buffer, [0, 0]); // is not seen
    /// assert_eq!(own.arena().offset_of(&buffer), None);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// [`Error::NotRegistered`] when `data` is not in this arena, and [`Error::Os`] when there
    /// is no memory for the copy. Then peers can still write to `data`.
    pub fn detach<T: Element>(&self, data: &[T]) -> Result<()> {
        let shared = &*self.0;
        let bytes = shared.bytes_of(data).ok_or(Error::NotRegistered)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let mut pages = shared.pages();
        shared.any_detached.store(true, Ordering::Relaxed);
        let arena_start = shared.mapping.layout().arena().start;
        for gap in pages.detached.gaps(&shared.whole_pages(&bytes)) {
            let (offset, address) = ((arena_start + gap.start) as u64, shared.address(gap.start));
            // SAFETY: `gap` is whole pages of the arena, mapped shared until now, at this offset
            // of the memory.
            unsafe { map_privately(shared.memory.as_fd(), offset, address, gap.len()) }?;
            let bytes = gap.len();
            pages.detached.insert(gap);
            // SAFETY: they have just been mapped, privately.
            unsafe { copy_pages(address, bytes) }?;
        }
        Ok(())
    }

    /// Bytes of a page, which no two buffers share.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// assert!(own.arena().page_bytes().is_power_of_two());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn page_bytes(&self) -> usize {
        self.0.page_bytes
    }

    /// Bytes of the arena.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// assert_eq!(own.arena().bytes(), 1 << 20);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn bytes(&self) -> usize {
        self.0.mapping.layout().arena().len()
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.0.mapping
    }

    /// A new descriptor of the whole segment.
    pub(crate) fn memory(&self) -> Result<OwnedFd> {
        self.0.memory.try_clone().map_err(Error::os("duplicate the descriptor of a segment"))
    }
}

impl Shared {
    fn pages(&self) -> MutexGuard<'_, Pages> {
        self.pages.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The address of a byte of the arena.
    fn address(&self, offset: usize) -> *mut u8 {
        self.mapping.address(self.mapping.layout().arena().start + offset)
    }

    /// Where `data` lies in the arena, if it does. Rust's references never reach from one mapping
    /// into another, so it lies there wholly or not at all.
    fn bytes_of<T>(&self, data: &[T]) -> Option<Range<usize>> {
        let arena = self.mapping.layout().arena();
        let start = data.as_ptr().addr().checked_sub(self.address(0).addr())?;
        let end = start.checked_add(size_of_val(data))?;
        (end <= arena.len()).then_some(start..end)
    }

    /// Whether a part of these bytes was detached.
    fn is_detached(&self, bytes: &Range<usize>) -> bool {
        !self.pages().detached.within(&self.whole_pages(bytes)).is_empty()
    }

    fn whole_pages(&self, bytes: &Range<usize>) -> Range<usize> {
        let start = bytes.start - bytes.start % self.page_bytes;
        start..bytes.end.next_multiple_of(self.page_bytes)
    }

    /// Takes pages for so many bytes, at least one.
    fn take_pages(&self, bytes: u128) -> Result<Range<usize>> {
        let asked = bytes.max(1).next_multiple_of(self.page_bytes as u128);
        let allowed = self.mapping.layout().arena().len();
        let mut pages = self.pages();
        usize::try_from(asked).ok().and_then(|asked| pages.free.take(asked)).ok_or_else(|| {
            let (free, largest_free) = pages.free.total_and_longest();
            Error::ArenaFull { asked, used: allowed - free, allowed, largest_free }
        })
    }

    /// Has the kernel find memory for pages. If it cannot, that is an error here, and not a
    /// fatal signal when the pages are touched.
    fn find_memory(&self, range: &Range<usize>) -> Result<()> {
        // In pieces: a signal makes the kernel start a piece again.
        const PIECE: usize = 64 << 20;
        let arena_start = self.mapping.layout().arena().start;
        for start in range.clone().step_by(PIECE) {
            let bytes = PIECE.min(range.end - start) as u64;
            let at = (arena_start + start) as u64;
            retry_on_intr(|| fallocate(&self.memory, FallocateFlags::KEEP_SIZE, at, bytes))
                .map_err(Error::os("find memory for a registered buffer"))?;
        }
        Ok(())
    }

    /// Takes a buffer's pages back and gives their memory to the kernel.
    ///
    /// Not so the shared memory behind pages that were detached: an operation that failed here may
    /// yet succeed on a peer that is about to read them. It goes when nobody maps the segment.
    fn give_back(&self, range: Range<usize>) {
        if std::process::id() != self.process {
            return; // A forked process gives up its reference, not the owner's memory.
        }
        let arena_start = self.mapping.layout().arena().start;
        let mut pages = self.pages();
        for private in pages.detached.within(&range) {
            let address = self.address(private.start).cast();
            // SAFETY: these are pages of our mapping that belonged to a buffer which is being
            // dropped; nobody looks at them again.
            let _ = unsafe { madvise(address, private.len(), Advice::LinuxDontNeed) };
        }
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for free in pages.detached.gaps(&range) {
            let (at, bytes) = ((arena_start + free.start) as u64, free.len() as u64);
            // If it fails the memory stays taken until the pages are used again.
            let _ = retry_on_intr(|| fallocate(&self.memory, punch, at, bytes));
            pages.free.insert(free);
        }
    }
}

/// A buffer in a rank's arena, which the rank's peers can read and write without a copy.
///
/// A slice in every respect. It keeps the arena mapped, and goes back to it when dropped.
///
/// ```
/// # use drumline_shm::{Registered, Segment, SegmentSize};
/// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
/// # let own = Segment::create(size)?;
/// let buffer: Registered<f32> = own.arena().allocate(3)?;
/// drop(own); // the memory stays mapped for it
/// assert_eq!(buffer.iter().sum::<f32>(), 0.0);
/// # Ok::<(), drumline_shm::Error>(())
/// ```
pub struct Registered<T: Element> {
    arena: Arena,
    /// Bytes of the arena, in whole pages.
    range: Range<usize>,
    /// Elements, of which the range has room for at least as many.
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Registered<T> {
    /// The arena that this buffer lies in.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// let buffer = own.arena().allocate::<u8>(100)?;
    /// assert!(buffer.arena().offset_of(&buffer).is_some());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Cuts the buffer at element `at`, without a copy: keeps what lies before, and returns the
    /// rest. `None`, and nothing has changed, where `at` lies beyond the end or inside of a page:
    /// no two buffers share a page, because a page is what [`Arena::detach`] takes back.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// let page = own.arena().page_bytes();
    /// let mut first = own.arena().allocate::<u8>(3 * page)?;
    /// let rest = first.split_off(page).expect("it is the border of a page");
    /// assert_eq!((first.len(), rest.len()), (page, 2 * page));
    /// assert!(first.split_off(page / 2).is_none());
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    #[must_use = "what is cut off goes back to the arena when it is dropped"]
    pub fn split_off(&mut self, at: usize) -> Option<Registered<T>> {
        let bytes = at.checked_mul(size_of::<T>())?;
        if at > self.len || !bytes.is_multiple_of(self.arena.0.page_bytes) {
            return None;
        }
        let middle = self.range.start + bytes;
        let rest = Registered {
            arena: self.arena.clone(),
            range: middle..self.range.end,
            len: self.len - at,
            elements: PhantomData,
        };
        self.range.end = middle;
        self.len = at;
        Some(rest)
    }

    /// Joins a buffer to the end of this one, without a copy.
    ///
    /// ```
    /// # use drumline_shm::{Segment, SegmentSize};
    /// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
    /// # let own = Segment::create(size)?;
    /// let page = own.arena().page_bytes();
    /// let mut first = own.arena().allocate::<u8>(3 * page)?;
    /// let mut middle = first.split_off(page).unwrap();
    /// let last = middle.split_off(page).unwrap();
    /// let last = first.append(last).unwrap_err(); // something lies between the two
    /// first.append(middle).unwrap();
    /// first.append(last).unwrap();
    /// assert_eq!(first.len(), 3 * page);
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// The buffer comes back if it does not begin where this one ends.
    pub fn append(&mut self, mut next: Registered<T>) -> Result<(), Registered<T>> {
        let is_full = self.len * size_of::<T>() == self.range.len();
        let is_same = Arc::ptr_eq(&self.arena.0, &next.arena.0);
        if !is_full || !is_same || next.range.start != self.range.end {
            return Err(next);
        }
        self.range.end = next.range.end;
        self.len += next.len;
        // It has nothing left to give back when it is dropped here.
        next.range.start = next.range.end;
        next.len = 0;
        Ok(())
    }
}

impl<T: Element> Deref for Registered<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let start = self.arena.0.address(self.range.start).cast::<T>();
        // SAFETY: the range is mapped for as long as `self.arena` lives, holds `len` elements,
        // begins on a page, and belongs to this buffer alone, so `&self` and `&mut self` guard
        // it as they guard a `Vec`. Elements are plain old data: any bytes are values. Peers write
        // only while an operation has the buffer; the crate's documentation says what that means.
        unsafe { slice::from_raw_parts(start, self.len) }
    }
}

impl<T: Element> DerefMut for Registered<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let start = self.arena.0.address(self.range.start).cast::<T>();
        // SAFETY: as in `deref`; `&mut self` makes it the only reference.
        unsafe { slice::from_raw_parts_mut(start, self.len) }
    }
}

impl<T: Element> Drop for Registered<T> {
    fn drop(&mut self) {
        self.arena.0.give_back(self.range.clone());
    }
}

impl<T: Element> fmt::Debug for Registered<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Registered")
            .field("type", &T::DTYPE)
            .field("len", &self.len)
            .field("byte_offset", &self.range.start)
            .finish()
    }
}
