//! Element types, reduce operators, and the loops that apply them.
//!
//! Every function here works on operands ([`Source`], [`Target`]): slices, or memory that other
//! processes map too. The caller chooses the order in which inputs are added ([`reduce_tree`]), so
//! that all algorithms give the same bits.
//!
//! The crate serves `drumline`, which exports the element types and [`ReduceOp`] to its users.
//!
//! ```
//! use drumline_kernels::{ReduceOp, Source, Target, combine};
//!
//! let mut sum = [1.0_f32, 2.0];
//! let dst = Target::from(&mut sum[..]);
//! // A partial sum, not divided yet.
//! combine(ReduceOp::Avg, dst, Source::from(&[3.0, 7.0][..]), None);
//! // The sum of all three ranks, divided once.
//! combine(ReduceOp::Avg, dst, Source::from(&[2.0, 3.0][..]), Some(3));
//! assert_eq!(sum, [2.0, 4.0]);
//! ```
//!
//! # What the operators promise
//!
//! - Integer sums and products wrap. An integer average is the wrapped sum divided by the number
//!   of ranks, rounded towards zero.
//! - A floating-point average is the canonical sum divided once, never a sum of quotients.
//! - Floating-point minimum and maximum do not depend on the order of their operands: a NaN
//!   wins (and comes out as the one canonical NaN), and -0 is less than +0.
//! - Floats of 16 and 8 bits are widened to `f32`, and the result is rounded once, to nearest, ties
//!   to even. An algorithm that forwards partial results forwards them as `f32` ([`reduce_to_sums`],
//!   [`reduce_sums`], or [`widen`] and [`narrow`]).
//! - No result depends on the instructions that the processor has.
//!
//! [`ReduceOp`] has a table of all this.

// Here, because every crate of Drumline is built after this one.
#[cfg(not(all(target_os = "linux", target_pointer_width = "64")))]
compile_error!(
    "Drumline builds for 64-bit Linux only. On another system run it in a container or a virtual machine \
     with Linux: see docs/non-goals.md"
);

mod arithmetic;
mod boolean;
mod convert;
mod dtype;
mod element;
mod error;
mod float8;
mod isa;
mod kernels;
mod lanes;
mod number;
mod op;
mod operand;
mod past_cache;
mod reduce;
mod rounding;
mod table;

pub use boolean::Bool;
pub use convert::{copy, fetch, narrow, scale, take_over, widen};
pub use dtype::DType;
pub use element::Element;
pub use error::UnknownName;
pub use float8::{F8E4M3, F8E5M2};
pub use half::{bf16, f16};
pub use num_complex::Complex;
pub use number::Number;
pub use op::ReduceOp;
pub use operand::{Addend, Source, Target};
pub use past_cache::{copy_past_cache, fetch_past_cache};
pub use reduce::{combine, reduce_sums, reduce_to_sums, reduce_tree, reduce_tree_with};
pub use rounding::with_ieee_rounding;
pub use table::{KernelTable, ReduceSums, ReduceToSums, ReduceTree};
