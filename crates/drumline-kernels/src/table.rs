//! The loops of an element type that is known at run time only.

use bytemuck::Pod;

use crate::number::Number;
use crate::operand::Addend;
use crate::{
    DType, Element, ReduceOp, Source, Target, narrow, reduce_sums, reduce_to_sums, reduce_tree,
    scale, widen,
};

/// Evaluates an expression in which a name stands for the Rust type of a [`DType`].
///
/// ```
/// use drumline_kernels::{DType, with_element};
///
/// let bytes = with_element!(DType::F64, T => size_of::<T>());
/// assert_eq!(bytes, 8);
/// ```
#[macro_export]
macro_rules! with_element {
    ($dtype:expr, $name:ident => $value:expr) => {
        $crate::with_element!(@ $dtype, $name => $value;
            U8 u8, U16 u16, U32 u32, U64 u64, I8 i8, I16 i16, I32 i32, I64 i64, F32 f32, F64 f64,
            F16 $crate::f16, Bf16 $crate::bf16, F8E4M3 $crate::F8E4M3, F8E5M2 $crate::F8E5M2,
            Bool $crate::Bool, Complex64 $crate::Complex<f32>, Complex128 $crate::Complex<f64>)
    };
    (@ $dtype:expr, $name:ident => $value:expr; $($dtypes:ident $types:ty),*) => {
        match $dtype {
            $($crate::DType::$dtypes => {
                type $name = $types;
                $value
            })*
            #[allow(unreachable_patterns, reason = "other crates must expect more types")]
            _ => unreachable!(),
        }
    };
}

/// The loops of one element type. Their operands are the bytes of elements.
///
/// Each loop is the function of the same name for elements whose type is known, and panics where that does. It also
/// panics if the bytes of an operand are not aligned, or are no whole number of elements.
#[derive(Debug)]
pub struct KernelTable {
    /// The type of the elements.
    pub dtype: DType,
    /// The alignment of an element in bytes.
    pub align: usize,
    /// [`reduce_tree`].
    pub reduce_tree: ReduceTree,
    /// [`reduce_to_sums`].
    pub reduce_to_sums: ReduceToSums,
    /// [`reduce_sums`].
    pub reduce_sums: ReduceSums,
    /// [`widen`].
    pub widen: fn(Target<'_, u8>, Source<'_, u8>),
    /// [`narrow`].
    pub narrow: fn(Target<'_, u8>, Source<'_, u8>),
    /// [`scale`]. The factor is the bytes of one element.
    pub scale: fn(Target<'_, u8>, &[u8]),
    /// The bytes of the element with this value, rounded to nearest, and zeros. `None`: there is none.
    pub element: fn(Number) -> Option<[u8; 16]>,
}

/// [`reduce_tree`] on bytes.
pub type ReduceTree = fn(ReduceOp, &[Target<'_, u8>], &[Source<'_, u8>], &[usize], Option<usize>);

/// [`reduce_to_sums`] on bytes.
pub type ReduceToSums = fn(ReduceOp, &[Target<'_, u8>], &[Addend<'_, u8>], &[usize]);

/// [`reduce_sums`] on bytes.
pub type ReduceSums = fn(ReduceOp, &[Target<'_, u8>], &[Addend<'_, u8>], &[usize], Option<usize>);

impl DType {
    /// The loops of this type.
    pub const fn kernels(self) -> &'static KernelTable {
        with_element!(self, T => table::<T>())
    }
}

const fn table<T: Element>() -> &'static KernelTable {
    const {
        &KernelTable {
            dtype: T::DTYPE,
            align: align_of::<T>(),
            reduce_tree: |op, dsts, srcs, merges, finish| {
                with_elements(dsts, srcs, |dsts, srcs| {
                    reduce_tree::<T>(op, dsts, srcs, merges, finish);
                });
            },
            reduce_to_sums: |op, dsts, srcs, merges| {
                let dsts: Vec<_> = dsts.iter().map(|dst| dst.elements()).collect();
                reduce_to_sums::<T>(op, &dsts, &addends(srcs), merges);
            },
            reduce_sums: |op, dsts, srcs, merges, finish| {
                let dsts: Vec<_> = dsts.iter().map(|dst| dst.elements()).collect();
                reduce_sums::<T>(op, &dsts, &addends(srcs), merges, finish);
            },
            widen: |dst, src| widen::<T>(dst.elements::<T::Accumulator>(), src.elements()),
            narrow: |dst, src| narrow::<T>(dst.elements(), src.elements::<T::Accumulator>()),
            scale: |data, factor| {
                scale::<T>(data.elements(), bytemuck::pod_read_unaligned(factor));
            },
            element: |number| {
                let mut bytes = [0; 16];
                bytes[..size_of::<T>()].copy_from_slice(bytemuck::bytes_of(&T::of_number(number)?));
                Some(bytes)
            },
        }
    }
}

