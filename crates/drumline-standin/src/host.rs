//! Host memory that the device reads and writes.
//!
//! A program may give away memory that the device still uses. The stand-in must tell this, and not die of it, so the
//! kernel does these copies: it reports addresses at which nothing is mapped.

use std::io;
use std::sync::atomic::{AtomicU32, Ordering};

#[derive(Clone, Copy)]
enum Way {
    Read,
    Write,
}

/// Copies from `address` to `into`. False: nothing is mapped at some of it.
pub(crate) fn read(address: usize, into: &mut [u8]) -> bool {
    copy(Way::Read, address, into.as_mut_ptr(), into.len())
}

/// Copies `from` to `address`. False: some of it cannot be written.
pub(crate) fn write(address: usize, from: &[u8]) -> bool {
    copy(Way::Write, address, from.as_ptr().cast_mut(), from.len())
}

/// The word at an aligned address; nothing if it is not mapped.
pub(crate) fn load(address: usize) -> Option<u32> {
    let mut word = [0; 4];
    // SAFETY: the address is aligned and was readable a moment ago. Whoever unmaps a word that a stream waits for,
    // while he calls the driver, would crash a real program too.
    read(address, &mut word)
        .then(|| unsafe { AtomicU32::from_ptr(address as *mut u32) }.load(Ordering::Acquire))
}

/// Writes the word at an aligned address. False: it cannot be written.
pub(crate) fn store(address: usize, value: u32) -> bool {
    let Some(now) = load(address) else { return false };
    if !write(address, &now.to_ne_bytes()) {
        return false;
    }
    // SAFETY: as in `load`; it could be written a moment ago.
    unsafe { AtomicU32::from_ptr(address as *mut u32) }.store(value, Ordering::Release);
    true
}

/// Whether all pages of a range are mapped.
pub(crate) fn is_mapped(address: usize, len: usize) -> bool {
    let first = address & !(PAGE - 1);
    let mut pages = vec![0u8; (address + len - first).div_ceil(PAGE)];
    // SAFETY: mincore only looks at the range, and writes one byte for each page of it.
    unsafe {
        libc::mincore(first as *mut libc::c_void, address + len - first, pages.as_mut_ptr()) == 0
    }
}

/// The granularity of ranges: any multiple of the page of the machine would do.
pub(crate) const PAGE: usize = 4096;

fn copy(way: Way, address: usize, local: *mut u8, len: usize) -> bool {
    let mut done = 0;
    while done < len {
        let here = libc::iovec { iov_base: local.wrapping_add(done).cast(), iov_len: len - done };
        let there =
            libc::iovec { iov_base: (address + done) as *mut libc::c_void, iov_len: len - done };
        // SAFETY: `here` is memory of the caller, who holds it for this time; the kernel checks `there`.
        let moved = unsafe {
            match way {
                Way::Read => libc::process_vm_readv(libc::getpid(), &here, 1, &there, 1, 0),
                Way::Write => libc::process_vm_writev(libc::getpid(), &here, 1, &there, 1, 0),
            }
        };
        match moved {
            1.. => done += moved as usize,
            0 => return false,
            _ => match io::Error::last_os_error().raw_os_error() {
                Some(libc::EINTR) => {}
                Some(libc::ENOSYS | libc::EPERM) => return copy_plainly(way, address, local, len),
                _ => return false,
            },
        }
    }
    true
}

/// For machines that forbid the kernel's way. Here a range that is not mapped ends the process.
fn copy_plainly(way: Way, address: usize, local: *mut u8, len: usize) -> bool {
    // SAFETY: a program that gives memory to the driver keeps it mapped as long as the driver uses it.
    unsafe {
        match way {
            Way::Read => std::ptr::copy(address as *const u8, local, len),
            Way::Write => std::ptr::copy(local, address as *mut u8, len),
        }
    }
    true
}
