use std::{
    ffi::OsString,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, BufReader, Read, Write},
    os::unix::fs::MetadataExt,
    path::Path,
};

/// The operations on a file system that checkpoints are made of, one call each.
///
/// [`SystemDisk`] does them. The tests put a disk underneath that fails at the n-th operation, and
/// one that forgets what was not synced.
pub(super) trait Disk {
    /// A file that is being written.
    type File: Write;
    /// A file that is being read.
    type Reader: Read;

    /// Makes a directory and those above it, all lasting; fine if it is there.
    fn create_directory(&self, directory: &Path) -> io::Result<()>;
    /// The names in a directory, in any order.
    fn names(&self, directory: &Path) -> io::Result<Vec<OsString>>;
    /// Makes a file and marks it as being written, until it is closed. `AlreadyExists` when the
    /// name is taken.
    fn create(&self, path: &Path) -> io::Result<Self::File>;
    /// Returns when the content would survive a power cut.
    fn sync(&self, file: &Self::File) -> io::Result<()>;
    /// Moves a file over the one that has the new name, if any. Never shows anything in between.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Returns when names would survive a power cut.
    fn sync_directory(&self, directory: &Path) -> io::Result<()>;
    /// Deletes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Deletes a file unless some process is writing it; tells whether it did.
    fn remove_if_abandoned(&self, path: &Path) -> io::Result<bool>;
    /// Opens a file to read, and tells its length in bytes.
    fn open(&self, path: &Path) -> io::Result<(Self::Reader, u64)>;
}

/// The operating system's.
///
/// A file that is being written has an exclusive advisory lock. The system lets go of it when the
/// process ends, however it ends, so what is left of a dead process can be told from what a living
/// one is about to finish. Where a file system has no locks, nothing is taken for abandoned.
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
                Ok(()) // Somebody was faster.
            }
            made => made.and_then(|()| self.sync_directory(parent)),
        }
    }

    fn names(&self, directory: &Path) -> io::Result<Vec<OsString>> {
        fs::read_dir(here_if_empty(directory))?.map(|entry| Ok(entry?.file_name())).collect()
    }

    fn create(&self, path: &Path) -> io::Result<File> {
        let file = File::create_new(path)?;
        let taken = || io::Error::from(io::ErrorKind::AlreadyExists);
        match file.try_lock() {
            // Somebody took it for abandoned before it was locked, and deletes it.
            Err(TryLockError::WouldBlock) => Err(taken()),
            Ok(()) if !is_still_there(&file, path) => Err(taken()),
            Ok(()) | Err(TryLockError::Error(_)) => Ok(file),
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
        let file = OpenOptions::new().write(true).open(path)?;
        match file.try_lock() {
            Ok(()) => fs::remove_file(path).map(|()| true), // Still locked, so nobody begins anew.
            Err(TryLockError::WouldBlock) => Ok(false),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }

    fn open(&self, path: &Path) -> io::Result<(BufReader<File>, u64)> {
        // Asked before it is opened, because opening a pipe may take for ever.
        if !fs::metadata(path)?.is_file() {
            return Err(io::Error::other("it is not a file"));
        }
        let file = File::open(path)?;
        let length = file.metadata()?.len();
        Ok((BufReader::with_capacity(1 << 16, file), length))
    }
}

/// The directory of a file name alone is the present one.
fn here_if_empty(directory: &Path) -> &Path {
    if directory.as_os_str().is_empty() { Path::new(".") } else { directory }
}

/// Whether `path` still leads to the open `file`.
fn is_still_there(file: &File, path: &Path) -> bool {
    let place = |about: fs::Metadata| (about.dev(), about.ino());
    match (file.metadata().map(place), fs::symlink_metadata(path).map(place)) {
        (Ok(ours), Ok(there)) => ours == there,
        _ => false,
    }
}
