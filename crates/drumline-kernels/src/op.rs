//! The reduce operators.

use std::fmt;
use std::str::FromStr;

use crate::dtype::Class;
use crate::{DType, UnknownName};

/// An operator that combines the values of all ranks into one.
///
/// | | integers | `f32`, `f64` | `f16`, `bf16`, `f8e4m3`, `f8e5m2` | `complex64`, `complex128` | `bool` |
/// |---|---|---|---|---|---|
/// | `Sum` | wraps | rounded at each node of the tree | computed as `f32`, rounded once at the end | part by part, as floats | or |
/// | `Product` | wraps | as `Sum` | as `Sum` | `(ac - bd) + (ad + bc)i`, every step rounded | and |
/// | `Avg` | the wrapped sum, divided once, rounded towards zero | the sum, divided once | the `f32` sum, divided once, then rounded | part by part, as floats | – |
/// | `Min`, `Max` | exact | exact; a NaN wins and becomes the one canonical NaN; -0 < +0 | as `f32` | – | and, or |
/// | `Band`, `Bor`, `Bxor` | bit by bit | – | – | – | and, or, exclusive or |
///
/// A dash is a combination that [`supports`](ReduceOp::supports) refuses.
///
/// All operators commute bit for bit, payloads of NaN apart. Those that round nothing are associative, too.
///
/// ```
/// use drumline_kernels::{ReduceOp, combine};
///
/// let mut data = [1.0_f32, f32::NAN, 0.0];
/// combine(ReduceOp::Min, (&mut data[..]).into(), (&[2.0, 3.0, -0.0][..]).into(), None);
/// assert_eq!(data[0], 1.0);
/// assert!(data[1].is_nan() && data[2].is_sign_negative());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
#[repr(u8)]
pub enum ReduceOp {
    /// The sum. Integers wrap.
    Sum = 1,
    /// The sum divided by the number of ranks. Integers round towards zero.
    Avg = 2,
    /// The smallest value. A NaN wins.
    Min = 3,
    /// The largest value. A NaN wins.
    Max = 4,
    /// The product. Integers wrap.
    Product = 5,
    /// The bits that all ranks have set.
    Band = 6,
    /// The bits that any rank has set.
    Bor = 7,
    /// The bits that an odd number of ranks has set.
    Bxor = 8,
}

impl ReduceOp {
    /// All operators, in the order of their codes.
    pub const ALL: [ReduceOp; 8] = [
        ReduceOp::Sum,
        ReduceOp::Avg,
        ReduceOp::Min,
        ReduceOp::Max,
        ReduceOp::Product,
        ReduceOp::Band,
        ReduceOp::Bor,
        ReduceOp::Bxor,
    ];

    /// The operator with this code (`op as u8`, as in messages), if there is one.
    pub const fn from_code(code: u8) -> Option<ReduceOp> {
        match (code as usize).checked_sub(1) {
            Some(index) if index < ReduceOp::ALL.len() => Some(ReduceOp::ALL[index]),
            _ => None,
        }
    }

    /// The name of the operator in texts, such as `sum`.
    pub const fn name(self) -> &'static str {
        match self {
            ReduceOp::Sum => "sum",
            ReduceOp::Avg => "avg",
            ReduceOp::Min => "min",
            ReduceOp::Max => "max",
            ReduceOp::Product => "product",
            ReduceOp::Band => "band",
            ReduceOp::Bor => "bor",
            ReduceOp::Bxor => "bxor",
        }
    }

    /// Whether the operator is defined for elements of this type.
    pub const fn supports(self, dtype: DType) -> bool {
        let class = dtype.class();
        match self {
            ReduceOp::Sum | ReduceOp::Product => true,
            ReduceOp::Avg => !matches!(class, Class::Bool),
            ReduceOp::Min | ReduceOp::Max => !matches!(class, Class::Complex),
            ReduceOp::Band | ReduceOp::Bor | ReduceOp::Bxor => {
                matches!(class, Class::Bool | Class::Integer)
            }
        }
    }
}

impl fmt::Display for ReduceOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for ReduceOp {
    type Err = UnknownName;

    fn from_str(name: &str) -> Result<ReduceOp, UnknownName> {
        let known = ReduceOp::ALL.into_iter().find(|op| op.name() == name);
        known.ok_or_else(|| {
            UnknownName::new("reduce operator", name, ReduceOp::ALL.map(ReduceOp::name))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_operator_has_a_code_and_a_name() {
        for code in 0..=u8::MAX {
            let op = ReduceOp::from_code(code);
            assert_eq!(op.map(|op| op as u8), (1..=8).contains(&code).then_some(code));
        }
        for op in ReduceOp::ALL {
            assert_eq!(op.to_string().parse(), Ok(op));
        }
        let error = "mean".parse::<ReduceOp>().unwrap_err().to_string();
        assert_eq!(
            error,
            "there is no reduce operator \"mean\"; \
             it is one of sum, avg, min, max, product, band, bor, bxor"
        );
    }
}
