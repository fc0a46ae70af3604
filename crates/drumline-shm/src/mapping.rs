//! A segment in the address space of this process.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use std::arch::asm;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use drumline_kernels::{Element, Target};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::error::{Error, Result};
use crate::flag::{Flags, PAYLOAD_BYTES, payload_offset};
use crate::layout::Layout;

/// A whole segment, mapped for reading and writing until this value is dropped.
///
/// Other processes may write to the segment at any time. So no Rust reference points into it, except
/// to the atomics of the flag lines and, in the owner's process, to registered buffers.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the mapping belongs to the process, not to a thread. It is unmapped once, on whichever
// thread the value is dropped.
unsafe impl Send for Mapping {}
// SAFETY: a shared `Mapping` gives out references to atomics, addresses, and operands. References to atomics
// may be shared. Using an address is unsafe, so its user answers for the thread. Operands (`target`, `slot`,
// `payload`) are made only by `Segment` and `PeerSegment`, which are not `Sync`: all operands of one mapping
// stay on one thread.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a memfd that is sealed to the size of `layout`.
    pub(crate) fn new(memfd: BorrowedFd<'_>, layout: Layout) -> Result<Mapping> {
        let length = layout.total_bytes();
        // SAFETY: the kernel chooses the address, so this replaces no existing mapping.
        let base = unsafe {
            mmap(
                ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::SHARED | MapFlags::NORESERVE,
                memfd,
                0,
            )
        }
        .map_err(Error::os("map a segment (mmap: is the limit of the address space too low?)"))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| Error::os("map a segment")(rustix::io::Errno::FAULT))?;
        let mapping = Mapping { base, layout };
        // Failures do not matter: kernels may be built without either.
        for advice in [Advice::LinuxDontDump, Advice::LinuxHugepage] {
            // SAFETY: the whole range is the mapping made above, and neither advice changes a byte.
            let _ = unsafe { madvise(base.as_ptr().cast(), length, advice) };
        }
        Ok(mapping)
    }

    #[inline]
    pub(crate) fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The address of a byte of the segment.
    #[inline]
    pub(crate) fn address(&self, offset: usize) -> *mut u8 {
        self.base.as_ptr().wrapping_add(offset)
    }

    /// The flag lines.
    #[inline]
    pub(crate) fn flags(&self) -> &Flags {
        // SAFETY: `FLAGS` lies within every segment, which is mapped while `self` lives. It is
        // aligned to 64 bytes, because the base is aligned to a page and the offset to 64 bytes.
        // Any bytes are values of atomics, and atomics may be shared, with other processes too.
        unsafe { &*self.address(Layout::FLAGS.start).cast::<Flags>() }
    }

    /// Asks the processor for exclusive access to the line of one parity, which this rank is about to
    /// write. The processor may ignore it.
    #[inline]
    pub(crate) fn claim(&self, parity: usize) {
        let line = self.address(Layout::FLAGS.start + payload_offset(parity));
        // Not the intrinsic: for a baseline target it compiles to a prefetch for reading.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch changes only caches, whatever the address. Processors without this
        // instruction execute it as a `nop`.
        unsafe {
            asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = line;
    }

    /// Has the kernel make the pages of `bytes` now, as if each were written, so that the first call need not wait
    /// for page faults. Kernels before 5.14 cannot do this.
    pub(crate) fn populate(&self, bytes: Range<usize>) {
        self.advise(bytes, Advice::LinuxPopulateWrite);
    }

    /// The same for pages that their owner has made, as if they were read: the kernel then maps 16 of them in one
    /// step. They can be written, too, because nothing tracks writes to memory files.
    pub(crate) fn populate_made(&self, bytes: Range<usize>) {
        self.advise(bytes, Advice::LinuxPopulateRead);
    }

    /// `advice` is one that changes no byte. Whether the kernel takes it does not matter.
    fn advise(&self, bytes: Range<usize>, advice: Advice) {
        let address = self.address(bytes.start).cast();
        // SAFETY: callers pass a part of the layout, which is mapped, and the advice changes no byte.
        let _ = unsafe { madvise(address, bytes.len(), advice) };
    }

    /// `len` elements of a part of the segment, from byte `offset` of that part on.
    ///
    /// `what` names the part in errors.
    #[inline]
    pub(crate) fn target<T: Element>(
        &self,
        what: &'static str,
        part: Range<usize>,
        offset: usize,
        len: usize,
    ) -> Result<Target<'_, T>> {
        let end = len.checked_mul(size_of::<T>()).and_then(|bytes| offset.checked_add(bytes));
        if end.is_none_or(|end| end > part.len()) {
            return Err(out_of_range(
                what,
                part.len(),
                offset,
                len as u128 * size_of::<T>() as u128,
            ));
        }
        if !offset.is_multiple_of(align_of::<T>()) {
            return Err(Error::Misaligned { offset, align: align_of::<T>() });
        }
        let address = self.address(part.start + offset).cast::<T>();
        // SAFETY:
        // - The range lies within a part of the segment. The segment is mapped for reading and
        //   writing while `self` is borrowed, and its file cannot shrink.
        // - Slots and the arena begin at multiples of 64 KiB, and payloads at multiples of 8 bytes.
        //   (No element is aligned to more than 8 bytes.) The offset is a multiple of the alignment
        //   of `T`.
        // - No other thread of this process uses the range: all operands of one mapping stay on one
        //   thread (see `Sync`), and only operands access these parts. Slots have no references, the
        //   atomics of the payloads are never accessed, and only arenas of peers are used here.
        // - Elements are plain old data, so any bytes that another process writes are values.
        Ok(unsafe { Target::from_raw(address, len) })
    }

    /// Some elements of the staging slot of a parity.
    pub(crate) fn slot<T: Element>(
        &self,
        parity: usize,
        elements: Range<usize>,
    ) -> Result<Target<'_, T>> {
        self.elements("staging slot", self.layout.slot(parity), elements)
    }

    /// Some elements of the payload in the line of a parity.
    #[inline]
    pub(crate) fn payload<T: Element>(
        &self,
        parity: usize,
        elements: Range<usize>,
    ) -> Result<Target<'_, T>> {
        const { assert!(align_of::<T>() <= 8, "payloads are aligned to 8 bytes") };
        let Range { start, end } = elements;
        let line = Layout::payload(parity);
        if start > end || end > PAYLOAD_BYTES / size_of::<T>() {
            return self.elements("payload", line, elements);
        }
        let address = self.address(line.start + start * size_of::<T>()).cast::<T>();
        // SAFETY: as in `target`. The elements lie within the payload, and the payload begins at a
        // multiple of 8 bytes, which is enough for `T`.
        Ok(unsafe { Target::from_raw(address, end - start) })
    }

    #[inline]
    fn elements<T: Element>(
        &self,
        what: &'static str,
        part: Range<usize>,
        elements: Range<usize>,
    ) -> Result<Target<'_, T>> {
        // If the product is too large, or the range reversed, the result ends beyond the part and
        // `target` refuses it.
        let offset = elements.start.saturating_mul(size_of::<T>());
        let len = elements.end.checked_sub(elements.start).unwrap_or(usize::MAX);
        self.target(what, part, offset, len)
    }
}

#[cold]
fn out_of_range(what: &'static str, bytes: usize, offset: usize, len: u128) -> Error {
    let start = offset as u128;
    Error::OutOfRange { what, start, end: start + len, bytes }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `new` mapped this range, and `detach` may have replaced pages of it by others of
        // this segment. Whatever points there borrows `self` or keeps it alive.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.layout.total_bytes()) };
    }
}
