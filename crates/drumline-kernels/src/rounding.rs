//! The floating-point mode of the thread.
//!
//! Flush-to-zero, denormals-are-zero and the rounding direction belong to a thread. Audio code and some maths
//! libraries change them. A collective would then give different bits on the caller's thread and on a thread
//! of Drumline.

/// Runs `f` with IEEE 754 arithmetic: rounding to nearest, subnormal numbers kept, no traps. Restores
/// the caller's mode afterwards, also when `f` panics.
///
/// On targets other than x86-64 and AArch64 this only calls `f`.
///
/// ```
/// use drumline_kernels::with_ieee_rounding;
///
/// // Correct in every mode that other code may have set on this thread.
/// let tiny = std::hint::black_box(f32::MIN_POSITIVE);
/// assert!(with_ieee_rounding(|| tiny / 2.0) > 0.0); // not flushed to zero
/// ```
pub fn with_ieee_rounding<R>(f: impl FnOnce() -> R) -> R {
    let _restore = Restore::new();
    f()
}

/// Restores the mode of the thread when dropped, if it had to be changed.
struct Restore(Option<mode::Word>);

impl Restore {
    fn new() -> Restore {
        let found = mode::read();
        if found & mode::MEANINGFUL == mode::IEEE {
            return Restore(None);
        }
        mode::write(mode::IEEE);
        Restore(Some(found))
    }
}

impl Drop for Restore {
    fn drop(&mut self) {
        if let Some(found) = self.0 {
            mode::write(found);
        }
    }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
mod mode {
    use std::arch::asm;

    pub(super) type Word = u32;

    /// All exceptions masked, all other bits 0: the value at the start of a process.
    pub(super) const IEEE: Word = 0x1f80;
    /// All bits but the six sticky exception flags, which are no part of the mode.
    pub(super) const MEANINGFUL: Word = !0x3f;

    pub(super) fn read() -> Word {
        let mut word: Word = 0;
        // SAFETY: stores the 32-bit MXCSR to `word`, which is alive and writable, and changes nothing
        // else. SSE is part of x86-64.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut word, options(nostack, preserves_flags)) };
        word
    }

    pub(super) fn write(word: Word) {
        // SAFETY: loads the MXCSR from `word`, which is alive. Every value that is passed (`IEEE`, or
        // one that was read before) has the reserved bits clear, so there is no fault. The compiler
        // assumes the IEEE mode, and `f` in `with_ieee_rounding` runs in exactly that mode. No memory
        // access moves across the `asm!`, because it is not marked `nomem`.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const word, options(nostack)) };
    }
}

#[cfg(all(target_arch = "aarch64", not(miri)))]
mod mode {
    use std::arch::asm;

    pub(super) type Word = u64;

    /// Round to nearest, no flush to zero, no traps.
    pub(super) const IEEE: Word = 0;
    pub(super) const MEANINGFUL: Word = !0;

    pub(super) fn read() -> Word {
        let word: Word;
        // SAFETY: reads the floating-point control register. User code may always do so.
        unsafe { asm!("mrs {}, fpcr", out(reg) word, options(nostack, preserves_flags)) };
        word
    }

    pub(super) fn write(word: Word) {
        // SAFETY: writes `IEEE` or a value that was read before. The compiler's assumptions hold for
        // the same reasons as on x86-64.
        unsafe { asm!("msr fpcr, {}", in(reg) word, options(nostack)) };
    }
}

#[cfg(any(miri, not(any(target_arch = "x86_64", target_arch = "aarch64"))))]
mod mode {
    pub(super) type Word = u32;
    pub(super) const IEEE: Word = 0;
    pub(super) const MEANINGFUL: Word = 0;

    pub(super) fn read() -> Word {
        0
    }

    pub(super) fn write(_word: Word) {}
}

#[cfg(all(test, target_arch = "x86_64", not(miri)))]
mod tests {
    use super::*;
    use crate::{ReduceOp, combine};

    #[test]
    fn subnormal_sums_survive_a_thread_that_flushes_to_zero() {
        const FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO: u32 = 0x8040;
        let quarter = f32::MIN_POSITIVE / 4.0;
        let sum = || {
            let mut sum = [quarter];
            let other = std::hint::black_box([quarter]);
            combine(ReduceOp::Sum, (&mut sum[..]).into(), (&other[..]).into(), None);
            sum[0]
        };

        mode::write(mode::IEEE | FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO);
        let flushed = std::hint::black_box(sum());
        let kept = with_ieee_rounding(|| std::hint::black_box(sum()));
        let after = mode::read();
        mode::write(mode::IEEE);

        assert_eq!(flushed.to_bits(), 0, "the mode has no effect, so this test proves nothing");
        assert_eq!(kept, f32::MIN_POSITIVE / 2.0);
        assert_eq!(
            after & FLUSH_TO_ZERO_AND_DENORMALS_ARE_ZERO,
            0x8040,
            "the mode was not restored"
        );
    }
}
