//! Carries out the schedule of one call.
//!
//! `drive` lets four parties take turns, and never blocks:
//!
//! - the [`Machine`] decides what is next,
//! - the [`Memory`] holds the caller's buffers,
//! - a [`Transport`](crate::transport::Transport) moves bytes between ranks,
//! - a [`Host`](crate::host::Host) is the memory that neighbours share.
//!
//! The caller of `drive` has a clock and can wait. It calls `drive` again and again: a blocking call, the
//! progress thread or a simulator.

mod drive;
mod flags;
mod history;
mod layout;
mod local;
mod machine;
mod memory;
mod message;
mod now;
mod plan;
mod scratch;
mod task;
#[cfg(test)]
mod tests;

pub use drive::{Progress, Spin};
pub use history::History;
pub use layout::Stretch;
pub use machine::Machine;
pub use memory::{Buffers, Held, Memory, Pool};
pub use message::{Description, Header, array};
pub use now::Now;

pub(crate) use drive::drive;
pub(crate) use flags::{Flags, Seat, Seats};
pub(crate) use layout::Layout;
pub(crate) use machine::{Awaited, Notice};
pub use plan::Plan;
pub(crate) use plan::Shape;
