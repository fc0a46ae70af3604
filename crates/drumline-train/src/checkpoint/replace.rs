use std::{
    ffi::{OsStr, OsString},
    io::{self, BufWriter, Write},
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use super::disk::Disk;

/// What a file's name ends with until it is complete.
const SUFFIX: &str = ".partial";

/// Writes a file so that under `path` there is always either the old content or the whole new one.
///
/// The content reaches the disk before the name does, and the name before this returns. Until then
/// the file has a name that no other process uses: `.NAME.SOMETHING.partial`. When something fails,
/// nothing of the new file is left, unless the failure is that it cannot be deleted, or comes after
/// it got its name.
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
        disk.rename(&partial, path) // Still open, and so not taken for abandoned.
    })();
    if written.is_err() {
        let _ = disk.remove(&partial); // The error that brought us here is the one to report.
    }
    written?;
    disk.sync_directory(directory)
}

/// Makes sure that files can be written in a directory, by writing one whose name begins with
/// `.PREFIX`, and deleting it.
pub(super) fn probe(disk: &impl Disk, directory: &Path, prefix: &str) -> io::Result<()> {
    let (mut file, partial) = create_partial(disk, directory, OsStr::new(prefix))?;
    let written = file.write_all(b"x").and_then(|()| disk.sync(&file));
    written.and(disk.remove(&partial))
}

/// Deletes what dead processes have left of files whose names begin with `prefix`.
///
/// Nothing depends on its success, so what goes wrong is only told.
pub(super) fn remove_leftovers(disk: &impl Disk, directory: &Path, prefix: &str) {
    let start = format!(".{prefix}");
    let is_leftover = |name: &OsString| {
        let name = name.as_encoded_bytes();
        name.starts_with(start.as_bytes()) && name.ends_with(SUFFIX.as_bytes())
    };
    let names = disk.names(directory).unwrap_or_default(); // Writing will tell what is wrong.
    for path in names.iter().filter(|name| is_leftover(name)).map(|name| directory.join(name)) {
        match disk.remove_if_abandoned(&path) {
            Ok(true) => tracing::info!(?path, "removed what an interrupted save had left"),
            Ok(false) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => tracing::warn!(?path, %error, "cannot remove what a save had left"),
        }
    }
}

/// Directory and name of a file.
pub(super) fn split(path: &Path) -> io::Result<(&Path, &OsStr)> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    Ok((path.parent().unwrap_or(Path::new("")), name))
}

fn create_partial<D: Disk>(
    disk: &D,
    directory: &Path,
    name: &OsStr,
) -> io::Result<(D::File, PathBuf)> {
    /// More failures than a name that is taken now and then can explain.
    const TRIES_MAX: usize = 100;
    static COUNTER: AtomicU64 = AtomicU64::new(0);

    let mut tries = 0;
    loop {
        let number = COUNTER.fetch_add(1, Ordering::Relaxed);
        let mut partial = OsString::from(".");
        partial.push(name);
        partial.push(format!(".{:x}-{number:x}{SUFFIX}", std::process::id()));
        let partial = directory.join(partial);
        tries += 1;
        match disk.create(&partial) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && tries < TRIES_MAX => {}
            created => return Ok((created?, partial)),
        }
    }
}
