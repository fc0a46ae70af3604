//! The functions of a driver that are used here, under the names of CUDA and of HIP.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;

use drumline_loader::Library;

use crate::family::Family;

/// `CUcontext`, `CUstream`, `CUevent`: pointers that only the driver follows.
pub(crate) type Handle = *mut c_void;

/// `CUipcMemHandle` and `hipIpcMemHandle_t`: bytes that only the driver understands.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct IpcHandle(pub(crate) [u8; 64]);

/// Why a library cannot be used: the function that it lacks.
pub(crate) type Missing = &'static CStr;

macro_rules! functions {
    ($($field:ident = $cuda:literal, $hip:literal: ($($argument:ty),*);)*) => {
        /// Functions of one library. Each has the type that the driver's manual gives it.
        #[derive(Clone, Copy)]
        pub(crate) struct Functions {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> c_int,)*
            pub(crate) wait_value: Option<WaitValue>,
            pub(crate) ipc: Option<Ipc>,
        }

        impl Functions {
            pub(crate) fn find(library: Library, family: Family) -> Result<Functions, Missing> {
                Ok(Functions {
                    $($field: {
                        let name = match family { Family::Cuda => $cuda, Family::Hip => $hip };
                        let address = library.symbol(name).ok_or(name)?;
                        // SAFETY: the library is the driver of this family, whose function of this name has this type.
                        unsafe {
                            transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> c_int>(address.as_ptr())
                        }
                    },)*
                    wait_value: WaitValue::find(library, family),
                    ipc: Ipc::find(library, family),
                })
            }
        }
    };
}

functions! {
    init = c"cuInit", c"hipInit": (c_uint);
    error_name = c"cuGetErrorName", c"hipDrvGetErrorName": (c_int, *mut *const c_char);
    error_string = c"cuGetErrorString", c"hipDrvGetErrorString": (c_int, *mut *const c_char);
    driver_version = c"cuDriverGetVersion", c"hipDriverGetVersion": (*mut c_int);
    device_count = c"cuDeviceGetCount", c"hipGetDeviceCount": (*mut c_int);
    device_get = c"cuDeviceGet", c"hipDeviceGet": (*mut c_int, c_int);
    device_name = c"cuDeviceGetName", c"hipDeviceGetName": (*mut c_char, c_int, c_int);
    device_uuid = c"cuDeviceGetUuid_v2", c"hipDeviceGetUuid": (*mut [u8; 16], c_int);
    device_pci = c"cuDeviceGetPCIBusId", c"hipDeviceGetPCIBusId": (*mut c_char, c_int, c_int);
    can_access_peer = c"cuDeviceCanAccessPeer", c"hipDeviceCanAccessPeer": (*mut c_int, c_int, c_int);
    context_retain = c"cuDevicePrimaryCtxRetain", c"hipDevicePrimaryCtxRetain": (*mut Handle, c_int);
    context_release = c"cuDevicePrimaryCtxRelease_v2", c"hipDevicePrimaryCtxRelease": (c_int);
    context_push = c"cuCtxPushCurrent_v2", c"hipCtxPushCurrent": (Handle);
    context_pop = c"cuCtxPopCurrent_v2", c"hipCtxPopCurrent": (*mut Handle);
    current_device = c"cuCtxGetDevice", c"hipGetDevice": (*mut c_int);
    pointer_attribute = c"cuPointerGetAttribute", c"hipPointerGetAttribute": (*mut c_void, c_int, u64);
    address_range = c"cuMemGetAddressRange_v2", c"hipMemGetAddressRange": (*mut u64, *mut usize, u64);
    allocate = c"cuMemAlloc_v2", c"hipMalloc": (*mut u64, usize);
    free = c"cuMemFree_v2", c"hipFree": (u64);
    host_allocate = c"cuMemHostAlloc", c"hipHostMalloc": (*mut *mut c_void, usize, c_uint);
    host_free = c"cuMemFreeHost", c"hipHostFree": (*mut c_void);
    host_register = c"cuMemHostRegister_v2", c"hipHostRegister": (*mut c_void, usize, c_uint);
    host_unregister = c"cuMemHostUnregister", c"hipHostUnregister": (*mut c_void);
    host_device_pointer = c"cuMemHostGetDevicePointer_v2", c"hipHostGetDevicePointer": (*mut u64, *mut c_void, c_uint);
    copy_out = c"cuMemcpyDtoHAsync_v2", c"hipMemcpyDtoHAsync": (*mut c_void, u64, usize, Handle);
    copy_in = c"cuMemcpyHtoDAsync_v2", c"hipMemcpyHtoDAsync": (u64, *const c_void, usize, Handle);
    copy_within = c"cuMemcpyDtoDAsync_v2", c"hipMemcpyDtoDAsync": (u64, u64, usize, Handle);
    copy_out_now = c"cuMemcpyDtoH_v2", c"hipMemcpyDtoH": (*mut c_void, u64, usize);
    copy_in_now = c"cuMemcpyHtoD_v2", c"hipMemcpyHtoD": (u64, *const c_void, usize);
    fill_now = c"cuMemsetD8_v2", c"hipMemsetD8": (u64, u8, usize);
    stream_create = c"cuStreamCreate", c"hipStreamCreateWithFlags": (*mut Handle, c_uint);
    stream_destroy = c"cuStreamDestroy_v2", c"hipStreamDestroy": (Handle);
    stream_wait = c"cuStreamWaitEvent", c"hipStreamWaitEvent": (Handle, Handle, c_uint);
    stream_synchronize = c"cuStreamSynchronize", c"hipStreamSynchronize": (Handle);
    stream_is_capturing = c"cuStreamIsCapturing", c"hipStreamIsCapturing": (Handle, *mut c_int);
    event_create = c"cuEventCreate", c"hipEventCreateWithFlags": (*mut Handle, c_uint);
    event_record = c"cuEventRecord", c"hipEventRecord": (Handle, Handle);
    event_query = c"cuEventQuery", c"hipEventQuery": (Handle);
    event_synchronize = c"cuEventSynchronize", c"hipEventSynchronize": (Handle);
    event_destroy = c"cuEventDestroy_v2", c"hipEventDestroy": (Handle);
}

