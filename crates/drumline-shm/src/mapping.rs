//! A segment in the address space of this process.

#[cfg(all(target_arch = "x86_64", not(miri)))]
use std::arch::asm;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr::{self, NonNull};

use drumline_kernels::{Element, Source, Target};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};

use crate::error::{Error, Result};
use crate::flag::{Flags, PAYLOAD_BYTES, payload_offset};
use crate::layout::Layout;

/// A whole segment, mapped to be read and written until this is dropped.
///
/// Other processes may write to it at any time. So no reference to it is ever formed, other than
/// to the atomics of the flag lines and, by the owner, to its registered buffers.
#[derive(Debug)]
pub(crate) struct Mapping {
    base: NonNull<u8>,
    layout: Layout,
}

// SAFETY: the mapping belongs to the process, not to a thread, and is unmapped once, by whoever
// drops the value.
unsafe impl Send for Mapping {}
// SAFETY: a shared `Mapping` gives out addresses and references to atomics only. What may be done
// with the addresses on which thread is up to the callers of its methods.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps a memfd that is sealed to the size of `layout`.
    pub(crate) fn new(memfd: BorrowedFd<'_>, layout: Layout) -> Result<Mapping> {
        let length = layout.total_bytes();
        // SAFETY: the kernel chooses the place, so nothing that exists is replaced.
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
        .map_err(Error::os("map a segment (is the limit of the address space too low?)"))?;
        let base = NonNull::new(base.cast::<u8>())
            .ok_or_else(|| Error::os("map a segment")(rustix::io::Errno::FAULT))?;
        let mapping = Mapping { base, layout };
        // Both are wishes: kernels may be built without them.
        for advice in [Advice::LinuxDontDump, Advice::LinuxHugepage] {
            // SAFETY: the whole range is our mapping, and neither advice changes what it holds.
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
        // SAFETY: `FLAGS` lies within every segment and is aligned to 64 bytes as the base is to
        // a page. Atomics have no invalid bytes and may be shared, with other processes too.
        unsafe { &*self.address(Layout::FLAGS.start).cast::<Flags>() }
    }

    /// Asks for the line of one parity to be this core's own, as it is about to be written. A wish.
    #[inline]
    pub(crate) fn claim(&self, parity: usize) {
        let line = self.address(Layout::FLAGS.start + payload_offset(parity));
        // The intrinsic would become a prefetch for reading on a baseline target.
        #[cfg(all(target_arch = "x86_64", not(miri)))]
        // SAFETY: a prefetch changes nothing but caches, whatever the address; processors without
        // this one take it for a `nop`.
        unsafe {
            asm!("prefetchw [{}]", in(reg) line, options(nostack, preserves_flags, readonly));
        }
        #[cfg(not(all(target_arch = "x86_64", not(miri))))]
        let _ = line;
    }

    /// Makes the pages of `bytes` of the segment present, so that the first operation does not
    /// pay for them. Kernels before 5.14 do not know how; then it does.
    pub(crate) fn populate(&self, bytes: Range<usize>) {
        let address = self.address(bytes.start).cast();
        // SAFETY: callers pass a part of the layout. Populating changes no byte.
        let _ = unsafe { madvise(address, bytes.len(), Advice::LinuxPopulateWrite) };
    }

    /// `len` elements of a part of the segment, from its byte `offset` on.
    ///
    /// The handles that call this are not `Sync`: all operands that are made through one mapping
    /// stay on one thread.
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
        // SAFETY: the range lies within a part of the segment, which is mapped for reading and
        // writing for as long as `self` is borrowed and cannot shrink; parts are aligned to
        // 64 KiB, or to 8 bytes as payloads of lines, which is enough for every element, and the
        // offset in them to `T`. Elements are plain old data. Parts that are given out here are
        // never behind references of this mapping's users other than to atomics that nobody
        // accesses: slots and payloads are used only through operands, arenas only those of peers.
        Ok(unsafe { Target::from_raw(address, len) })
    }

    /// Elements `elements` of the staging slot of a parity.
    pub(crate) fn slot<T: Element>(
        &self,
        parity: usize,
        elements: Range<usize>,
    ) -> Result<Target<'_, T>> {
        self.elements("staging slot", self.layout.slot(parity), elements)
    }

    /// Elements `elements` of the payload in the line of a parity.
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
            return self.elements("line", line, elements);
        }
        let address = self.address(line.start + start * size_of::<T>()).cast::<T>();
        // SAFETY: as in `target`. The elements lie within the payload, and where it begins is
        // aligned to 8 bytes, which is enough for `T`.
        Ok(unsafe { Target::from_raw(address, end - start) })
    }

    #[inline]
    fn elements<T: Element>(
        &self,
        what: &'static str,
        part: Range<usize>,
        elements: Range<usize>,
    ) -> Result<Target<'_, T>> {
        // Too large a product, or a reversed range, ends beyond the part and is refused there.
        let offset = elements.start.saturating_mul(size_of::<T>());
        let len = elements.end.checked_sub(elements.start).unwrap_or(usize::MAX);
        self.target(what, part, offset, len)
    }

    /// The same, to be read.
    pub(crate) fn slot_source<T: Element>(
        &self,
        parity: usize,
        elements: Range<usize>,
    ) -> Result<Source<'_, T>> {
        Ok(self.slot(parity, elements)?.as_source())
    }
}

#[cold]
fn out_of_range(what: &'static str, bytes: usize, offset: usize, len: u128) -> Error {
    let start = offset as u128;
    Error::OutOfRange { what, start, end: start + len, bytes }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, pieces of it may have been replaced by `detach`;
        // everything that points there borrows `self` or keeps it alive.
        let _ = unsafe { munmap(self.base.as_ptr().cast(), self.layout.total_bytes()) };
    }
}
