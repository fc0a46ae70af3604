//! A file for decoders that read one.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::OnceLock,
};

use tempfile::TempDir;

/// A directory of this process, in memory where the host has such.
fn directory() -> io::Result<&'static Path> {
    static DIRECTORY: OnceLock<TempDir> = OnceLock::new();
    if DIRECTORY.get().is_none() {
        let memory = Path::new("/dev/shm");
        let parent = if memory.is_dir() { memory.to_owned() } else { std::env::temp_dir() };
        // Another thread may have been faster; its directory counts.
        let _ =
            DIRECTORY.set(tempfile::Builder::new().prefix("drumline-fuzz-").tempdir_in(parent)?);
    }
    Ok(DIRECTORY.get().map(TempDir::path).unwrap_or(Path::new("/nowhere")))
}

/// The path of an empty directory of that name.
pub(super) fn empty(name: &str) -> io::Result<PathBuf> {
    let path = directory()?.join(name);
    match fs::remove_dir_all(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    fs::create_dir(&path)?;
    Ok(path)
}

/// The path of a file with these bytes, which only this user can read.
pub(super) fn file(name: &str, bytes: &[u8]) -> io::Result<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = directory()?.join(name);
    fs::write(&path, bytes)?;
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600))?;
    Ok(path)
}
