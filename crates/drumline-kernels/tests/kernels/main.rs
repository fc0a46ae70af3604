//! Compares the kernels with definitions that are simple and slow.

/// Evaluates an expression for every element type: `by_type!(T => check::<T>())`.
macro_rules! by_type {
    ($name:ident => $body:expr) => {
        by_type!(
            $name => $body;
            u8, i8, u16, i16, u32, i32, u64, i64, f32, f64, Bool, F8E4M3, F8E5M2, f16, bf16,
            Complex<f32>, Complex<f64>
        )
    };
    ($name:ident => $body:expr; $($type:ty),*) => {{
        #[allow(unused_imports, reason = "some callers import them")]
        use drumline_kernels::{Bool, Complex, F8E4M3, F8E5M2, bf16, f16};
        $({ type $name = $type; $body; })*
    }};
}

mod convert;
mod format;
mod lengths;
mod reduce;
mod reference;
mod table;
