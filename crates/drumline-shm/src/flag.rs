//! The flag lines of a segment, and the protocol that lets a sleeper miss no post.
//!
//! Everything that two processes do to each other without a lock is in this file, so that loom
//! can try all of its interleavings (`tests/loom.rs`):
//!
//! ```text
//! poster                               sleeper
//! payload, announcement                sleeping = 1
//! posted = n            (release)      full fence
//! full fence                           look again at everything awaited: posted (acquire), ...
//! sleeping of each peer?               poll the doorbell, sockets, pidfds
//!   set: ring its doorbell             sleeping = 0, then drain the doorbell
//! ```
//!
//! Of the two fences one comes first. If it is the poster's, the sleeper's second look sees the
//! post; if it is the sleeper's, the poster sees `sleeping` and rings. A doorbell remembers that
//! it was rung, so the order of ringing and polling does not matter. A ring that nobody needed any
//! more only costs one turn of the sleeper's loop.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Bytes of an announcement: one cache line.
pub(crate) const ANNOUNCEMENT_BYTES: usize = 64;

/// Something that remembers being rung until it is drained, and that can be slept on.
pub(crate) trait Doorbell {
    /// Wakes who sleeps on it now, or next.
    fn ring(&self);
    /// Forgets all rings.
    fn drain(&self);
}

/// A value on a cache line of its own.
#[derive(Debug)]
#[repr(C, align(64))]
struct Line<T>(T);

/// The lines of one rank. Only their owner writes them; its peers read.
///
/// All fields are atomics: whatever a peer writes here by mistake, and whenever, is a wrong number
/// and nothing worse. All zeros is the state of a new segment.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Flags {
    /// How often the owner has posted.
    posted: Line<AtomicU64>,
    /// How many guards of the owner's say that it sleeps or is about to.
    sleeping: Line<AtomicU32>,
    /// What the owner says, by parity. In words, because atomics of a whole line do not exist:
    /// a reader that comes too early sees a mixture.
    announced: [Line<[AtomicU64; 8]>; 2],
}

/// Bytes of the flag lines in a segment.
#[cfg(not(loom))]
pub(crate) const FLAGS_BYTES: usize = 4 * 64;
#[cfg(not(loom))]
const _: () = assert!(size_of::<Flags>() == FLAGS_BYTES && align_of::<Flags>() == 64);

impl Flags {
    /// Flags outside a segment.
    #[cfg(loom)]
    pub(crate) fn new() -> Flags {
        let line = || Line(std::array::from_fn(|_| AtomicU64::new(0)));
        Flags {
            posted: Line(AtomicU64::new(0)),
            sleeping: Line(AtomicU32::new(0)),
            announced: [line(), line()],
        }
    }

    /// Writes the announcement of one parity. It belongs to the next post.
    pub(crate) fn announce(&self, parity: usize, bytes: &[u8; ANNOUNCEMENT_BYTES]) {
        let (words, _) = bytes.as_chunks::<8>();
        for (line, word) in self.announced[parity].0.iter().zip(words) {
            line.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
    }

    /// Copies the announcement of one parity out.
    pub(crate) fn announcement(&self, parity: usize) -> [u8; ANNOUNCEMENT_BYTES] {
        let mut bytes = [0; ANNOUNCEMENT_BYTES];
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (word, line) in words.iter_mut().zip(&self.announced[parity].0) {
            *word = line.load(Ordering::Relaxed).to_ne_bytes();
        }
        bytes
    }

    /// Counts one more post, after everything that the owner wrote before. Returns the count.
    pub(crate) fn post(&self) -> u64 {
        let count = self.posted.0.load(Ordering::Relaxed).wrapping_add(1);
        self.posted.0.store(count, Ordering::Release);
        count
    }

    /// The owner's count. Whoever reads it may read what the owner wrote before that post.
    pub(crate) fn posted(&self) -> u64 {
        self.posted.0.load(Ordering::Acquire)
    }

    /// Counts one more post and rings those of `peers` that sleep.
    pub(crate) fn post_and_wake<'a, B: Doorbell + 'a>(
        &self,
        peers: impl IntoIterator<Item = (&'a Flags, &'a B)>,
    ) -> u64 {
        let count = self.post();
        fence(Ordering::SeqCst);
        for (flags, bell) in peers {
            if flags.sleeping.0.load(Ordering::Relaxed) != 0 {
                bell.ring();
            }
        }
        count
    }

    /// Says that the owner is about to sleep on `bell`. To be called before the last look at
    /// what is awaited.
    pub(crate) fn prepare_sleep<'a, B: Doorbell>(&'a self, bell: &'a B) -> Asleep<'a, B> {
        let guards = self.sleeping.0.load(Ordering::Relaxed).wrapping_add(1);
        self.sleeping.0.store(guards, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Asleep { flags: self, bell }
    }

    /// Undoes one [`Flags::prepare_sleep`]: what the guard does when it is dropped.
    pub(crate) fn end_sleep<B: Doorbell>(&self, bell: &B) {
        let guards = self.sleeping.0.load(Ordering::Relaxed).wrapping_sub(1);
        self.sleeping.0.store(guards, Ordering::Relaxed);
        // A guard around this one may still go to sleep: what has been rung is its business too.
        if guards == 0 {
            bell.drain();
        }
    }
}

/// While it lives, every post rings its owner's doorbell.
#[derive(Debug)]
pub(crate) struct Asleep<'a, B: Doorbell> {
    flags: &'a Flags,
    bell: &'a B,
}

impl<B: Doorbell> Drop for Asleep<'_, B> {
    fn drop(&mut self) {
        self.flags.end_sleep(self.bell);
    }
}
