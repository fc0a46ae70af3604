use bytemuck::Pod;

use crate::{Source, Target};

/// Copies `src` to `dst`. The two may overlap in any way.
///
/// # Panics
///
/// When the lengths differ.
pub fn copy<T: Pod>(dst: Target<'_, T>, src: Source<'_, T>) {
    assert_eq!(dst.len(), src.len(), "source and destination of a copy differ in length");
    // SAFETY: the contracts of the operands: `src` is valid for reads and `dst` for writes of
    // this many aligned elements, and no other thread of this process interferes. `ptr::copy`
    // allows an overlap and forms no reference; bytes that another process changes meanwhile
    // are some bytes, and any bytes are a value of a `Pod` type.
    unsafe { std::ptr::copy(src.as_ptr(), dst.as_mut_ptr(), src.len()) };
}
