//! Descriptors that a forked process does not keep.
//!
//! A connection ends when the last copy of its descriptor is closed. A forked process (such as every worker
//! of a torch `DataLoader`) has a copy of each descriptor. While it lives, the peers would not notice that
//! its parent has died. Linux can close a descriptor at `exec`, but not at `fork`. So `fork` calls the
//! functions below. In the child they replace each copy by a socket that was never connected. The
//! descriptor's number stays taken, so when the child drops its socket, it closes no other descriptor. The
//! parent's connection does not change.
//!
//! `vfork` and `posix_spawn` do not call these functions. The process that they start goes on to `exec`,
//! which closes all descriptors of this library. A bare `clone` system call is not noticed.

use std::{
    cell::UnsafeCell,
    io::{self, Read, Write},
    mem::ManuallyDrop,
    ops::Deref,
    os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
    sync::{Mutex, MutexGuard, PoisonError},
};

use rustix::{
    net::{AddressFamily, SocketFlags, SocketType, socket_with},
    process::Pid,
};

/// A socket that a forked process does not share.
///
/// In a forked process it is a socket that was never connected: reading and writing fail.
#[derive(Debug)]
pub struct Unforked<T: AsFd>(ManuallyDrop<T>);

impl<T: AsFd> Unforked<T> {
    /// Keeps the socket that `open` opens. A fork waits meanwhile, so `open` must not wait.
    ///
    /// # Errors
    ///
    /// The errors of `open`, and a failure to open the socket that replaces copies.
    pub fn open(open: impl FnOnce() -> io::Result<T>) -> io::Result<Unforked<T>> {
        let mut kept = kept();
        kept.prepare()?;
        let socket = open()?;
        kept.numbers.push(socket.as_fd().as_raw_fd());
        Ok(Unforked(ManuallyDrop::new(socket)))
    }
}

impl<T: AsFd> Drop for Unforked<T> {
    fn drop(&mut self) {
        // The lock keeps a fork from coming between closing and forgetting the number. Otherwise the child
        // would keep a copy, or replace the descriptor that gets the number next.
        let mut kept = kept();
        let number = self.0.as_fd().as_raw_fd();
        if let Some(at) = kept.numbers.iter().rposition(|it| *it == number) {
            kept.numbers.swap_remove(at);
        }
        // SAFETY: nothing uses the value after its owner's `drop`.
        unsafe { ManuallyDrop::drop(&mut self.0) };
    }
}

impl<T: AsFd> Deref for Unforked<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsFd> AsFd for Unforked<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl<T: AsFd + Read> Read for Unforked<T> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.0.read(bytes)
    }

    fn read_vectored(&mut self, bytes: &mut [io::IoSliceMut<'_>]) -> io::Result<usize> {
        self.0.read_vectored(bytes)
    }
}

impl<T: AsFd + Write> Write for Unforked<T> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(bytes)
    }

    fn write_vectored(&mut self, bytes: &[io::IoSlice<'_>]) -> io::Result<usize> {
        self.0.write_vectored(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// The sockets that a fork must not share.
struct Kept {
    numbers: Vec<RawFd>,
    /// The socket that replaces each copy. Set once `fork` calls the functions below.
    dead: Option<OwnedFd>,
}

static KEPT: Mutex<Kept> = Mutex::new(Kept { numbers: Vec::new(), dead: None });

fn kept() -> MutexGuard<'static, Kept> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Kept {
    fn prepare(&mut self) -> io::Result<()> {
        if self.dead.is_none() {
            // A socket of this type says, for reads and for writes, that it is not connected.
            let (kind, flags) =
                (SocketType::SEQPACKET, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK);
            let dead = socket_with(AddressFamily::UNIX, kind, flags, None)?;
            // SAFETY: the three are functions of this program, which stays loaded. The function in the child
            // only calls `dup3` and releases a lock, which is allowed after a fork.
            let code =
                unsafe { libc::pthread_atfork(Some(before), Some(in_parent), Some(in_child)) };
            if code != 0 {
                return Err(io::Error::from_raw_os_error(code));
            }
            self.dead = Some(dead);
        }
        Ok(())
    }
}

/// Keeps the lock while a thread forks.
struct Held(UnsafeCell<Option<MutexGuard<'static, Kept>>>);

// SAFETY: only the thread that holds the lock accesses the cell.
unsafe impl Sync for Held {}

static HELD: Held = Held(UnsafeCell::new(None));

/// Runs before a fork. No socket is opened or closed until the fork is over.
extern "C" fn before() {
    let kept = kept();
    // SAFETY: this thread holds the lock.
    unsafe { *HELD.0.get() = Some(kept) };
}

extern "C" fn in_parent() {
    // SAFETY: this thread has held the lock since `before`.
    drop(unsafe { (*HELD.0.get()).take() });
}

extern "C" fn in_child() {
    // SAFETY: the only thread of this process is the one that took the lock in `before`.
    let Some(mut kept) = (unsafe { (*HELD.0.get()).take() }) else { return };
    let Kept { numbers, dead } = &mut *kept;
    let Some(dead) = dead else { return };
    for number in numbers.drain(..) {
        // SAFETY: `number` is the copy of a socket of this library, which is replaced by another socket. Its
        // holder still closes it once, and gets only errors from it until then.
        while unsafe { libc::dup3(dead.as_raw_fd(), number, libc::O_CLOEXEC) } < 0
            && io::Error::last_os_error().kind() == io::ErrorKind::Interrupted
        {}
    }
}

/// For tests: a fork of this process that does nothing, and ends after `seconds`.
///
/// # Errors
///
/// The errors of `fork`.
#[doc(hidden)]
pub fn fork_idle(seconds: u32) -> io::Result<Pid> {
    // SAFETY: the child calls only what is allowed after a fork, and never returns.
    let child = unsafe { libc::fork() };
    if child == 0 {
        // SAFETY: both calls are allowed after a fork, and access no memory of this process.
        unsafe {
            libc::alarm(seconds);
            loop {
                libc::pause();
            }
        }
    }
    Pid::from_raw(child).filter(|_| child > 0).ok_or_else(io::Error::last_os_error)
}
