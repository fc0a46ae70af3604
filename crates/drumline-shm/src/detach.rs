//! How a stretch of a shared mapping becomes private without changing a value.

use std::os::fd::BorrowedFd;
use std::ptr;

use rustix::mm::{MapFlags, MremapFlags, ProtFlags, mmap, mremap_fixed, munmap};

use crate::error::{Error, Result};

/// Replaces `bytes` bytes at `address`, which map `memory` from `offset` on and are shared, by a
/// private mapping of the same bytes of the same memory, and makes every page of it a copy.
///
/// The replacement is one step for everybody in this process: a thread that uses other bytes of
/// the first or the last page finds either the old mapping or the new one, with the same values,
/// and none of its writes is lost. (Memory that was filled beforehand and moved into place would
/// lose those of the time between.) A page of a private mapping shows the shared page until it is
/// first written. So one byte of each page is written, with the value that it has.
///
/// # Safety
///
/// - `address` and `bytes` are whole pages of a shared mapping of `memory` from `offset` on, which
///   this process unmaps by address when it is done.
/// - `touched` lies within, has at least one byte in each of the pages, and no other thread
///   uses those bytes.
pub(crate) unsafe fn make_private(
    memory: BorrowedFd<'_>,
    offset: u64,
    address: *mut u8,
    bytes: usize,
    touched: *mut [u8],
    page_bytes: usize,
) -> Result<()> {
    let failed = "make a registered buffer private";
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
    .map_err(Error::os(failed))?;
    // SAFETY: `private` is the mapping made above, and moves whole. The pages at `address` are
    // replaced by pages with the same values, so references to them stay valid.
    let moved =
        unsafe { mremap_fixed(private, bytes, bytes, MremapFlags::MAYMOVE, address.cast()) };
    if let Err(error) = moved {
        // SAFETY: nothing points into the mapping made above.
        let _ = unsafe { munmap(private, bytes) };
        return Err(Error::os(failed)(error));
    }

    let first = touched.cast::<u8>();
    let in_first_page = page_bytes - first.addr() % page_bytes;
    let others = (in_first_page..touched.len()).step_by(page_bytes);
    for at in std::iter::once(0).chain(others) {
        // SAFETY: `at` is below the length of `touched`, which is mapped, and which only this
        // thread uses.
        unsafe {
            let byte = first.add(at);
            byte.write_volatile(byte.read_volatile());
        }
    }
    Ok(())
}
