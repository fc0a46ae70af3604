use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

/// Writes a file so that under `path` there is always either the old content or the whole new one.
///
/// The content reaches the disk before the name does, and the name before this returns. When
/// something fails, nothing of the new file is left.
pub(super) fn atomically(
    path: &Path,
    write: impl FnOnce(&mut File) -> io::Result<()>,
) -> io::Result<()> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "the path names no file"))?;
    let directory = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    };
    let mut partial_name = OsString::from(".");
    partial_name.push(name);
    partial_name.push(".partial");

    let partial = Partial(directory.join(partial_name));
    let mut file = File::create(&partial.0)?;
    write(&mut file)?;
    file.sync_all()?;
    partial.rename(path)?;
    File::open(directory)?.sync_all()
}

/// A file that is deleted unless it gets its final name.
struct Partial(PathBuf);

impl Partial {
    fn rename(self, path: &Path) -> io::Result<()> {
        fs::rename(&self.0, path)?;
        std::mem::forget(self);
        Ok(())
    }
}

impl Drop for Partial {
    fn drop(&mut self) {
        // The error that brought us here is the one to report.
        let _ = fs::remove_file(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_disk_that_fills_up_leaves_the_old_file_alone() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("file");
        atomically(&path, |file| file.write_all(b"old")).unwrap();
        let error = atomically(&path, |file| {
            file.write_all(b"ne")?;
            Err(io::ErrorKind::StorageFull.into())
        });
        assert_eq!(error.unwrap_err().kind(), io::ErrorKind::StorageFull);
        assert_eq!(fs::read(&path).unwrap(), b"old");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
    }
}
