//! Element types that Rust does not have, besides [`f16`](crate::f16) and [`bf16`](crate::bf16).

pub use drumline_kernels::{Bool, Complex, F8E4M3, F8E5M2};
