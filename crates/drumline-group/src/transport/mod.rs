//! What carries a group's messages: sockets.

mod far;
pub(crate) mod mesh;
mod sockets;
mod stream;

pub(crate) use far::{Far, Lingering};
pub(crate) use sockets::{Sockets, Waker};
