//! Descriptors that a process has inherited, of which it knows the number only.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd, RawFd},
};

/// A duplicate of the descriptor `number`. Programs do not inherit the duplicate.
///
/// ```
/// # use drumline_shm::inherited;
/// assert!(inherited(2).is_ok());
/// assert!(inherited(-1).is_err());
/// assert!(inherited(1_000_000).is_err());
/// ```
///
/// # Errors
///
/// The descriptor is not open.
pub fn inherited(number: RawFd) -> io::Result<OwnedFd> {
    if number < 0 {
        return Err(io::Error::from_raw_os_error(libc::EBADF));
    }
    // SAFETY: The number is not -1. It is used for one system call, which duplicates the descriptor, and says EBADF if there
    // is none. What else uses the descriptor is not hurt by a duplicate.
    unsafe { BorrowedFd::borrow_raw(number) }.try_clone_to_owned()
}