/// Lists of as many operands need no allocation.
const FEW: usize = 8;

/// Hands the elements of the operands to `reduce`.
#[inline]
fn with_elements<T: Pod>(
    dsts: &[Target<'_, u8>],
    srcs: &[Source<'_, u8>],
    reduce: impl FnOnce(&[Target<'_, T>], &[Source<'_, T>]),
) {
    if dsts.len() > FEW || srcs.len() > FEW {
        let dsts: Vec<_> = dsts.iter().map(|dst| dst.elements()).collect();
        let srcs: Vec<_> = srcs.iter().map(|src| src.elements()).collect();
        return reduce(&dsts, &srcs);
    }
    let (mut of_dsts, mut of_srcs) = ([Target::NONE; FEW], [Source::NONE; FEW]);
    of_dsts.iter_mut().zip(dsts).for_each(|(to, dst)| *to = dst.elements());
    of_srcs.iter_mut().zip(srcs).for_each(|(to, src)| *to = src.elements());
    reduce(&of_dsts[..dsts.len()], &of_srcs[..srcs.len()]);
}

fn addends<'a, T: Element>(srcs: &[Addend<'a, u8>]) -> Vec<Addend<'a, T>> {
    let addend = |src: &Addend<'a, u8>| match src {
        Addend::Element(src) => Addend::Element(src.elements()),
        Addend::Sum(src) => Addend::Sum(src.elements()),
    };
    srcs.iter().map(addend).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_type_has_loops_of_its_own() {
        for dtype in DType::ALL {
            let kernels = dtype.kernels();
            assert_eq!(kernels.dtype, dtype);
            assert!(dtype.size().is_multiple_of(kernels.align));
        }
    }

    #[test]
    #[should_panic(expected = "bytes are no elements")]
    fn bytes_between_elements_are_refused() {
        let mut words = [0_u32; 2];
        let bytes = Target::from(bytemuck::bytes_of_mut(&mut words)).slice(1..5);
        (DType::F32.kernels().reduce_tree)(
            ReduceOp::Sum,
            &[bytes],
            &[bytes.as_source()],
            &[0],
            None,
        );
    }

    #[test]
    fn numbers_become_elements_or_do_not_fit() {
        let element = |dtype: DType, number| (dtype.kernels().element)(number);
        let bytes = |start: &[u8]| {
            let mut bytes = [0; 16];
            bytes[..start.len()].copy_from_slice(start);
            Some(bytes)
        };
        assert_eq!(element(DType::U16, Number::Integer(258)), bytes(&258_u16.to_ne_bytes()));
        assert_eq!(element(DType::F64, Number::Integer(2)), bytes(&2_f64.to_ne_bytes()));
        assert_eq!(element(DType::Bf16, Number::Float(0.5)), bytes(&0x3f00_u16.to_ne_bytes()));
        assert_eq!(element(DType::U8, Number::Integer(256)), None);
        assert_eq!(element(DType::I32, Number::Float(0.5)), None);
    }

    #[test]
    fn many_operands_are_summed_like_few() {
        for count in [1, FEW, FEW + 1] {
            let inputs: Vec<[u64; 2]> = (0..count as u64).map(|it| [it, 1]).collect();
            let srcs: Vec<Source<'_, u8>> =
                inputs.iter().map(|input| bytemuck::bytes_of(input).into()).collect();
            let merges: Vec<usize> = (0..count).map(|at| usize::from(at > 0)).collect();
            let mut sum = [0_u64; 2];
            let dst = Target::from(bytemuck::bytes_of_mut(&mut sum));
            (DType::U64.kernels().reduce_tree)(ReduceOp::Sum, &[dst], &srcs, &merges, None);
            assert_eq!(sum, [(0..count as u64).sum(), count as u64]);
        }
    }
}
