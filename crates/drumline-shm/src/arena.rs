//! Registered buffers: memory of this process that peers read and write.

use std::collections::BTreeMap;
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

/// The part of a rank's segment from which registered buffers are allocated.
///
/// Clones share one arena. It stays mapped until the segment, all clones and all buffers are
/// dropped.
#[derive(Clone, Debug)]
pub struct Arena(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    mapping: Mapping,
    memory: OwnedFd,
    /// Ranges are bytes of the arena, in whole pages.
    pages: Mutex<Pages>,
    /// Whether any page was ever detached. Until then `offset_of` needs no lock.
    any_detached: AtomicBool,
    page_bytes: usize,
    /// The process that may allocate and free. A process forked from it shares the memory, but has
    /// its own copy of the list of free pages.
    process: u32,
}

struct Pages {
    free: Ranges,
    /// Pages that are private to this process. They are never allocated again, because late peers may still
    /// write to the shared memory behind them.
    detached: Ranges,
    /// What is to be done before bytes are detached, by a number.
    before: BTreeMap<u64, (Range<usize>, Unpin)>,
    /// The number of the next entry of `before`.
    next: u64,
}

type Unpin = Box<dyn FnOnce() + Send>;

impl Arena {
    pub(crate) fn new(mapping: Mapping, memory: OwnedFd) -> Arena {
        let mut free = Ranges::default();
        free.insert(0..mapping.layout().arena().len());
        Arena(Arc::new(Shared {
            mapping,
            memory,
            pages: Mutex::new(Pages {
                free,
                detached: Ranges::default(),
                before: BTreeMap::new(),
                next: 0,
            }),
            any_detached: AtomicBool::new(false),
            page_bytes: rustix::param::page_size(),
            process: std::process::id(),
        }))
    }

    /// Allocates a buffer of `len` zeros. It begins on a page and shares no page with another
    /// buffer.
    ///
    /// # Errors
    ///
    /// [`Error::ArenaFull`] when no free range is long enough; [`Error::Os`] when the host has no
    /// memory left; [`Error::Forked`] in a process forked from the owner.
    pub fn allocate<T: Element>(&self, len: usize) -> Result<Registered<T>> {
        let shared = &*self.0;
        if std::process::id() != shared.process {
            return Err(Error::Forked { owner: shared.process });
        }
        let range = shared.take_pages(len as u128 * size_of::<T>() as u128)?;
        // From here on, dropping the buffer frees the pages, also after an error.
        let buffer = Registered { arena: self.clone(), range, len, elements: PhantomData };
        shared.reserve_memory(&buffer.range)?;
        let start = shared.address(buffer.range.start);
        // SAFETY: the range was free, so no reference of this process points there, and now it
        // belongs to this buffer. It lies within the arena, which is mapped for writing. Detached
        // pages are never free, so these are shared pages, whose zeros peers see too.
        unsafe { ptr::write_bytes(start, 0, buffer.range.len()) };
        Ok(buffer)
    }

    /// Where `data` begins, in bytes from the start of the arena. Peers pass this offset to
    /// [`PeerSegment::arena`](crate::PeerSegment::arena). `None` when `data` lies elsewhere, or a
    /// part of it was detached.
    pub fn offset_of<T: Element>(&self, data: &[T]) -> Option<usize> {
        let shared = &*self.0;
        let bytes = shared.bytes_of(data)?;
        let is_detached = shared.any_detached.load(Ordering::Relaxed) && shared.is_detached(&bytes);
        (!is_detached).then_some(bytes.start)
    }

