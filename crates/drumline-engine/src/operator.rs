//! How a reducing call combines the values of all ranks.

use std::{fmt, sync::Arc};

use xxhash_rust::xxh3::xxh3_64;

use crate::{Cause, DType, ReduceOp};

/// How a reducing call combines the values of all ranks.
///
/// A [`ReduceOp`] converts into it. Two more operators are made here: a sum of multiples, and a function of
/// the caller's own.
///
/// ```
/// use drumline::{Operator, ProcessGroup, ReduceOp};
///
/// let group = ProcessGroup::alone();
/// let mut data = [4_u64, 6];
/// group.all_reduce(&mut data, ReduceOp::Max)?;
/// group.all_reduce(&mut data, Operator::premul_sum(3))?;
/// group.all_reduce(&mut data, Operator::custom("latest", |_, right| right))?;
/// assert_eq!(data, [12, 18]);
/// # Ok::<(), drumline::Error>(())
/// ```
pub struct Operator<T> {
    /// The factor by which this rank multiplies its own values before ranks combine theirs.
    pub(crate) factor: Option<T>,
    /// How two values become one.
    pub(crate) combine: Combine<T>,
}

/// An operator on bytes: it knows the type of its elements.
pub trait Reduce {
    /// Reduces `inputs`, from left to right, into `output`. They hold what `ranks` ranks bring: an average is
    /// their sum, divided by this number.
    fn reduce(&self, inputs: &[&[u8]], output: &mut [u8], ranks: usize) -> Result<(), Cause>;
}

/// How two values become one.
pub(crate) enum Combine<T> {
    Builtin(ReduceOp),
    Custom { name: &'static str, function: Arc<Function<T>> },
}

/// A function of the caller's that combines two values.
pub(crate) type Function<T> = dyn Fn(T, T) -> T + Send + Sync;

impl<T> Operator<T> {
    /// A sum to which every rank brings `factor` times its values.
    ///
    /// It gives the same bits as multiplying the data before a call with [`ReduceOp::Sum`]: products are
    /// rounded to `T`, integers wrap. Ranks may pass different factors, for example each its share of the
    /// samples. `bool` has no multiples.
    ///
    /// ```
    /// use drumline::{Operator, ProcessGroup};
    ///
    /// std::thread::scope(|threads| {
    ///     for group in ProcessGroup::local_world(2)? {
    ///         threads.spawn(move || {
    ///             // Each rank's share of the samples: one quarter, and three.
    ///             let share = [0.25_f32, 0.75][group.rank()];
    ///             let mut mean_loss = [4.0 * (1 + group.rank()) as f32];
    ///             group.all_reduce(&mut mean_loss, Operator::premul_sum(share)).unwrap();
    ///             assert_eq!(mean_loss, [7.0]);
    ///         });
    ///     }
    ///     Ok::<_, drumline::Error>(())
    /// })?;
    /// # Ok::<_, drumline::Error>(())
    /// ```
    pub fn premul_sum(factor: T) -> Operator<T> {
        Operator { factor: Some(factor), combine: Combine::Builtin(ReduceOp::Sum) }
    }

    /// A function of two values, which must be associative:
    /// `f(f(a, b), c) == f(a, f(b, c))`.
    ///
    /// It need not commute: values of lower ranks stand on the left. In a group that sums by
    /// [`SumOrder::Placement`](drumline_schedule::SumOrder::Placement) it must commute, because values of one
    /// host stand together there. A function that rounds is not quite associative. It still gives the same
    /// bits with every algorithm, because all algorithms combine along the same tree. The function always
    /// works on `T`: floats of 16 and 8 bits are not widened for it.
    ///
    /// Ranks compare the names of their operators, and a call with different names fails. The functions
    /// themselves cannot be compared. If the function panics, the call fails with [`Cause::Panicked`] on this
    /// rank, and with this rank's error on the others.
    pub fn custom(
        name: &'static str,
        function: impl Fn(T, T) -> T + Send + Sync + 'static,
    ) -> Operator<T> {
        let function = Arc::new(function);
        Operator { factor: None, combine: Combine::Custom { name, function } }
    }

    /// The part of the operator that does not depend on the type of the elements.
    pub fn kind(&self) -> OperatorKind {
        match (&self.combine, &self.factor) {
            (Combine::Custom { name, .. }, _) => OperatorKind::Custom(name),
            (Combine::Builtin(_), Some(_)) => OperatorKind::PremulSum,
            (Combine::Builtin(op), None) => OperatorKind::Builtin(*op),
        }
    }
}

impl<T> From<ReduceOp> for Operator<T> {
    fn from(op: ReduceOp) -> Operator<T> {
        Operator { factor: None, combine: Combine::Builtin(op) }
    }
}

/// For an operator that several calls use: they share its function.
impl<T: Clone> From<&Operator<T>> for Operator<T> {
    fn from(operator: &Operator<T>) -> Operator<T> {
        operator.clone()
    }
}

impl<T: Clone> Clone for Operator<T> {
    fn clone(&self) -> Operator<T> {
        Operator { factor: self.factor.clone(), combine: self.combine.clone() }
    }
}

// Not derived: a derive would ask for `T: Clone`.
impl<T> Clone for Combine<T> {
    fn clone(&self) -> Combine<T> {
        match self {
            Combine::Builtin(op) => Combine::Builtin(*op),
            Combine::Custom { name, function } => {
                Combine::Custom { name, function: function.clone() }
            }
        }
    }
}

impl<T> fmt::Debug for Combine<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Combine::Builtin(op) => op.fmt(f),
            Combine::Custom { name, .. } => f.write_str(name),
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Operator<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Operator { factor, combine } = self;
        f.debug_struct("Operator").field("factor", factor).field("combine", combine).finish()
    }
}

