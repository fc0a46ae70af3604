//! What a process has inherited: descriptors of which it knows the number only, and how it takes signals.

use std::{
    io, mem,
    os::fd::{BorrowedFd, OwnedFd, RawFd},
};

/// A duplicate of the descriptor `number`. Programs do not inherit the duplicate.
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

/// Takes signals as a process does that a shell has started. From now on this thread, and those that it starts, block no
/// signal. If this process ignores SIGCHLD, the kernel tells nobody how its children end: from now on it does. Other
/// signals that are ignored stay so, because `nohup` ignores one on purpose.
///
/// # Errors
///
/// The kernel refuses a call. None is known to do so.
pub fn take_signals() -> io::Result<()> {
    let check = |answer| match answer {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: All bytes of both structures may be zero. The pointers are to values of the right type that live, or null where
    // the call allows that. The new action is the default one or the one that was there before.
    unsafe {
        let mut none: libc::sigset_t = mem::zeroed();
        check(libc::sigemptyset(&raw mut none))?;
        match libc::pthread_sigmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut()) {
            0 => {}
            number => return Err(io::Error::from_raw_os_error(number)),
        }
        let mut action: libc::sigaction = mem::zeroed();
        check(libc::sigaction(libc::SIGCHLD, std::ptr::null(), &raw mut action))?;
        let forgets = action.sa_flags & libc::SA_NOCLDWAIT != 0;
        if action.sa_sigaction == libc::SIG_IGN || forgets {
            if action.sa_sigaction == libc::SIG_IGN {
                action.sa_sigaction = libc::SIG_DFL;
            }
            action.sa_flags &= !libc::SA_NOCLDWAIT;
            check(libc::sigaction(libc::SIGCHLD, &raw const action, std::ptr::null_mut()))?;
        }
    }
    Ok(())
}
