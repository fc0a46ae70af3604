//! Gradients as an adapter hands them in and takes them out.

use std::ops::AddAssign;

use bytemuck::NoUninit;
use drumline_group::{DType, Element, bf16, f16};
use drumline_kernels::copy;
use xxhash_rust::xxh3::Xxh3;

/// Evaluates one expression for any dtype.
macro_rules! with_values {
    ($it:expr, $values:ident => $result:expr) => {
        match $it {
            Values::F32($values) => $result,
            Values::F64($values) => $result,
            Values::F16($values) => $result,
            Values::Bf16($values) => $result,
        }
    };
}

/// Borrowed elements of a gradient, row-major.
///
/// ```
/// use drumline::ddp::Values;
///
/// let gradient = vec![1.0_f64, 2.0];
/// assert_eq!(Values::from(&gradient[..]), Values::F64(&[1.0, 2.0]));
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
#[non_exhaustive]
pub enum Values<'a> {
    /// Single precision.
    F32(&'a [f32]),
    /// Double precision.
    F64(&'a [f64]),
    /// Half precision.
    F16(&'a [f16]),
    /// bfloat16.
    Bf16(&'a [bf16]),
}

impl<'a> Values<'a> {
    /// The elements of this type in these bytes, which are aligned for them.
    pub(super) fn of(dtype: DType, bytes: &'a [u8]) -> Self {
        match dtype {
            DType::F64 => Values::F64(bytemuck::cast_slice(bytes)),
            DType::F16 => Values::F16(bytemuck::cast_slice(bytes)),
            DType::Bf16 => Values::Bf16(bytemuck::cast_slice(bytes)),
            _ => Values::F32(bytemuck::cast_slice(bytes)),
        }
    }

    pub(super) fn first(self) -> f64 {
        with_values!(self, values => widened(values[0]))
    }

    /// The number of elements.
    pub fn len(self) -> usize {
        with_values!(self, values => values.len())
    }

    /// Whether there are no elements.
    pub fn is_empty(self) -> bool {
        self.len() == 0
    }

    /// The elements as native-endian bytes.
    pub fn as_bytes(self) -> &'a [u8] {
        with_values!(self, values => bytemuck::cast_slice(values))
    }

    /// Whether no element is infinite or NaN.
    pub fn are_finite(self) -> bool {
        with_values!(self, values => values.iter().all(|it| it.is_finite()))
    }

    /// A number for the values. It is equal on two ranks if the elements have the same bits, but all NaNs count as one:
    /// sums do not say which payload a NaN has. (XXH3, 64 bits: it guards against mistakes, not against an adversary.)
    ///
    /// ```
    /// use drumline::ddp::Values;
    ///
    /// let of = |value: f32| Values::F32(&[1.0, value]).digest();
    /// assert_eq!(of(2.0), of(2.0));
    /// assert_ne!(of(2.0), of(f32::NAN));
    /// assert_eq!(of(f32::NAN), of(-f32::NAN));
    /// ```
    pub fn digest(self) -> u64 {
        match self {
            Values::F32(values) => digest(values, f32::NAN, |it| it.is_nan()),
            Values::F64(values) => digest(values, f64::NAN, |it| it.is_nan()),
            Values::F16(values) => digest(values, f16::NAN, |it| it.is_nan()),
            Values::Bf16(values) => digest(values, bf16::NAN, |it| it.is_nan()),
        }
    }

    /// The elements, if they are `T`.
    pub fn as_slice<T: Element>(self) -> Option<&'a [T]> {
        fn cast<S: Element, T: Element>(values: &[S]) -> Option<&[T]> {
            (S::DTYPE == T::DTYPE).then(|| bytemuck::cast_slice(values))
        }
        with_values!(self, values => cast(values))
    }
}

fn widened(value: impl Into<f64>) -> f64 {
    value.into()
}

fn digest<T: NoUninit>(values: &[T], nan: T, is_nan: impl Fn(&T) -> bool) -> u64 {
    const CHUNK: usize = 4096;
    let mut hash = Xxh3::new();
    for chunk in values.chunks(CHUNK) {
        if chunk.iter().any(&is_nan) {
            let as_one = |it: &T| if is_nan(it) { nan } else { *it };
            hash.update(bytemuck::cast_slice(&chunk.iter().map(as_one).collect::<Vec<T>>()));
        } else {
            hash.update(bytemuck::cast_slice(chunk));
        }
    }
    hash.digest()
}

/// The place of a gradient in its bucket: as many elements as the parameter has, row-major.
///
/// ```
/// use drumline::ddp::ValuesMut;
///
/// /// Writes the transpose of a 2 x 2 gradient to its place.
/// fn fill(place: ValuesMut<'_>, [[a, b], [c, d]]: [[f32; 2]; 2]) -> bool {
///     let ValuesMut::F32(place) = place else { return false };
///     place.copy_from_slice(&[a, c, b, d]);
///     true
/// }
/// let mut place = [0.0; 4];
/// assert!(fill(ValuesMut::F32(&mut place), [[1.0, 2.0], [3.0, 4.0]]));
/// assert_eq!(place, [1.0, 3.0, 2.0, 4.0]);
/// ```
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub enum ValuesMut<'a> {
    /// Single precision.
    F32(&'a mut [f32]),
    /// Double precision.
    F64(&'a mut [f64]),
    /// Half precision.
    F16(&'a mut [f16]),
    /// bfloat16.
    Bf16(&'a mut [bf16]),
}

/// Evaluates one expression for values and their place, or `false` if they do not fit.
macro_rules! put {
    ($place:expr, $values:expr, $to:ident, $from:ident => $put:expr) => {
        match ($place, $values) {
            (ValuesMut::F32($to), Values::F32($from)) if $to.len() == $from.len() => $put,
            (ValuesMut::F64($to), Values::F64($from)) if $to.len() == $from.len() => $put,
            (ValuesMut::F16($to), Values::F16($from)) if $to.len() == $from.len() => $put,
            (ValuesMut::Bf16($to), Values::Bf16($from)) if $to.len() == $from.len() => $put,
            _ => return false,
        }
    };
}

impl<'a> ValuesMut<'a> {
    /// As [`Values::of`].
    pub(super) fn of(dtype: DType, bytes: &'a mut [u8]) -> Self {
        match dtype {
            DType::F64 => ValuesMut::F64(bytemuck::cast_slice_mut(bytes)),
            DType::F16 => ValuesMut::F16(bytemuck::cast_slice_mut(bytes)),
            DType::Bf16 => ValuesMut::Bf16(bytemuck::cast_slice_mut(bytes)),
            _ => ValuesMut::F32(bytemuck::cast_slice_mut(bytes)),
        }
    }

    /// Replaces each element by what `by` makes of it, rounded once.
    pub(super) fn replace(self, by: impl Fn(f64) -> f64) {
        match self {
            ValuesMut::F32(values) => {
                values.iter_mut().for_each(|it| *it = by((*it).into()) as f32)
            }
            ValuesMut::F64(values) => values.iter_mut().for_each(|it| *it = by(*it)),
            ValuesMut::F16(values) => {
                values.iter_mut().for_each(|it| *it = f16::from_f64(by((*it).into())));
            }
            ValuesMut::Bf16(values) => {
                values.iter_mut().for_each(|it| *it = bf16::from_f64(by((*it).into())));
            }
        }
    }

    /// Copies `values`, if they have the right dtype and number. Returns whether they had.
    pub fn copy_from(self, values: Values<'_>) -> bool {
        put!(self, values, to, from => copy(to.into(), from.into()));
        true
    }

    /// Adds `values`, if they have the right dtype and number. Returns whether they had.
    pub fn add_from(self, values: Values<'_>) -> bool {
        put!(self, values, to, from => add_to(to, from));
        true
    }
}

/// The place of a gradient that may hold the sum of earlier micro-batches.
///
/// ```
/// use drumline::ddp::{Place, Values, ValuesMut};
///
/// /// Writes or adds the numbers 1 and 2.
/// fn fill(place: Place<'_>) -> bool {
///     place.put(Values::F32(&[1.0, 2.0]))
/// }
/// let mut place = [7.0, 7.0];
/// assert!(fill(Place { values: ValuesMut::F32(&mut place), holds_sum: false }));
/// assert!(fill(Place { values: ValuesMut::F32(&mut place), holds_sum: true }));
/// assert_eq!(place, [2.0, 4.0]);
/// ```
#[derive(Debug, PartialEq)]
pub struct Place<'a> {
    /// The elements.
    pub values: ValuesMut<'a>,
    /// Whether to add to the elements. If not, they are to be overwritten.
    pub holds_sum: bool,
}

impl Place<'_> {
    /// Copies or adds `values`, if they have the right dtype and number. Returns whether they had.
    pub fn put(self, values: Values<'_>) -> bool {
        match self.holds_sum {
            true => self.values.add_from(values),
            false => self.values.copy_from(values),
        }
    }

    /// Copies or adds zeros. A sum of minus zero becomes zero.
    pub(super) fn put_zeros(self) -> bool {
        self.put_with(|place| {
            match place {
                ValuesMut::F32(values) => values.fill(0.0),
                ValuesMut::F64(values) => values.fill(0.0),
                ValuesMut::F16(values) => values.fill(f16::ZERO),
                ValuesMut::Bf16(values) => values.fill(bf16::ZERO),
            }
            true
        })
    }

    /// Copies or adds what `fill` writes. To add, it needs memory for the gradient.
    pub(super) fn put_with(self, fill: impl FnOnce(ValuesMut<'_>) -> bool) -> bool {
        if !self.holds_sum {
            return fill(self.values);
        }
        match self.values {
            ValuesMut::F32(sum) => add_with(sum, |values| fill(ValuesMut::F32(values))),
            ValuesMut::F64(sum) => add_with(sum, |values| fill(ValuesMut::F64(values))),
            ValuesMut::F16(sum) => add_with(sum, |values| fill(ValuesMut::F16(values))),
            ValuesMut::Bf16(sum) => add_with(sum, |values| fill(ValuesMut::Bf16(values))),
        }
    }
}

fn add_with<T: Element + AddAssign>(sum: &mut [T], fill: impl FnOnce(&mut [T]) -> bool) -> bool {
    let mut values = vec![T::zeroed(); sum.len()];
    let is_filled = fill(&mut values);
    if is_filled {
        add_to(sum, &values);
    }
    is_filled
}

fn add_to<T: Copy + AddAssign>(sum: &mut [T], values: &[T]) {
    sum.iter_mut().zip(values).for_each(|(sum, &value)| *sum += value);
}

impl<'a> From<&'a [f32]> for Values<'a> {
    fn from(values: &'a [f32]) -> Self {
        Values::F32(values)
    }
}

impl<'a> From<&'a [f64]> for Values<'a> {
    fn from(values: &'a [f64]) -> Self {
        Values::F64(values)
    }
}

impl<'a> From<&'a [f16]> for Values<'a> {
    fn from(values: &'a [f16]) -> Self {
        Values::F16(values)
    }
}

impl<'a> From<&'a [bf16]> for Values<'a> {
    fn from(values: &'a [bf16]) -> Self {
        Values::Bf16(values)
    }
}
