//! Truth values that are safe to receive.

use std::fmt;

use bytemuck::{Pod, Zeroable};

/// A truth value in one byte: 0 is false, and all other bytes are true.
///
/// `bool` itself is not safe to receive, since a `bool` whose byte is neither 0 nor 1 is undefined
/// behaviour. Every byte is a valid `Bool`. A `Bool` made from a `bool`, or by an operator, is 0 or 1.
///
/// ```
/// use drumline_kernels::{Bool, ReduceOp, combine};
///
/// let mut any = [Bool::from(true), Bool::FALSE];
/// combine(ReduceOp::Bor, (&mut any[..]).into(), (&[Bool::FALSE; 2][..]).into(), None);
/// assert_eq!(any.map(bool::from), [true, false]);
///
/// // Every `bool` is a `Bool`, so a slice needs no copy.
/// let flags: &[Bool] = bytemuck::cast_slice(&[true, false]);
/// assert_eq!(flags, [Bool::TRUE, Bool::FALSE]);
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Bool(u8);

// SAFETY: the type is a transparent wrapper of `u8`, of which 0 is a value.
unsafe impl Zeroable for Bool {}

// SAFETY: the type is a transparent wrapper of `u8`, and every byte is a valid value.
unsafe impl Pod for Bool {}

impl Bool {
    /// False.
    pub const FALSE: Bool = Bool(0);
    /// True.
    pub const TRUE: Bool = Bool(1);

    /// The truth value.
    #[inline(always)]
    pub const fn get(self) -> bool {
        self.0 != 0
    }

    /// The same truth value, with 0 or 1 as its byte.
    #[inline(always)]
    pub(crate) const fn canonical(self) -> Bool {
        Bool(self.get() as u8)
    }

    #[inline(always)]
    pub(crate) const fn and(self, other: Bool) -> Bool {
        Bool(self.0 & other.0)
    }

    #[inline(always)]
    pub(crate) const fn or(self, other: Bool) -> Bool {
        Bool(self.0 | other.0)
    }

    #[inline(always)]
    pub(crate) const fn xor(self, other: Bool) -> Bool {
        Bool(self.0 ^ other.0)
    }
}

impl From<bool> for Bool {
    fn from(value: bool) -> Bool {
        Bool(value.into())
    }
}

impl From<Bool> for bool {
    fn from(value: Bool) -> bool {
        value.get()
    }
}

impl PartialEq for Bool {
    fn eq(&self, other: &Bool) -> bool {
        self.get() == other.get()
    }
}

impl Eq for Bool {}

impl fmt::Debug for Bool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.get().fmt(f)
    }
}
