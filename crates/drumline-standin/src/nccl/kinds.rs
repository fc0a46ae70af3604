//! Types, operators and result codes, with the numbers of `nccl.h`.

use std::ffi::c_int;

use crate::code::Code;
use crate::variables::variable;

/// Why a call fails: its result code, and what ncclGetLastError says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    pub(crate) code: c_int,
    pub(crate) text: String,
}

pub(crate) const SUCCESS: c_int = 0;
pub(crate) const UNHANDLED_CUDA: c_int = 1;
pub(crate) const SYSTEM: c_int = 2;
pub(crate) const INTERNAL: c_int = 3;
pub(crate) const INVALID_ARGUMENT: c_int = 4;
pub(crate) const INVALID_USAGE: c_int = 5;
pub(crate) const IN_PROGRESS: c_int = 7;

impl Fault {
    pub(crate) fn argument(text: impl Into<String>) -> Self {
        Fault { code: INVALID_ARGUMENT, text: text.into() }
    }

    pub(crate) fn usage(text: impl Into<String>) -> Self {
        Fault { code: INVALID_USAGE, text: text.into() }
    }

    /// The state of a communicator that has no fault of its own.
    pub(crate) fn of_state(code: c_int) -> Self {
        let text =
            if code == INTERNAL { "the communicator was aborted" } else { "the device is broken" };
        Fault { code, text: text.to_owned() }
    }

    pub(crate) fn system(text: impl Into<String>) -> Self {
        Fault { code: SYSTEM, text: text.into() }
    }
}

/// A pointer that may not be null, or the driver's word against a call.
impl From<Code> for Fault {
    fn from(code: Code) -> Self {
        match code {
            Code::INVALID_VALUE => Fault::argument("a pointer is null"),
            Code(number) => Fault { code: UNHANDLED_CUDA, text: format!("Cuda failure {number}") },
        }
    }
}

/// 2.23.4, or what a test wants.
pub(crate) fn version() -> c_int {
    variable("STANDIN_NCCL_VERSION").and_then(|it| it.parse().ok()).unwrap_or(22_304)
}

pub(crate) fn text_of(code: c_int) -> &'static [u8] {
    match code {
        SUCCESS => b"no error\0",
        UNHANDLED_CUDA => b"unhandled cuda error (run with NCCL_DEBUG=INFO for details)\0",
        SYSTEM => b"unhandled system error (run with NCCL_DEBUG=INFO for details)\0",
        INTERNAL => b"internal error - please report this issue to the NCCL developers\0",
        INVALID_ARGUMENT => b"invalid argument (run with NCCL_DEBUG=WARN for details)\0",
        INVALID_USAGE => b"invalid usage (run with NCCL_DEBUG=WARN for details)\0",
        6 => b"remote process exited or there was a network error\0",
        IN_PROGRESS => b"NCCL operation in progress\0",
        8 => b"operation timed out\0",
        _ => b"unknown result code\0",
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Type {
    I8,
    U8,
    I32,
    U32,
    I64,
    U64,
    F16,
    F32,
    F64,
    Bf16,
    F8E4m3,
    F8E5m2,
}

impl Type {
    pub(crate) fn of(number: c_int) -> Result<Self, Fault> {
        use Type::*;
        [I8, U8, I32, U32, I64, U64, F16, F32, F64, Bf16, F8E4m3, F8E5m2]
            .get(usize::try_from(number).unwrap_or(usize::MAX))
            .copied()
            .ok_or_else(|| Fault::argument(format!("invalid type {number}")))
    }

    pub(crate) fn size(self) -> usize {
        match self {
            Type::I8 | Type::U8 | Type::F8E4m3 | Type::F8E5m2 => 1,
            Type::F16 | Type::Bf16 => 2,
            Type::I32 | Type::U32 | Type::F32 => 4,
            Type::I64 | Type::U64 | Type::F64 => 8,
        }
    }

    pub(crate) fn is_float(self) -> bool {
        matches!(self, Type::F16 | Type::F32 | Type::F64 | Type::Bf16)
    }

    pub(crate) fn can_be_summed(self) -> bool {
        !matches!(self, Type::F8E4m3 | Type::F8E5m2)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Operator {
    Sum,
    Product,
    Max,
    Min,
}

/// How inputs become a result: each is multiplied with the factor of its rank, if there is one; all are reduced; the
/// result is divided, if there is a divisor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Reduction {
    pub(crate) operator: Operator,
    pub(crate) factor: Option<Factor>,
    pub(crate) divisor: Option<u64>,
}

/// A factor, in bytes of the type of the data.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Factor {
    Value(Vec<u8>),
    /// Read on the device when the operation begins.
    At(usize),
}
