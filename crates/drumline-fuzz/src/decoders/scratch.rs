//! A directory for decoders that read files.

use std::{
    fs, io,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use tempfile::TempDir;

/// A directory of its own for one input, in memory where the host has such. It goes with the value.
pub(super) struct Scratch(TempDir);

impl Scratch {
    pub(super) fn new() -> io::Result<Scratch> {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        // A child that a crash ends leaves it behind: its name is none that jobs take.
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
