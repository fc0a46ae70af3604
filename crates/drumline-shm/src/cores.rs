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

    /// Those with these numbers.
    pub(crate) fn of(numbers: impl IntoIterator<Item = usize>) -> Cores {
        let mut cores = CpuSet::new();
        numbers.into_iter().for_each(|core| cores.set(core));
        Cores(cores)
    }

    /// Lets this thread, and those that it is going to start, use these cores only.
    ///
    /// ```
    /// use drumline_shm::Cores;
    ///
    /// let cores = Cores::of_this_thread()?;
    /// cores.stay()?;
    /// assert!(Cores::of_this_thread()?.iter().eq(cores.iter()));
    /// # Ok::<(), std::io::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// Those of the system call.
    pub fn stay(&self) -> io::Result<()> {
        Ok(sched_setaffinity(None, &self.0)?)
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
        self.numbers().map(|core| Core(core as u32))
    }

    /// The same, as numbers.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = usize> {
        (0..CpuSet::MAX_CPU).filter(|&core| self.0.is_set(core))
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
        Cores::of([core.0 as usize]).stay()?;
        self.stay()
    }
}
