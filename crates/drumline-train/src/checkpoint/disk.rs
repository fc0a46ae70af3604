use std::{
    ffi::OsString,
    fs::{self, File, TryLockError},
    io::{self, BufReader, Read, Write},
    os::unix::fs::MetadataExt,
    path::Path,
};

use drumline_shm::files::{here_if_empty, open_regular, open_to_read};
use rustix::fs::OFlags;

/// The operations on a file system that checkpoints need, one system call each where possible.
///
/// [`SystemDisk`] carries them out. The tests use a disk that fails at the n-th operation, and one
/// that forgets what was not synced.
pub(super) trait Disk {
    /// A file that is being written.
    type File: Write;
    /// A file that is being read.
    type Reader: Read;

    /// Makes a directory and its parents, so that they survive a power cut. An existing directory is
    /// no error.
    fn create_directory(&self, directory: &Path) -> io::Result<()>;
    /// The names in a directory, in any order.
    fn names(&self, directory: &Path) -> io::Result<Vec<OsString>>;
    /// Makes a file and marks it as being written until it is closed. `AlreadyExists` when the name
    /// is taken.
    fn create(&self, path: &Path) -> io::Result<Self::File>;
    /// Returns when the content of the file would survive a power cut.
    fn sync(&self, file: &Self::File) -> io::Result<()>;
    /// Renames a file, replacing any file that has the new name, in one atomic step.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Returns when the names in the directory would survive a power cut.
    fn sync_directory(&self, directory: &Path) -> io::Result<()>;
    /// Deletes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Deletes a file unless a process is writing it. Returns whether it was deleted.
    fn remove_if_abandoned(&self, path: &Path) -> io::Result<bool>;
    /// Opens a file to read. Returns its length in bytes too.
    fn open(&self, path: &Path) -> io::Result<(Self::Reader, u64)>;
}

/// The file system of the operating system.
///
/// A file that is being written has an exclusive advisory lock. The system releases the lock when
/// the process ends, however it ends. So a file without a lock is left over from a dead process. On
/// a file system without locks, no file counts as abandoned.
#[derive(Clone, Copy, Debug)]
pub(super) struct SystemDisk;

impl Disk for SystemDisk {
    type File = File;
    type Reader = BufReader<File>;

    fn create_directory(&self, directory: &Path) -> io::Result<()> {
        if directory.as_os_str().is_empty() || directory.is_dir() {
            return Ok(());
        }
        let parent = directory.parent().unwrap_or(Path::new("/"));
        self.create_directory(parent)?;
        match fs::create_dir(directory) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && directory.is_dir() => {
                Ok(()) // Another process made it meanwhile.
            }
            made => made.and_then(|()| self.sync_directory(parent)),
        }
    }

    fn names(&self, directory: &Path) -> io::Result<Vec<OsString>> {
        let entries = loop {
            match fs::read_dir(here_if_empty(directory)) {
                // std makes other calls again by itself.
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                opened => break opened?,
            }
        };
        entries.map(|entry| Ok(entry?.file_name())).collect()
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        let file = File::create_new(path)?;
        let taken = || io::Error::from(io::ErrorKind::AlreadyExists);
        match file.try_lock() {
            // Another process took the file for abandoned before it was locked, and is deleting it.
            Err(TryLockError::WouldBlock) => Err(taken()),
            Err(TryLockError::Error(_)) => Ok(file), // A file system without locks.
            Ok(()) => match is_still_there(&file, path) {
                Ok(true) => Ok(file),
                Ok(false) => Err(taken()),
                Err(error) => {
                    let _ = fs::remove_file(path); // `error` is the one to report.
                    Err(error)
                }
            },
        }
    }

    fn sync(&self, file: &File) -> io::Result<()> {
        file.sync_all()
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    fn sync_directory(&self, directory: &Path) -> io::Result<()> {
        File::open(here_if_empty(directory))?.sync_all()
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_if_abandoned(&self, path: &Path) -> io::Result<bool> {
        // No save leaves a link, and the file to which a link leads belongs to someone else.
        let file = open_regular(path, OFlags::WRONLY | OFlags::NOFOLLOW)?.0;
        match file.try_lock() {
            Ok(()) => fs::remove_file(path).map(|()| true), // Our lock keeps others from writing it.
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn open(&self, path: &Path) -> io::Result<(BufReader<File>, u64)> {
        let (file, about) = open_to_read(path)?;
        Ok((BufReader::with_capacity(1 << 16, file), about.len()))
    }
}

/// Whether `path` still leads to the open `file`.
pub(super) fn is_still_there(file: &File, path: &Path) -> io::Result<bool> {
    let place = |about: fs::Metadata| (about.dev(), about.ino());
    let ours = file.metadata().map(place)?;
    match fs::metadata(path).map(place) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        there => Ok(there? == ours),
    }
}
