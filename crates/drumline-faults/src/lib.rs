//! Runs one rank of a job and lets its n-th system call fail.
//!
//! The library makes system calls itself (through [`rustix`]), not through libc, so a replaced libc would not
//! see them. `ptrace` does. `strace -e inject=` uses `ptrace`, too, but counts in each thread; this tracer
//! counts over all threads of the process. It uses the safe interface of the crate `nix`, and no tool needs
//! to be installed.
//!
//! | program | what it does |
//! |---|---|
//! | `ten-steps` | one of two ranks: a group, ten training steps with checked sums, two checkpoints, the digest |
//! | `fail-nth` | runs a program; its n-th call of the kinds in [`faults_of`] fails, or does less than it was asked |
//!
//! The test `every_nth` runs these programs for every n, and reports the outcomes.
//!
//! # What is not ours
//!
//! In some places the runtime of Rust ends the process by itself. No library can turn these ends into errors.
//! The test counts them separately (`not ours`) and never ignores them:
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
