//! Pointers of C through which a call hands something out.

use std::ffi::{c_char, c_int};

use crate::code::Code;

/// Where the caller wants a value. It may be null; otherwise the caller answers for it, as C has it.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(crate) struct Out<T>(*mut T);

impl<T> Out<T> {
    pub(crate) fn new(at: *mut T) -> Self {
        Out(at)
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    pub(crate) fn set(self, value: T) -> Result<(), Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so the caller of the C function says that a value of this type may be written there.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }
}

impl Out<c_char> {
    /// Writes a text with its zero byte, cut to `len` bytes.
    pub(crate) fn text(self, text: &str, len: c_int) -> Result<(), Code> {
        let len = usize::try_from(len).ok().filter(|len| *len > 0).ok_or(Code::INVALID_VALUE)?;
        let kept = text.len().min(len - 1);
        let bytes = text.as_bytes()[..kept].iter().chain(&[0]);
        for (at, byte) in bytes.enumerate() {
            Out(self.0.wrapping_add(if self.0.is_null() { 0 } else { at })).set(*byte as c_char)?;
        }
        Ok(())
    }
}
