//! Makes pages of a shared mapping private without changing a value.

use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::io::{Errno, retry_on_intr};
use rustix::mm::{Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap, mremap_fixed, munmap};

use crate::error::{Error, Result};

const FAILED: &str = "make a registered buffer private";

/// Replaces a shared mapping by a private mapping of the same bytes. The shared mapping is `bytes` bytes at
/// `address`, and shows `memory` from `offset` on. A private page shows the shared page until the private
/// page is first written: see [`copy_pages`].
///
/// All threads of this process see the replacement in one step. A thread that uses these bytes finds
/// either the old mapping or the new one, with the same values, and loses no write. (The alternative,
/// to fill other memory and move it into place, would lose the writes in between.)
///
/// # Safety
///
/// `address` and `bytes` are whole pages of a shared mapping of `memory` from `offset` on. The owner of that
/// mapping later unmaps these addresses, whatever they map by then.
pub(crate) unsafe fn map_privately(
    memory: BorrowedFd<'_>,
    offset: u64,
    address: *mut u8,
    bytes: usize,
) -> Result<()> {
    // Mapped elsewhere first and then moved: if the kernel has no memory left, the old mapping stays.
    // SAFETY: the kernel chooses the address, so this replaces no existing mapping.
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
    // SAFETY: `private` is the whole mapping made above, and nothing points into it yet. It replaces
    // the pages at `address` by pages with the same values, so references to them stay valid.
    let moved =
        unsafe { mremap_fixed(private, bytes, bytes, MremapFlags::MAYMOVE, address.cast()) };
    if let Err(error) = moved {
        // SAFETY: nothing points into the mapping made above.
        let _ = unsafe { munmap(private, bytes) };
        return Err(Error::os(FAILED)(error));
    }
    Ok(())
}

/// Gives this process its own copy of pages, as a write to each page would.
///
/// # Safety
///
/// `address` and `bytes` are whole pages of a private mapping with read and write access.
pub(crate) unsafe fn copy_pages(address: *mut u8, bytes: usize) -> Result<()> {
    // SAFETY: the contract says that the pages are mapped privately and may be written. Populating them
    // changes no value.
    match retry_on_intr(|| unsafe { madvise(address.cast(), bytes, Advice::LinuxPopulateWrite) }) {
        Err(Errno::INVAL) => {
            // SAFETY: both functions have the same contract.
            unsafe { write_to_pages(address, bytes) };
            Ok(())
        }
        result => result.map_err(Error::os(FAILED)),
    }
}

/// [`copy_pages`] on kernels before 5.14: writes one byte of each page, with its present value.
///
/// # Safety
///
/// As for [`copy_pages`].
unsafe fn write_to_pages(address: *mut u8, bytes: usize) {
    for at in (0..bytes).step_by(rustix::param::page_size()) {
        // SAFETY: by the contract, the byte is mapped for reading and writing, and a byte is always aligned.
        // `Arena::detach` borrows the data, so safe code of this process only reads
        // it meanwhile. The first and the last page may also hold other elements of the same buffer, which
        // another thread may read and write without atomics. The processor executes the compare-and-exchange
        // below in one step, and it stores only the value that is there: so such a thread reads what it would
        // read anyway, and none of its writes is lost.
        let byte = unsafe { AtomicU8::from_ptr(address.add(at)) };
        let value = byte.load(Ordering::Relaxed);
        // If the exchange fails, another thread has written to the byte since the load, and its write has
        // copied the page.
        let _ = byte.compare_exchange(value, value, Ordering::Relaxed, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::io::{pread, pwrite};

    use super::*;

    /// Maps three pages and copies the middle one. The others must show later writes to the memory.
    fn check(copy: unsafe fn(*mut u8, usize)) {
        let page = rustix::param::page_size();
        let memory = memfd_create("pages", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&memory, 3 * page as u64).unwrap();
        let write = |value| pwrite(&memory, &vec![value; 3 * page], 0).unwrap();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        write(1);
        // SAFETY: only this test uses the mapping, and it accesses no byte beyond it.
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
    fn old_kernels_copy_pages_that_are_written_to() {
        check(write_to_pages);
    }
}