    /// Takes `data` back from peers that may still use it after a call has failed, because a peer is slow and
    /// not dead. Call it after the group is poisoned and before the caller gets the buffer back.
    ///
    /// Every page that holds a part of `data` becomes private to this process, with its values at
    /// their addresses. From then on the owner does not see what peers write to these pages, peers do
    /// not see what the owner writes, and the pages are never allocated again. The first and the last
    /// page may hold other elements of the same buffer; these must not be lent to peers at that time.
    /// The crate's documentation says why this is sound.
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
        let overlap = |range: &Range<usize>| range.start < bytes.end && bytes.start < range.end;
        pages
            .before
            .extract_if(.., |_, (range, _)| overlap(range))
            .for_each(|(_, (_, unpin))| unpin());
        let arena_start = shared.mapping.layout().arena().start;
        for gap in pages.detached.gaps(&shared.whole_pages(&bytes)) {
            let (offset, address) = ((arena_start + gap.start) as u64, shared.address(gap.start));
            // SAFETY: `gap` is whole pages of the arena that were not detached, so they are mapped
            // shared, from this offset of the memory on. `Mapping` unmaps them by address.
            unsafe { map_privately(shared.memory.as_fd(), offset, address, gap.len()) }?;
            let bytes = gap.len();
            pages.detached.insert(gap);
            // SAFETY: `map_privately` has just mapped these pages privately, for reading and writing.
            unsafe { copy_pages(address, bytes) }?;
        }
        Ok(())
    }

    /// Bytes of a page. No two buffers share a page.
    pub fn page_bytes(&self) -> usize {
        self.0.page_bytes
    }

    /// Bytes of the arena.
    pub fn bytes(&self) -> usize {
        self.0.mapping.layout().arena().len()
    }

    pub(crate) fn mapping(&self) -> &Mapping {
        &self.0.mapping
    }

    /// A new descriptor of the whole segment.
    pub(crate) fn memory(&self) -> Result<OwnedFd> {
        self.0
            .memory
            .try_clone()
            .map_err(Error::os("duplicate the descriptor of a segment (fcntl)"))
    }
}

impl fmt::Debug for Pages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pages { free, detached, .. } = self;
        f.debug_struct("Pages").field("free", free).field("detached", detached).finish()
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

    /// Where `data` lies in the arena, or `None` if it lies elsewhere. A Rust reference never reaches
    /// from one mapping into another, so `data` lies in the arena wholly or not at all.
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

    /// Takes as many pages as `bytes` need, at least one, out of the free pages.
    fn take_pages(&self, bytes: u128) -> Result<Range<usize>> {
        let asked = bytes.max(1).next_multiple_of(self.page_bytes as u128);
        let allowed = self.mapping.layout().arena().len();
        let mut pages = self.pages();
        usize::try_from(asked).ok().and_then(|asked| pages.free.take(asked)).ok_or_else(|| {
            let (free, largest_free) = pages.free.total_and_longest();
            Error::ArenaFull { asked, used: allowed - free, allowed, largest_free }
        })
    }

    /// Has the kernel allocate memory for pages. If the host is out of memory, this is an error here
    /// and not a fatal signal on first use of a page.
    fn reserve_memory(&self, range: &Range<usize>) -> Result<()> {
        // In pieces, because a signal makes the kernel start a piece over.
        const PIECE: usize = 64 << 20;
        let arena_start = self.mapping.layout().arena().start;
        for start in range.clone().step_by(PIECE) {
            let bytes = PIECE.min(range.end - start) as u64;
            let at = (arena_start + start) as u64;
            retry_on_intr(|| fallocate(&self.memory, FallocateFlags::KEEP_SIZE, at, bytes))
                .map_err(Error::os("find memory for a registered buffer (fallocate)"))?;
        }
        Ok(())
    }

    /// Frees the pages of a buffer and returns their memory to the kernel.
    ///
    /// The shared memory behind detached pages stays until no process maps the segment: the call that
    /// failed here may yet succeed on a peer that is about to read it.
    fn free(&self, range: Range<usize>) {
        if std::process::id() != self.process {
            return; // A forked process drops its copy of the handle. The memory is the owner's.
        }
        let arena_start = self.mapping.layout().arena().start;
        let mut pages = self.pages();
        for private in pages.detached.within(&range) {
            let address = self.address(private.start).cast();
            // SAFETY: these pages of our mapping belong to a buffer that is being dropped, so no
            // reference points there. Detached pages are never allocated again.
            let _ = unsafe { madvise(address, private.len(), Advice::LinuxDontNeed) };
        }
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        for shared in pages.detached.gaps(&range) {
            let (at, bytes) = ((arena_start + shared.start) as u64, shared.len() as u64);
            // If this fails, the memory stays allocated until the pages are used again.
            let _ = retry_on_intr(|| fallocate(&self.memory, punch, at, bytes));
            pages.free.insert(shared);
        }
    }
}

