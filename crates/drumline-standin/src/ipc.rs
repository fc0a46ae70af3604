//! Memory of a device that processes share: a file in memory, which the other process opens by the name that it has in
//! this one.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::MetadataExt;

use crate::code::Code;

/// `CUipcMemHandle`, in which programs look for nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(C)]
pub(crate) struct Handle([u8; 64]);

/// What a handle says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lent {
    process: u32,
    file: i32,
    /// Another file may have this number by now.
    inode: u64,
    pub(crate) len: usize,
    /// The machine's number of the device.
    pub(crate) device: usize,
}

const MAGIC: u64 = u64::from_le_bytes(*b"stand-in");

impl Handle {
    fn of(lent: &Lent) -> Handle {
        let words = [
            MAGIC,
            u64::from(lent.process),
            lent.file as u64,
            lent.inode,
            lent.len as u64,
            lent.device as u64,
        ];
        let mut bytes = [0; 64];
        for (into, word) in bytes.chunks_exact_mut(8).zip(words) {
            into.copy_from_slice(&word.to_ne_bytes());
        }
        Handle(bytes)
    }

    /// None: no driver has made it.
    pub(crate) fn read(&self) -> Option<Lent> {
        let (words, _) = self.0.as_chunks::<8>();
        let word = |at: usize| words.get(at).map(|it| u64::from_ne_bytes(*it));
        if word(0)? != MAGIC {
            return None;
        }
        Some(Lent {
            process: word(1)?.try_into().ok()?,
            file: word(2)?.try_into().ok()?,
            inode: word(3)?,
            len: word(4)?.try_into().ok()?,
            device: word(5)?.try_into().ok()?,
        })
    }
}

impl Lent {
    pub(crate) fn is_of_this_process(&self) -> bool {
        self.process == std::process::id()
    }

    /// The file, which its process may have given back.
    pub(crate) fn file(&self) -> Result<File, Code> {
        let path = format!("/proc/{}/fd/{}", self.process, self.file);
        let file = OpenOptions::new().read(true).write(true).open(path);
        let file = file.map_err(|_| Code::INVALID_HANDLE)?;
        match file.metadata() {
            Ok(found) if found.ino() == self.inode && found.len() >= self.len as u64 => Ok(file),
            _ => Err(Code::INVALID_HANDLE),
        }
    }
}

/// A file in memory of so many bytes.
pub(crate) fn file_of(len: usize) -> Result<File, Code> {
    // SAFETY: a text with a zero byte; the descriptor is nobody else's.
    let file = unsafe {
        let number = libc::memfd_create(c"standin-memory".as_ptr(), libc::MFD_CLOEXEC);
        if number < 0 {
            return Err(Code::OUT_OF_MEMORY);
        }
        File::from_raw_fd(number)
    };
    file.set_len(len as u64).map_err(|_| Code::OUT_OF_MEMORY)?;
    Ok(file)
}

/// What another process needs to open the file.
pub(crate) fn handle_of(file: &File, len: usize, device: usize) -> io::Result<Handle> {
    let (process, inode) = (std::process::id(), file.metadata()?.ino());
    Ok(Handle::of(&Lent { process, file: file.as_raw_fd(), inode, len, device }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handle_says_what_was_lent_and_nothing_else_is_one() {
        let file = file_of(100).unwrap();
        let handle = handle_of(&file, 100, 1).unwrap();
        let lent = handle.read().unwrap();
        assert_eq!((lent.len, lent.device, lent.is_of_this_process()), (100, 1, true));
        assert!(lent.file().is_ok());
        assert!(Lent { inode: lent.inode + 1, ..lent }.file().is_err(), "another file");
        assert!(Lent { len: 101, ..lent }.file().is_err(), "longer than it is");
        drop(file);
        assert!(lent.file().is_err(), "it was given back");
        assert_eq!(Handle([7; 64]).read(), None);
    }
}
