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
mod available;
pub mod backend;
mod board;
mod callbacks;
mod config;
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
mod work;

pub use addresses::{describe_addresses, own_addresses};
pub use available::{describe_mpi, is_mpi_available, is_torchelastic_launched};
pub use backend::register_backend;
pub use config::{Config, DebugLevel};
#[doc(hidden)]
pub use drumline_engine::deadline;
pub use drumline_engine::{
    Cause, CollectiveError, Reason,
    explain::{Candidate, Explanation},
    operator::Operator,
};
pub use drumline_kernels::{Bool, Complex, DType, Element, F8E4M3, F8E5M2, ReduceOp, bf16, f16};
pub use drumline_schedule::{Collective, Rounding, SumOrder, price::PriceList, step::Rank};
#[doc(hidden)]
pub use drumline_shm::PerProcess;
pub use drumline_store::{ErrorOrigin, auth, net::Endpoint, store};
#[doc(hidden)]
pub use drumline_store::{
    in_section, launched,
    net::{free_port, interface::interface_with, site},
};
pub use error::{Error, Result};
pub use group::driving;
pub use group::{
    GroupOptions, ProcessGroup, RegisteredBuffer, connect_members, default_group,
    init_process_group, init_with_store, is_initialized, metrics_text,
};
pub use interrupt::interruptible;
pub use prices::PriceSource;
pub use rendezvous::{is_launched, register_rendezvous_handler};
pub use work::{Begun, Work, WorkError, WorkFuture};
