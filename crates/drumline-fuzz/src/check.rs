//! The bound on memory.

use peak_alloc::PeakAlloc;

use crate::{Decoder, Verdict};

/// Counts what every program that uses this crate allocates.
#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

/// Runs a decoder on bytes, alone in its process.
///
/// # Panics
///
/// When the decoder does, when it takes more memory than its bound, and when what it has read does not
/// come back the same.
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
