//! Result codes of the driver: number, name, text.

/// A code of the driver other than success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) i32);

macro_rules! codes {
    ($($name:ident = $number:literal, $text:literal;)*) => {
        #[allow(dead_code, reason = "the table is the driver's; a code may only be asked for by number")]
        impl Code {
            $(pub(crate) const $name: Code = Code($number);)*
        }

        /// Name and text of a code, each with the zero byte that C wants.
        pub(crate) fn words(number: i32) -> Option<(&'static [u8], &'static [u8])> {
            match number {
                0 => Some((b"CUDA_SUCCESS\0", b"no error\0")),
                $($number => Some((
                    concat!("CUDA_ERROR_", stringify!($name), "\0").as_bytes(),
                    concat!($text, "\0").as_bytes(),
                )),)*
                _ => None,
            }
        }
    };
}

codes! {
    INVALID_VALUE = 1, "invalid argument";
    OUT_OF_MEMORY = 2, "out of memory";
    NOT_INITIALIZED = 3, "initialization error";
    DEINITIALIZED = 4, "driver shutting down";
    STUB_LIBRARY = 34, "CUDA driver is a stub library";
    DEVICE_UNAVAILABLE = 46, "CUDA-capable device(s) is/are busy or unavailable";
    NO_DEVICE = 100, "no CUDA-capable device is detected";
    INVALID_DEVICE = 101, "invalid device ordinal";
    INVALID_CONTEXT = 201, "invalid device context";
    MAP_FAILED = 205, "mapping of buffer object failed";
    ECC_UNCORRECTABLE = 214, "uncorrectable ECC error encountered";
    PEER_ACCESS_UNSUPPORTED = 217, "peer access is not supported between these two devices";
    NVLINK_UNCORRECTABLE = 220, "uncorrectable NVLink error detected during the execution";
    OPERATING_SYSTEM = 304, "OS call failed or operation not supported on this OS";
    INVALID_HANDLE = 400, "invalid resource handle";
    ILLEGAL_STATE = 401, "the operation cannot be performed in the present state";
    NOT_FOUND = 500, "named symbol not found";
    NOT_READY = 600, "device not ready";
    ILLEGAL_ADDRESS = 700, "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = 701, "too many resources requested for launch";
    LAUNCH_TIMEOUT = 702, "the launch timed out and was terminated";
    PEER_ACCESS_ALREADY_ENABLED = 704, "peer access is already enabled";
    PEER_ACCESS_NOT_ENABLED = 705, "peer access has not been enabled";
    CONTEXT_IS_DESTROYED = 709, "context is destroyed";
    ASSERT = 710, "device-side assert triggered";
    HOST_MEMORY_ALREADY_REGISTERED = 712, "part or all of the requested memory range is already mapped";
    HOST_MEMORY_NOT_REGISTERED = 713, "pointer does not correspond to a registered memory region";
    HARDWARE_STACK_ERROR = 714, "hardware stack error";
    MISALIGNED_ADDRESS = 716, "misaligned address";
    LAUNCH_FAILED = 719, "unspecified launch failure";
    NOT_PERMITTED = 800, "operation not permitted";
    NOT_SUPPORTED = 801, "operation not supported";
    SYSTEM_NOT_READY = 802, "system not yet initialized";
    STREAM_CAPTURE_UNSUPPORTED = 900, "operation not permitted when stream is capturing";
    STREAM_CAPTURE_INVALIDATED = 901, "operation failed due to a previous error during capture";
    STREAM_CAPTURE_UNMATCHED = 903, "capture was not initiated in this stream";
    STREAM_CAPTURE_IMPLICIT = 906, "operation would make the legacy stream depend on a capturing blocking stream";
    UNKNOWN = 999, "unknown error";
}
