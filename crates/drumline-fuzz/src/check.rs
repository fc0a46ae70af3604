//! The limit on memory.

use peak_alloc::PeakAlloc;

use crate::{Decoder, Verdict};

/// The allocator of every program that uses this crate. It counts the allocated bytes.
#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Runs a decoder on bytes. No other thread of the process may allocate memory meanwhile.
///
/// # Panics
///
/// Panics if the decoder panics, if it allocates more than its bound, or if what it has decoded does not
/// encode to the same bytes.
pub fn check(decoder: &Decoder, bytes: &[u8]) -> Verdict {
    let before = MEMORY.current_usage();
    MEMORY.reset_peak_usage();
    let verdict = (decoder.run)(bytes);
    let taken = MEMORY.peak_usage().saturating_sub(before);
    let bound = decoder.bound(bytes.len());
    assert!(
        taken <= bound,
        "{}: {taken} bytes of memory for {} of input, and the bound is {bound}",
        decoder.name,
        bytes.len()
    );
    verdict
}
