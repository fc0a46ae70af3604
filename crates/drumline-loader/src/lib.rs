//! Libraries that are found at run time: MPI, and the drivers of devices. A program is built without them.
//!
//! ```
//! use std::path::Path;
//!
//! use drumline_loader::{Found, find};
//!
//! match find(None, &["libmissing.so.1", "libm.so.6"], |library, _| {
//!     library.symbol(c"cos").ok_or_else(|| "it has no function cos".to_owned())
//! }) {
//!     Ok(Found { path, .. }) => assert_eq!(path, Path::new("libm.so.6")),
//!     Err(tried) => println!("tried\n  {}", tried.join("\n  ")),
//! }
//! ```
//!
//! What a process has loaded already comes first: two copies of a driver or of an MPI in one process disturb each
//! other. Then comes the path that the user has named, and nothing after it. Then each name, in the dynamic loader's
//! way.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// A library that this process has loaded. It stays loaded.
#[derive(Clone, Copy, Debug)]
pub struct Library(NonNull<c_void>);

// SAFETY: it is a handle of the dynamic loader, whose functions any thread may call.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a library: a path, or a name that the dynamic loader looks for. Its symbols are there for plug-ins that it
    /// opens later, which those of Open MPI 4 need.
    pub fn open(name: &OsStr) -> Result<Library, String> {
        open(name, 0)
    }

    /// The library of that name, if this process has loaded it already.
    pub fn loaded(name: &OsStr) -> Option<Library> {
        open(name, libc::RTLD_NOLOAD).ok()
    }

    /// The address of a function or variable of the library, or of one that it depends on.
    pub fn symbol(self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the library is open, and the name ends with a zero.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

/// The file that holds what lies at `address`.
pub fn file_of(address: NonNull<c_void>) -> Option<PathBuf> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: dladdr reads no memory at the address, and `info` is there to be written.
    let known = unsafe { libc::dladdr(address.as_ptr(), info.as_mut_ptr()) } != 0;
    // SAFETY: zeros are a valid value, and so is what dladdr writes.
    let name = unsafe { info.assume_init() }.dli_fname;
    if !known || name.is_null() {
        return None;
    }
    // SAFETY: the loader keeps the name of a library as a string that ends with a zero, as long as it is loaded.
    let name = unsafe { CStr::from_ptr(name) };
    let path = Path::new(OsStr::from_bytes(name.to_bytes()));
    Some(path.canonicalize().unwrap_or_else(|_| path.to_owned()))
}

fn open(name: &OsStr, flags: c_int) -> Result<Library, String> {
    let name = CString::new(name.as_bytes()).map_err(|_| "its name has a zero byte".to_owned())?;
    // SAFETY: the name ends with a zero. The initialisers of the library run: they are trusted as the program is, since
    // who names a library for a process may run code in it.
    let handle = unsafe { libc::dlopen(name.as_ptr(), flags | libc::RTLD_NOW | libc::RTLD_GLOBAL) };
    NonNull::new(handle).map(Library).ok_or_else(|| {
        // SAFETY: dlerror has no condition. Its text belongs to this thread until its next call of the loader.
        let reason = unsafe { libc::dlerror() };
        if reason.is_null() {
            return "it is not loaded".to_owned();
        }
        // SAFETY: what it gives is a string that ends with a zero.
        unsafe { CStr::from_ptr(reason) }.to_string_lossy().into_owned()
    })
}

/// What [`find`] has found.
#[derive(Clone, Debug)]
pub struct Found<T> {
    /// The library.
    pub library: Library,
    /// The name or path by which it was found.
    pub path: PathBuf,
    /// What the caller has made of it.
    pub made: T,
}

/// Finds a library that `look_at` accepts.
///
/// # Errors
///
/// What was tried, and why each attempt failed.
pub fn find<T>(
    named: Option<&Path>,
    names: &[impl AsRef<Path>],
    mut look_at: impl FnMut(Library, &Path) -> Result<T, String>,
) -> Result<Found<T>, Vec<String>> {
    let mut tried = Vec::new();
    let mut attempt = |opened: Result<Library, String>, path: &Path, tried: &mut Vec<String>| {
        let made = opened.and_then(|library| Ok((library, look_at(library, path)?)));
        match made {
            Ok((library, made)) => Some(Found { library, path: path.to_owned(), made }),
            Err(reason) => {
                tried.push(why(path, reason));
                None
            }
        }
    };
    let mut absent = Vec::new();
    for name in names.iter().map(AsRef::as_ref) {
        match Library::loaded(name.as_os_str()) {
            None => absent.push(name),
            Some(library) => match attempt(Ok(library), name, &mut tried) {
                Some(found) => return Ok(found),
                None => continue,
            },
        }
    }
    let names = named.map_or(absent, |path| vec![path]);
    names
        .into_iter()
        .find_map(|path| attempt(Library::open(path.as_os_str()), path, &mut tried))
        .ok_or(tried)
}

/// An attempt, for a list of them. The loader's reason mostly begins with the name.
pub fn why(path: &Path, reason: String) -> String {
    let path = path.display().to_string();
    if reason.starts_with(&path) { reason } else { format!("{path}: {reason}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_there_is_found_and_says_where() {
        let math = Library::open(OsStr::new("libm.so.6")).unwrap();
        let cosine = math.symbol(c"cos").unwrap();
        assert!(file_of(cosine).unwrap().to_string_lossy().contains("libm"));
        assert!(math.symbol(c"MPI_Init_thread").is_none());
        assert!(Library::loaded(OsStr::new("libm.so.6")).is_some());
    }

    #[test]
    fn one_that_is_not_there_says_why() {
        assert!(Library::loaded(OsStr::new("libno-such-thing.so")).is_none());
        let reason = Library::open(OsStr::new("libno-such-thing.so")).unwrap_err();
        assert!(reason.contains("libno-such-thing.so"), "{reason}");
        assert!(Library::open(OsStr::new("a\0b")).is_err());
    }

    #[test]
    fn a_search_says_what_it_has_tried() {
        let names = ["libno-such-thing.so", "libm.so.6"];
        let any = |_: Library, _: &Path| Ok(());
        assert_eq!(find(None, &names, any).unwrap().path, Path::new("libm.so.6"));
        let tried = find(Some(Path::new("/no/lib.so")), &names[..1], any).unwrap_err();
        assert!(tried.len() == 1 && tried[0].starts_with("/no/lib.so: "), "{tried:?}");
        let refused = |_: Library, _: &Path| Err::<(), _>("too old".to_owned());
        let tried = find(None, &names[1..], refused).unwrap_err();
        assert_eq!(tried, ["libm.so.6: too old"]);
    }
}
