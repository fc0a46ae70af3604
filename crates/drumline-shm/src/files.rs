//! Files at places that others know, or may write to.
//!
//! A path may lead to a pipe that nobody serves, to a device, or through a link of another user. So a file is read
//! only if it is a regular one of limited size, and a new file comes to its place whole, under a name that nobody
//! could foresee. Opening never blocks. The check is made on the open file, not on the path, which may lead to another
//! file a moment later.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, Metadata},
    hash::{BuildHasher, Hasher, RandomState},
    io::{self, ErrorKind, Read, Write},
    os::{fd::AsFd, unix::ffi::OsStringExt, unix::fs::FileTypeExt},
    path::{Path, PathBuf},
};

use rustix::{
    fs::{
        Access, FileType, Mode, OFlags, PROC_SUPER_MAGIC, access, fcntl_setfl, fstat, fstatfs,
        open, readlinkat,
    },
    io::{Errno, retry_on_intr},
    process::geteuid,
};

/// The end of a file's name until the file is complete.
pub const PARTIAL: &str = ".partial";

/// Links that lead from one to the next.
const LINKS_MAX: usize = 40;

/// Opens a regular file to read.
///
/// # Errors
///
/// It cannot be opened, or is no regular file.
pub fn open_to_read(path: &Path) -> io::Result<(File, Metadata)> {
    open_regular(path, OFlags::RDONLY)
}

/// Opens a regular file that is there, with these flags.
///
/// # Errors
///
/// It cannot be opened, or is no regular file.
pub fn open_regular(path: &Path, flags: OFlags) -> io::Result<(File, Metadata)> {
    regular(path, plainly(path, flags, Mode::empty()))
}

/// Reads a regular file of at most `bytes_max` bytes.
///
/// # Errors
///
/// It cannot be read, is no regular file, or is longer.
pub fn read(path: &Path, bytes_max: usize) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    open_to_read(path)?.0.take(bytes_max as u64 + 1).read_to_end(&mut bytes)?;
    if bytes.len() > bytes_max {
        let problem = format!("it has more than {bytes_max} bytes");
        return Err(io::Error::new(ErrorKind::FileTooLarge, problem));
    }
    Ok(bytes)
}

/// Reads a [regular file](read) of text.
///
/// # Errors
///
/// As [`read`], or it is not UTF-8.
pub fn read_text(path: &Path, bytes_max: usize) -> io::Result<String> {
    String::from_utf8(read(path, bytes_max)?)
        .map_err(|_| io::Error::new(ErrorKind::InvalidData, "it is not text in UTF-8"))
}

/// Writes a whole file anew: `path` leads to the old content or to the new, never to a part. The new file is not yet
/// safe from a power cut. An open file, such as `/proc/self/fd/7`, is emptied and written.
///
/// # Errors
///
/// The system does not write it, or there is something that is no regular file. `path` is then as it was.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    if let Ok(link) = plainly(path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty())
        && is_link_to_open_file(&link)?
    {
        return open_regular(path, OFlags::WRONLY | OFlags::TRUNC)?.0.write_all(bytes);
    }
    let mut file = NewFile::create(path)?;
    file.write_all(bytes)?;
    file.finish()
}

/// Whether [`write()`] would be let write to `path`, before there is anything to write.
///
/// # Errors
///
/// Why not.
pub fn check_place(path: &Path) -> io::Result<()> {
    let (directory, _) = split(path)?;
    replaceable(path)?;
    access(here_if_empty(directory), Access::WRITE_OK | Access::EXEC_OK)?;
    Ok(())
}

/// A file that is being written, and that comes to its place when it is whole. If it is dropped before, nothing is left.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    partial: Option<PathBuf>,
    path: PathBuf,
}

impl NewFile {
    /// Begins the file that shall be at `path`.
    ///
    /// # Errors
    ///
    /// As [`write()`].
    pub fn create(path: &Path) -> io::Result<NewFile> {
        replaceable(path)?;
        let (directory, name) = split(path)?;
        let partial = directory.join(partial_name(name));
        // The call fails if there is anything with this name, be it a link.
        let file = File::create_new(&partial)?;
        Ok(NewFile { file, partial: Some(partial), path: path.to_owned() })
    }

    /// Puts the file to its place.
    ///
    /// # Errors
    ///
    /// The system refuses. Nothing is left then.
    pub fn finish(mut self) -> io::Result<()> {
        if let Some(partial) = &self.partial {
            fs::rename(partial, &self.path)?;
        }
        self.partial = None;
        Ok(())
    }
}

impl Write for NewFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.file.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(partial) = &self.partial {
            let _ = fs::remove_file(partial); // The error that led here is the one to report.
        }
    }
}

/// A name for a file that will be called `name`, until it is complete. Nobody can foresee it.
pub fn partial_name(name: &OsStr) -> OsString {
    // The keys of the hasher come from the operating system.
    let random = RandomState::new().build_hasher().finish();
    let mut partial = OsString::from(".");
    partial.push(name);
    partial.push(format!(".{random:016x}{PARTIAL}"));
    partial
}

