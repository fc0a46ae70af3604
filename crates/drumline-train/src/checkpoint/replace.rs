use std::{
    ffi::{OsStr, OsString},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
};

use drumline_shm::files::{PARTIAL, partial_name, split};

use super::disk::Disk;

/// Writes a file so that `path` always leads to either the old content or the whole new content.
///
/// The content is on the disk before the name, and the name is on the disk before this returns. Until then
/// the file has a name that no other process uses: `.NAME.SOMETHING.partial`. After a failure nothing of the
/// new file remains, with two exceptions: the partial file cannot be deleted, or the failure comes after the
/// rename.
pub(super) fn atomically<D: Disk>(
    disk: &D,
    path: &Path,
    write: impl FnOnce(&mut BufWriter<D::File>) -> io::Result<()>,
) -> io::Result<()> {
    let (directory, name) = split(path)?;
    let (file, partial) = create_partial(disk, directory, name)?;
    let written = (|| {
        let mut file = BufWriter::with_capacity(1 << 16, file);
        write(&mut file)?;
        file.flush()?;
        disk.sync(file.get_ref())?;
        disk.rename(&partial, path) // The file is still open, so no process takes it for abandoned.
    })();
    if written.is_err() {
        let _ = disk.remove(&partial); // `written` holds the error to report.
    }
    written?;
    disk.sync_directory(directory)
}

/// Checks that files can be written in a directory: writes a file whose name begins with `.PREFIX`,
/// and deletes it.
pub(super) fn probe(disk: &impl Disk, directory: &Path, prefix: &str) -> io::Result<()> {
    let (mut file, partial) = create_partial(disk, directory, OsStr::new(prefix))?;
    let written = file.write_all(b"x").and_then(|()| disk.sync(&file));
    written.and(disk.remove(&partial))
}

/// Deletes the partial files of dead processes whose final names begin with `prefix`.
///
/// Nothing depends on its success, so a failure is only logged.
pub(super) fn remove_leftovers(disk: &impl Disk, directory: &Path, prefix: &str) {
    let start = format!(".{prefix}");
    let is_leftover = |name: &OsString| {
        let name = name.as_encoded_bytes();
        name.starts_with(start.as_bytes()) && name.ends_with(PARTIAL.as_bytes())
    };
    // If the directory cannot be read, the write that follows reports it.
    let names = disk.names(directory).unwrap_or_default();
    for path in names.iter().filter(|name| is_leftover(name)).map(|name| directory.join(name)) {
        match disk.remove_if_abandoned(&path) {
            Ok(true) => tracing::info!(?path, "removed what an interrupted save had left"),
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(?path, %error, "cannot remove what a save had left"),
        }
    }
}

fn create_partial<D: Disk>(
    disk: &D,
    directory: &Path,
    name: &OsStr,
) -> io::Result<(D::File, PathBuf)> {
    /// If this many names are taken, it is not by chance.
    const TRIES_MAX: usize = 100;

    let mut tries = 0;
    loop {
        let partial = directory.join(partial_name(name));
        tries += 1;
        match disk.create(&partial) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries < TRIES_MAX => {}
            created => return Ok((created?, partial)),
        }
    }
}
