//! How MPI begins and ends, and what is refused.

use std::env;
use std::ffi::{CStr, CString, c_int, c_void};
use std::mem::transmute;
use std::path::{Path, PathBuf};
use std::process::exit;
use std::ptr::null_mut;

use drumline_mpi::{Abi, Error, Level, Mpi, launcher};

use super::{everybody, made, mpi, over, until, world};

/// Rank 0 begins what nobody ends. Its process ends nevertheless.
pub(super) fn dropped() {
    let all = everybody();
    over(all.barrier());
    if all.rank() == 0 {
        let mut request = all.barrier().unwrap();
        assert!(!request.poll().unwrap());
        drop(request);
        let request = all.barrier().unwrap();
        assert_eq!(request.finish(), (vec![], vec![]), "before the end, buffers are MPI's");
    }
    // A rank that ends without MPI_Finalize takes the others with it, under some launchers. So both say it before.
    println!("{}", super::WELL);
    let other = 1 - all.rank();
    let told = all.send(vec![1], 1, other, 5);
    let message = until(|| all.probe(Some(other), 5));
    over(message.receive(vec![0]));
    over(told);
    exit(0);
}

/// A forked process is refused, and its end does not disturb its parent.
pub(super) fn fork() {
    let all = everybody();
    // SAFETY: the child calls what needs no other thread, and ends.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let refused =
            [all.barrier().map(drop), all.probe(None, 1).map(drop), mpi().init().map(drop)];
        let is_well = refused.iter().all(|it| matches!(it, Err(Error::Forked)));
        // Its hooks of exit run.
        // SAFETY: no other thread runs in the child.
        unsafe { libc::exit(if is_well { 0 } else { 1 }) }
    }
    let mut status = -1;
    // SAFETY: `status` is there to be written.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert_eq!(status, 0, "the child says what was wrong by its status");
    over(all.barrier());
}

/// Others finalise MPI while a communicator is there.
pub(super) fn finalised() {
    let all = everybody();
    over(all.barrier());
    assert_eq!(call0(c"MPI_Finalize"), 0);
    assert!(matches!(all.barrier().unwrap_err(), Error::Finalized));
    assert!(matches!(mpi().init().unwrap_err(), Error::Finalized));
    assert!(matches!(world_error(), Error::Finalized));
}

pub(super) fn initialised_by_others() {
    initialise(Level::Multiple);
    let all = everybody();
    over(all.barrier());
    mpi().before_finalize(|| {
        // The hook of C's exit runs, but MPI is not finalised there: this would be the second time.
        assert_eq!(call0(c"MPI_Finalize"), 0);
    });
}

/// A communicator is then made under the lock.
pub(super) fn initialised_for_one_thread_at_a_time() {
    initialise(Level::Serialized);
    over(everybody().barrier());
    assert_eq!(call0(c"MPI_Finalize"), 0);
}

/// What the process has loaded is used, whatever path is named.
pub(super) fn loaded_by_others() {
    let library = PathBuf::from(env::var_os(super::LIBRARY).unwrap());
    let name = CString::new(library.to_str().unwrap()).unwrap();
    // SAFETY: the name ends with a zero; the library is an MPI, which does nothing when it is loaded.
    assert!(!unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW) }.is_null());
    let other = Path::new("/no/libmpi.so");
    let about = Mpi::load(Some(other)).unwrap().about();
    assert_eq!(about.path, library.canonicalize().unwrap());
    assert_eq!(about.passed_over.as_deref(), Some(other));
}

pub(super) fn initialised_for_one_thread() {
    let level = initialise(Level::Funneled);
    match mpi().init() {
        Err(Error::Threads { provided }) => assert_eq!(provided, Level::Funneled),
        Ok(_) => {
            assert!(level >= Level::Serialized, "some MPIs give more than they were asked for")
        }
        Err(other) => panic!("{other}"),
    }
    assert_eq!(call0(c"MPI_Finalize"), 0);
}

/// A hook may use MPI.
pub(super) fn hooks() {
    let world = world();
    let _ = made(world, &[world.rank()], 2);
    mpi().before_finalize(|| {
        over(everybody().barrier());
        println!("a hook still uses MPI");
    });
}

/// No path is named.
pub(super) fn search() {
    assert!(env::var_os(super::LIBRARY).is_none());
    let world = world();
    assert_eq!(world.size(), 2, "{}", mpi().about());
    assert!(mpi().about().launcher.is_some() && mpi().about().passed_over.is_none());
    over(everybody().barrier());
}

pub(super) fn misfit() {
    let error = mpi().init().unwrap_err();
    let Error::Misfit { launcher: named, path, version } = &error else { panic!("{error}") };
    assert_eq!(Some(*named), launcher());
    assert_eq!((path, version), (&mpi().about().path, &mpi().about().version));
    let text = error.to_string();
    assert!(text.contains(version.as_str()) && text.contains(&named.to_string()), "{text}");
}

fn world_error() -> Error {
    Mpi::load(None).and_then(Mpi::init).unwrap_err()
}

/// Calls a function of MPI as another part of the program would.
fn call0(name: &CStr) -> c_int {
    // SAFETY: MPI_Finalize takes nothing and returns an integer.
    unsafe { transmute::<*mut c_void, extern "C" fn() -> c_int>(symbol(name))() }
}

fn initialise(level: Level) -> Level {
    type Init = unsafe extern "C" fn(*mut c_void, *mut c_void, c_int, *mut c_int) -> c_int;
    let factor = if mpi().about().abi == Abi::Standard { 1024 } else { 1 };
    let levels = [
        (Level::Single, 0),
        (Level::Funneled, factor),
        (Level::Serialized, 2 * factor),
        (Level::Multiple, if factor == 1 { 3 } else { 4096 }),
    ];
    let wanted = levels.iter().find(|it| it.0 == level).unwrap().1;
    let mut provided = 0;
    // SAFETY: this is the type of MPI_Init_thread, which takes null for the arguments.
    let code = unsafe {
        let function = transmute::<*mut c_void, Init>(symbol(c"MPI_Init_thread"));
        function(null_mut(), null_mut(), wanted, &raw mut provided)
    };
    assert_eq!(code, 0);
    levels.iter().rev().find(|it| it.1 <= provided).unwrap().0
}

fn symbol(name: &CStr) -> *mut c_void {
    let path = CString::new(mpi().about().path.to_str().unwrap()).unwrap();
    // SAFETY: both are strings that end with a zero, and the library is loaded.
    let found = unsafe {
        libc::dlsym(libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD), name.as_ptr())
    };
    assert!(!found.is_null(), "{name:?}");
    found
}
