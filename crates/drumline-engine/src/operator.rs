//! How a reducing call combines the values of all ranks.

use std::{
    fmt,
    marker::PhantomData,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use drumline_kernels::{Source, Target, reduce_tree_with, with_ieee_rounding};
use drumline_schedule::tree::{Node, merges};
use xxhash_rust::xxh3::xxh3_64;

use crate::{Cause, DType, Element, ReduceOp, bytes::Bytes, panics::panic_text};

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
    any: AnyOperator,
    element: PhantomData<fn(T, T) -> T>,
}

/// An [`Operator`] of a type that is known at run time.
#[derive(Clone)]
pub enum AnyOperator {
    /// An operator of the library, for elements of any type that has it.
    Builtin(ReduceOp),
    /// [`Operator::premul_sum`].
    PremulSum {
        /// The type of the factor.
        dtype: DType,
        /// Its bytes, and zeros.
        factor: [u8; 16],
    },
    /// [`Operator::custom`].
    Custom {
        /// The type on which the function works.
        dtype: DType,
        /// The name that ranks compare.
        name: &'static str,
        /// The function.
        function: Arc<Tree>,
    },
}

/// A function of the caller's that combines the bytes of elements along a tree, which is a
/// [program for a stack](drumline_kernels::reduce_tree).
pub type Tree = dyn Fn(&[Target<'_, u8>], &[Source<'_, u8>], &[usize]) + Send + Sync;

impl AnyOperator {
    /// A sum to which this rank brings multiples of its values. `factor` is the bytes of one element.
    ///
    /// # Panics
    ///
    /// When they are not.
    pub fn premul_sum(dtype: DType, factor: &[u8]) -> AnyOperator {
        let mut bytes = [0; 16];
        bytes[..dtype.size()].copy_from_slice(factor);
        AnyOperator::PremulSum { dtype, factor: bytes }
    }

    /// The part of the operator that does not depend on the type of the elements.
    #[inline]
    pub fn kind(&self) -> OperatorKind {
        match self {
            AnyOperator::Builtin(op) => OperatorKind::Builtin(*op),
            AnyOperator::PremulSum { .. } => OperatorKind::PremulSum,
            AnyOperator::Custom { name, .. } => OperatorKind::Custom(name),
        }
    }

    /// The operator of the library that combines values, if it is one.
    #[inline]
    pub(crate) fn builtin(&self) -> Option<ReduceOp> {
        match self {
            AnyOperator::Builtin(op) => Some(*op),
            AnyOperator::PremulSum { .. } => Some(ReduceOp::Sum),
            AnyOperator::Custom { .. } => None,
        }
    }

    /// Why the operator cannot be applied to elements of `data`. `None`: it can.
    pub fn problem_with(&self, data: DType) -> Option<String> {
        match self {
            AnyOperator::PremulSum { dtype, .. } | AnyOperator::Custom { dtype, .. }
                if *dtype != data =>
            {
                let name = self.kind().name();
                Some(format!("the operator {name} is one of {dtype}, but the data is {data}"))
            }
            _ => self.kind().problem_with(data),
        }
    }
}

impl From<ReduceOp> for AnyOperator {
    fn from(op: ReduceOp) -> AnyOperator {
        AnyOperator::Builtin(op)
    }
}

impl<T> From<Operator<T>> for AnyOperator {
    #[inline]
    fn from(operator: Operator<T>) -> AnyOperator {
        operator.any
    }
}

/// `avg`, `premul_sum of f32`
impl fmt::Display for AnyOperator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind().name())?;
        match self {
            AnyOperator::Builtin(_) => Ok(()),
            AnyOperator::PremulSum { dtype, .. } | AnyOperator::Custom { dtype, .. } => {
                write!(f, " of {dtype}")
            }
        }
    }
}

impl fmt::Debug for AnyOperator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Operator({self})")
    }
}

/// An operator that a foreign backend applies to whole buffers.
#[derive(Clone, Copy, Debug)]
pub struct Reducer<'a> {
    operator: Option<&'a AnyOperator>,
    dtype: DType,
}

