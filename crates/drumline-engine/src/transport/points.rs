//! Messages from rank to rank, outside of collectives. Each pair of ranks has a stream for them.
//!
//! ```text
//! sender                                 receiver
//! offer (number, tag, type, count) ────▶ kept until a receive with that tag is posted
//!               payload may be sent ◀──── grant (number)
//! payload, in chunks ──────────────────▶ straight into the receiver's buffer
//! ```
//!
//! A payload travels only when its place is known. So a message that no rank receives takes 40 bytes of the
//! receiver's memory, and holds up neither other messages nor collectives. Messages that are granted at the
//! same time take turns, chunk by chunk.
//!
//! A receive from any rank belongs to no stream. It waits at the [`Desk`], and the first offer with its tag
//! is granted. A message of a rank to itself is copied at the desk.

mod by_tag;
mod desk;
mod exchange;
mod frame;
mod link;
mod point;
mod said;
#[cfg(test)]
mod tests;

pub use point::{Content, Direction, Ended, Message, Outcome, Point, PointCall};
#[doc(hidden)]
pub use {frame::frame_again, said::messages_of};

pub(super) use desk::Desk;
pub(super) use link::PointLink;
