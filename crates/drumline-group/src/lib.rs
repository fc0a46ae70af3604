//! Process groups: how ranks meet, what carries their messages, and the calls they make.
//!
//! | module | what it holds |
//! |---|---|
//! | [`ProcessGroup`] | the ranks that work together, and their collectives |
//! | [`rendezvous`] | how processes meet: `env://`, `tcp://`, `file://`, and schemes that a program registers |
//! | [`backend`] | what carries a group's calls, and how to add a backend of your own |
//! | [`trace`] | records of what every rank did, and when; which rank the others wait for |
//! | [`Config`] | every setting |

#![forbid(unsafe_code)]

mod addresses;
pub mod algorithms;
mod available;
pub mod backend;
mod board;
mod callbacks;
pub mod config;
#[doc(hidden)]
pub mod decoders;
mod error;
mod group;
mod interrupt;
mod prices;
mod progress_thread;
pub mod rendezvous;
mod start_up;
pub mod trace;
mod transport;
pub mod types;
mod work;

pub use config::Config;
#[doc(hidden)]
pub use drumline_engine::deadline;
pub use drumline_engine::{Cause, CollectiveError, Reason, operator::Operator};
pub use drumline_error::{Error, ErrorKind, ErrorOrigin, Result, Section};
pub use drumline_kernels::{DType, Element, ReduceOp, bf16, f16};
pub use drumline_schedule::step::Rank;
#[doc(hidden)]
pub use drumline_shm::PerProcess;
pub use drumline_store::{auth, store};
#[doc(hidden)]
pub use drumline_store::{
    launched,
    net::{free_port, interface::interface_with, site},
};
#[cfg(feature = "objects")]
pub use group::Objects;
pub use group::driving;
pub use group::{
    GroupOptions, ProcessGroup, RegisteredBuffer, blocks, default_group, init_process_group,
    init_with_store, is_initialized, metrics,
};
#[doc(hidden)]
pub use group::{connect_members, regroup};
pub use rendezvous::is_launched;
pub use work::{Begun, Work, WorkError, WorkFuture};
