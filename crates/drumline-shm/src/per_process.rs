//! Values that each process makes for itself.
//!
//! A forked process inherits the memory of its parent, but none of its threads. Work that such a thread
//! should do is never done in the forked process, and a lock that such a thread held at the fork stays
//! locked. So threads and what they share are kept in a [`PerProcess`], and a forked process makes its own.

use std::{iter::successors, sync::OnceLock};

use rustix::process::{Pid, getpid};

/// A value that each process makes for itself.
#[derive(Debug)]
pub struct PerProcess<T>(OnceLock<Box<Generation<T>>>);

/// The value of one process; `next` is that of its fork.
#[derive(Debug)]
struct Generation<T> {
    process: Pid,
    value: T,
    next: OnceLock<Box<Generation<T>>>,
}

impl<T> PerProcess<T> {
    /// A value that no process has made yet.
    pub const fn new() -> Self {
        PerProcess(OnceLock::new())
    }

    /// The value of this process. The first caller makes it with `make`.
    pub fn get(&self, make: impl Fn() -> T) -> &T {
        let process = getpid();
        let new = || Box::new(Generation { process, value: make(), next: OnceLock::new() });
        let mut generation = self.0.get_or_init(new);
        while generation.process != process {
            generation = generation.next.get_or_init(new);
        }
        &generation.value
    }

    /// The values of the processes from which this one was forked, as they were at the fork.
    pub fn inherited(&self) -> impl Iterator<Item = &T> {
        let process = getpid();
        successors(self.0.get(), |generation| generation.next.get())
            .take_while(move |generation| generation.process != process)
            .map(|generation| &generation.value)
    }
}

impl<T> Default for PerProcess<T> {
    fn default() -> Self {
        PerProcess::new()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn a_process_makes_its_value_once() {
        static VALUE: PerProcess<usize> = PerProcess::new();
        let made = AtomicUsize::new(0);
        let make = || made.fetch_add(1, Ordering::SeqCst) + 7;
        assert_eq!((*VALUE.get(make), *VALUE.get(make)), (7, 7));
        assert_eq!((made.load(Ordering::SeqCst), VALUE.inherited().count()), (1, 0));
    }

    #[test]
    fn what_another_process_has_made_is_inherited_and_not_used() {
        let parent = Pid::INIT;
        assert_ne!(getpid(), parent);
        let of_parent = Generation { process: parent, value: 1, next: OnceLock::new() };
        let value = PerProcess(OnceLock::from(Box::new(of_parent)));
        assert_eq!(value.inherited().collect::<Vec<_>>(), [&1]);
        assert_eq!((*value.get(|| 2), *value.get(|| 3)), (2, 2));
        assert_eq!(value.inherited().collect::<Vec<_>>(), [&1], "the own value is not inherited");
    }
}
