//! What carries a group's calls: the library's own transports, or a foreign backend.
//!
//! A backend is an object that carries out collectives, and messages if it likes, for one rank of one group. It is
//! registered under a name and chosen by [`Config::backend`](crate::Config::backend) or `DRUMLINE_BACKEND`. The library
//! takes care of the order of calls, work in the background, arguments, errors and poisoning. A backend sees one call
//! at a time, as bytes, and needs to know no type and no operator ([`Call::reduce`]).
//!
//! ```
//! # use drumline_group as drumline;
//! use std::{sync::Arc, time::Instant};
//!
//! use drumline::{
//!     Cause, CollectiveError, Config, ProcessGroup, ReduceOp,
//!     backend::{Backend, Collective, Request, register_backend},
//! };
//!
//! /// Serves groups of one rank.
//! #[derive(Debug)]
//! struct Lonely;
//!
//! impl Backend for Lonely {
//!     fn collective(&self, request: &mut Request<'_>) -> Result<(), Cause> {
//!         match request.call.collective() {
//!             Collective::ReduceScatter => request.call.reduce(&[request.input], request.data),
//!             _ if request.input.is_empty() => Ok(()), // in place
//!             _ => Ok(request.data.copy_from_slice(request.input)),
//!         }
//!     }
//!
//!     fn abort(&self, _: &CollectiveError) {}
//!
//!     fn shutdown(&self, _: Instant) -> Result<(), Cause> {
//!         Ok(())
//!     }
//! }
//!
//! register_backend("lonely", |options| match options.world_size {
//!     1 => Ok(Arc::new(Lonely)),
//!     _ => Err(options.error("it serves groups of one rank".to_owned())),
//! })?;
//! let config = Config::default().backend("lonely");
//! for group in drumline::rendezvous::local_world_with(1, &config)? {
//!     let mut data = [1.0_f32, 2.0];
//!     group.all_reduce(&mut data, ReduceOp::Avg)?;
//!     assert_eq!(data, [1.0, 2.0]);
//!     group.destroy()?;
//! }
//! assert!(drumline::rendezvous::local_world_with(2, &config).is_err());
//! # Ok::<_, drumline::Error>(())
//! ```
//!
//! The example `hub-backend` has a simple backend for any number of ranks.

mod guard;
mod interface;
mod message;
#[cfg(feature = "mpi")]
pub(crate) mod mpi;
#[cfg(not(feature = "mpi"))]
#[path = "without_mpi.rs"]
pub(crate) mod mpi;
mod registry;
mod request;

pub use drumline_schedule::Collective;

pub use self::{
    guard::Guard,
    interface::{Backend, BackendOptions},
    message::{Arrived, Label, Outgoing, Wanted},
    registry::{BUILT_IN, backends, is_backend_available, register_backend},
    request::{Call, Request, Signature},
};
pub(crate) use self::{
    guard::{Guards, Watch},
    registry::find,
};
pub use crate::{
    available::{describe_mpi, is_mpi_available},
    interrupt::interruptible,
};
