//! How a stretch of a shared mapping becomes private without changing a value.

use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mremap_fixed, munmap};

use crate::error::{Error, Result};

const FAILED: &str = "make a registered buffer private";

/// Replaces `bytes` bytes at `address`, which map `memory` from `offset` on and are shared, by a
/// private mapping of the same bytes of the same memory. A page of it shows the shared one until it is
/// first written: see [`copy_pages`].
///
/// The replacement is one step for everybody in this process: a thread that uses these bytes
/// finds either the old mapping or the new one, with the same values, and none of its writes is lost.
/// (Memory that was filled beforehand and moved into place would lose those of the time between.)
///
/// # Safety
///
/// `address` and `bytes` are whole pages of a shared mapping of `memory` from `offset` on, which
/// this process unmaps by address when it is done.
pub(crate) unsafe fn map_privately(
    memory: BorrowedFd<'_>,
    offset: u64,
    address: *mut u8,
    bytes: usize,
) -> Result<()> {
    // Made elsewhere first, and only then moved: if the kernel has no memory to promise, the old
    // mapping is still there.
    // SAFETY: the kernel chooses the place, so nothing that exists is replaced.
    let private = unsafe {
        mmap(
            ptr::null_mut(),
            bytes,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE,
            memory,
            offset,
        )
    }
    .map_err(Error::os(FAILED))?;
    // SAFETY: `private` is the mapping made above, and moves whole. The pages at `address` are
    // replaced by pages with the same values, so references to them stay valid.
    let moved =
        unsafe { mremap_fixed(private, bytes, bytes, MremapFlags::MAYMOVE, address.cast()) };
    if let Err(error) = moved {
        // SAFETY: nothing points into the mapping made above.
        let _ = unsafe { munmap(private, bytes) };
        return Err(Error::os(FAILED)(error));
    }
    Ok(())
}

/// Has the kernel copy pages as if they had been written.
///
/// # Safety
///
/// `address` and `bytes` are whole pages of a private mapping, to be read and written.
pub(crate) unsafe fn copy_pages(address: *mut u8, bytes: usize) -> Result<()> {
    // SAFETY: it changes no value.
    match retry_on_intr(|| unsafe { madvise(address.cast(), bytes, Advice::LinuxPopulateWrite) }) {
        Err(Errno::INVAL) => {
            // SAFETY: as the caller's.
            unsafe { write_to_pages(address, bytes) };
            Ok(())
        }
        result => result.map_err(Error::os(FAILED)),
    }
}

/// The same on kernels before 5.14: writes a byte of each page, with the value that it has.
///
/// # Safety
///
/// As for [`copy_pages`].
unsafe fn write_to_pages(address: *mut u8, bytes: usize) {
    for at in (0..bytes).step_by(rustix::param::page_size()) {
        // SAFETY: it lies within. Others may use the byte, and cannot tell: its value is compared
        // and written in one step.
        let byte = unsafe { AtomicU8::from_ptr(address.add(at)) };
        let value = byte.load(Ordering::Relaxed);
        // If it fails, another thread has written to the page, which does as well.
        let _ = byte.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::io::{pread, pwrite};

    use super::*;

    /// Of three pages that are mapped the middle one is copied, and the others show what is written
    /// to the memory.
    fn check(copy: unsafe fn(*mut u8, usize)) {
        let page = rustix::param::page_size();
        let memory = memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 3 * page as u64).unwrap();
        let write = |value| pwrite(&memory, &vec![value; 3 * page], 0).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        write(1);
        // SAFETY: this mapping is the test's own, and nothing else points there.
        let seen = unsafe {
            let private =
                mmap(ptr::null_mut(), 3 * page, protection, MapFlags::PRIVATE, &memory, 0);
            let first = private.unwrap().cast::<u8>();
            copy(first.add(page), page);
            write(2);
            let at = [0, page - 1, page, 2 * page - 1, 2 * page];
            let seen = at.map(|at| first.add(at).read_volatile());
            first.add(page).write_volatile(3);
            munmap(first.cast(), 3 * page).unwrap();
            seen
        };
        assert_eq!(seen, [2, 2, 1, 1, 2]);
        let mut shared = [0];
        pread(&memory, &mut shared, page as u64).unwrap();
        assert_eq!(shared, [2]);
    }

    #[test]
    fn kernels_copy_pages() {
        // SAFETY: as for `copy_pages`.
        check(|address, bytes| unsafe { copy_pages(address, bytes) }.unwrap());
    }

    #[test]
    fn pages_that_are_written_to_are_copied_by_old_kernels_too() {
        check(write_to_pages);
    }
}