/// Opens a regular file for a log: at its end, made if it is missing. Follows no link of another user.
///
/// # Errors
///
/// It cannot be opened, or is no regular file.
pub fn append(path: &Path) -> io::Result<File> {
    Ok(open_shared(path, OFlags::WRONLY | OFlags::APPEND, 0o666)?.0)
}

/// Opens a regular file that other processes write, too, with these flags. Makes it if it is missing. Follows no link
/// of another user.
///
/// # Errors
///
/// It cannot be opened, or is no regular file.
pub fn open_shared(path: &Path, flags: OFlags, mode: u32) -> io::Result<(File, Metadata)> {
    let flags = flags | OFlags::CREATE;
    regular(path, through_own_links(path, flags, Mode::from_raw_mode(mode)))
}

/// As [`append`], but also opens a terminal, `/dev/null`, and a pipe that some process reads. Writing to these may
/// block.
///
/// # Errors
///
/// It cannot be opened, nobody reads the pipe, or it is another kind of file.
pub fn append_or_stream(path: &Path) -> io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE;
    let file = through_own_links(path, flags, Mode::from_raw_mode(0o666)).map_err(|error| {
        match fs::metadata(path) {
            Ok(about) if about.file_type().is_fifo() && error == Errno::NXIO => {
                io::Error::new(ErrorKind::NotConnected, "it is a pipe that no process reads")
            }
            _ => error.into(),
        }
    })?;
    let kind = file.metadata()?.file_type();
    if kind.is_fifo() || kind.is_char_device() {
        fcntl_setfl(&file, OFlags::APPEND)?; // No longer non-blocking.
    } else if !kind.is_file() {
        return Err(no_file());
    }
    Ok(file)
}

fn plainly(path: &Path, flags: OFlags, mode: Mode) -> Result<File, Errno> {
    let flags = flags | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    Ok(retry_on_intr(|| open(path, flags, mode))?.into())
}

/// Follows links at the end of the path only if they belong to this user or to root, as Linux does in directories like
/// `/tmp` where its administrator has not told it otherwise.
fn through_own_links(path: &Path, flags: OFlags, mode: Mode) -> Result<File, Errno> {
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        match plainly(&path, flags | OFlags::NOFOLLOW, mode) {
            Err(Errno::LOOP) => {}
            opened => return opened,
        }
        let link = plainly(&path, OFlags::PATH | OFlags::NOFOLLOW, Mode::empty())?;
        let about = fstat(&link)?;
        if !FileType::from_raw_mode(about.st_mode).is_symlink() {
            continue; // It was replaced meanwhile.
        }
        if about.st_uid != 0 && about.st_uid != geteuid().as_raw() {
            return Err(Errno::ACCESS);
        }
        if is_link_to_open_file(&link)? {
            return plainly(&path, flags, mode);
        }
        let target = readlinkat(link.as_fd(), "", Vec::new())?.into_bytes();
        path.set_file_name(OsString::from_vec(target)); // An absolute one replaces all of the path.
    }
    Err(Errno::LOOP)
}

/// Whether it is a link like `/proc/self/fd/1`, which the system makes. It leads to an open file, whatever it shows as
/// its target.
fn is_link_to_open_file(link: &File) -> Result<bool, Errno> {
    let is_link = FileType::from_raw_mode(fstat(link)?.st_mode).is_symlink();
    Ok(is_link && fstatfs(link)?.f_type == PROC_SUPER_MAGIC)
}

fn regular(path: &Path, opened: Result<File, Errno>) -> io::Result<(File, Metadata)> {
    let file = opened.map_err(|error| match fs::metadata(path) {
        // The system's text for a pipe without a reader, or for a socket, says less.
        Ok(about) if !about.is_file() => no_file(),
        _ => error.into(),
    })?;
    let about = file.metadata()?;
    if about.is_file() { Ok((file, about)) } else { Err(no_file()) }
}

/// Whether a new file may take this place: not that of a pipe, a device or a directory, even behind a link.
fn replaceable(path: &Path) -> io::Result<()> {
    match fs::metadata(path) {
        Ok(about) if !about.is_file() => Err(no_file()),
        _ => Ok(()), // What else is wrong shows when the file is made.
    }
}

fn no_file() -> io::Error {
    io::Error::new(ErrorKind::InvalidInput, "it is no regular file")
}

/// The directory and the name of a file.
///
/// # Errors
///
/// The path ends with no name.
pub fn split(path: &Path) -> io::Result<(&Path, &OsStr)> {
    let name = path
        .file_name()
        .ok_or_else(|| io::Error::new(ErrorKind::InvalidInput, "the path names no file"))?;
    Ok((path.parent().unwrap_or(Path::new("")), name))
}

