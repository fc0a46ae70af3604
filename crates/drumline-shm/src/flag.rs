//! The flag lines of a segment, and the protocol of posting and sleeping.
//!
//! All lock-free communication between two processes is in this file, so that loom can try all of
//! its interleavings (`drumline-loom`):
//!
//! ```text
//! poster                               sleeper
//! payload, announcement                sleeping = 1
//! posted = n            (release)      full fence
//! full fence                           check again for all it waits for: posted (acquire), ...
//! sleeping of each peer?               poll the doorbell, sockets, pidfds
//!   set: ring its doorbell             sleeping = 0, then drain the doorbell
//! ```
//!
//! One of the two fences comes first. If the poster's does, the sleeper's second check sees the
//! post. If the sleeper's does, the poster sees `sleeping` and rings. A doorbell stays rung until it
//! is drained, so ringing and polling may come in either order. A ring that comes too late only
//! costs one turn of the sleeper's loop.
//!
//! A rank that gives up and a late rank keep to the same order:
//!
//! ```text
//! gives up                             late
//! failed = call + 1                    posted = n           (release)
//! full fence                           full fence
//! posted of each peer?                 failed of each peer?
//! ```
//!
//! So the late rank sees the failure, or the rank that gives up sees its post.

#[cfg(loom)]
use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
#[cfg(not(loom))]
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

/// Bytes of a description: one cache line.
pub(crate) const DESCRIPTION_BYTES: usize = 64;

/// Bytes of the payload in the cache line of an announcement.
pub const PAYLOAD_BYTES: usize = 64 - 3 * 8;

/// What a rank tells its peers about a call. It shares a cache line with the count of posts, so a
/// peer that polls the count gets both from one line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Announcement {
    /// A digest of the description. Ranks whose digests differ have made different calls.
    pub digest: u64,
    /// A number for the peers, such as the offset of a registered buffer.
    pub place: u64,
}

/// Stays rung until it is drained. A rank can sleep until it is rung.
pub(crate) trait Doorbell {
    /// Ends the present sleep on this doorbell, or else the next one.
    fn ring(&self);
    /// Forgets all rings.
    fn drain(&self);
}

/// A value on a cache line of its own.
#[derive(Debug)]
#[repr(C, align(64))]
struct Line<T>(T);

/// The lines of one rank. Only the owner writes them, and its peers read them.
///
/// All fields are atomics: if a peer writes here by mistake, the result is a wrong number and
/// nothing worse. In a new segment all are zero.
#[derive(Debug)]
#[repr(C)]
pub(crate) struct Flags {
    /// Whether the owner sleeps, on which core it runs, and whether it has failed.
    owner: Line<Owner>,
    /// What the owner announced and posted, by parity.
    said: [Line<Said>; 2],
    /// The descriptions, by parity. In words, since no atomic is as large as a line: a peer that
    /// reads too early sees a mixture.
    described: [Line<[AtomicU64; 8]>; 2],
}

#[derive(Debug)]
#[repr(C)]
struct Owner {
    /// How many sleeps of the owner have begun and not ended. They can be nested.
    sleeping: AtomicU32,
    /// The number of the core on which the owner last waited, plus one; 0 before its first wait.
    core: AtomicU32,
    /// Once the owner has failed: one more than the number of the first call that it does not complete. In this line,
    /// because a rank that posts reads it anyway.
    failed: AtomicU64,
}

#[derive(Debug)]
#[repr(C)]
struct Said {
    /// The owner's count of posts at its last post in this line.
    posted: AtomicU64,
    digest: AtomicU64,
    place: AtomicU64,
    /// A slot for very short calls. Accessed like a slot, never through these atomics.
    payload: [AtomicU64; PAYLOAD_BYTES / 8],
}

/// Bytes of the flag lines in a segment.
#[cfg(not(loom))]
pub(crate) const FLAGS_BYTES: usize = 5 * 64;
#[cfg(not(loom))]
const _: () = assert!(size_of::<Flags>() == FLAGS_BYTES && align_of::<Flags>() == 64);

/// Where the payload of a parity begins, in bytes from the first flag line.
#[cfg(not(loom))]
pub(crate) const fn payload_offset(parity: usize) -> usize {
    std::mem::offset_of!(Flags, said) + parity * 64 + std::mem::offset_of!(Said, payload)
}

impl Flags {
    /// Flags that lie in no segment.
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
            owner: Line(Owner {
                sleeping: AtomicU32::new(0),
                core: AtomicU32::new(0),
                failed: AtomicU64::new(0),
            }),
            said: [Line(said()), Line(said())],
            described: [described(), described()],
        }
    }

    /// Writes the announcement and the description of one parity. They belong to the next post.
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

    /// The announcement of one parity. A reader that has seen the post after it sees it whole.
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

    /// Writes the owner's count of posts to the line of a parity. A peer that reads this count sees
    /// everything that the owner wrote before.
    #[inline]
    pub(crate) fn post(&self, parity: usize, count: u64) {
        self.said[parity].0.posted.store(count, Ordering::Release);
    }

    /// The owner's count of posts in the line of a parity. The reader may then read everything that
    /// the owner wrote before that post.
    #[inline]
    pub(crate) fn posted(&self, parity: usize) -> u64 {
        self.said[parity].0.posted.load(Ordering::Acquire)
    }

    /// [`Flags::post`], and rings the doorbells of those `peers` that sleep.
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

    /// Tells peers on which core the owner runs. All peers have the line in their caches, so it is
    /// written only if the core has changed.
    pub(crate) fn set_core(&self, core: u32) {
        if self.core() != core {
            self.owner.0.core.store(core, Ordering::Relaxed);
        }
    }

    /// The owner's core as of its last [`Flags::set_core`].
    pub(crate) fn core(&self) -> u32 {
        self.owner.0.core.load(Ordering::Relaxed)
    }

    /// Tells peers that the owner completes no call from number `call` on. A peer that has not posted before the owner
    /// looks at its posts after this sees it once it has.
    pub(crate) fn fail(&self, call: u64) {
        let failed = &self.owner.0.failed;
        let known = failed.load(Ordering::Relaxed);
        if known == 0 || call < known - 1 {
            failed.store(call.saturating_add(1), Ordering::Release);
        }
        fence(Ordering::SeqCst);
    }

    /// Whether the owner does not complete the call with this number.
    #[inline]
    pub(crate) fn has_failed(&self, call: u64) -> bool {
        self.owner.0.failed.load(Ordering::Acquire).wrapping_sub(1) <= call
    }

    /// Tells peers that the owner is about to sleep on `bell`. The owner must check once more for
    /// what it waits for between this call and its sleep.
    pub(crate) fn prepare_sleep<'a, B: Doorbell>(&'a self, bell: &'a B) -> Asleep<'a, B> {
        let guards = self.owner.0.sleeping.load(Ordering::Relaxed).wrapping_add(1);
        self.owner.0.sleeping.store(guards, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        Asleep { flags: self, bell }
    }

    /// Undoes one [`Flags::prepare_sleep`]. Dropping the guard calls this.
    pub(crate) fn end_sleep<B: Doorbell>(&self, bell: &B) {
        let guards = self.owner.0.sleeping.load(Ordering::Relaxed).wrapping_sub(1);
        self.owner.0.sleeping.store(guards, Ordering::Relaxed);
        // Inside another sleep the rings stay: the outer sleep may not have seen them yet.
        if guards == 0 {
            bell.drain();
        }
    }
}

/// While this guard lives, every post rings the owner's doorbell.
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
