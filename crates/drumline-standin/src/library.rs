//! For tests in Rust: where the shared library is, and its controls.

use std::ffi::{CString, c_char, c_int, c_void};
use std::path::{Path, PathBuf};
use std::process::Command;

const FILE: &str = "libdrumline_standin.so";

/// The shared library, as built for the test that runs now. It stands for `libcuda.so.1` and for `libnccl.so.2`.
///
/// A test whose package has this crate among its dev-dependencies needs nothing else: Cargo builds the library with
/// it. Otherwise it is built here, once, without a network.
///
/// # Panics
///
/// If it is nowhere and cannot be built.
#[must_use]
pub fn library() -> PathBuf {
    match find() {
        Ok(path) => path,
        #[expect(clippy::panic, reason = "only tests call this, and cannot go on")]
        Err(why) => panic!("{why}"),
    }
}

fn find() -> Result<PathBuf, String> {
    let program =
        std::env::current_exe().map_err(|error| format!("where does this test lie? {error}"))?;
    // A test lies in target/debug/deps, an example in target/debug/examples, a program in target/debug.
    let folders: Vec<&Path> = program.ancestors().skip(1).take(3).collect();
    let places = |folders: &[&Path]| {
        folders
            .iter()
            .flat_map(|it| [it.join("deps").join(FILE), it.join(FILE)])
            .find(|it| it.is_file())
    };
    if let Some(found) = places(&folders) {
        return Ok(found);
    }
    let profile = folders
        .iter()
        .find(|it| it.join("deps").is_dir())
        .ok_or_else(|| format!("{FILE} is not beside {}", program.display()))?;
    build(profile)?;
    places(&folders).ok_or_else(|| format!("cargo built no {FILE} in {}", profile.display()))
}

/// A copy of the library that lacks some functions, as an older driver or NCCL does. It is another library: it has a
/// world of its own, and [`Controls::of`] are its controls.
///
/// # Panics
///
/// If the library is nowhere, has no such function, or cannot be copied.
#[must_use]
pub fn library_without(functions: &[&str]) -> PathBuf {
    match copy_without(&library(), functions) {
        Ok(path) => path,
        #[expect(clippy::panic, reason = "only tests call this, and cannot go on")]
        Err(why) => panic!("{why}"),
    }
}

/// A symbol whose name has another first letter is not found by its own: its place in the table of names is wrong.
fn copy_without(library: &Path, functions: &[&str]) -> Result<PathBuf, String> {
    let mut bytes =
        std::fs::read(library).map_err(|error| format!("{}: {error}", library.display()))?;
    for function in functions {
        let name = format!("\0{function}\0");
        let places: Vec<usize> = bytes
            .windows(name.len())
            .enumerate()
            .filter_map(|(at, window)| (window == name.as_bytes()).then_some(at + 1))
            .collect();
        if places.is_empty() {
            return Err(format!("{} has no {function}", library.display()));
        }
        places.into_iter().for_each(|at| bytes[at] = b'X');
    }
    let name = format!("libdrumline_standin-without-{}.so", functions.join("-"));
    let (copy, draft) = (
        library.with_file_name(&name),
        library.with_file_name(format!("{name}.{}", std::process::id())),
    );
    std::fs::write(&draft, bytes)
        .and_then(|()| std::fs::rename(&draft, &copy))
        .map_err(|error| format!("{}: {error}", copy.display()))?;
    Ok(copy)
}

/// Builds the library into the folder of a profile. Cargo's own lock keeps others out.
fn build(folder: &Path) -> Result<(), String> {
    let name = folder.file_name().and_then(|it| it.to_str()).unwrap_or("debug");
    let target = folder.parent().unwrap_or(folder);
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let done = Command::new(&cargo)
        .args(["build", "--quiet", "--offline", "--locked", "--package", "drumline-standin"])
        .args(["--profile", if name == "debug" { "dev" } else { name }])
        .arg("--manifest-path")
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/Cargo.toml"))
        .arg("--target-dir")
        .arg(target)
        .output()
        .map_err(|error| {
            format!("{FILE} is not there, and {} does not run: {error}", cargo.display())
        })?;
    if done.status.success() {
        Ok(())
    } else {
        Err(format!(
            "{FILE} is not there, and cannot be built:\n{}",
            String::from_utf8_lossy(&done.stderr)
        ))
    }
}

