use std::fmt;

use bytemuck::{Pod, Zeroable};

/// A truth value as it travels: a byte, of which 0 is false and all others are true.
///
/// `bool` itself cannot be received from anybody: a byte other than 0 and 1 in its place is
/// undefined behaviour. This type has no wrong bytes. What it is made from `bool`, or is computed
/// by an operator, is 0 or 1.
///
/// ```
/// use drumline_kernels::{Bool, ReduceOp, combine};
///
/// let mut any = [Bool::from(true), Bool::FALSE];
/// combine(ReduceOp::Bor, (&mut any[..]).into(), (&[Bool::FALSE; 2][..]).into(), None);
/// assert_eq!(any.map(bool::from), [true, false]);
///
/// // Borrowed as they are: every `bool` is a `Bool`.
/// let flags: &[Bool] = bytemuck::cast_slice(&[true, false]);
/// assert_eq!(flags, [Bool::TRUE, Bool::FALSE]);
/// ```
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub struct Bool(u8);

// SAFETY: a byte, of which 0 is a value.
unsafe impl Zeroable for Bool {}

// SAFETY: a transparent wrapper of a byte, all of whose values are allowed.
unsafe impl Pod for Bool {}

impl Bool {
    /// False.
    pub const FALSE: Bool = Bool(0);
    /// True.
    pub const TRUE: Bool = Bool(1);

    /// The truth value.
    ///
    /// ```
    /// use drumline_kernels::Bool;
    ///
    /// let received: Bool = bytemuck::cast(7_u8); // torch sums the bytes of `bool`
    /// assert!(received.get() && !Bool::FALSE.get());
    /// ```
    #[inline(always)]
    pub const fn get(self) -> bool {
        self.0 != 0
    }

    /// The same truth value as 0 or 1.
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