/// A buffer in a rank's arena. The rank's peers can read and write it without a copy.
///
/// Use it as a slice. It keeps the arena mapped, and dropping it frees its pages.
pub struct Registered<T: Element> {
    arena: Arena,
    /// Bytes of the arena, in whole pages.
    range: Range<usize>,
    /// Number of elements. They fit in the range.
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Element> Registered<T> {
    /// The arena that this buffer lies in.
    pub fn arena(&self) -> &Arena {
        &self.arena
    }

    /// Has `unpin` run before a part of this buffer is [detached](Arena::detach), unless what this returns is
    /// dropped first. For drivers of devices that have pinned the buffer's pages. `unpin` must not use the arena.
    pub fn before_detach(&self, unpin: impl FnOnce() + Send + 'static) -> BeforeDetach {
        let mut pages = self.arena.0.pages();
        let number = pages.next;
        pages.next += 1;
        pages.before.insert(number, (self.range.clone(), Box::new(unpin)));
        BeforeDetach { arena: self.arena.clone(), number }
    }

    /// Cuts the buffer at element `at`, without a copy. Keeps the elements before `at` and returns
    /// the rest. `None`, without a change, when `at` lies beyond the end or inside a page: no two
    /// buffers share a page, because [`Arena::detach`] takes back whole pages.
    #[must_use = "dropping the part that was cut off frees its pages"]
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
    /// # Errors
    ///
    /// Returns `next` if it does not begin where this buffer ends.
    pub fn append(&mut self, mut next: Registered<T>) -> Result<(), Registered<T>> {
        let is_full = self.len * size_of::<T>() == self.range.len();
        let is_same = Arc::ptr_eq(&self.arena.0, &next.arena.0);
        if !is_full || !is_same || next.range.start != self.range.end {
            return Err(next);
        }
        self.range.end = next.range.end;
        self.len += next.len;
        // Dropping `next` here then frees no page.
        next.range.start = next.range.end;
        next.len = 0;
        Ok(())
    }
}

/// What runs before a part of a buffer is detached: see [`Registered::before_detach`]. Dropping this cancels it.
#[must_use = "dropping it cancels what runs before a detach"]
pub struct BeforeDetach {
    arena: Arena,
    number: u64,
}

impl BeforeDetach {
    /// Cancels it. `false`: it has run, because the buffer was detached.
    pub fn cancel(&self) -> bool {
        self.arena.0.pages().before.remove(&self.number).is_some()
    }
}

impl Drop for BeforeDetach {
    fn drop(&mut self) {
        self.cancel();
    }
}

impl fmt::Debug for BeforeDetach {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("BeforeDetach").field("number", &self.number).finish()
    }
}

impl<T: Element> Deref for Registered<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        let start = self.arena.0.address(self.range.start).cast::<T>();
        // SAFETY: the range is mapped for as long as `self.arena` lives. It holds `len` elements and
        // begins on a page. It belongs to this buffer alone, so `&self` and `&mut self` guard it as
        // they guard the elements of a `Vec`. Elements are plain old data: any bytes are values.
        // Peers write only while a call has the buffer on loan, which needs this buffer's borrow; the
        // crate's documentation discusses peers that write at other times.
        unsafe { slice::from_raw_parts(start, self.len) }
    }
}

impl<T: Element> DerefMut for Registered<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let start = self.arena.0.address(self.range.start).cast::<T>();
        // SAFETY: as in `deref`, and `&mut self` makes this the only reference.
        unsafe { slice::from_raw_parts_mut(start, self.len) }
    }
}

impl<T: Element> Drop for Registered<T> {
    fn drop(&mut self) {
        self.arena.0.free(self.range.clone());
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
