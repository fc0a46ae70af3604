//! A directory for decoders that read files.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

/// A directory for one input, in memory if the host has `/dev/shm`. Dropping the value deletes the directory.
pub(super) struct Scratch(TempDir);

impl Scratch {
    pub(super) fn new() -> io::Result<Scratch> {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        // A child that crashes leaves its directory behind, so the name must differ from those of jobs.
        Ok(Scratch(tempfile::Builder::new().prefix("fuzz-input-").tempdir_in(parent)?))
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    /// The path of a file with these bytes, which only this user can read.
    pub(super) fn file(&self, bytes: &[u8]) -> io::Result<PathBuf> {
        let path = self.path().join("file");
        fs::write(&path, bytes)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
        Ok(path)
    }
}
