//! What tests ask of the stand-in itself.

use std::ffi::{CStr, c_char, c_int};

use crate::code::Code;
use crate::nccl::communicator;
use crate::out::Out;
use crate::streams::Capture;
use crate::variables::{forget_overrides, override_variable};
use crate::world::world;

/// Sets a variable that the stand-in reads, without touching the environment. A null value: as if it were not set.
/// Variables of devices are read by the first cuInit after a reset.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_set(name: *const c_char, value: *const c_char) {
    if let Some(name) = text(name) {
        override_variable(&name, text(value));
    }
}

/// A text of the caller's; nothing if it is null.
fn text(at: *const c_char) -> Option<String> {
    if at.is_null() {
        return None;
    }
    // SAFETY: not null, so the caller says that it is a text with a zero byte.
    Some(unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned())
}

/// Takes back what [`standin_set`] said.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_unset_all() {
    forget_overrides();
}

/// Begins the random choices anew.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_seed(seed: u64) {
    world().work.reseed(seed);
}

/// Lets the n-th later call of a function fail with a code. The name may lack its version; `nccl*` is
/// any function of NCCL.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_fail(name: *const c_char, nth: u32, code: c_int) {
    if let Some(name) = text(name) {
        world().faults.add(&name, nth, code);
    }
}

/// Lets the n-th later call of any function of the driver fail with a code.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_fail_any(nth: u32, code: c_int) {
    world().faults.add("cu*", nth, code);
}

/// The function whose call has failed on request last; nothing if there was none.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_failed(text: *mut c_char, len: usize) {
    let failed = world().faults.failed().unwrap_or_default();
    // A null pointer or no room: there is nobody to tell.
    let _ = Out::new(text).text(failed, len.min(1 << 20) as c_int);
}

/// Calls of the driver so far.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_calls() -> u64 {
    world().faults.calls("cu")
}

/// Calls of NCCL so far.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_nccl_calls() -> u64 {
    world().faults.calls("nccl")
}

/// Breaks a device: all that it does from now on fails with this code.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_break_device(ordinal: c_int, code: c_int) {
    if let Ok(device) = usize::try_from(ordinal) {
        world().break_device(device, Code(code));
    }
}

/// Lays the next allocations of device memory side by side, until `len` bytes are used up.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_side_by_side(len: usize) -> c_int {
    match world().memory.lay_side_by_side(len) {
        Ok(()) => 0,
        Err(code) => code.0,
    }
}

/// The stream that the program has made last on a device begins a capture, or ends it. 1: it was in none before it began,
/// or in one that nothing has spoilt before it ended.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_capture(ordinal: c_int, begins: c_int) -> c_int {
    let (was, is) = match begins {
        0 => (Capture::Active, Capture::None),
        _ => (Capture::None, Capture::Active),
    };
    let mut world = world();
    let stream = usize::try_from(ordinal).ok().and_then(|it| world.streams.last_of(it));
    stream.map_or(0, |it| c_int::from(std::mem::replace(&mut it.capture, is) == was))
}

/// Mistakes of the program that a real device would not tell.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_violations() -> u64 {
    world().violations
}

/// The last of them in words; nothing if there was none.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_last_violation(text: *mut c_char, len: usize) {
    let last = world().last_violation.clone();
    // A null pointer or no room: there is nobody to tell.
    let _ = Out::new(text).text(&last, len.min(1 << 20) as c_int);
}

/// What the program has not given back: streams, events, allocations, registrations,
/// communicators.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_leaks() -> u64 {
    let world = world();
    (world.streams.len() + world.memory.len() + world.abandoned + communicator::count()) as u64
}

/// How often the program has retained a context without a release.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_retained() -> u64 {
    world().devices.iter().map(|device| device.retained as u64).sum()
}

/// Forgets everything, and reads the variables anew.
#[unsafe(no_mangle)]
pub(crate) unsafe extern "C" fn standin_reset() {
    communicator::forget_all();
    world().reset();
}
