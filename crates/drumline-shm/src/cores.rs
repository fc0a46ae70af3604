//! Cores: which one a thread runs on, and how a thread moves to another.

use std::io;

use rustix::thread::{CpuSet, sched_getaffinity, sched_getcpu, sched_setaffinity};

/// A core of this host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Core(u32);

impl Core {
    /// The core on which this thread runs.
    pub(crate) fn here() -> Core {
        Core(sched_getcpu() as u32)
    }

    /// The core's number plus one, so never 0.
    pub(crate) fn number(self) -> u32 {
        self.0.wrapping_add(1)
    }
}

/// A set of cores, to which a thread can be bound.
#[derive(Clone, Debug)]
pub struct Cores(CpuSet);

impl Cores {
    /// The cores that this thread may use, by its affinity mask.
    ///
    /// # Errors
    ///
    /// The errors of the system call.
    pub fn of_this_thread() -> io::Result<Cores> {
        Ok(Cores(sched_getaffinity(None)?))
    }

    /// The cores with these numbers.
    pub fn of(numbers: impl IntoIterator<Item = usize>) -> Cores {
        let mut cores = CpuSet::new();
        numbers.into_iter().for_each(|core| cores.set(core));
        Cores(cores)
    }

    /// Binds this thread, and the threads that it starts from now on, to these cores.
    ///
    /// # Errors
    ///
    /// The errors of the system call.
    pub fn stay(&self) -> io::Result<()> {
        Ok(sched_setaffinity(None, &self.0)?)
    }

    /// The cores in the order of their numbers.
    pub fn iter(&self) -> impl Iterator<Item = Core> {
        self.numbers().map(|core| Core(core as u32))
    }

    /// The numbers of the cores, in order.
    pub fn numbers(&self) -> impl Iterator<Item = usize> {
        (0..CpuSet::MAX_CPU).filter(|&core| self.0.is_set(core))
    }

    /// Moves this thread to `core` and then binds it to the whole set again, so that the kernel may
    /// move it on at any time.
    ///
    /// # Errors
    ///
    /// The errors of the system calls.
    pub fn go_to(&self, core: Core) -> io::Result<()> {
        Cores::of([core.0 as usize]).stay()?;
        self.stay()
    }
}
