//! One group's collectives and messages on one rank, as state machines.
//!
//! Nothing here opens a socket, starts a thread or asks a store: bytes, events and the time come from
//! outside. So the process group of `drumline-group` and the simulator drive the same code.
//!
//! | module | what it holds |
//! |---|---|
//! | [`call`] | a call: which collective, on what, without its buffers |
//! | [`choice`], [`explain`] | which algorithm carries a call out, and why |
//! | [`operation`] | a call together with the caller's buffers |
//! | [`executor`] | the plan of a call, and the machine that carries it out |
//! | [`lane`] | a group's queue: one collective after another, messages beside them |
//! | [`host`] | the memory that the ranks of one host share |
//! | [`transport`] | what carries messages between ranks, up to the streams |
//! | [`start_up`] | how the ranks of a group meet and connect |
//! | [`error`] | why a call failed, and which rank is at fault |

#![forbid(unsafe_code)]

pub mod bytes;
pub mod call;
pub mod choice;
pub mod deadline;
pub mod error;
pub mod executor;
pub mod explain;
pub mod handoff;
pub mod host;
pub mod lane;
pub mod membership;
pub mod operation;
pub mod operator;
pub mod panics;
pub mod recorder;
pub mod registered;
pub mod settings;
pub mod start_up;
pub mod transport;
pub mod usage;

pub use drumline_kernels::{DType, Element, ReduceOp};
pub use error::{Cause, CollectiveError, Error, ErrorKind, Reason, Result};
pub use settings::Settings;