/// The part of an operator that all ranks must have in common. It does not depend on the type of the
/// elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperatorKind {
    /// An operator of the library.
    Builtin(ReduceOp),
    /// [`Operator::premul_sum`].
    PremulSum,
    /// [`Operator::custom`] of this name.
    Custom(&'static str),
}

impl OperatorKind {
    /// Leaves room for more codes of [`ReduceOp`].
    const PREMUL_SUM: u8 = 128;
    const CUSTOM: u8 = 129;

    /// The code on the wire.
    pub(crate) fn code(self) -> u8 {
        match self {
            OperatorKind::Builtin(op) => op as u8,
            OperatorKind::PremulSum => OperatorKind::PREMUL_SUM,
            OperatorKind::Custom(_) => OperatorKind::CUSTOM,
        }
    }

    /// `sum`, `premul_sum`, or the name of a custom operator.
    pub fn name(self) -> &'static str {
        match self {
            OperatorKind::Builtin(op) => op.name(),
            OperatorKind::PremulSum => "premul_sum",
            OperatorKind::Custom(name) => name,
        }
    }

    /// The digest of a custom operator's name on the wire. 0 for other operators.
    pub(crate) fn digest(self) -> u32 {
        match self {
            OperatorKind::Custom(name) => xxh3_64(name.as_bytes()) as u32,
            OperatorKind::Builtin(_) | OperatorKind::PremulSum => 0,
        }
    }

    /// Shows a code and a digest from a peer. `name` is the name of a custom operator if this rank called it.
    pub(crate) fn show(
        f: &mut fmt::Formatter<'_>,
        code: u8,
        digest: u32,
        name: &str,
    ) -> fmt::Result {
        match (ReduceOp::from_code(code), code) {
            (Some(op), _) => write!(f, "{op}"),
            (None, OperatorKind::PREMUL_SUM) => f.write_str("premul_sum"),
            (None, OperatorKind::CUSTOM) if name.is_empty() => write!(f, "custom {digest:08x}"),
            (None, OperatorKind::CUSTOM) => write!(f, "custom {name} {digest:08x}"),
            (None, code) => write!(f, "operator {code}"),
        }
    }

    /// Whether this is an operator of the caller's own.
    pub(crate) fn is_custom(self) -> bool {
        matches!(self, OperatorKind::Custom(_))
    }

    /// Why the operator cannot be applied to elements of `dtype`. `None`: it can.
    pub fn problem_with(self, dtype: DType) -> Option<String> {
        let (name, supported) = match self {
            OperatorKind::Builtin(op) => (op.name(), op.supports(dtype)),
            OperatorKind::PremulSum => ("premul_sum", dtype != DType::Bool),
            OperatorKind::Custom(_) => return None,
        };
        let others = || {
            let others = ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype));
            others.map(ReduceOp::name).collect::<Vec<_>>().join(", ")
        };
        (!supported).then(|| format!("{dtype} has no operator {name}, but {}", others()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operators_say_what_they_are() {
        let shown = |operator: Operator<f32>| format!("{operator:?}");
        assert_eq!(shown(ReduceOp::Avg.into()), "Operator { factor: None, combine: Avg }");
        assert_eq!(
            shown(Operator::premul_sum(0.5)),
            "Operator { factor: Some(0.5), combine: Sum }"
        );
        let custom = Operator::custom("first", |left: f32, _| left);
        assert_eq!(shown((&custom).into()), "Operator { factor: None, combine: first }");
    }

    #[test]
    fn kinds_differ_in_what_travels() {
        let kinds = [
            OperatorKind::Builtin(ReduceOp::Sum),
            OperatorKind::PremulSum,
            OperatorKind::Custom("a"),
            OperatorKind::Custom("b"),
        ];
        let sent = kinds.map(|kind| (kind.code(), kind.digest()));
        for (i, one) in sent.iter().enumerate() {
            assert!(sent[..i].iter().all(|other| other != one), "{sent:?}");
        }
        assert!(ReduceOp::ALL.iter().all(|op| (*op as u8) < OperatorKind::PREMUL_SUM));
    }

    #[test]
    fn a_type_without_an_operator_names_those_that_it_has() {
        let problem = OperatorKind::Builtin(ReduceOp::Min).problem_with(DType::Complex64);
        let expected = "complex64 has no operator min, but sum, avg, product";
        assert_eq!(problem.as_deref(), Some(expected));
        assert!(OperatorKind::PremulSum.problem_with(DType::Bool).is_some());
        assert_eq!(OperatorKind::PremulSum.problem_with(DType::F16), None);
        assert_eq!(OperatorKind::Custom("any").problem_with(DType::Bool), None);
    }
}