macro_rules! controls {
    ($(#[$about:meta])* $($field:ident: $name:literal, $function:ty;)*) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug)]
        pub struct Controls {
            $($field: $function,)*
        }

        impl Controls {
            fn open(path: &Path) -> Result<Self, String> {
                let library = Loaded::new(path)?;
                Ok(Controls {
                    $($field: {
                        let found = library.symbol($name)?;
                        // SAFETY: the function of this name has this type; see `controls.rs`.
                        unsafe { std::mem::transmute::<*mut c_void, $function>(found) }
                    },)*
                })
            }
        }
    };
}

controls! {
    /// The controls of the shared library that this process has loaded, or loads now.
    ///
    /// What they change is the process's: tests that use them run one after the other.
    ///
    /// ```no_run
    /// let standin = drumline_standin::Controls::load();
    /// standin.reset();
    /// standin.seed(7);
    /// standin.fail("cuEventCreate", 2, 2); // the second cuEventCreate from here: out of memory
    /// // ... the test ...
    /// assert_eq!((standin.violations(), standin.leaks()), (0, 0), "{}", standin.last_violation());
    /// ```
    seed: "standin_seed", unsafe extern "C" fn(u64);
    set: "standin_set", unsafe extern "C" fn(*const c_char, *const c_char);
    unset_all: "standin_unset_all", unsafe extern "C" fn();
    fail: "standin_fail", unsafe extern "C" fn(*const c_char, u32, c_int);
    fail_any: "standin_fail_any", unsafe extern "C" fn(u32, c_int);
    failed: "standin_failed", unsafe extern "C" fn(*mut c_char, usize);
    calls: "standin_calls", unsafe extern "C" fn() -> u64;
    nccl_calls: "standin_nccl_calls", unsafe extern "C" fn() -> u64;
    break_device: "standin_break_device", unsafe extern "C" fn(c_int, c_int);
    side_by_side: "standin_side_by_side", unsafe extern "C" fn(usize) -> c_int;
    capture: "standin_capture", unsafe extern "C" fn(c_int, c_int) -> c_int;
    violations: "standin_violations", unsafe extern "C" fn() -> u64;
    last_violation: "standin_last_violation", unsafe extern "C" fn(*mut c_char, usize);
    leaks: "standin_leaks", unsafe extern "C" fn() -> u64;
    retained: "standin_retained", unsafe extern "C" fn() -> u64;
    reset: "standin_reset", unsafe extern "C" fn();
}

/// A shared library that stays loaded.
struct Loaded(*mut c_void);

impl Loaded {
    fn new(path: &Path) -> Result<Self, String> {
        let name =
            CString::new(path.as_os_str().as_encoded_bytes()).map_err(|error| error.to_string())?;
        // SAFETY: the library is ours, and runs nothing when it is loaded.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() { Err("cannot be loaded".to_owned()) } else { Ok(Loaded(handle)) }
    }

    fn symbol(&self, name: &str) -> Result<*mut c_void, String> {
        let text = CString::new(name).map_err(|error| error.to_string())?;
        // SAFETY: a live handle and a text with a zero byte.
        let found = unsafe { libc::dlsym(self.0, text.as_ptr()) };
        if found.is_null() { Err(format!("has no {name}")) } else { Ok(found) }
    }
}

impl Controls {
    /// Those of [`library()`].
    ///
    /// # Panics
    ///
    /// If it cannot be loaded.
    #[must_use]
    pub fn load() -> Self {
        Self::of(&library())
    }

    /// Those of a copy of the library.
    ///
    /// # Panics
    ///
    /// If it cannot be loaded.
    #[must_use]
    pub fn of(path: &Path) -> Self {
        match Self::open(path) {
            Ok(controls) => controls,
            #[expect(clippy::panic, reason = "only tests call this, and cannot go on")]
            Err(why) => panic!("{}: {why}", path.display()),
        }
    }

    /// Begins the random choices anew. With one thread, a seed gives one order.
    pub fn seed(&self, seed: u64) {
        // SAFETY: takes any number.
        unsafe { (self.seed)(seed) }
    }

    /// Sets a variable that the library reads, without touching the environment. `None`: as if it were not set.
    /// Variables of devices are read by the first `cuInit` after a [reset](Self::reset).
    pub fn set(&self, name: &str, value: Option<&str>) {
        let (Ok(name), Ok(value)) = (CString::new(name), value.map(CString::new).transpose())
        else {
            return;
        };
        let value = value.as_ref().map_or(std::ptr::null(), |it| it.as_ptr());
        // SAFETY: texts with a zero byte, or null; the function copies them.
        unsafe { (self.set)(name.as_ptr(), value) }
    }

    /// Takes back all that [`set`](Self::set) said.
    pub fn unset_all(&self) {
        // SAFETY: takes nothing.
        unsafe { (self.unset_all)() }
    }

    /// Lets the `nth` call from here of a function fail with a code. The name may lack its version; `nccl*` is
    /// any function of NCCL. With the code -9 the process is killed there (SIGKILL).
    pub fn fail(&self, name: &str, nth: u32, code: i32) {
        let Ok(name) = CString::new(name) else { return };
        // SAFETY: a text with a zero byte, which the function copies.
        unsafe { (self.fail)(name.as_ptr(), nth, code) }
    }

    /// Lets the `nth` call from here of any function of the driver fail with a code.
    pub fn fail_any(&self, nth: u32, code: i32) {
        // SAFETY: takes any numbers.
        unsafe { (self.fail_any)(nth, code) }
    }

    /// The function whose call has failed on request last, since the last reset; empty if there was none.
    #[must_use]
    pub fn failed(&self) -> String {
        told_by(self.failed)
    }

    /// Calls of the driver since the last reset.
    #[must_use]
    pub fn calls(&self) -> u64 {
        // SAFETY: takes nothing.
        unsafe { (self.calls)() }
    }

    /// Calls of NCCL since the last reset.
    #[must_use]
    pub fn nccl_calls(&self) -> u64 {
        // SAFETY: takes nothing.
        unsafe { (self.nccl_calls)() }
    }

    /// Breaks a device as an illegal address (code 700) does: all that it is asked from now on fails.
    pub fn break_device(&self, ordinal: i32, code: i32) {
        // SAFETY: takes any numbers.
        unsafe { (self.break_device)(ordinal, code) }
    }

    /// Lays the next allocations of device memory side by side, whichever devices they are of, until `bytes` are used up.
    /// Each takes whole pages.
    ///
    /// # Panics
    ///
    /// If there are not as many addresses.
    pub fn side_by_side(&self, bytes: usize) {
        // SAFETY: takes any number.
        let code = unsafe { (self.side_by_side)(bytes) };
        assert!(code == 0, "no {bytes} bytes of addresses: {code}");
    }

    /// The stream that was made last on a device begins a capture.
    ///
    /// # Panics
    ///
    /// If there is none, or if it is in a capture.
    pub fn begin_capture(&self, ordinal: i32) {
        // SAFETY: takes any numbers.
        let done = unsafe { (self.capture)(ordinal, 1) };
        assert!(done == 1, "no stream of device {ordinal} can begin a capture");
    }

    /// The same stream ends its capture: whether nothing has spoilt it.
    #[must_use]
    pub fn end_capture(&self, ordinal: i32) -> bool {
        // SAFETY: takes any numbers.
        unsafe { (self.capture)(ordinal, 0) == 1 }
    }

    /// How many mistakes the program made that a real device would not tell.
    #[must_use]
    pub fn violations(&self) -> u64 {
        // SAFETY: takes nothing.
        unsafe { (self.violations)() }
    }

    /// The last of these mistakes in words.
    #[must_use]
    pub fn last_violation(&self) -> String {
        told_by(self.last_violation)
    }

    /// Streams, events, allocations, registrations and communicators that were not given back.
    #[must_use]
    pub fn leaks(&self) -> u64 {
        // SAFETY: takes nothing.
        unsafe { (self.leaks)() }
    }

    /// How often contexts were retained and not released yet.
    #[must_use]
    pub fn retained(&self) -> u64 {
        // SAFETY: takes nothing.
        unsafe { (self.retained)() }
    }

    /// Forgets everything, and reads the variables anew. Nothing may be under way, and whatever retained a context must
    /// be gone: a context is released by the number of its device, so a late release would take the next one's.
    pub fn reset(&self) {
        // SAFETY: handles from before are refused from now on; memory of the driver is gone, as after its end.
        unsafe { (self.reset)() }
    }
}

/// A text that one of the functions above writes.
fn told_by(tell: unsafe extern "C" fn(*mut c_char, usize)) -> String {
    let mut text = [0u8; 512];
    // SAFETY: a buffer, with its length.
    unsafe { tell(text.as_mut_ptr().cast(), text.len()) };
    text.iter().take_while(|it| **it != 0).map(|it| char::from(*it)).collect()
}
