//! How processes meet: key-value stores, connections, and the secret that connections prove.
//!
//! | module | what it holds |
//! |---|---|
//! | [`store`] | the key-value stores |
//! | [`auth`] | the job's secret, and how both ends of a connection prove that they know it |
//! | [`secured`] | what protects the bytes of a connection after the proof |
//! | [`net`] | streams, listeners and calls to them, over TCP and Unix sockets |
//! | [`text`] | how text from others is shown |

#![forbid(unsafe_code)]

pub mod auth;
#[doc(hidden)]
pub mod launched;
pub mod net;
pub mod secured;
pub mod store;
pub mod text;

pub use drumline_error::{Error, Result};
#[doc(hidden)]
pub use net::Endpoint;

/// The number of a rank, in `0..world_size`.
pub type Rank = usize;
