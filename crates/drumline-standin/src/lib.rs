//! A device for tests: a shared library with the C functions of the CUDA driver and of NCCL, and no hardware.
//!
//! It is no mock: nobody tells it what to answer. It models devices, contexts, memory, streams, events, copy engines
//! and communicators as the manuals describe them, so that code which is wrong on a device is wrong here, sooner.
//! [`library()`] is where it lies, as `libcuda.so.1` and as `libnccl.so.2`. [`Controls`] are what tests ask of it.
//!
//! # What it models
//!
//! - **Memory of a device** has addresses that a CPU cannot touch: who does gets a fatal signal.
//! - **Poison.** New memory, and what a copy has yet to write, holds bytes `0xDB`. A copy poisons its destination when
//!   it is queued, or, if a correct program could tell, when its turn comes. It reads its source when it is carried
//!   out, at times in pieces. So who reads too early sees poison or torn data, and who overwrites too early loses
//!   data.
//! - **Streams** keep their order, and wait for events, for words in memory, and for the legacy stream as the manual
//!   says. Each device has an engine for copies out, one for copies in and one for fills; each does one thing at a
//!   time. Everything else happens in any order.
//! - **Time.** The library has no threads. Each call lets a random number of operations move on, chosen among those
//!   that may. A seed repeats all choices, if one thread calls. A call that waits lets work move on until what it waits
//!   for is over; if nothing has moved for `STANDIN_PATIENCE_MS` (20,000), it fails with `CUDA_ERROR_LAUNCH_TIMEOUT`. A
//!   real device would wait for ever.
//! - **Pageable host memory.** A copy from it takes its bytes at once; a copy to it returns when it is over.
//! - **Mistakes** that a device does not tell: memory that is freed or unregistered while queued work uses it, copies
//!   that overlap. They are counted as violations. Work whose memory is gone leaves poison, or breaks its device.
//! - **Faults.** Calls fail on request, or kill their process. A device that is broken fails everything from then on;
//!   what is given back to it is given back all the same.
//! - **NCCL**: communicators of threads and of processes of one host, blocking and not, that split, finalise and abort;
//!   groups; all operations of 2.30 but windows and signals, on streams, in the types of the data, added in the order
//!   of ranks. An operation needs all its ranks; a send is over when it was received. A rank that is gone is told to
//!   nobody: its peers' operations never end, until their communicators are aborted. Ranks that share a device are
//!   refused as NCCL refuses them: each needs an `NCCL_HOSTID`, or, from 2.30 on, `NCCL_MULTI_RANK_GPU_ENABLE=1`.
//! - **CUDA IPC**: memory that one process has allocated, another one opens. That its owner frees it too early is not told.
//! - **Invalid handles** are refused, where a driver may crash.
//!
//! # What it does not model
//!
//! Kernels, modules, graphs (a capture holds nothing), memory pools, devices that processes share, contexts
//! other than the primary ones, ranks on several hosts, sums of 8-bit floats, and how fast anything is. Host functions
//! run in a thread that is in a call of the library, so they must not need a lock that a caller of the driver holds. A
//! host function and a word that a stream waits for need no engine. Priorities of streams do nothing.
//!
//! # Variables
//!
//! | variable | what |
//! |---|---|
//! | `STANDIN_DEVICES` | devices of the machine (2); `CUDA_VISIBLE_DEVICES` hides some |
//! | `STANDIN_MEMORY` | bytes of each device (4 GiB) |
//! | `STANDIN_NUMA` | NUMA nodes of the devices, such as `0,1` |
//! | `STANDIN_SEED` | the first seed (1) |
//! | `STANDIN_FAIL` | `name:nth:code`, with commas between; `cu*` and `nccl*`: any function; code -9: SIGKILL |
//! | `STANDIN_NO_STREAM_MEM=1` | streams cannot wait for words in memory |
//! | `STANDIN_NO_HOST_REGISTER=1` | memory cannot be pinned in place |
//! | `STANDIN_NO_IPC=1` | processes cannot open each other's memory |
//! | `STANDIN_NO_PEER=1` | devices do not reach each other |
//! | `STANDIN_NCCL_VERSION` | what ncclGetVersion says (22304) |
//! | `STANDIN_PATIENCE_MS` | how long a call waits while nothing moves |
//!
//! [`Controls::set`] overrides them in a process.
//!
//! # Files
//!
//! | file | what |
//! |---|---|
//! | `driver/` | the C functions of the driver |
//! | `nccl/` | the C functions of NCCL, and what is behind them |
//! | `controls.rs` | the C functions of the stand-in's own |
//! | `world.rs` | all state, and the way of a call |
//! | `work.rs` | what is queued, and how it moves on |
//! | `streams.rs`, `devices.rs`, `memory.rs`, `ipc.rs`, `host.rs` | what their names say |
//! | `faults.rs`, `variables.rs`, `random.rs` | calls that fail, settings, chance |
//! | `code.rs`, `out.rs` | result codes, pointers of C |
//! | `library.rs` | for tests in Rust: the library and its controls |

#![allow(non_snake_case, reason = "the names of C")]

mod code;
mod controls;
mod devices;
mod driver;
mod faults;
mod host;
mod ipc;
mod library;
mod memory;
mod nccl;
mod out;
mod random;
mod streams;
mod variables;
mod work;
mod world;

pub use library::{Controls, library, library_without};
