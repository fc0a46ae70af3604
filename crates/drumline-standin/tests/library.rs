//! The shared library, as other crates find it.

use std::ffi::{CString, c_void};

use std::path::Path;

use drumline_standin::{Controls, library, library_without};

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

/// Those of NCCL.
const NCCL: &str = "ncclGetVersion ncclGetUniqueId ncclGetErrorString ncclGetLastError ncclCommInitRankConfig \
    ncclCommInitRank ncclCommSplit ncclCommFinalize ncclCommDestroy ncclCommAbort ncclCommGetAsyncError ncclCommCount \
    ncclCommUserRank ncclCommCuDevice ncclGroupStart ncclGroupEnd ncclAllReduce ncclBroadcast ncclReduce ncclAllGather \
    ncclReduceScatter ncclSend ncclRecv ncclRedOpCreatePreMulSum ncclRedOpDestroy ncclAlltoAll ncclGather ncclScatter";

/// A function of a library, or null.
fn symbol(library: &Path, name: &str) -> *mut c_void {
    let path = CString::new(library.as_os_str().as_encoded_bytes()).unwrap_or_default();
    let name = CString::new(name).unwrap_or_default();
    // SAFETY: texts with a zero byte; the library runs nothing when it is loaded, and stays loaded.
    unsafe {
        let handle = libc::dlopen(path.as_ptr(), libc::RTLD_NOW);
        assert!(!handle.is_null(), "{}", library.display());
        libc::dlsym(handle, name.as_ptr())
    }
}

fn init(library: &Path) -> extern "C" fn(u32) -> i32 {
    // SAFETY: the function of this name has this type.
    unsafe { std::mem::transmute(symbol(library, "cuInit")) }
}

#[test]
fn it_has_every_function_and_its_controls_reach_it() {
    let names = DRIVER.split_whitespace().chain(NCCL.split_whitespace());
    let missing: Vec<&str> = names.filter(|name| symbol(&library(), name).is_null()).collect();
    assert!(missing.is_empty(), "{missing:?}");

    let controls = Controls::load();
    controls.reset();
    controls.fail("cuInit", 1, 46);
    let init = init(&library());
    assert_eq!((init(0), init(0)), (46, 0));
    assert_eq!((controls.calls(), controls.violations(), controls.leaks()), (2, 0, 0));
    assert_eq!(controls.last_violation(), "");
}

#[test]
fn a_copy_lacks_functions_and_has_a_world_of_its_own() {
    let gone = ["ncclAlltoAll", "cuStreamWaitValue32_v2"];
    let copy = library_without(&gone);
    let names = DRIVER.split_whitespace().chain(NCCL.split_whitespace());
    let missing: Vec<&str> = names.filter(|name| symbol(&copy, name).is_null()).collect();
    assert_eq!(missing, ["cuStreamWaitValue32_v2", "ncclAlltoAll"]);
    let controls = Controls::of(&copy);
    controls.set("STANDIN_DEVICES", Some("0"));
    assert_eq!(init(&copy)(0), 100, "it has no device");
    controls.unset_all();
    assert_eq!((init(&copy)(0), controls.calls(), controls.nccl_calls()), (0, 2, 0));
}
