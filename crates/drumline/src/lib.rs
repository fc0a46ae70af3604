//! Synchronous data-parallel training: process groups, collectives, and what data-parallel
//! adapters are built from.
//!
//! ```
//! use drumline::{ProcessGroup, ReduceOp};
//!
//! // Under `drumline run` or `torchrun` one of many processes, otherwise alone.
//! let group = ProcessGroup::init_or_alone()?;
//! let mut gradient = [1.0_f32, 2.0, 3.0];
//! group.all_reduce(&mut gradient, ReduceOp::Avg)?; // now the same on every rank
//! group.destroy()?;
//! # Ok::<_, drumline::Error>(())
//! ```
//!
//! Warnings (of late ranks, of sockets used instead of shared memory, of refused peers) go to
//! [`tracing`](https://docs.rs/tracing). A program sees them if it has a subscriber. Add
//! `tracing-subscriber`, and begin `main` as below. The threads that serve the other ranks log as well, and wait for
//! the subscriber. [`stderr`](log::stderr) lets nobody wait, also if nobody reads it.
//!
//! ```
//! tracing_subscriber::fmt().with_writer(drumline::log::stderr).init();
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`ProcessGroup`] | the ranks that work together, and their collectives |
//! | [`GroupOptions`] | groups of some of the ranks: `new_group`, `split` |
//! | [`blocks`] | collectives on blocks of different lengths |
//! | `Objects` | calls and messages with objects of any type that serde knows (feature `objects`) |
//! | [`Work`] | a call in the background |
//! | [`RegisteredBuffer`] | memory that the ranks of a host reach without a copy |
//! | [`ddp`] | buckets, the reducer, verification and broadcast of models; users of burn want `drumline-burn` |
//! | [`async_reduce`] | named tensors, reduced in any order |
//! | [`sampler`] | which samples each rank sees, in torch's exact order |
//! | [`checkpoint`] | named tensors in files that are written atomically; the last files are kept |
//! | [`rendezvous`] | how processes meet: `env://`, `tcp://`, `file://`, and schemes that a program registers |
//! | [`store`] | the key-value stores through which they meet |
//! | [`step()`] | tells the launcher which step a rank begins |
//! | [`record()`] | tells the launcher why a rank fails: its panic or its error |
//! | [`local()`] | runs ranks in threads of this program, for tests and examples |
//! | [`spawn()`] | runs ranks in processes of this program, without a launcher |
//! | [`trace`] | records of what every rank did, and when; which rank the others wait for |
//! | [`metrics`] | number, bytes and time of the calls of each kind, in Prometheus' format |
//! | [`auth`] | the job's secret, and how connections prove that they belong to it |
//! | `views` | collectives on strided views of `ndarray` (feature `ndarray`) |
//! | [`backend`] | what carries a group's calls, and how to add a backend of your own |
//! | [`algorithms`] | which algorithms carry a call, and in which order they add |
//! | [`types`] | element types that Rust does not have |
//! | [`cores`] | which cores and which memory a process uses |
//! | [`Config`] | every setting; the types of some of them are in [`config`] |
//!
//! # Features
//!
//! | feature | what a program has with it |
//! |---|---|
//! | `objects` (on) | calls and messages with objects of any type that serde knows, as `all_gather_object` |
//! | `device` | the module `device`: collectives on the memory of GPUs, over CUDA, HIP and NCCL |
//! | `mpi` | the backend `mpi`, and `mpi://` |
//! | `tls` | the level `tls` of [`Config::security`] |
//! | `etcd` | stores in etcd, and `tls` |
//! | `ndarray` | `views` |
//!
//! What asks for a part that is not built gets an error that names the feature.
//!
//! Users of `torch.distributed` find its names beside ours in `docs/reference`.
//!
//! # What you can rely on
//!
//! - **The same bits.** For one world size a floating-point sum is always added in the same
//!   order, whatever the algorithm, the message size and the timing (payloads of NaN apart).
//! - **Errors that name a rank.** Every message carries a description of its call. If ranks make different
//!   calls, each is told both calls. A rank that dies, leaves or does not answer is named. No call waits
//!   longer than [`Config::timeout`].
//! - **One failure is enough.** A group that has failed is poisoned: every later call returns the first
//!   failure.
//! - **Closed by default.** Ranks of one host meet over Unix sockets of their own user. Across
//!   hosts every connection starts with a proof that both ends know the job's secret ([`auth`]).
//!
//! # What it does not do yet
//!
//! - No GPU has run `device`, and there are no GPU kernels.
//! - Data between hosts is encrypted only on request ([`Config::security`]).

#![forbid(unsafe_code)]

#[cfg(feature = "device")]
pub mod device;
#[cfg(feature = "ndarray")]
pub mod views;

/// Which cores and which memory a process uses.
pub mod cores {
    pub use drumline_shm::{MemoryNode, NumaBinding, bind_to_cores, memory_nodes};
}
/// Where log lines go.
pub mod log {
    pub use drumline_trace::{Stderr, stderr};
}
/// Where ranks meet.
pub mod rendezvous {
    pub use drumline_group::{init_with_store, rendezvous::*};
}

#[cfg(feature = "objects")]
pub use drumline_group::Objects;
pub use drumline_group::{
    Begun, Cause, CollectiveError, Config, DType, Element, Error, ErrorKind, ErrorOrigin,
    GroupOptions, Operator, ProcessGroup, Rank, Reason, ReduceOp, RegisteredBuffer, Result,
    Section, Work, WorkError, WorkFuture, algorithms, auth, backend, bf16, blocks, config,
    default_group, f16, init_process_group, is_initialized, metrics, store, trace, types,
};
#[doc(hidden)]
pub use drumline_group::{
    PerProcess, connect_members, deadline, driving, free_port, interface_with, site,
};
#[doc(hidden)]
pub use drumline_shm::{
    LEASE_VARIABLE, dumps_core, files, inherited, kill_with_parent, limit_of, named, take_signals,
};
#[doc(hidden)]
pub use drumline_trace::{ERASE, Outlet, write_all};
pub use drumline_train as train;
pub use drumline_train::{
    ElasticGroup, RankEnd, Spawn, Step, async_reduce, checkpoint, ddp, local, record, sampler,
    spawn, step,
};
#[doc(hidden)]
pub use drumline_train::{blame, error_file, outer_job, steps};

#[cfg(doctest)]
mod book;
