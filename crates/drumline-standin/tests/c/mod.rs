//! The C functions, as a program declares them, and what most tests begin with.
//!
//! They are linked in from the crate, and are the same as those of the shared library.

#![allow(dead_code, non_snake_case, reason = "each test uses some; the names are those of C")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

// The crate that has the functions must be linked.
use drumline_standin as _;

// The stand-in refuses wrong handles and null pointers, and the tests give it live memory only.
unsafe extern "C" {
    pub(crate) safe fn cuInit(flags: c_uint) -> c_int;
    pub(crate) safe fn cuGetErrorName(code: c_int, text: &mut *const c_char) -> c_int;
    pub(crate) safe fn cuDeviceGetCount(count: &mut c_int) -> c_int;
    pub(crate) safe fn cuDeviceGetName(name: *mut c_char, len: c_int, device: c_int) -> c_int;
    pub(crate) safe fn cuDeviceGetUuid_v2(uuid: &mut [u8; 16], device: c_int) -> c_int;
    pub(crate) safe fn cuDeviceGetPCIBusId(id: *mut c_char, len: c_int, device: c_int) -> c_int;
    pub(crate) safe fn cuDeviceGetAttribute(
        value: &mut c_int,
        attribute: c_int,
        device: c_int,
    ) -> c_int;
    pub(crate) safe fn cuDevicePrimaryCtxRetain(context: &mut usize, device: c_int) -> c_int;
    pub(crate) safe fn cuDevicePrimaryCtxRelease_v2(device: c_int) -> c_int;
    pub(crate) safe fn cuCtxSetCurrent(context: usize) -> c_int;
    pub(crate) safe fn cuCtxGetCurrent(context: &mut usize) -> c_int;
    pub(crate) safe fn cuCtxPushCurrent_v2(context: usize) -> c_int;
    pub(crate) safe fn cuCtxPopCurrent_v2(context: &mut usize) -> c_int;
    pub(crate) safe fn cuCtxSynchronize() -> c_int;
    pub(crate) safe fn cuMemAlloc_v2(pointer: &mut usize, len: usize) -> c_int;
    pub(crate) safe fn cuMemFree_v2(pointer: usize) -> c_int;
    pub(crate) safe fn cuMemHostAlloc(pointer: &mut usize, len: usize, flags: c_uint) -> c_int;
    pub(crate) safe fn cuMemFreeHost(pointer: usize) -> c_int;
    pub(crate) safe fn cuMemHostRegister_v2(pointer: usize, len: usize, flags: c_uint) -> c_int;
    pub(crate) safe fn cuMemHostUnregister(pointer: usize) -> c_int;
    pub(crate) safe fn cuPointerGetAttribute(
        data: *mut c_void,
        attribute: c_int,
        pointer: usize,
    ) -> c_int;
    pub(crate) safe fn cuPointerGetAttributes(
        count: c_uint,
        attributes: *const c_int,
        data: *const *mut c_void,
        pointer: usize,
    ) -> c_int;
    pub(crate) safe fn cuMemGetAddressRange_v2(
        base: &mut usize,
        len: &mut usize,
        pointer: usize,
    ) -> c_int;
    pub(crate) safe fn cuMemcpyAsync(to: usize, from: usize, len: usize, stream: usize) -> c_int;
    pub(crate) safe fn cuMemcpyHtoDAsync_v2(
        to: usize,
        from: usize,
        len: usize,
        stream: usize,
    ) -> c_int;
    pub(crate) safe fn cuMemcpyDtoHAsync_v2(
        to: usize,
        from: usize,
        len: usize,
        stream: usize,
    ) -> c_int;
    pub(crate) safe fn cuMemcpyPeerAsync(
        to: usize,
        to_context: usize,
        from: usize,
        from_context: usize,
        len: usize,
        stream: usize,
    ) -> c_int;
    pub(crate) safe fn cuDeviceCanAccessPeer(can: &mut c_int, device: c_int, peer: c_int) -> c_int;
    pub(crate) safe fn cuCtxEnablePeerAccess(context: usize, flags: c_uint) -> c_int;
    pub(crate) safe fn cuMemGetInfo_v2(free: &mut usize, total: &mut usize) -> c_int;
    pub(crate) safe fn cuMemcpyHtoD_v2(to: usize, from: usize, len: usize) -> c_int;
    pub(crate) safe fn cuMemcpyDtoH_v2(to: usize, from: usize, len: usize) -> c_int;
    pub(crate) safe fn cuMemsetD8Async(to: usize, value: u8, len: usize, stream: usize) -> c_int;
    pub(crate) safe fn cuStreamCreate(stream: &mut usize, flags: c_uint) -> c_int;
    pub(crate) safe fn cuStreamDestroy_v2(stream: usize) -> c_int;
    pub(crate) safe fn cuStreamSynchronize(stream: usize) -> c_int;
    pub(crate) safe fn cuStreamQuery(stream: usize) -> c_int;
    pub(crate) safe fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) -> c_int;
    pub(crate) safe fn cuStreamWaitValue32_v2(
        stream: usize,
        address: usize,
        value: u32,
        flags: c_uint,
    ) -> c_int;
    pub(crate) safe fn cuStreamWriteValue32_v2(
        stream: usize,
        address: usize,
        value: u32,
        flags: c_uint,
    ) -> c_int;
    pub(crate) safe fn cuStreamIsCapturing(stream: usize, status: &mut c_int) -> c_int;
    pub(crate) safe fn cuStreamBeginCapture_v2(stream: usize, mode: c_int) -> c_int;
    pub(crate) safe fn cuStreamEndCapture(stream: usize, graph: &mut usize) -> c_int;
    pub(crate) safe fn cuLaunchHostFunc(
        stream: usize,
        function: extern "C" fn(*mut c_void),
        data: usize,
    ) -> c_int;
    pub(crate) safe fn cuEventCreate(event: &mut usize, flags: c_uint) -> c_int;
    pub(crate) safe fn cuEventRecord(event: usize, stream: usize) -> c_int;
    pub(crate) safe fn cuEventQuery(event: usize) -> c_int;
    pub(crate) safe fn cuEventSynchronize(event: usize) -> c_int;
    pub(crate) safe fn cuEventDestroy_v2(event: usize) -> c_int;
    pub(crate) safe fn cuEventElapsedTime(
        milliseconds: &mut f32,
        start: usize,
        end: usize,
    ) -> c_int;
    pub(crate) safe fn standin_seed(seed: u64);
    pub(crate) safe fn standin_fail(name: *const c_char, nth: u32, code: c_int);
    pub(crate) safe fn standin_fail_any(nth: u32, code: c_int);
    pub(crate) safe fn standin_calls() -> u64;
    pub(crate) safe fn standin_break_device(ordinal: c_int, code: c_int);
    pub(crate) safe fn standin_violations() -> u64;
    pub(crate) safe fn standin_leaks() -> u64;
    pub(crate) safe fn standin_reset();
    pub(crate) safe fn standin_set(name: *const c_char, value: *const c_char);
    pub(crate) safe fn standin_unset_all();
}

