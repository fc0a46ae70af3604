//! On which core a rank is, and how it gets to another one.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// A core of this host.
///
/// ```
/// use drumline_shm::{Core, PeerSegment, Segment, SegmentSize};
///
/// let own = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 0 })?;
/// let peer = PeerSegment::map(own.handles()?)?; // as another process has it
/// let core: Core = own.stand_here();
/// assert!(peer.stands_on(core));
/// # Ok::<(), drumline_shm::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Core(u32);

impl Core {
    /// The one on which this thread runs.
    pub(crate) fn here() -> Core {
        Core(sched_getcpu() as u32)
    }

    /// Never 0.
    pub(crate) fn number(self) -> u32 {
        self.0.wrapping_add(1)
    }
}

/// The cores that a thread may use.
///
/// ```
/// use drumline_shm::Cores;
///
/// let cores = Cores::of_this_thread()?;
/// assert!(cores.iter().count() > 0);
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Cores(CpuSet);

impl Cores {
    /// By its affinity mask.
    ///
    /// # Errors
    ///
    /// Those of the system call.
    pub fn of_this_thread() -> io::Result<Cores> {
        Ok(Cores(sched_getaffinity(None)?))
    }

    /// In the order of their numbers.
    ///
    /// ```
    /// use drumline_shm::{Cores, Segment, SegmentSize};
    ///
    /// let own = Segment::create(SegmentSize { slot_bytes: 4096, arena_bytes: 0 })?;
    /// let cores = Cores::of_this_thread().expect("it has some");
    /// assert!(cores.iter().any(|core| core == own.stand_here()));
    /// # Ok::<(), drumline_shm::Error>(())
    /// ```
    pub fn iter(&self) -> impl Iterator<Item = Core> {
        let is_set = |core: &usize| self.0.is_set(*core);
        (0..CpuSet::MAX_CPU).filter(is_set).map(|core| Core(core as u32))
    }

    /// Brings this thread to one of them. It may still use all of them, and the kernel may take it
    /// elsewhere at any time.
    ///
    /// ```
    /// use drumline_shm::Cores;
    ///
    /// let cores = Cores::of_this_thread()?;
    /// for core in cores.iter() {
    ///     cores.go_to(core)?;
    /// }
    /// assert!(Cores::of_this_thread()?.iter().eq(cores.iter()));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the system calls.
    pub fn go_to(&self, core: Core) -> io::Result<()> {
        let mut alone = CpuSet::new();
        alone.set(core.0 as usize);
        sched_setaffinity(None, &alone)?;
        Ok(sched_setaffinity(None, &self.0)?)
    }
}
