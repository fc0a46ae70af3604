//! One rank of a job, whose n-th system call fails.
//!
//! The library's calls do not go through libc ([`rustix`] makes them itself), so a replaced libc would not see
//! them. `ptrace` does. It also counts over all threads of the process, which `strace -e inject=` does not: that
//! counts in each thread. And the safe interface of the crate `nix` needs no tool to be installed.
//!
//! | program | what it does |
//! |---|---|
//! | `ten-steps` | one of two ranks: a group, ten training steps with checked sums, two checkpoints, the digest |
//! | `fail-nth` | runs a program; its n-th call of the kinds in [`faults_of`] fails, or does less than it was asked |
//!
//! The test `every_nth` runs them for every n, and says which outcomes there are.
//!
//! # What is not ours
//!
//! The runtime of Rust ends the process by itself in some places. No library can turn these into errors. They are
//! counted apart (`not ours`), never passed over:
//!
//! - memory that the allocator does not get: `memory allocation of … bytes failed`, and the process aborts;
//! - the stack for signals of a new thread (`failed to allocate an alternative stack`).
#![cfg(target_os = "linux")]

mod calls;
#[cfg(target_arch = "x86_64")]
mod tracer;

pub use calls::{Fault, faults_of, name_of};
#[cfg(target_arch = "x86_64")]
pub use tracer::{Outcome, become_traced, trace};
