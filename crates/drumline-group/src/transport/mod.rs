//! What carries a group's messages: sockets.

mod far;
mod greeting;
pub(crate) mod mesh;
mod sockets;
pub(crate) mod stream;
mod waker;

pub(crate) use far::{Far, Lingering};
pub(crate) use sockets::Sockets;
pub(crate) use waker::Waker;