/// A bare file name has an empty directory, which means the current one.
pub fn here_if_empty(directory: &Path) -> &Path {
    if directory.as_os_str().is_empty() { Path::new(".") } else { directory }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use rustix::fs::{AtFlags, CWD, Gid, Uid, chownat, mknodat};

    use super::*;

    fn special(kind: FileType, path: &Path) {
        mknodat(CWD, path, kind, Mode::RWXU, 0).unwrap();
    }

    fn pipe_at(path: &Path) {
        special(FileType::Fifo, path);
    }

    fn names(directory: &Path) -> Vec<OsString> {
        let mut names: Vec<_> =
            fs::read_dir(directory).unwrap().map(|it| it.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn what_is_no_regular_file_is_neither_read_nor_written_nor_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        pipe_at(&at("pipe"));
        symlink(at("pipe"), at("link")).unwrap();
        // The path may be longer than that of a socket that is bound.
        special(FileType::Socket, &at("socket"));
        let places = ["pipe", "link", "socket", "."].map(at);
        let devices = ["/dev/null", "/dev/zero"].map(PathBuf::from);
        for path in places.iter().chain(&devices) {
            let told = |outcome: io::Result<()>| outcome.unwrap_err().to_string();
            let shown = path.display();
            assert_eq!(told(read(path, 9).map(drop)), "it is no regular file", "{shown}");
            assert_eq!(told(append(path).map(drop)), "it is no regular file", "{shown}");
            assert_ne!(told(write(path, b"x")), "", "{shown}");
            assert_ne!(told(check_place(path)), "", "{shown}");
        }
        assert!(fs::symlink_metadata(at("pipe")).unwrap().file_type().is_fifo());
        assert_eq!(names(directory.path()), ["link", "pipe", "socket"], "nothing is left");
    }

    #[test]
    fn a_file_is_written_anew_and_not_through_a_link() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("victim"), "precious").unwrap();
        symlink("victim", at("report")).unwrap();
        write(&at("report"), b"new").unwrap();
        assert_eq!(fs::read(at("victim")).unwrap(), b"precious");
        assert_eq!(read(&at("report"), 3).unwrap(), b"new");
        assert!(fs::symlink_metadata(at("report")).unwrap().is_file());
        assert_ne!(partial_name("report".as_ref()), partial_name("report".as_ref()));

        let mut file = NewFile::create(&at("half")).unwrap();
        file.write_all(b"half").unwrap();
        drop(file);
        let error = NewFile::create(&at("none/x")).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(names(directory.path()), ["report", "victim"]);
    }

    #[test]
    fn events_go_to_a_pipe_with_a_reader_and_to_what_a_link_of_this_user_leads_to() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        pipe_at(&at("pipe"));
        symlink("pipe", at("to pipe")).unwrap();
        for path in [at("pipe"), at("to pipe")] {
            let error = append_or_stream(&path).unwrap_err().to_string();
            assert_eq!(error, "it is a pipe that no process reads");
        }
        let mut reader = plainly(&at("pipe"), OFlags::RDWR, Mode::empty()).unwrap();
        append_or_stream(&at("to pipe")).unwrap().write_all(b"event").unwrap();
        let mut bytes = [0; 9];
        assert_eq!(reader.read(&mut bytes).unwrap(), 5);
        append_or_stream("/dev/null".as_ref()).unwrap().write_all(b"event").unwrap();

        symlink("log", at("to log")).unwrap();
        symlink(at("to log"), at("further")).unwrap();
        for path in ["log", "to log", "further"] {
            append(&at(path)).unwrap().write_all(b"line\n").unwrap();
        }
        assert_eq!(read(&at("log"), 99).unwrap(), b"line\nline\nline\n");
        symlink("round", at("round")).unwrap();
        assert_eq!(
            append(&at("round")).unwrap_err().raw_os_error(),
            Some(Errno::LOOP.raw_os_error())
        );
        let open = File::open(at("log")).unwrap();
        let magic = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&open));
        append_or_stream(magic.as_ref()).unwrap().write_all(b"last\n").unwrap();
        assert!(read(&at("log"), 99).unwrap().ends_with(b"last\n"));
        write(magic.as_ref(), b"emptied").unwrap();
        assert_eq!(read(magic.as_ref(), 7).unwrap(), b"emptied");
    }

    /// Only root can make a link of another user.
    #[test]
    fn a_link_of_another_user_is_not_followed() {
        if !geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("victim"), "precious").unwrap();
        symlink("victim", at("log")).unwrap();
        let nobody = (Uid::from_raw(65_534), Gid::from_raw(65_534));
        let flags = AtFlags::SYMLINK_NOFOLLOW;
        chownat(CWD, at("log"), Some(nobody.0), Some(nobody.1), flags).unwrap();
        for opened in [append(&at("log")), append_or_stream(&at("log"))] {
            assert_eq!(opened.unwrap_err().kind(), ErrorKind::PermissionDenied);
        }
        assert_eq!(fs::read(at("victim")).unwrap(), b"precious");
    }
}