pub(crate) const INVALID_VALUE: c_int = 1;
pub(crate) const OUT_OF_MEMORY: c_int = 2;
pub(crate) const NOT_INITIALIZED: c_int = 3;
pub(crate) const INVALID_CONTEXT: c_int = 201;
pub(crate) const INVALID_HANDLE: c_int = 400;
pub(crate) const NOT_READY: c_int = 600;
pub(crate) const ILLEGAL_ADDRESS: c_int = 700;
pub(crate) const ALREADY_REGISTERED: c_int = 712;
pub(crate) const NOT_REGISTERED: c_int = 713;
pub(crate) const CAPTURE_UNSUPPORTED: c_int = 900;
pub(crate) const CAPTURE_INVALIDATED: c_int = 901;
pub(crate) const POISON: u8 = 0xDB;

/// A stream that the legacy stream does not order.
pub(crate) const NON_BLOCKING: c_uint = 1;
/// An event without times.
pub(crate) const UNTIMED: c_uint = 2;

static ALONE: Mutex<()> = Mutex::new(());

/// The world is the process's: one test has it at a time, fresh, with the context of device 0.
pub(crate) struct Test {
    _alone: MutexGuard<'static, ()>,
}

impl Test {
    pub(crate) fn new(seed: u64) -> Self {
        Self::with(seed, &[])
    }

    /// With variables set.
    pub(crate) fn with(seed: u64, variables: &[(&CStr, &CStr)]) -> Self {
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        standin_unset_all();
        for (name, value) in variables {
            standin_set(name.as_ptr(), value.as_ptr());
        }
        standin_reset();
        standin_seed(seed);
        assert_eq!(cuInit(0), 0);
        let test = Test { _alone: alone };
        test.use_device(0);
        test
    }

    pub(crate) fn use_device(&self, device: c_int) -> usize {
        let context = made(|context| cuDevicePrimaryCtxRetain(context, device));
        assert_eq!(cuCtxSetCurrent(context), 0);
        context
    }
}

/// What a function hands out.
pub(crate) fn made(make: impl FnOnce(&mut usize) -> c_int) -> usize {
    let mut handle = 0;
    assert_eq!(make(&mut handle), 0);
    handle
}

pub(crate) fn stream() -> usize {
    made(|it| cuStreamCreate(it, NON_BLOCKING))
}

pub(crate) fn event() -> usize {
    made(|it| cuEventCreate(it, UNTIMED))
}

pub(crate) fn device_memory(len: usize) -> usize {
    made(|it| cuMemAlloc_v2(it, len))
}

/// Host memory that stays where it is, pinned until it is dropped.
pub(crate) struct Pinned(pub(crate) Vec<u8>);

impl Pinned {
    pub(crate) fn new(bytes: Vec<u8>) -> Self {
        assert_eq!(cuMemHostRegister_v2(bytes.as_ptr() as usize, bytes.len(), 0), 0);
        Pinned(bytes)
    }

    pub(crate) fn at(&self) -> usize {
        self.0.as_ptr() as usize
    }

    /// What the device has written so far; the compiler knows nothing of it.
    pub(crate) fn now(&self) -> Vec<u8> {
        // SAFETY: live bytes, which only this thread's calls of the library change.
        (0..self.0.len()).map(|at| unsafe { self.0.as_ptr().add(at).read_volatile() }).collect()
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        cuMemHostUnregister(self.at());
    }
}
