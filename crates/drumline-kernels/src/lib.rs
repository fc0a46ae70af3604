//! Element types, reduce operators, and the loops that apply them.
//!
//! Everything here is a pure function over slices; nothing knows of ranks' memory, messages or
//! time. The order in which inputs are added comes from the caller ([`reduce_tree`]), so that
//! all algorithms give the same bits.
//!
//! ```
//! use drumline_kernels::{ReduceOp, combine};
//!
//! let mut sum = [1.0_f32, 2.0];
//! combine(ReduceOp::Avg, &mut sum, &[3.0, 6.0], None);
//! assert_eq!(sum, [4.0, 8.0]); // a partial sum: not divided yet
//! combine(ReduceOp::Avg, &mut sum, &[2.0, 1.0], Some(3));
//! assert_eq!(sum, [2.0, 3.0]); // the sum of all three ranks, divided once
//! ```
//!
//! # What the operators promise
//!
//! - Integer sums wrap. An integer average is the wrapped sum divided by the number of ranks,
//!   rounded towards zero.
//! - A floating-point average is the canonical sum divided once, never a sum of quotients.
//! - Floating-point minimum and maximum do not depend on the order of their operands: a NaN
//!   wins (and comes out as the one canonical NaN), and -0 is less than +0.

mod copy;
mod dtype;
mod op;
mod operand;
mod reduce;
mod rounding;

pub use copy::copy;
pub use dtype::{DType, Element};
pub use op::ReduceOp;
pub use operand::{Source, Target};
pub use reduce::{TreeInput, combine, reduce_tree};
pub use rounding::with_ieee_rounding;
