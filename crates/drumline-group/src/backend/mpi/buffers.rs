//! Memory that MPI reads and writes, kept from call to call.

use std::sync::{Mutex, PoisonError};

/// Buffers that no call uses now.
#[derive(Debug, Default)]
pub(super) struct Buffers(Mutex<Vec<Vec<u8>>>);

/// Two pieces are under way at a time, each with two buffers. The others serve messages.
const KEPT_MAX: usize = 8;

impl Buffers {
    /// A buffer of `len` bytes at least. What it holds is left from other calls.
    pub(super) fn take(&self, len: usize) -> Vec<u8> {
        if len == 0 {
            return Vec::new();
        }
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let found =
            kept.iter().rposition(|it| it.len() >= len).unwrap_or(kept.len().wrapping_sub(1));
        let mut buffer = if found < kept.len() { kept.swap_remove(found) } else { Vec::new() };
        drop(kept);
        if buffer.len() < len {
            buffer.resize(len, 0);
        }
        buffer
    }

    /// Keeps buffers for later calls.
    pub(super) fn give<const N: usize>(&self, buffers: [Vec<u8>; N]) {
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.extend(buffers.into_iter().filter(|buffer| !buffer.is_empty()));
        kept.truncate(KEPT_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_comes_back_if_it_is_long_enough() {
        let buffers = Buffers::default();
        let mut long = buffers.take(100);
        long[99] = 7;
        buffers.give([long, Vec::new(), buffers.take(10)]);
        assert_eq!(buffers.take(50)[99], 7);
        assert!(buffers.take(20).len() >= 20); // the short one has grown
        assert!(buffers.take(0).is_empty() && buffers.0.lock().unwrap().is_empty());
    }
}
