//! What NCCL lacks.

use std::ffi::c_int;

use drumline_device::fabric::Work;
use drumline_kernels::{DType, ReduceOp};

use crate::nccl::version::Version;

/// `ncclDataType_t`, or what NCCL does not have.
pub(crate) fn number_of(dtype: DType) -> Result<c_int, &'static str> {
    Ok(match dtype {
        DType::I8 => 0,
        DType::U8 => 1,
        DType::I32 => 2,
        DType::U32 => 3,
        DType::I64 => 4,
        DType::U64 => 5,
        DType::F16 => 6,
        DType::F32 => 7,
        DType::F64 => 8,
        DType::Bf16 => 9,
        DType::F8E4M3 => 10,
        DType::F8E5M2 => 11,
        DType::I16 | DType::U16 => return Err("integers of 16 bits"),
        DType::Bool => return Err("booleans"),
        DType::Complex64 | DType::Complex128 => return Err("complex numbers"),
        _ => return Err("elements of this type"),
    })
}

pub(crate) fn supports(version: Version, dtype: DType, work: Work) -> Result<(), String> {
    let lacks = |what: &str| Err(format!("NCCL has no {what}"));
    match work {
        Work::Move => return Ok(()),
        Work::Reduce(ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor) => {
            return lacks("operators on bits");
        }
        Work::PreMulSum if !matches!(dtype, DType::F16 | DType::Bf16 | DType::F32 | DType::F64) => {
            return Err(format!("premul_sum is for f16, bf16, f32 and f64, not for {dtype}"));
        }
        Work::Reduce(_) | Work::PreMulSum => {}
    }
    if let Err(what) = number_of(dtype) {
        return lacks(what);
    }
    let since = Version::WITH_FLOATS_OF_8_BITS;
    if matches!(dtype, DType::F8E4M3 | DType::F8E5M2) && version < since {
        return Err(format!("floats of 8 bits came with NCCL {since}, and this is {version}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_named() {
        let sum = Work::Reduce(ReduceOp::Sum);
        for (dtype, work, problem) in [
            (DType::I16, sum, "NCCL has no integers of 16 bits"),
            (DType::U16, sum, "NCCL has no integers of 16 bits"),
            (DType::Bool, sum, "NCCL has no booleans"),
            (DType::Complex64, sum, "NCCL has no complex numbers"),
            (DType::I32, Work::Reduce(ReduceOp::Bxor), "NCCL has no operators on bits"),
            (DType::I32, Work::PreMulSum, "premul_sum is for f16, bf16, f32 and f64, not for i32"),
            (DType::F8E5M2, sum, "floats of 8 bits came with NCCL 2.24.0, and this is 2.23.4"),
        ] {
            assert_eq!(supports(Version(22_304), dtype, work), Err(problem.to_owned()));
            assert_eq!(supports(Version(22_304), dtype, Work::Move), Ok(()));
        }
        assert_eq!(supports(Version(22_400), DType::F8E5M2, sum), Ok(()));
        for dtype in [DType::F32, DType::Bf16, DType::I64, DType::U8] {
            assert_eq!(supports(Version(21_800), dtype, sum), Ok(()));
        }
    }
}
