//! The shared library, as other crates find it.

use std::ffi::CString;

use drumline_standin::{Controls, library};

/// The functions of the driver that a program looks up.
const DRIVER: &str = "cuInit cuDriverGetVersion cuGetErrorName cuGetErrorString cuDeviceGetCount cuDeviceGet \
    cuDeviceGetName cuDeviceGetUuid_v2 cuDeviceGetPCIBusId cuDeviceGetAttribute cuDeviceTotalMem_v2 \
    cuDeviceCanAccessPeer cuDevicePrimaryCtxRetain cuDevicePrimaryCtxRelease_v2 cuCtxGetCurrent cuCtxSetCurrent \
    cuCtxPushCurrent_v2 cuCtxPopCurrent_v2 cuCtxGetDevice cuCtxSynchronize cuCtxEnablePeerAccess cuMemGetInfo_v2 \
    cuMemAlloc_v2 cuMemFree_v2 cuMemHostAlloc cuMemFreeHost cuMemHostRegister_v2 cuMemHostUnregister \
    cuMemHostGetDevicePointer_v2 cuPointerGetAttribute cuPointerGetAttributes cuMemGetAddressRange_v2 cuMemcpyAsync \
    cuMemcpyHtoDAsync_v2 cuMemcpyDtoHAsync_v2 cuMemcpyDtoDAsync_v2 cuMemcpyPeerAsync cuMemcpyHtoD_v2 cuMemcpyDtoH_v2 \
    cuMemsetD8Async cuMemsetD8_v2 cuStreamCreate cuStreamCreateWithPriority cuStreamDestroy_v2 cuStreamSynchronize \
    cuStreamQuery cuStreamWaitEvent cuStreamWaitValue32_v2 cuStreamWriteValue32_v2 cuStreamIsCapturing \
    cuStreamBeginCapture_v2 cuStreamEndCapture cuStreamGetCtx cuLaunchHostFunc cuEventCreate cuEventRecord \
    cuEventQuery cuEventSynchronize cuEventDestroy_v2 cuEventElapsedTime cuIpcGetMemHandle cuIpcOpenMemHandle_v2 \
    cuIpcCloseMemHandle";

#[test]
fn it_has_every_function_and_its_controls_reach_it() {
    let path = CString::new(library().as_os_str().as_encoded_bytes()).unwrap();
    // SAFETY: a text with a zero byte; the library runs nothing when it is loaded.
    let handle = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    assert!(!handle.is_null());
    let symbol = |name: &str| {
        let name = CString::new(name).unwrap();
        // SAFETY: a live handle, a text with a zero byte.
        unsafe { libc::dlsym(handle, name.as_ptr()) }
    };
    let missing: Vec<&str> =
        DRIVER.split_whitespace().filter(|name| symbol(name).is_null()).collect();
    assert!(missing.is_empty(), "{missing:?}");

    let controls = Controls::load();
    controls.reset();
    controls.fail("cuInit", 1, 46);
    // SAFETY: the function of this name has this type.
    let init: extern "C" fn(u32) -> i32 = unsafe { std::mem::transmute(symbol("cuInit")) };
    assert_eq!((init(0), init(0)), (46, 0));
    assert_eq!((controls.calls(), controls.violations(), controls.leaks()), (2, 0, 0));
    assert_eq!(controls.last_violation(), "");
}
