//! The functions of NCCL that are used here. All of them are in 2.18, and RCCL has the same names.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::mem::transmute;
use std::ptr::null;

use drumline_loader::Library;

use crate::nccl::unique_id::UniqueId;
use crate::nccl::version::Version;
use crate::table::{Handle, Missing};

/// `ncclConfig_t` of 2.18. Newer versions read its size, and take their defaults for what it lacks.
#[repr(C)]
pub(crate) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`
const UNDEFINED: c_int = c_int::MIN;

impl Config {
    /// A communicator whose calls do not wait for other ranks.
    pub(crate) const NON_BLOCKING: Config = Config {
        size: size_of::<Config>(),
        magic: 0xcafe_beef,
        version: 21_800,
        blocking: 0,
        cga_cluster_size: UNDEFINED,
        min_ctas: UNDEFINED,
        max_ctas: UNDEFINED,
        net_name: null(),
        split_share: UNDEFINED,
    };
}

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const IN_PROGRESS: c_int = 7;
/// `NCCL_SPLIT_NOCOLOR`
pub(crate) const NO_COLOR: c_int = -1;
/// `ncclScalarHostImmediate`
pub(crate) const OF_HOST: c_int = 1;

macro_rules! functions {
    ($($field:ident = $name:literal: ($($argument:ty),*) -> $result:ty;)*) => {
        /// Functions of one library. Each has the type that `nccl.h` gives it.
        #[derive(Clone, Copy)]
        pub(crate) struct Functions {
            $(pub(crate) $field: unsafe extern "C" fn($($argument),*) -> $result,)*
        }

        impl Functions {
            pub(crate) fn find(library: Library) -> Result<Functions, Missing> {
                Ok(Functions {
                    $($field: {
                        let address = library.symbol($name).ok_or($name)?;
                        // SAFETY: the library is NCCL or RCCL, whose function of this name has this type.
                        unsafe {
                            transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) -> $result>(address.as_ptr())
                        }
                    },)*
                })
            }
        }
    };
}

functions! {
    unique_id = c"ncclGetUniqueId": (*mut UniqueId) -> c_int;
    error_string = c"ncclGetErrorString": (c_int) -> *const c_char;
    last_error = c"ncclGetLastError": (Handle) -> *const c_char;
    init = c"ncclCommInitRankConfig": (*mut Handle, c_int, UniqueId, c_int, *const Config) -> c_int;
    split = c"ncclCommSplit": (Handle, c_int, c_int, *mut Handle, *const Config) -> c_int;
    async_error = c"ncclCommGetAsyncError": (Handle, *mut c_int) -> c_int;
    count = c"ncclCommCount": (Handle, *mut c_int) -> c_int;
    user_rank = c"ncclCommUserRank": (Handle, *mut c_int) -> c_int;
    finalize = c"ncclCommFinalize": (Handle) -> c_int;
    destroy = c"ncclCommDestroy": (Handle) -> c_int;
    abort = c"ncclCommAbort": (Handle) -> c_int;
    group_start = c"ncclGroupStart": () -> c_int;
    group_end = c"ncclGroupEnd": () -> c_int;
    create_factor = c"ncclRedOpCreatePreMulSum": (*mut c_int, *const c_void, c_int, c_int, Handle) -> c_int;
    destroy_operator = c"ncclRedOpDestroy": (c_int, Handle) -> c_int;
    all_reduce = c"ncclAllReduce": (u64, u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    reduce = c"ncclReduce": (u64, u64, usize, c_int, c_int, c_int, Handle, Handle) -> c_int;
    reduce_scatter = c"ncclReduceScatter": (u64, u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    broadcast = c"ncclBroadcast": (u64, u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    all_gather = c"ncclAllGather": (u64, u64, usize, c_int, Handle, Handle) -> c_int;
    send = c"ncclSend": (u64, usize, c_int, c_int, Handle, Handle) -> c_int;
    receive = c"ncclRecv": (u64, usize, c_int, c_int, Handle, Handle) -> c_int;
}

/// `ncclGetVersion` alone: an old library lacks other functions.
pub(crate) fn version_of(library: Library) -> Result<Version, String> {
    let address = library.symbol(c"ncclGetVersion").ok_or("it has no function ncclGetVersion")?;
    // SAFETY: the function of this name has this type.
    let function = unsafe {
        transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(address.as_ptr())
    };
    let mut version = 0;
    // SAFETY: the place is there to be written.
    match unsafe { function(&raw mut version) } {
        SUCCESS => Ok(Version(version)),
        code => Err(format!("ncclGetVersion failed with code {code}")),
    }
}

/// The library's text at `text`; nothing if there is none.
///
/// # Safety
///
/// Null, or a text that ends with a zero and lives until this returns.
pub(crate) unsafe fn text_at(text: *const c_char) -> Option<String> {
    // SAFETY: not null, so the caller's promise holds.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
}