impl<'a> Reducer<'a> {
    pub(crate) fn new(operator: Option<&'a AnyOperator>, dtype: DType) -> Reducer<'a> {
        Reducer { operator, dtype }
    }

    /// Reduces `inputs`, from left to right, into `output`. They hold what `ranks` ranks bring: an average is
    /// their sum, divided by this number.
    ///
    /// # Errors
    ///
    /// [`Cause::Panicked`] if a function of the caller's panics, [`Cause::Backend`] if the call has no operator.
    pub fn reduce(self, inputs: &[&[u8]], output: &mut [u8], ranks: usize) -> Result<(), Cause> {
        let leaves: Vec<Node> = (0..inputs.len()).map(Node::leaf).collect();
        let Some(merges) = merges(Node::root(inputs.len()), &leaves) else {
            unreachable!("the leaves of a tree tile it");
        };
        let kernels = self.dtype.kernels();
        // Bytes from elsewhere may have any alignment.
        let copy = |bytes: &[u8]| {
            let is_aligned = bytes.as_ptr().addr().is_multiple_of(kernels.align);
            (!is_aligned).then(|| Bytes::from(bytes))
        };
        let copies: Vec<Option<Bytes>> = inputs.iter().map(|input| copy(input)).collect();
        let inputs = inputs.iter().zip(&copies);
        let srcs: Vec<Source<'_, u8>> =
            inputs.map(|(input, copy)| copy.as_deref().unwrap_or(input).into()).collect();
        let mut result = copy(output);
        let dsts = [Target::from(result.as_deref_mut().unwrap_or(&mut *output))];
        with_ieee_rounding(|| match self.operator {
            Some(AnyOperator::Custom { name, function, .. }) => {
                by_function(name, &**function, &dsts, &srcs, &merges)
            }
            other => match other.and_then(AnyOperator::builtin) {
                Some(op) => {
                    (kernels.reduce_tree)(op, &dsts, &srcs, &merges, Some(ranks));
                    Ok(())
                }
                None => {
                    let problem = "the call has no operator to reduce by".to_owned();
                    Err(Cause::Backend { problem })
                }
            },
        })?;
        if let Some(result) = result {
            output.copy_from_slice(&result);
        }
        Ok(())
    }
}

impl<T: Element> Operator<T> {
    /// A sum to which every rank brings `factor` times its values.
    ///
    /// It gives the same bits as multiplying the data before a call with [`ReduceOp::Sum`]: products are
    /// rounded to `T`, integers wrap. Ranks may pass different factors, for example each its share of the
    /// samples. `bool` has no multiples.
    pub fn premul_sum(factor: T) -> Operator<T> {
        AnyOperator::premul_sum(T::DTYPE, bytemuck::bytes_of(&factor)).of_type()
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
        let tree = move |dsts: &[Target<'_, u8>], srcs: &[Source<'_, u8>], merges: &[usize]| {
            let dsts: Vec<Target<'_, T>> = dsts.iter().map(|dst| dst.elements()).collect();
            let srcs: Vec<Source<'_, T>> = srcs.iter().map(|src| src.elements()).collect();
            reduce_tree_with(&function, &dsts, &srcs, merges);
        };
        AnyOperator::Custom { dtype: T::DTYPE, name, function: Arc::new(tree) }.of_type()
    }
}

/// Combines by the caller's function. If it panics, the call fails, as it does when a peer is lost, and the peers are
/// told.
#[inline(never)]
pub(crate) fn by_function(
    name: &str,
    function: &Tree,
    dsts: &[Target<'_, u8>],
    srcs: &[Source<'_, u8>],
    merges: &[usize],
) -> Result<(), Cause> {
    catch_unwind(AssertUnwindSafe(|| function(dsts, srcs, merges))).map_err(|panic| {
        Cause::Panicked { text: format!("the operator {name:?}: {}", panic_text(&*panic)) }
    })
}

impl AnyOperator {
    fn of_type<T>(self) -> Operator<T> {
        Operator { any: self, element: PhantomData }
    }
}

impl<T> From<ReduceOp> for Operator<T> {
    #[inline]
    fn from(op: ReduceOp) -> Operator<T> {
        Operator { any: AnyOperator::Builtin(op), element: PhantomData }
    }
}

/// For an operator that several calls use: they share its function.
impl<T> From<&Operator<T>> for Operator<T> {
    fn from(operator: &Operator<T>) -> Operator<T> {
        operator.clone()
    }
}

// Not derived: a derive would ask for `T: Clone`.
impl<T> Clone for Operator<T> {
    fn clone(&self) -> Operator<T> {
        self.any.clone().of_type()
    }
}

impl<T> fmt::Debug for Operator<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.any.fmt(f)
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
        assert_eq!(shown(ReduceOp::Avg.into()), "Operator(avg)");
        assert_eq!(shown(Operator::premul_sum(0.5)), "Operator(premul_sum of f32)");
        let custom = Operator::custom("first", |left: f32, _| left);
        assert_eq!(shown((&custom).into()), "Operator(first of f32)");
    }

    #[test]
    fn an_operator_of_one_type_is_not_applied_to_another() {
        let halves: AnyOperator = Operator::premul_sum(0.5_f32).into();
        assert_eq!(halves.problem_with(DType::F32), None);
        let problem = halves.problem_with(DType::I32);
        let expected = "the operator premul_sum is one of f32, but the data is i32";
        assert_eq!(problem.as_deref(), Some(expected));
    }

    #[test]
    fn nothing_is_reduced_without_an_operator() {
        let mut output = [0; 4];
        let reducer = Reducer::new(None, DType::I32);
        assert!(matches!(reducer.reduce(&[&[1; 4]], &mut output, 1), Err(Cause::Backend { .. })));
        assert_eq!(output, [0; 4]);
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
