//! The dynamic loader: opens a library, and finds functions and variables in it.

use std::ffi::{CStr, CString, OsStr, c_int, c_void};
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::ptr::NonNull;

/// A library that this process has loaded. It stays loaded.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Library(NonNull<c_void>);

// SAFETY: it is a handle of the dynamic loader, whose functions any thread may call.
unsafe impl Send for Library {}
// SAFETY: as above.
unsafe impl Sync for Library {}

impl Library {
    /// Loads a library: a path, or a name that the dynamic loader looks for. Its symbols are there for plug-ins that it
    /// opens later, which those of Open MPI 4 need.
    pub(crate) fn open(name: &OsStr) -> Result<Library, String> {
        open(name, 0)
    }

    /// The library of that name, if this process has loaded it already.
    pub(crate) fn loaded(name: &OsStr) -> Option<Library> {
        open(name, libc::RTLD_NOLOAD).ok()
    }

    /// The address of a function or variable of the library, or of one that it depends on.
    pub(crate) fn symbol(self, name: &CStr) -> Option<NonNull<c_void>> {
        // SAFETY: the library is open, and the name ends with a zero.
        NonNull::new(unsafe { libc::dlsym(self.0.as_ptr(), name.as_ptr()) })
    }
}

/// The file that holds what lies at `address`.
pub(crate) fn file_of(address: NonNull<c_void>) -> Option<PathBuf> {
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
}