/// How a stream waits for a word: stream, address, value, flags; HIP also wants a mask.
#[derive(Clone, Copy)]
pub(crate) enum WaitValue {
    Cuda(unsafe extern "C" fn(Handle, u64, u32, c_uint) -> c_int),
    Hip(unsafe extern "C" fn(Handle, u64, u32, c_uint, u32) -> c_int),
}

impl WaitValue {
    fn find(library: Library, family: Family) -> Option<WaitValue> {
        let name = match family {
            Family::Cuda => c"cuStreamWaitValue32_v2",
            Family::Hip => c"hipStreamWaitValue32",
        };
        let address = library.symbol(name)?.as_ptr();
        // SAFETY: the function of this name has this type in this family.
        Some(unsafe {
            match family {
                Family::Cuda => WaitValue::Cuda(transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(Handle, u64, u32, c_uint) -> c_int,
                >(address)),
                Family::Hip => WaitValue::Hip(transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(Handle, u64, u32, c_uint, u32) -> c_int,
                >(address)),
            }
        })
    }

    /// Has `stream` wait until the word at `address` is at least `value`.
    ///
    /// # Safety
    ///
    /// A live stream, and a word of mapped host memory that lives until the stream has passed.
    pub(crate) unsafe fn call(self, stream: Handle, address: u64, value: u32) -> c_int {
        const AT_LEAST: c_uint = 0;
        // SAFETY: the caller's promise.
        unsafe {
            match self {
                WaitValue::Cuda(wait) => wait(stream, address, value, AT_LEAST),
                WaitValue::Hip(wait) => wait(stream, address, value, AT_LEAST, u32::MAX),
            }
        }
    }
}

/// How processes open each other's memory. Nothing but a measurement needs it, so a library may lack it.
#[derive(Clone, Copy)]
pub(crate) struct Ipc {
    /// Writes the handle of an allocation.
    pub(crate) lend: unsafe extern "C" fn(*mut IpcHandle, u64) -> c_int,
    /// Writes the address of what another process has lent.
    pub(crate) open: unsafe extern "C" fn(*mut u64, IpcHandle, c_uint) -> c_int,
    pub(crate) close: unsafe extern "C" fn(u64) -> c_int,
}

impl Ipc {
    fn find(library: Library, family: Family) -> Option<Ipc> {
        let [lend, open, close] = match family {
            Family::Cuda => {
                [c"cuIpcGetMemHandle", c"cuIpcOpenMemHandle_v2", c"cuIpcCloseMemHandle"]
            }
            Family::Hip => [c"hipIpcGetMemHandle", c"hipIpcOpenMemHandle", c"hipIpcCloseMemHandle"],
        };
        let address = |name| library.symbol(name).map(|it| it.as_ptr());
        // SAFETY: the functions of these names have these types in both families.
        Some(unsafe {
            Ipc {
                lend: transmute::<*mut c_void, unsafe extern "C" fn(*mut IpcHandle, u64) -> c_int>(
                    address(lend)?,
                ),
                open: transmute::<
                    *mut c_void,
                    unsafe extern "C" fn(*mut u64, IpcHandle, c_uint) -> c_int,
                >(address(open)?),
                close: transmute::<*mut c_void, unsafe extern "C" fn(u64) -> c_int>(address(
                    close,
                )?),
            }
        })
    }
}
