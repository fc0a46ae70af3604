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

/// Bytes of a description: one cache line.
pub(crate) const DESCRIPTION_BYTES: usize = 64;

/// Bytes of the payload that fits the line of an announcement.
///
/// ```
/// use drumline_shm::{PAYLOAD_BYTES, Parity, Segment, SegmentSize};
///
/// let own = Segment::create(SegmentSize { slot_bytes: 1, arena_bytes: 0 })?;
/// assert!(own.payload::<u8>(Parity::Even, 0..PAYLOAD_BYTES).is_ok());
/// assert!(own.payload::<u8>(Parity::Even, 0..PAYLOAD_BYTES + 1).is_err());
/// # Ok::<(), drumline_shm::Error>(())
/// ```
pub const PAYLOAD_BYTES: usize = 64 - 3 * 8;

/// What a rank says of an operation in one line, so that a peer who waits for the count has it all
/// with one look.
///
/// ```
/// # use drumline_shm::{Announcement, Parity, PeerSegment, Segment, SegmentSize};
/// # let size = SegmentSize { slot_bytes: 4096, arena_bytes: 1 << 20 };
/// # let own = Segment::create(size)?;
/// # let peer = PeerSegment::map(own.handles()?)?; // as another process has it
/// let announcement = Announcement { digest: 7, place: 4096 };
/// own.announce(Parity::Odd, announcement, &[1; 64]);
/// own.post(Parity::Odd);
/// assert_eq!(peer.announcement(Parity::Odd), announcement);
/// # Ok::<(), drumline_shm::Error>(())
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Announcement {
    /// Stands for the description: who has another digest has called something else.
    pub digest: u64,
    /// A number for the peers: where a registered buffer lies, say.
    pub place: u64,
}

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
    /// Whether the owner runs, and where.
    owner: Line<Owner>,
    /// What the owner says, by parity.
    said: [Line<Said>; 2],
    /// What its digests stand for, by parity. In words, because atomics of a whole line do not
    /// exist: a reader that comes too early sees a mixture.
    described: [Line<[AtomicU64; 8]>; 2],
}

/// One line.
#[derive(Debug)]
#[repr(C)]
struct Owner {
    /// How many guards of the owner's say that it sleeps or is about to.
    sleeping: AtomicU32,
    /// The core on which it last waited, plus one. 0: it has not said.
    core: AtomicU32,
}

/// One line.
#[derive(Debug)]
#[repr(C)]
struct Said {
    /// How often the owner had posted when it last did so in this line.
    posted: AtomicU64,
    digest: AtomicU64,
    place: AtomicU64,
    /// A slot for very short operations. Only ever accessed as slots are.
    payload: [AtomicU64; PAYLOAD_BYTES / 8],
}

/// Bytes of the flag lines in a segment.
#[cfg(not(loom))]
pub(crate) const FLAGS_BYTES: usize = 5 * 64;
#[cfg(not(loom))]
const _: () = assert!(size_of::<Flags>() == FLAGS_BYTES && align_of::<Flags>() == 64);

/// Where the payload of a parity begins, in bytes of the flag lines.
#[cfg(not(loom))]
pub(crate) const fn payload_offset(parity: usize) -> usize {
    std::mem::offset_of!(Flags, said) + parity * 64 + std::mem::offset_of!(Said, payload)
}

impl Flags {
    /// Flags outside a segment.
    #[cfg(loom)]
    pub(crate) fn new() -> Flags {
        let words = || AtomicU64::new(0);
        let said = || Said {
            posted: words(),
            digest: words(),
            place: words(),
            payload: std::array::from_fn(|_| words()),
        };
        let described = || Line(std::array::from_fn(|_| words()));
        Flags {
            owner: Line(Owner { sleeping: AtomicU32::new(0), core: AtomicU32::new(0) }),
            said: [Line(said()), Line(said())],
            described: [described(), described()],
        }
    }

    /// Writes the announcement of one parity, and what it stands for. They belong to the next post.
    #[inline]
    pub(crate) fn announce(
        &self,
        parity: usize,
        announcement: Announcement,
        description: &[u8; DESCRIPTION_BYTES],
    ) {
        let Announcement { digest, place } = announcement;
        let said = &self.said[parity].0;
        said.digest.store(digest, Ordering::Relaxed);
        said.place.store(place, Ordering::Relaxed);
        let (words, _) = description.as_chunks::<8>();
        for (line, word) in self.described[parity].0.iter().zip(words) {
            line.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
        }
    }

    /// The announcement of one parity. It is whole for whoever has seen the post behind it.
    #[inline]
    pub(crate) fn announcement(&self, parity: usize) -> Announcement {
        let said = &self.said[parity].0;
        Announcement {
            digest: said.digest.load(Ordering::Relaxed),
            place: said.place.load(Ordering::Relaxed),
        }
    }

    /// Copies the description of one parity out.
    pub(crate) fn description(&self, parity: usize) -> [u8; DESCRIPTION_BYTES] {
        let mut bytes = [0; DESCRIPTION_BYTES];
        let (words, _) = bytes.as_chunks_mut::<8>();
        for (word, line) in words.iter_mut().zip(&self.described[parity].0) {
            *word = line.load(Ordering::Relaxed).to_ne_bytes();
        }
        bytes
    }

    /// Says in the line of a parity that the owner has posted so often, after everything that it
    /// wrote before.
    #[inline]
    pub(crate) fn post(&self, parity: usize, count: u64) {
        self.said[parity].0.posted.store(count, Ordering::Release);
    }

    /// The owner's count in the line of a parity. Whoever reads it may read what the owner wrote
    /// before that post.
    #[inline]
    pub(crate) fn posted(&self, parity: usize) -> u64 {
        self.said[parity].0.posted.load(Ordering::Acquire)
    }

    /// Posts as [`Flags::post`] does and rings those of `peers` that sleep.
    #[inline]
    pub(crate) fn post_and_wake<'a, B: Doorbell + 'a>(
        &self,
        parity: usize,
        count: u64,
        peers: impl IntoIterator<Item = (&'a Flags, &'a B)>,
    ) {
        self.post(parity, count);
        fence(Ordering::SeqCst);
        for (flags, bell) in peers {
            if flags.owner.0.sleeping.load(Ordering::Relaxed) != 0 {
                bell.ring();
            }
        }
    }

    /// Says on which core the owner runs. All peers keep the line, so it is written only with news.
    pub(crate) fn set_core(&self, core: u32) {
        if self.core() != core {
            self.owner.0.core.store(core, Ordering::Relaxed);
        }
    }

    /// On which core the owner runs, as it last said.
    pub(crate) fn core(&self) -> u32 {
        self.owner.0.core.load(Ordering::Relaxed)
    }

    /// Says that the owner is about to sleep on `bell`. To be called before the last look at
    /// what is awaited.
    pub(crate) fn prepare_sleep<'a, B: Doorbell>(&'a self, bell: &'a B) -> Asleep<'a, B> {
        let guards = self.owner.0.sleeping.load(Ordering::Relaxed).wrapping_add(1);
        self.owner.0.sleeping.store(guards, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Asleep { flags: self, bell }
    }

    /// Undoes one [`Flags::prepare_sleep`]: what the guard does when it is dropped.
    pub(crate) fn end_sleep<B: Doorbell>(&self, bell: &B) {
        let guards = self.owner.0.sleeping.load(Ordering::Relaxed).wrapping_sub(1);
        self.owner.0.sleeping.store(guards, Ordering::Relaxed);
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
